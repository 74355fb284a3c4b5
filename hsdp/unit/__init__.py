"""One parameter group: the parameters that one `fully_shard` call manages, gathered and reduced as one.

    unit.py               the unit: start reading here
    unsharded.py          its unsharded parameters: gathered, freed (shadows.py: put where its modules find them)
    dtype_group.py        the part of its parameters that shares dtypes, and so buffers (extension_group.py: subclasses with
                          FSDP2's gather hooks; composite_group.py: subclasses around several tensors)
    reduce_plan.py        how gradients become the operands of a reduce-scatter (grad_layout.py: where they lie in them)
    replica_shares.py     how its sums become a replica's share of them; sharing.py: of which gradients replicas have shares
    replica_gather.py     and how a replica gets the others' shares of stepped parameters (pending_shards.py: until they
                          are read)
    gradients.py          this rank's gradients, from autograd (arrivals.py) to `.grad` (landing.py, rollback.py,
                          zero_grad.py)
    stash.py              whole sums of micro-batches that were not communicated: which factors they have
    deferred_sums.py      sums over the shard group whose all-reduce comes later
    write_guard.py        user code writes to no unsharded parameters (shard_prints.py: nor to the shards behind them
                          meanwhile); readers.py: which streams read them
    state.py, settings.py what it is doing, and what users may change about it
    lookup.py             from a parameter or a module to its units

A unit knows no other unit: what concerns several is `schedule`'s. May import `params` and what is below it.
"""

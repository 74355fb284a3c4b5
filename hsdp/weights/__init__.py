"""Full parameters outside of a step: made, filled, made equal on all ranks, lent to users.

    init.py              `init_sharded`: values for a model that was built on the meta device
    full_params.py       `full_params`, `gathered_apply`: users read and write full parameters
    gather.py            the gathers and writes behind both
    held_grads.py        gradients of full parameters, which nobody has whole
    replica_check.py     ranks begin with the same parameters, or are told that they do not
    drift.py             `check_replicas`: they still have the same ones
    whole_loads.py       whole tensors in `load_state_dict`: what to do instead
    random_numbers.py    equal ones on all ranks; whole_draws.py: those of tensor-parallel parameters
    module_buffers.py    modules' buffers, of which each rank has all

May import `schedule` and what is below it. Nothing here runs inside a forward or a backward.
"""

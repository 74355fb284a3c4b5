"""What users call: `fully_shard` and what comes with it.

    fully_shard.py        checks what the user asked for, builds one unit, attaches its `ModuleHooks` to the module(s)
    module.py             `HSDPModule`: the methods that a sharded module has
    setters.py            its setters, hsdp's names and FSDP2's
    fsdp2.py              what else scripts and libraries written for FSDP2 call, and what of it is refused
    forward_methods.py    other methods as entry points, as forwards are: `register_forward_method`
    shard_units.py        `shard_units`: which modules of a model become units
    select.py             which parameters a unit gets, and how each of them is cut
    other_meshes.py       parameters that `shard_placement_fn` puts on another mesh
    describe.py           `describe`, and what `print(model)` shows

May import everything but what looks at sharded models from outside (`planning`, `tracing`, `doctor`) or uses them
(`elastic`, `integrations`, `examples`).
Start reading at `fully_shard`.
"""

"""One parameter: the sharded DTensor that users see, and the unsharded tensor that a forward computes with.

    param.py              both of them: start reading here
    ownership.py          the table of which unit manages which parameter
    memory.py             parameters that share memory without being one parameter
    placement.py          `least_padding`: which dim to cut
    replica_rows.py       which rows of a parameter are a replica's share
    pending.py            what stands for a local tensor of which parts are on their way
    local.py              what a rank holds of a tensor
    tensor_parallel.py    parameters that tensor parallelism has cut already
    annotations.py        parameters of which spmd_types says that it has
    subclass.py           tensor subclasses that hold plain tensors
    shard_geometry.py     which part of a DTensor each rank holds
    arguments.py          operators' arguments by name, and which are written to
    handlers.py           DTensor's table of handlers that replace its operators
    operators.py          operators that hsdp does otherwise than DTensor
    parts.py              writes to parts of sharded tensors
    dtensors.py           DTensors made without communication

May import `comm.mesh`, `buffers`, `policies`, `errors` and `torch_private`.
"""

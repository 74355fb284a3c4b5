"""Communication: meshes, streams, collectives, and the guard that notices when ranks disagree.

    mesh.py              a DeviceMesh as one axis of shards and one of replicas
    streams.py           a device's side streams and events
    collectives.py       starts collectives on a process group: start reading here
    transports.py        how tensors go between ranks: by a process group's own collectives, or those of gloo
    compare.py           how ranks compare what they are about to do
    host_memory.py       the transport between ranks of one host, on CPUs: memory that they share
    host_blocks.py       that memory, block by block
    host_meeting.py      how these ranks find each other
    uneven.py            collectives of tensors of which ranks hold different parts
    reals.py             complex numbers as the reals that backends sum
    backends.py          backends' habits: names, sizes, what they can do
    work.py              a collective under way
    divergence.py        ranks that are about to start different collectives get an error instead of a hang
    questions.py         how they ask each other over the store, at a cost that is the same for any number of ranks
    labels.py            names of what is started and waited for, in torch.profiler
    observer.py          the points at which a unit's observer is told what happens: `hsdp.trace`
    groups.py            a process group's backend and patience; groups of some of its ranks
    replica_reduce.py    the all-reduce over replicas as a stage (compressed.py: 16 bits on the wire)
    tree.py              sums over ranks in one order, whatever the mesh
    custom.py            users' own all-gather, reduce-scatter and all-reduce: one shape, with torch's works

May import `buffers`, `debug`, `errors`, `format` and `torch_private`. A new backend's habits go into `backends.py`;
how the host waits for it, into `work.py`.
"""

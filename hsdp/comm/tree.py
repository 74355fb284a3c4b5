"""Sums over data ranks in one fixed binary order, however these are split: `CommPolicy(reduction="tree")`.

    data rank g = r S + s, which is rank s of the shards of replica r:      0   1   2   3   4   5
    neighbours are added, and the sum is rounded to its dtype:              0+1     2+3     4+5
    again, and one without a neighbour goes up as it is:                    0+1+2+3         4+5
    again:                                                                  0+1+2+3+4+5

With a power of two of shard ranks (or a single replica) the sum over a replica's shards is one node of this tree, and the
tree over replicas is what is above it: a reduction over shards and one over replicas add what a single one over all would.

    reduce-scatter     all-to-all of the ranks' parts, added here
    all-reduce         the same, and an all-gather of the sums: as many bytes as a ring sends
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hsdp.comm.backends import REDUCE_ALONE_BYTES
from hsdp.comm.collectives import Comm
from hsdp.comm.labels import Named
from hsdp.comm.mesh import MeshAxes
from hsdp.comm.replica_reduce import AllReduceStage
from hsdp.comm.uneven import Uneven
from hsdp.comm.work import CommWork, TwoPhases, in_turn

_EVEN = 64
"""Parts of a large tensor have a multiple of so many elements: odd sizes are slow on NCCL."""


def fits_tree(replicas: int, shards: int) -> bool:
    """Whether the shard ranks of each replica are a node of the tree over all data ranks."""
    return replicas == 1 or shards & (shards - 1) == 0


def check_shape(replicas: int, shards: int, where: str) -> None:
    """Raises ValueError naming `where` if a mesh does not fit the tree."""
    if not fits_tree(replicas, shards):
        raise ValueError(
            f"{where}: with reduction='tree' and {replicas} replicas the number of shard ranks must be a power of two, and "
            f"it is {shards}: its sums would be no part of the tree over {replicas * shards} ranks. Choose 1, 2, 4, ... "
            "shard ranks, or a mesh with one replica"
        )


def check_axes(axes: MeshAxes, where: str) -> None:
    """Raises ValueError naming `where` if sums over these axes are not those of the tree over data ranks in order."""
    check_shape(axes.replicate_size, axes.shard_size, where)
    ranks = axes.mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"{where}: reduction='tree' adds gradients in the order of global ranks, and the mesh (replicate, shard) has "
            f"them in another order: {ranks[:16]}. Make it of ranks in order, the replicate axis outermost, as "
            "init_device_mesh(..., (replicas, shards)) does"
        )


def fold(rows: Tensor, out: Tensor) -> None:
    """Adds the rows of `rows` (ranks, n), at least two, in the order of the tree; `out` (n) may be the first of them.

    Every sum is rounded to the dtype of `rows`, which is overwritten.
    """
    ranks, step = rows.shape[0], 1
    while 2 * step < ranks:
        left, right = rows[:: 2 * step], rows[step :: 2 * step]
        left[: right.shape[0]].add_(right)
        step *= 2
    torch.add(rows[0], rows[step], out=out)


def reduce_scatter(
    comm: Comm,
    owner: Named,
    key: int,
    outputs: list[Tensor],
    inputs: list[Tensor],
    replicated: list[Tensor],
    finish: Callable[[], object] | None,
    uneven: Sequence[Uneven] = (),
) -> CommWork:
    """`Comm.reduce_scatter` in the order of the tree, with the same arguments."""
    received = [torch.empty_like(tensor) for tensor in inputs]
    of_uneven = [(one.own.new_empty(comm.size * one.own.numel()), one) for one in uneven]

    def add() -> None:
        for output, parts in zip(outputs, received, strict=True):
            fold(parts.view(comm.size, -1), output.view(-1))
        for parts, one in of_uneven:
            if one.own.numel():
                fold(parts.view(comm.size, -1), one.own)

    if not replicated:
        return comm.all_to_all(owner, key, received, inputs, in_turn(add, finish), of_uneven)
    scattered = [comm.all_to_all(owner, key, received, inputs, add, of_uneven)] if inputs else []
    return _all_reduce(comm, "reduce-scatter", owner, hash((key, 2)), replicated, scattered, finish)


class TreeAllReduce(AllReduceStage):
    """The all-reduce stage in the order of the tree. It has no state: units share `TREE`."""

    exact = True

    def start(
        self, owner: Named, key: int, tensors: list[Tensor], comm: Comm, finish: Callable[[], object] | None
    ) -> CommWork:
        """Sums `tensors` over the ranks of `comm`, in place; `owner`, `key` and `finish` as `AllReduceStage` says."""
        return _all_reduce(comm, "all-reduce", owner, key, tensors, [], finish)


TREE = TreeAllReduce()


def _all_reduce(
    comm: Comm,
    kind: str,
    owner: Named,
    key: int,
    tensors: list[Tensor],
    beside: list[CommWork],
    finish: Callable[[], object] | None,
) -> CommWork:
    """Sums 1-D `tensors` in place, and waits for the works `beside` it: one work of this kind."""
    sent, packed = _cut(tensors, comm.size)
    received = [torch.empty_like(tensor) for tensor in sent]
    first = comm.all_to_all(owner, key, received, sent)

    def unpack() -> None:
        for to, values in packed:
            torch._foreach_copy_(to, values)

    then = in_turn(unpack, finish)

    def gather() -> CommWork:
        sums = []
        for parts in received:
            rows = parts.view(comm.size, -1)
            fold(rows, rows[0])
            sums.append(rows[0].view(torch.uint8))
        return comm.all_gather(owner, hash((key, 1)), [tensor.view(torch.uint8) for tensor in sent], sums, then)

    return TwoPhases(comm, kind, owner, [*beside, first], gather)


def _cut(tensors: list[Tensor], ranks: int) -> tuple[list[Tensor], list[tuple[list[Tensor], list[Tensor]]]]:
    """1-D tensors as those that travel, which `ranks` equal parts make up.

    Large ones travel from where they are, but for a few elements at their ends; these, and small ones, share a buffer.

    Returns:
        What travels, and for each shared buffer the places in the tensors and those in the buffer.
    """
    sent: list[Tensor] = []
    rests: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        whole = _in_place(tensor.numel(), tensor.itemsize, ranks)
        if whole:
            sent.append(tensor[:whole])
        if whole < tensor.numel():
            rests.setdefault(tensor.dtype, []).append(tensor[whole:])
    packed = []
    for dtype, places in rests.items():
        sizes = [place.numel() for place in places]
        buffer = torch.zeros(-(-sum(sizes) // ranks) * ranks, dtype=dtype, device=places[0].device)
        values = list(buffer[: sum(sizes)].split(sizes))
        torch._foreach_copy_(values, places)
        sent.append(buffer)
        packed.append((places, values))
    return sent, packed


def _in_place(numel: int, itemsize: int, ranks: int) -> int:
    """How many elements of a tensor travel from where they are."""
    return numel // (ranks * _EVEN) * ranks * _EVEN if numel * itemsize >= REDUCE_ALONE_BYTES else 0


def travelling(dtype: torch.dtype, sizes: list[int], ranks: int) -> tuple[list[int], int]:
    """Bytes of what travels in an all-reduce of tensors of one dtype and these bytes: those in place, and the buffer."""
    each = dtype.itemsize
    wholes = [_in_place(nbytes // each, each, ranks) for nbytes in sizes]
    rest = sum(nbytes // each - whole for nbytes, whole in zip(sizes, wholes, strict=True))
    return [whole * each for whole in wholes if whole], -(-rest // ranks) * ranks * each

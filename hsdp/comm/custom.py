"""Collectives that users bring: the protocols, which are FSDP2's, and how a collective is made of one.

    hsdp's input --copy--> comm.allocate()d input --comm(...)--> comm.allocate()d output --copy--> hsdp's output

The copies are there only for a `comm` that has `allocate`, as FSDP2's have: it wants memory of its own (registered with a
network card, say). One without it works on hsdp's buffers where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class AllGather(Protocol):
    """An all-gather. It may have `allocate(size, *, dtype, device) -> Tensor`, for memory of its own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers `input_tensor` (1-D, n elements) of every rank of `group` into `output_tensor` (1-D, S * n), by rank.

        Called once for each transfer of a unit (each large parameter, and the packed rest), with tensors of bytes (uint8).
        All parts are equal: a unit that has its own all-gather or reduce-scatter pads all that does not go evenly.
        With `async_op` it may return a work to wait for; without, or if it returns None, the output is there, on a device
        in the order of the current stream. A work without `is_completed` is waited for by `wait()`, once and without a
        time-out; if that raises, its tensors are left to it for good, and others are made.
        """
        ...


class ReduceScatter(Protocol):
    """A reduce-scatter. It may have `allocate(size, *, dtype, device) -> Tensor`, for memory of its own.

    With an attribute `exact`, which is true, it says that it keeps sums of 0 and 1 apart from 0, as this one and
    `ReplicaReduce` need not: one that rounds to a share of the largest value does not. Where it has none, what tells which
    parameters some rank has used goes in an all-reduce of its own.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sums `input_tensor` (1-D, S * n) over the ranks of `group`; `output_tensor` (1-D, n) gets this rank's n.

        Both are of the reduce dtype, complex numbers as pairs of reals; `op` is always `ReduceOp.SUM`. Called once for each
        transfer, as `AllGather` is.
        """
        ...


class ReplicaReduce(Protocol):
    """An all-reduce over replicas, for `set_replica_reduce`: one that compresses, say, or that survives a lost replica.

    It may be `exact`, as a `ReduceScatter` may.
    """

    def __call__(self, tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False) -> dist.Work | None:
        """Sums `tensor` over the ranks of `group`, in place; it and `op` are as for `ReduceScatter`.

        Called for each reduction buffer, in the same order on every rank. What it returns is as for `AllGather`; the
        current stream of a device is that of the all-reduces.
        """
        ...


class WaitedOnly:
    """A work that can be waited for and nothing else, which is all that FSDP2 asks of one, as `Work` has it."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._ended = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits without a time-out. What that raises is raised again by later waits, which users' works do not expect."""
        if self._error is not None:
            raise self._error
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
            raise
        self._ended = True
        return True

    def is_completed(self) -> bool:
        """Not if waiting raised: nothing tells that it has left its tensors alone since."""
        return self._ended


def _as_work(work: Any) -> Any:
    return work if work is None or hasattr(work, "is_completed") else WaitedOnly(work)


def is_exact(comm: object) -> bool:
    """Whether a collective that sums says that it keeps small numbers apart from 0."""
    return bool(getattr(comm, "exact", False))


def gather_by(
    comm: AllGather, outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup, async_op: bool
) -> tuple[list[Any], Callable[[], object] | None]:
    """Starts the gathers; returns their works, and what has to follow them."""
    allocate = getattr(comm, "allocate", None)
    works: list[Any] = []
    to: list[Tensor] = []
    sources: list[Tensor] = []
    rank = group.rank()
    for output, mine in zip(outputs, inputs, strict=True):
        if allocate is not None:
            to.append(output)
            output = allocate((output.numel(),), dtype=output.dtype, device=output.device)
            sources.append(output)
            # In place, as FSDP2 has it: the input is this rank's part of the output.
            mine = output.narrow(0, rank * mine.numel(), mine.numel()).copy_(mine)
        works.append(_as_work(comm(output_tensor=output, input_tensor=mine, group=group, async_op=async_op)))
    return works, _copies(to, sources)


def reduce_scatter_by(
    comm: ReduceScatter, outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup, async_op: bool
) -> tuple[list[Any], Callable[[], object] | None]:
    """Starts the reduce-scatters; returns their works, and what has to follow them."""
    allocate = getattr(comm, "allocate", None)
    works: list[Any] = []
    to: list[Tensor] = []
    sources: list[Tensor] = []
    for output, whole in zip((o.view(-1) for o in outputs), (i.view(-1) for i in inputs), strict=True):
        if allocate is not None:
            to.append(output)
            whole = allocate((whole.numel(),), dtype=whole.dtype, device=whole.device).copy_(whole)
            output = allocate((output.numel(),), dtype=output.dtype, device=output.device)
            sources.append(output)
        op = dist.ReduceOp.SUM
        works.append(_as_work(comm(output_tensor=output, input_tensor=whole, group=group, op=op, async_op=async_op)))
    return works, _copies(to, sources)


def all_reduce_by(comm: ReplicaReduce, tensors: list[Tensor], group: ProcessGroup, async_op: bool) -> list[Any]:
    """Starts the all-reduces; returns their works."""
    op = dist.ReduceOp.SUM
    return [_as_work(comm(tensor=tensor, group=group, op=op, async_op=async_op)) for tensor in tensors]


def _copies(to: list[Tensor], sources: list[Tensor]) -> Callable[[], object] | None:
    return (lambda: torch._foreach_copy_(to, sources)) if to else None

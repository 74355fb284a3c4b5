"""Collectives that users bring: the protocols, which are FSDP2's, and how a collective is made of one.

    hsdp's input --copy--> comm.allocate()d input --comm(...)--> comm.allocate()d output --copy--> hsdp's output

The copies are there only for a `comm` that has `allocate`, as FSDP2's have: it wants memory of its own (registered with a
network card, say). One without it works on hsdp's buffers where they are.

That memory may be the same every time, one buffer for each size or one for all. So the transfers of a call share what is
allocated once, and a call that gets memory of an earlier one, perhaps of another unit, has that one end first: its results
are copied out before anything is written. This is up to the rank: what is started, and in which order, does not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hsdp.comm.divergence import described
from hsdp.comm.labels import Named
from hsdp.errors import StateError


class AllGather(Protocol):
    """An all-gather. It may have `allocate(size, *, dtype, device) -> Tensor`, for memory of its own.

    `allocate` is called once for a gather of a unit, with the size of all of its transfers, which get parts of what it
    returns: a 1-D, contiguous tensor. It may return the same memory every time, for all units too. A gather that gets
    memory in which an earlier one is under way waits for that first, so that gathers ahead (`prefetch`) then hide nothing:
    memory of its own for each unit lets them overlap.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers `input_tensor` (1-D, n elements) of every rank of `group` into `output_tensor` (1-D, S * n), by rank.

        Called once for each transfer of a unit (each large parameter, and the packed rest), with tensors of bytes (uint8).
        All parts are equal: a unit that has its own all-gather or reduce-scatter pads all that does not go evenly.
        With `async_op` it may return a work to wait for; without, or if it returns None, the output is there, on a device
        in the order of the current stream. A work without `is_completed` is waited for by `wait()`, once and without a
        time-out; if that raises, its tensors are left to it for good, and new ones are made.
        """
        ...


class ReduceScatter(Protocol):
    """A reduce-scatter. It may have `allocate(size, *, dtype, device) -> Tensor`, for memory of its own.

    It is as for `AllGather`, but for what is allocated in one call: once for inputs and once for outputs, of each dtype.
    These must lie in different memory (they have different sizes), or it is a StateError.

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
    """A work that has `wait` alone, which is all that FSDP2 asks of one, as a `Work`."""

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
        """False if waiting raised: the work may still write to its tensors."""
        return self._ended


def _as_work(work: Any) -> Any:
    return work if work is None or hasattr(work, "is_completed") else WaitedOnly(work)


def is_exact(comm: object) -> bool:
    """Whether a collective that sums says that it keeps small numbers apart from 0."""
    return bool(getattr(comm, "exact", False))


class UnderWay(Protocol):
    """A collective, as far as the memory that it works on is concerned."""

    def vacate(self) -> None:
        """Copies its results out of that memory, which is about to be written to."""
        ...


WorkT = TypeVar("WorkT", bound=UnderWay)

_Span = tuple[torch.device, int, int]

_ALIGN = 256
"""Bytes: where each transfer begins in memory that several share, as a device's allocator would have it."""

_used: list[tuple[weakref.ref[UnderWay], list[_Span]]] = []
"""Collectives that may be waited for yet, with the users' memory that they work on."""


class Staging:
    """Memory of a user's collective for the transfers of one call.

    Args:
        comm: the collective; without `allocate` there is no such memory, and hsdp's own is used.
        kind, owner: whose call it is, for errors.

    Attributes:
        apart: whether there is such memory.
        then: what follows the call: copies its results out.
    """

    def __init__(self, comm: object, kind: str, owner: Named) -> None:
        self._allocate = getattr(comm, "allocate", None)
        self._labels = type(comm).__name__, kind, owner
        self._spans: list[_Span] = []
        self.apart = self._allocate is not None
        self.then: Callable[[], object] | None = None

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """An unused 1-D tensor for each of `tensors`; or these themselves.

        Raises:
            StateError: it is memory that this call has already.
            CollectiveError: a collective that was under way there failed.
        """
        if self._allocate is None:
            return list(tensors)
        found: dict[int, Tensor] = {}
        for kind in dict.fromkeys((one.dtype, one.device) for one in tensors):
            alike = [(at, one) for at, one in enumerate(tensors) if (one.dtype, one.device) == kind]
            starts, end = [], 0
            for _, one in alike:
                step = _ALIGN // one.itemsize
                starts.append(-(-end // step) * step)
                end = starts[-1] + one.numel()
            memory = self._take(end, *kind)
            found.update((at, memory.narrow(0, start, one.numel())) for start, (at, one) in zip(starts, alike, strict=True))
        return [found[at] for at in range(len(tensors))]

    def _take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self._allocate is not None, "there is memory apart"
        memory: Tensor = self._allocate((size,), dtype=dtype, device=device)
        span = memory.device, memory.data_ptr(), memory.data_ptr() + memory.nbytes
        if _meet([span], self._spans):
            name, kind, owner = self._labels
            raise StateError(
                f"the {described(kind, owner.name)}: {name}.allocate({(size,)}, dtype={dtype}) returned memory that it has "
                "returned within this call before, for an input perhaps, whose values would be lost; keep a buffer for "
                "each size and dtype, or make one anew every time"
            )
        self._spans.append(span)
        for ref, spans in _used[:]:  # at once: models in other threads add to it
            if (work := ref()) is not None and _meet([span], spans):
                work.vacate()
        return memory

    def copies(self, sources: list[Tensor], to: list[Tensor]) -> None:
        """Has results copied from where they arrive, once they are there."""
        if self.apart:
            self.then = lambda: torch._foreach_copy_(to, sources)

    def used_by(self, work: WorkT) -> WorkT:
        """Notes that `work` uses the memory from now on; returns it."""
        if self._spans:
            _used[:] = [(ref, spans) for ref, spans in _used if ref() is not None]
            _used.append((weakref.ref(work), self._spans))
        return work


def _meet(some: list[_Span], others: list[_Span]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)


def gather_by(
    comm: AllGather, owner: Named, outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup, async_op: bool
) -> tuple[list[Any], Staging]:
    """Starts the gathers; returns their works, and the memory that they use, with what has to follow them."""
    staging, works, rank = Staging(comm, "all-gather", owner), [], group.rank()
    arrivals = staging.like(outputs)
    for whole, mine in zip(arrivals, inputs, strict=True):
        if staging.apart:  # in place, as FSDP2 has it: the input is this rank's part of the output
            mine = whole.narrow(0, rank * mine.numel(), mine.numel()).copy_(mine)
        works.append(_as_work(comm(output_tensor=whole, input_tensor=mine, group=group, async_op=async_op)))
    staging.copies(arrivals, outputs)
    return works, staging


def reduce_scatter_by(
    comm: ReduceScatter, owner: Named, outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup, async_op: bool
) -> tuple[list[Any], Staging]:
    """Starts the reduce-scatters; returns their works, and the memory that they use, with what has to follow them."""
    staging, works, op = Staging(comm, "reduce-scatter", owner), [], dist.ReduceOp.SUM
    flat, to = [one.view(-1) for one in inputs], [one.view(-1) for one in outputs]
    wholes, results = staging.like(flat), staging.like(to)
    if staging.apart:
        torch._foreach_copy_(wholes, flat)
    for whole, result in zip(wholes, results, strict=True):
        works.append(_as_work(comm(output_tensor=result, input_tensor=whole, group=group, op=op, async_op=async_op)))
    staging.copies(results, to)
    return works, staging


def all_reduce_by(comm: ReplicaReduce, tensors: list[Tensor], group: ProcessGroup, async_op: bool) -> list[Any]:
    """Starts the all-reduces; returns their works."""
    op = dist.ReduceOp.SUM
    return [_as_work(comm(tensor=tensor, group=group, op=op, async_op=async_op)) for tensor in tensors]

"""The only file that talks to `torch.distributed`: starts collectives, gives back flights, knows backends' habits.

A *flight* is a collective under way. On a device its work was enqueued on a side stream and `wait` makes the current
stream wait for an event. On the CPU the backend's threads carry it and `wait` blocks the host until it is done, then
runs what has to follow it (a local sum, a scale).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hsdp.errors import CollectiveError
from hsdp.streams import Streams


class Named(Protocol):
    """Whatever a flight is for; its name appears in errors."""

    name: str


class Flight:
    """A collective under way: its works, the buffers they touch, and what follows them."""

    __slots__ = ("_event", "_failed", "_finish", "_keep", "_streams", "_works", "kind", "owner")

    def __init__(
        self,
        kind: str,
        owner: Named,
        streams: Streams,
        works: Sequence[Any],
        keep: Any,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.kind = kind
        self.owner = owner
        self._streams = streams
        self._works: list[Any] | None = [work for work in works if work is not None]
        self._keep = keep
        self._finish = finish
        self._failed = False
        self._event = None
        if streams.active:
            # Created with its side stream current: order everything on that stream, the host goes on.
            self._settle()
            self._event = streams.mark()

    def done(self) -> bool:
        """Whether waiting would not block the host (CPU) or the stream (device)."""
        if self._streams.active:
            return self._event is None or bool(self._event.query())
        return self._works is None or all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Blocks until the results are there: the host on the CPU, the current stream on a device.

        Raises:
            CollectiveError: the collective failed or timed out.
        """
        if self._streams.active:
            self._streams.join(self._event)
        elif self._works is not None:
            self._settle()
        # A device's side stream may still read the buffers, but whoever reuses their memory is behind the event now.
        self._keep = None

    @property
    def event(self) -> Any:
        """The device event behind the flight's last work; None on the CPU."""
        return self._event

    def _settle(self) -> None:
        works, self._works = self._works, None
        assert works is not None, "a flight settles once"
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._failed = True
            raise CollectiveError(
                f"{self.kind} of unit {self.owner.name!r} failed on rank {dist.get_rank()}: {error} "
                "(another rank may have stopped, raised or taken another branch; see its log)"
            ) from error
        if self._finish is not None:
            self._finish()
            self._finish = None


class Comm:
    """One process group as hsdp uses it. With one rank (or no group) every verb is local."""

    def __init__(self, group: ProcessGroup | None, size: int, device: torch.device, streams: Streams) -> None:
        self.group = group
        self.size = size
        self.streams = streams
        self.backend = _backend_name(group, device) if group is not None else "none"
        self._all_gather_options = _options(c10d.AllgatherOptions, streams)
        self._reduce_scatter_options = _options(c10d.ReduceScatterOptions, streams)
        self._all_reduce_options = _options(c10d.AllreduceOptions, streams)
        self._all_reduce_coalesced_options = _options(c10d.AllreduceCoalescedOptions, streams)
        self._all_to_all_options = _options(c10d.AllToAllOptions, streams)

    @property
    def direct_gather_bytes(self) -> int:
        """Measured default of `CommPolicy.direct_gather_bytes` for this backend."""
        # gloo runs the pieces of a coalesced gather one after the other: each must be worth its round of latency.
        return 256 * 1024 if self.backend == "gloo" else 32 * 1024

    @property
    def direct_reduce_bytes(self) -> int:
        """Measured default of `CommPolicy.direct_reduce_bytes` for this backend."""
        return 1024 * 1024 if self.backend == "gloo" else 32 * 1024

    def all_gather(
        self, owner: Named, outputs: list[Tensor], inputs: list[Tensor], finish: Callable[[], object] | None
    ) -> Flight:
        """Gathers each 1-D input of n elements into its 1-D output of S * n, all in one call; then `finish`."""
        assert self.group is not None, "a gather needs a group"
        if len(inputs) == 1:
            work = self.group._allgather_base(outputs[0], inputs[0], self._all_gather_options)
        else:
            work = self.group.allgather_into_tensor_coalesced(outputs, inputs, self._all_gather_options)
        return Flight("all-gather", owner, self.streams, [work], (outputs, inputs), finish)

    def reduce_scatter(
        self,
        owner: Named,
        outputs: list[Tensor],
        inputs: list[Tensor],
        finish: Callable[[], object] | None,
    ) -> Flight:
        """Sums each 1-D input of S * n elements over ranks and leaves this rank's n in its output; then `finish`."""
        assert self.group is not None, "a reduce-scatter needs a group"
        if self.backend == "gloo":
            return self._reduce_scatter_by_all_to_all(owner, outputs, inputs, finish)
        if len(inputs) == 1:
            work = self.group._reduce_scatter_base(outputs[0], inputs[0], self._reduce_scatter_options)
        else:
            work = self.group.reduce_scatter_tensor_coalesced(outputs, inputs, self._reduce_scatter_options)
        return Flight("reduce-scatter", owner, self.streams, [work], (outputs, inputs), finish)

    def _reduce_scatter_by_all_to_all(
        self,
        owner: Named,
        outputs: list[Tensor],
        inputs: list[Tensor],
        finish: Callable[[], object] | None,
    ) -> Flight:
        # gloo's own reduce-scatter clones its input and all-reduces it: twice the bytes. An all-to-all and a local sum
        # move what is needed, and sum in a fixed order over ranks.
        received = [torch.empty_like(tensor) for tensor in inputs]
        group, options = self.group, self._all_to_all_options
        assert group is not None, "checked by the caller"
        works = [group.alltoall_base(r, i, [], [], options) for r, i in zip(received, inputs, strict=True)]

        def sum_locally() -> None:
            for output, parts in zip(outputs, received, strict=True):
                torch.sum(parts.view(self.size, -1), 0, out=output)
            if finish is not None:
                finish()

        return Flight("reduce-scatter", owner, self.streams, works, (outputs, inputs), sum_locally)

    def all_reduce(self, owner: Named, tensors: list[Tensor], finish: Callable[[], object] | None = None) -> Flight:
        """Sums 1-D tensors over ranks, in place, in one call."""
        assert self.group is not None, "an all-reduce needs a group"
        if len(tensors) == 1:
            work = self.group.allreduce(tensors, self._all_reduce_options)
        else:
            work = self.group.allreduce_coalesced(tensors, self._all_reduce_coalesced_options)
        return Flight("all-reduce", owner, self.streams, [work], tensors, finish)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. Blocking and slow: for set-up, not for steps."""
        if self.group is None or self.size == 1 or self.backend == "fake":
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrites `tensor` with that of the group's rank 0. Blocking: for set-up."""
        if self.group is not None and self.size > 1 and self.backend != "fake":
            dist.broadcast(tensor, group=self.group, group_src=0)


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bits: equal values give equal sums, and other values hardly ever do."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(kind)
    plain = weighted = 0
    step = 1 << 20  # in slices, so that the 64-bit copies stay small beside the parameter
    for start in range(0, bits.numel(), step):
        part = bits[start : start + step].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        plain += int(part.sum())
        weighted += int((part * places).sum())
    return plain & (2**64 - 1), weighted & (2**64 - 1)


def _backend_name(group: ProcessGroup, device: torch.device) -> str:
    try:
        name = group._get_backend(device).name()
    except RuntimeError as error:
        raise ValueError(
            f"fully_shard(mesh=...): the process group of the mesh has no backend for device {device.type!r}; call "
            "init_process_group with one, e.g. backend='cpu:gloo,cuda:nccl'"
        ) from error
    return str(name).lower()


def _options(kind: Any, streams: Streams) -> Any:
    options = kind()
    if streams.active and hasattr(options, "asyncOp"):
        # The work runs on the stream that is current at the call, which is one of ours.
        options.asyncOp = False
    return options

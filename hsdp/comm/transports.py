"""Transports: how the tensors of one collective get from rank to rank. A `Comm` has one, and asks nobody else.

    GroupTransport    the process group's own collectives: one call for all tensors, where the backend has such a call
    GlooTransport     gloo's: large tensors go alone, and a reduce-scatter is an all-to-all and a local sum
    HostMemory        memory that the ranks of one host share (host_memory.py)

Each method starts what moves the tensors, and returns the works to wait for, and what has to follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hsdp.comm.backends import GATHER_ALONE_BYTES, REDUCE_ALONE_BYTES, by_dtype, names_in, share_calls, without_autocast
from hsdp.comm.labels import Named
from hsdp.comm.streams import Streams
from hsdp.comm.uneven import Uneven, start_gathers, start_reductions
from hsdp.torch_private import AllgatherOptions, multiplied_sum

Started = tuple[list[Any], Callable[[], object] | None]
"""The works of a collective, and what has to follow them."""


class Transport(Protocol):
    """How equal parts of tensors go between the ranks of a group.

    `owner` is who communicates, and `key` stands for the collective, for transports whose ranks compare what meets.
    """

    def all_gather(self, owner: Named, key: int, outputs: list[Tensor], inputs: list[Tensor]) -> Started:
        """Gathers each 1-D input of n elements into its 1-D output of S * n; an input may lie in its place there."""
        ...

    def reduce_scatter(self, owner: Named, key: int, outputs: list[Tensor], inputs: list[Tensor], factor: float) -> Started:
        """Sums each contiguous input of S * n elements over ranks, times `factor`; this rank's n go into its output."""
        ...

    def all_reduce(self, owner: Named, key: int, tensors: list[Tensor]) -> Started:
        """Sums tensors over ranks, in place."""
        ...

    def all_to_all(self, owner: Named, key: int, outputs: list[Tensor], inputs: list[Tensor]) -> Started:
        """Gets this rank's of S equal parts of every rank's 1-D input, in rank order."""
        ...


class GroupTransport:
    """The collectives of a process group.

    Args:
        group: the group.
        backend: the name of its backend for the tensors' device.
        streams: the side streams of that device.
    """

    def __init__(self, group: ProcessGroup, backend: str, streams: Streams) -> None:
        kind: Any = group.__class__
        self.group: Any = group
        self._backend = backend
        self._streams = streams
        self._names = names_in(kind)
        self._all_gather_options = self._options(AllgatherOptions)
        self._reduce_scatter_options = self._options(dist.ReduceScatterOptions)
        self._multiplying: tuple[float, Any] | None = None  # the factor of last time
        self._all_reduce_options = self._options(dist.AllreduceOptions)
        self._all_reduce_coalesced_options = self._options(dist.AllreduceCoalescedOptions)
        self._all_to_all_options = self._options(dist.AllToAllOptions)

    def all_gather(self, owner: Named, key: int, outputs: list[Tensor], inputs: list[Tensor]) -> Started:
        """As `Transport.all_gather`."""
        options = self._all_gather_options
        single = self._names["gather"]
        if single and len(inputs) == 1:
            return [getattr(self.group, single)(outputs[0], inputs[0], options)], None
        if len(inputs) > 1 and (coalesced := self._names["gather_coalesced"]):
            return [getattr(self.group, coalesced)(outputs, inputs, options)], None
        pairs = zip(outputs, inputs, strict=True)
        if single:
            return [getattr(self.group, single)(output, mine, options) for output, mine in pairs], None
        size = self.group.size()
        return [self.group.allgather([list(output.tensor_split(size))], [mine], options) for output, mine in pairs], None

    def reduce_scatter(self, owner: Named, key: int, outputs: list[Tensor], inputs: list[Tensor], factor: float) -> Started:
        """As `Transport.reduce_scatter`."""
        options, works = self._sum_of(factor), []
        for outs, ins in [(outputs, inputs)] if len(inputs) == 1 else by_dtype(outputs, inputs):
            works += self._scatter_alike(outs, ins, options)
        return works, None

    def _scatter_alike(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> list[Any]:
        """Sums and scatters inputs of one dtype."""
        single = self._names["scatter"]
        if single and len(inputs) == 1:
            return [getattr(self.group, single)(outputs[0], inputs[0], options)]
        if len(inputs) > 1 and (coalesced := self._names["scatter_coalesced"]):
            return [getattr(self.group, coalesced)(outputs, inputs, options)]
        pairs = zip(outputs, inputs, strict=True)
        if single:
            return [getattr(self.group, single)(output, whole, options) for output, whole in pairs]
        size = self.group.size()
        return [self.group.reduce_scatter([output], [list(whole.tensor_split(size))], options) for output, whole in pairs]

    def all_reduce(self, owner: Named, key: int, tensors: list[Tensor]) -> Started:
        """As `Transport.all_reduce`: in one call for each dtype."""
        if len(tensors) == 1:
            return [self.group.allreduce(tensors, self._all_reduce_options)], None
        works: list[Any] = []
        for alike, _ in by_dtype(tensors, tensors):
            works += self._sum_alike(alike)
        return works, None

    def _sum_alike(self, tensors: list[Tensor]) -> list[Any]:
        """Sums tensors of one dtype in place."""
        if len(tensors) > 1 and (coalesced := self._names["all_reduce_coalesced"]):
            return [getattr(self.group, coalesced)(tensors, self._all_reduce_coalesced_options)]
        return [self.group.allreduce([tensor], self._all_reduce_options) for tensor in tensors]

    def all_to_all(self, owner: Named, key: int, outputs: list[Tensor], inputs: list[Tensor]) -> Started:
        """As `Transport.all_to_all`."""
        options, pairs = self._all_to_all_options, zip(outputs, inputs, strict=True)
        if single := self._names["all_to_all"]:
            return [getattr(self.group, single)(output, sent, [], [], options) for output, sent in pairs], None
        n = self.group.size()
        return [self.group.alltoall(list(o.tensor_split(n)), list(i.tensor_split(n)), options) for o, i in pairs], None

    # -- parts of different sizes ------------------------------------------------------------------------------------------

    def all_gather_uneven(self, tensors: Sequence[Uneven]) -> list[Any]:
        """Fills each `whole` from the ranks' own parts of it."""
        return start_gathers(self.group, self._backend, tensors, self._all_gather_options)

    def reduce_scatter_uneven(self, tensors: Sequence[Uneven], factor: float) -> Started:
        """Leaves the sum of each rank's part, times `factor`, in its `own`. Each `whole` may be overwritten."""
        return start_reductions(self.group, self._backend, tensors, self._sum_of(factor))

    def exchange(self, output: Tensor, sent: Tensor, received: list[int], sizes: list[int]) -> list[Any]:
        """Sends `sizes[r]` elements to rank r, behind those for the ranks before it; `received[r]` come from there."""
        if single := self._names["all_to_all"]:
            return [getattr(self.group, single)(output, sent, received, sizes, self._all_to_all_options)]
        parts = list(output.split(received)), list(sent.split(sizes))
        return [self.group.alltoall(*parts, self._all_to_all_options)]

    # -- options -----------------------------------------------------------------------------------------------------------

    def _sum_of(self, factor: float) -> Any:
        """Options of a reduce-scatter of what is multiplied with `factor`."""
        if factor == 1.0:
            return self._reduce_scatter_options
        if self._multiplying is None or self._multiplying[0] != factor:
            options = self._options(dist.ReduceScatterOptions)
            options.reduceOp = multiplied_sum(factor)
            self._multiplying = factor, options
        return self._multiplying[1]

    def _options(self, kind: Any) -> Any:
        options = kind()
        if self._streams.active and hasattr(options, "asyncOp"):
            # The work runs on the stream that is current at the call, which is one of hsdp's.
            options.asyncOp = False
        return options


class GlooTransport(GroupTransport):
    """gloo's collectives.

    It flattens a coalesced call on its own thread: two copies that nobody sees, worth it for small tensors only. It has
    coalesced calls for the CPU alone.

    Args:
        group, streams: as for `GroupTransport`.
        coalesces: whether the tensors are on the CPU.
    """

    def __init__(self, group: ProcessGroup, streams: Streams, coalesces: bool) -> None:
        super().__init__(group, "gloo", streams)
        self._coalesces = coalesces

    def all_gather(self, owner: Named, key: int, outputs: list[Tensor], inputs: list[Tensor]) -> Started:
        """As `Transport.all_gather`."""
        works: list[Any] = []
        for call in self._calls(inputs, GATHER_ALONE_BYTES):
            works += super().all_gather(owner, key, [outputs[i] for i in call], [inputs[i] for i in call])[0]
        return works, None

    def reduce_scatter(self, owner: Named, key: int, outputs: list[Tensor], inputs: list[Tensor], factor: float) -> Started:
        """As `Transport.reduce_scatter`, by an all-to-all and a local sum, in rank order.

        gloo's own reduce-scatter clones its input and all-reduces it: twice the bytes.
        """
        assert factor == 1.0, "gloo multiplies nothing"
        received = [torch.empty_like(tensor) for tensor in inputs]
        works, _ = self.all_to_all(owner, key, received, inputs)
        size = self.group.size()

        def sum_locally() -> None:
            for output, parts in zip(outputs, received, strict=True):
                torch.sum(parts.view(size, -1), 0, out=output.view(-1))

        return works, sum_locally

    def _sum_alike(self, tensors: list[Tensor]) -> list[Any]:
        works: list[Any] = []
        with without_autocast():
            for call in self._calls(tensors, REDUCE_ALONE_BYTES):
                works += super()._sum_alike([tensors[i] for i in call])
        return works

    def _calls(self, tensors: list[Tensor], alone: int) -> list[list[int]]:
        """How tensors share calls, as lists of their indices: on the CPU those of `alone` bytes and more go alone."""
        return share_calls([tensor.nbytes for tensor in tensors], alone if self._coalesces else 0)


def transport_of(group: ProcessGroup, backend: str, device: torch.device, streams: Streams) -> GroupTransport:
    """The transport of a process group with this backend for tensors on `device`."""
    if backend == "gloo":
        return GlooTransport(group, streams, device.type == "cpu")
    return GroupTransport(group, backend, streams)

"""Starts collectives and returns them as `CommWork`.

Comm             agrees with the other ranks on what comes next, and starts it     this file
Transport        moves the tensors                                                 transports.py, host_memory.py
CommWork         waits for it, then does what has to follow                        work.py
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hsdp.buffers.layout import NEVER
from hsdp.comm import backends
from hsdp.comm.backends import direct_bytes, uneven_bytes
from hsdp.comm.compare import digest_of, guard_of
from hsdp.comm.custom import AllGather, ReduceScatter, ReplicaReduce, all_reduce_by, gather_by, reduce_scatter_by
from hsdp.comm.divergence import DivergenceGuard
from hsdp.comm.groups import backend_name, shared_group, timeout_of
from hsdp.comm.host_meeting import host_memory_of
from hsdp.comm.host_memory import HostMemory
from hsdp.comm.labels import Named, labelled
from hsdp.comm.observer import CommContext
from hsdp.comm.streams import Streams
from hsdp.comm.transports import GroupTransport, Transport, transport_of
from hsdp.comm.uneven import Uneven
from hsdp.comm.work import CommWork, in_turn, wait_for
from hsdp.torch_private import is_profiling

P = ParamSpec("P")
R = TypeVar("R")
SelfT = TypeVar("SelfT")


def labels(
    start: Callable[Concatenate[SelfT, Named, P], R],
) -> Callable[Concatenate[SelfT, Named, P], R]:
    """Labels a method whose first argument is who communicates, under the method's name."""
    what = start.__name__

    @wraps(start)
    def call(self: SelfT, owner: Named, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not is_profiling():  # asked here, too: `labelled` is in another file
            return start(self, owner, *args, **kwargs)
        return labelled(what, owner.name, start, self, owner, *args, **kwargs)

    return call


def all_reduce_now(tensor: Tensor, how: Any, group: ProcessGroup, key: int, what: str) -> None:
    """`torch.distributed.all_reduce(tensor, how, group)` among units' collectives, known as `key`, told as `what`."""
    count = 0
    if (divergence_guard := DivergenceGuard.among(group)) is not None:
        divergence_guard.before_collective(key, what, "")
        count = divergence_guard.count
    if (work := dist.all_reduce(tensor, how, group, async_op=True)) is not None:
        wait_for(work, backend_name(group, tensor.device), divergence_guard, count, what, "")


_KINDS = {"all-gather": 1, "reduce-scatter": 2, "all-reduce": 3, "all-to-all": 4}
"""Numbers that stand for kinds of collectives: strings have another hash in each process."""


class Comm:
    """One process group as hsdp uses it. With one rank (or no group) every verb is local.

    Attributes:
        size: number of its ranks.
        backend: "gloo", "nccl", "fake", ..., or "none".
        multiplies: whether the backend's own reduce-scatters can multiply what they sum.
        context: the side streams that its collectives use, and who observes them.
        divergence_guard: what makes ranks agree on the order of collectives; None where there is nobody to agree with.
        number: of this `Comm` among all that there were in the group: tells units of one name apart.
        custom_all_gather, custom_reduce_scatter: users' collectives, which take the place of the backend's.
        host_memory: memory that all ranks share, through which equal parts go and not through the backend; None: they share
            none, or have not met yet, which they do in the first collective.
    """

    _transport: Transport
    _group_transport: GroupTransport  # also beside the memory of a host, which knows equal parts only

    def __init__(
        self,
        group: ProcessGroup | None,
        rank: int,
        size: int,
        device: torch.device,
        context: CommContext,
        shares_memory: bool = False,
    ) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.device = device
        self.context = context
        self.backend = backend_name(group, device) if group is not None else "none"
        self.multiplies = self.backend in backends.MULTIPLIES
        self.divergence_guard: DivergenceGuard | None = None
        self.custom_all_gather: AllGather | None = None
        self.custom_reduce_scatter: ReduceScatter | None = None
        self.host_memory: HostMemory | None = None
        self.shares_memory = shares_memory
        self._meets = shares_memory and size > 1 and self.backend == "gloo" and device.type == "cpu"
        self.number = 0
        if group is not None and size > 1 and self.backend not in backends.UNGUARDED:
            self.divergence_guard = guard_of(group, rank, device)
            self.number = self.divergence_guard.next_user()
        if group is not None:
            self.use_group(group)

    def use_group(self, group: ProcessGroup) -> None:
        """From now on its collectives are those of `group`, which has the same ranks and backend."""
        self.group = group
        self._transport = self._group_transport = transport_of(group, self.backend, self.device, self.context.streams)

    @property
    def thresholds(self) -> tuple[int, int, int]:
        """From how many bytes on tensors are gathered and reduced directly, and spared their padding, by default.

        Users' collectives, and groups written in Python, know equal parts only.
        """
        own = type(self.group) is ProcessGroup and self.custom_all_gather is None and self.custom_reduce_scatter is None
        return (*direct_bytes(self.backend), uneven_bytes(self.backend) if own else NEVER)

    def local(self, kind: str, owner: Named, finish: Callable[[], object] | None = None) -> CommWork:
        """A collective without a collective: `finish`, with the waiting of the others."""
        return CommWork(self, kind, owner, [], None, finish)

    @labels
    def all_gather(
        self,
        owner: Named,
        key: int,
        outputs: list[Tensor],
        inputs: list[Tensor],
        finish: Callable[[], object] | None,
        uneven: Sequence[Uneven] = (),
    ) -> CommWork:
        """Gathers each 1-D input of n elements into its 1-D output of S * n, all in one call; then `finish`.

        The `uneven` ones are filled from the ranks' own parts, each in a call of its own.

        `key` stands for the call to the ranks' divergence guard, here and below.
        """
        key = self._ready(key, "all-gather", owner, self.custom_all_gather)
        if self.custom_all_gather is not None:
            assert not uneven, "users' collectives know equal parts only"
            by_host = not self.context.streams.active
            works, own = gather_by(self.custom_all_gather, owner, outputs, inputs, self._group_transport.group, by_host)
            return own.used_by(CommWork(self, "all-gather", owner, works, (outputs, inputs), in_turn(own.then, finish)))
        works, then = self._transport.all_gather(owner, key, outputs, inputs)
        if uneven:
            works += self._group_transport.all_gather_uneven(uneven)
            outputs, inputs = outputs + [one.whole for one in uneven], inputs + [one.own for one in uneven]
        if then is not None:
            finish = in_turn(then, finish)
        return CommWork(self, "all-gather", owner, works, (outputs, inputs), finish)

    @labels
    def reduce_scatter(
        self,
        owner: Named,
        key: int,
        outputs: list[Tensor],
        inputs: list[Tensor],
        replicated: list[Tensor],
        finish: Callable[[], object] | None,
        factor: float = 1.0,
        uneven: Sequence[Uneven] = (),
    ) -> CommWork:
        """Sums over ranks; then `finish`.

        Args:
            outputs, inputs: each contiguous input of S * n elements is summed and this rank's n of it left in its output;
                dim 0 of an input has S equal parts.
            replicated: tensors that every rank keeps whole: summed in place.
            factor: what is summed is multiplied with it on the way; of a backend that does so (`multiplies`).
            uneven: of the sum of each this rank gets its own part.
        """
        key = self._ready(key, "reduce-scatter", owner, self.custom_reduce_scatter)
        if (custom := self.custom_reduce_scatter) is not None:
            assert factor == 1.0 and not uneven, "users' collectives know equal parts and plain sums only"
            by_host = not self.context.streams.active
            works, own = reduce_scatter_by(custom, owner, outputs, inputs, self._group_transport.group, by_host)
            finish = in_turn(own.then, finish)
        else:
            works, then = self._transport.reduce_scatter(owner, key, outputs, inputs, factor)
            if then is not None:
                finish = in_turn(then, finish)
        if uneven:
            started, then = self._group_transport.reduce_scatter_uneven(uneven, factor)
            works += started
            finish = in_turn(then, finish)
            outputs, inputs = outputs + [one.own for one in uneven], inputs + [one.whole for one in uneven]
        if replicated:
            assert factor == 1.0, "what every rank keeps whole is not multiplied on the way"
            works += self._group_transport.all_reduce(owner, key, replicated)[0]
        work = CommWork(self, "reduce-scatter", owner, works, (outputs, inputs, replicated), finish)
        return work if custom is None else own.used_by(work)

    @labels
    def all_reduce(
        self,
        owner: Named,
        key: int,
        tensors: list[Tensor],
        finish: Callable[[], object] | None = None,
        custom: ReplicaReduce | None = None,
    ) -> CommWork:
        """Sums tensors over ranks, in place, in one call per dtype; then `finish`. A `custom` one takes tensors singly."""
        key = self._ready(key, "all-reduce", owner, custom)
        if custom is not None:
            works = all_reduce_by(custom, tensors, self._group_transport.group, not self.context.streams.active)
        else:
            works, then = self._transport.all_reduce(owner, key, tensors)
            if then is not None:
                finish = in_turn(then, finish)
        return CommWork(self, "all-reduce", owner, works, tensors, finish)

    @labels
    def all_to_all(
        self,
        owner: Named,
        key: int,
        outputs: list[Tensor],
        inputs: list[Tensor],
        finish: Callable[[], object] | None = None,
        uneven: Sequence[tuple[Tensor, Uneven]] = (),
    ) -> CommWork:
        """Each rank r gets the r-th of S equal parts of every rank's 1-D input, in rank order; then `finish`.

        Of the second of each `uneven` pair it gets every rank's part number r, into the first.
        """
        key = self._ready(key, "all-to-all", owner)
        works, then = self._transport.all_to_all(owner, key, outputs, inputs)
        if then is not None:
            finish = in_turn(then, finish)
        for received, one in uneven:
            works += self._group_transport.exchange(received, one.whole, [one.own.numel()] * self.size, list(one.sizes))
            outputs, inputs = [*outputs, received], [*inputs, one.whole]
        return CommWork(self, "all-to-all", owner, works, (outputs, inputs), finish)

    @labels
    def exchange_parts(
        self, owner: Named, key: int, output: Tensor, received: list[int], sent: Tensor, sizes: list[int]
    ) -> CommWork:
        """Each rank r gets `sizes[r]` elements of `sent`, and what came from rank r is `received[r]` elements of `output`.

        The parts lie in rank order, one behind the other, in 1-D tensors of one dtype.
        """
        self._ready(key, "all-to-all", owner)
        # As bytes, because not every backend knows every dtype.
        scale = sent.element_size()
        counts = [n * scale for n in received], [n * scale for n in sizes]
        works = self._group_transport.exchange(output.view(torch.uint8), sent.view(torch.uint8), *counts)
        return CommWork(self, "all-to-all", owner, works, ([output], [sent]))

    def agree(self, owner: Named, key: int) -> None:
        """Tells the ranks' divergence guard that this rank starts nothing where the others might."""
        if self.divergence_guard is not None:
            self.divergence_guard.before_collective(hash((key, self.number)), "step without an exchange", owner.name)

    def _ready(self, key: int, kind: str, owner: Named, custom: object = None) -> int:
        """Agrees with the other ranks on a call; returns what stands for it: of which `Comm`, by which collective."""
        assert self.group is not None, f"{kind} without a process group"
        if self.context.observer is not None:
            self.context.observer.starting()
        key = hash((key, self.number, _KINDS[kind], custom is None))
        if self.divergence_guard is not None:
            self.divergence_guard.before_collective(key, kind, owner.name)
        if self._meets and custom is None:
            self._meet(self.group)  # not before: the ranks have agreed on this collective, so all are here
        return key

    def _meet(self, group: ProcessGroup) -> None:
        """Finds out whether the ranks share memory, through which equal parts go from now on."""
        self._meets = False
        if (memory := host_memory_of(group)) is not None:
            self._transport = self.host_memory = memory

    def all_equal(self, what: str, value: object, owner: Named) -> bool:
        """Whether every rank has the same `value` (plain data), in a call `what`. Blocking, asks before: not for steps."""
        return not self.differing(what, [value], owner)

    def differing(self, what: str, values: Sequence[object], owner: Named) -> list[int]:
        """Which of `values` (plain data, as many on every rank) are not the same on all ranks. Blocking, as above."""
        if self.divergence_guard is None:
            return []
        return self.divergence_guard.differing(what, owner.name, [digest_of(value) for value in values])

    def exchange(self, what: str, value: Any, owner: Named) -> list[Any]:
        """Every rank's `value` (plain data), in rank order. It grows with the number of ranks: for errors."""
        if self.all_equal(what, value, owner):
            return [value] * self.size
        text = repr(value).encode()
        # torch's own all_gather_object needs numpy in torch 2.11, which torch does not require.
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()], device=self.device), group=self.group)
        longest = max(int(size) for size in sizes)
        texts = [torch.empty(longest, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
        dist.all_gather(texts, torch.nn.functional.pad(mine, (0, longest - mine.numel())), group=self.group)
        return [
            ast.literal_eval(bytes(text[: int(size)].tolist()).decode()) for text, size in zip(texts, sizes, strict=True)
        ]

    def broadcast(self, what: str, tensor: Tensor, owner: Named) -> None:
        """Overwrites `tensor` with that of the group's rank 0, in a call `what`. Blocking, asks before."""
        if self.divergence_guard is not None:
            self.divergence_guard.differing(f"broadcast in {what}", owner.name, [])
            dist.broadcast(tensor, group=self.group, group_src=0)


def comm_among(ranks: tuple[int, ...], device: torch.device) -> Comm:
    """A `Comm` over these global ranks, which all call it, with a process group of their own, made once for all who ask."""
    context = CommContext(Streams(device))
    group = shared_group("matrices", list(ranks), timeout_of(None, device)) if len(ranks) > 1 else None
    return Comm(group, ranks.index(dist.get_rank()) if group is not None else 0, len(ranks), device, context)


def twin_of(comm: Comm) -> Comm:
    """A `Comm` over the same ranks, which all call it, with a process group of its own that all who ask for them share."""
    if comm.group is None or comm.size == 1 or comm.backend == "fake":
        return comm
    group = shared_group("twin", dist.get_process_group_ranks(comm.group), timeout_of(comm.group, comm.device))
    twin = Comm(group, comm.rank, comm.size, comm.device, comm.context, comm.shares_memory)
    twin.custom_reduce_scatter = comm.custom_reduce_scatter
    return twin

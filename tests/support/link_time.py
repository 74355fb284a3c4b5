"""A device's streams on finite links: how long a step takes whose parts were enqueued in a library's own order.

The engine, or FSDP2, runs as it is on tiny tensors; a `Recorder` stands for the device module and notes what is put on
which stream, behind which events. Afterwards `run` lets time pass:

    a stream         runs its work in order
    a communicator   runs its collectives one at a time, in the order in which the host issued them: one whose operands are
                     not there yet holds up those behind it, whatever stream they are on
    a link           serves the collectives that are under way on it equally, each of another communicator

`tests.support.virtual` fixes times when work is issued, which is too early where a later collective slows an earlier one.
The host takes no time, and neither do copies. `bound` is what no schedule of the same work can beat.
"""

from __future__ import annotations

import copy
import functools
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from hsdp.comm.collectives import Comm
from hsdp.planning import Plan
from hsdp.planning.schedule import Event as Planned
from hsdp.planning.schedule import Verb
from hsdp.planning.timing import Predicted
from hsdp.planning.traffic import Wires
from tests.support.device_module import DeviceModule
from tests.support.rig import fake_world
from tests.support.virtual import divert_fsdp2, use_device

COMPUTE = "compute"
WORLD = 4
_COLUMNS = 1 << 14
Library = Literal["hsdp", "fsdp2"]


@dataclass(eq=False)
class Work:
    """Something that a stream runs.

    Attributes:
        kind: "forward", "backward" or a kind of collective.
        units: indices of the units that it is for, one unless they share a collective.
        resource: COMPUTE, or the link that it takes.
        duration: how long it takes alone.
        needs: what has to end before.
        start, end: when, once `run` has found out.
    """

    kind: str
    units: tuple[int, ...]
    resource: str
    duration: float
    needs: tuple[Work, ...] = ()
    start: float = 0.0
    end: float = 0.0


# -- what libraries take for a device -----------------------------------------------------------------------------------


class Stream:
    """A device stream; `behind` is what the next work on it waits for."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.behind: tuple[Work, ...] = ()

    @property
    def stream_id(self) -> int:
        return id(self)

    def wait_stream(self, other: Stream) -> None:
        self.behind = tuple(dict.fromkeys((*self.behind, *other.behind)))

    def wait_event(self, event: Event) -> None:
        self.behind = tuple(dict.fromkeys((*self.behind, *event.behind)))

    def record_event(self) -> Event:
        return Event(self._recorder).record(self)


class Event:
    """A device event: what a stream held when it was recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.behind: tuple[Work, ...] = ()

    def record(self, stream: Stream | None = None) -> Event:
        self.behind = (stream or self._recorder.current_stream()).behind
        return self


class Recorder(DeviceModule[Stream, Event]):
    """Notes what is put on streams; also the device module that the libraries find.

    Attributes:
        works: everything since the last `restart`, in the order of issue.
    """

    mode = "device"

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.communicators: list[Communicator] = []
        super().__init__(lambda: Stream(self), lambda: Event(self))

    def add(self, kind: str, units: tuple[int, ...], resource: str, duration: float, behind: Iterable[Work] = ()) -> Work:
        """Puts work on the current stream, `behind` more than what that holds."""
        stream = self.current_stream()
        work = Work(kind, units, resource, duration, tuple(dict.fromkeys((*stream.behind, *behind))))
        stream.behind = (work,)
        self.works.append(work)
        return work

    def restart(self) -> None:
        """Everything is done, and forgotten."""
        self.works = []
        for one in (*self._streams, *self.communicators):
            one.behind = ()


class Communicator:
    """A process group whose collectives take their time on a link, and move nothing."""

    def __init__(self, recorder: Recorder, times: Times) -> None:
        self._recorder = recorder
        self._times = times
        self.behind: tuple[Work, ...] = ()
        self.starting: tuple[str, tuple[int, ...]] = ("", ())
        recorder.communicators.append(self)

    def start(self, kind: str, units: tuple[int, ...]) -> None:
        """Issues a collective on the current stream."""
        link, duration = self._times.collective(kind, units)
        if duration:
            self.behind = (self._recorder.add(kind, units, link, duration, self.behind),)

    def _started(self, *_: Any) -> None:
        self.start(*self.starting)

    _allgather_base = allgather_into_tensor_coalesced = _started
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _started
    allreduce = allreduce_coalesced = _started


class LinkComm(Comm):
    """A Comm that tells its communicator what it starts, and for which units."""

    def _ready(self, key: int, kind: str, owner: Any, custom: object = None) -> Any:
        group: Any = self.group
        key = super()._ready(key, kind, owner, custom)
        group.starting = (kind, tuple(map(_index, owner.name.split(" + "))))
        return key


def _index(name: str) -> int:
    """The unit called "unit7", or "unit6.unit7", is number 7; the root has a class name."""
    return int(name.rpartition("unit")[2]) if name[-1].isdigit() else 0


# -- a planned model ----------------------------------------------------------------------------------------------------


class Times:
    """How long the parts of a plan's step take, and on what.

    Args:
        plan: of a model on a mesh.
    """

    def __init__(self, plan: Plan) -> None:
        assumed = plan.assumptions
        wires = Wires(plan.replicas, plan.shards, assumed.link, assumed.backend, assumed.over_replicas)
        sequence = assumed.seq_len or min(assumed.tokens_per_rank, 8192)
        self._predicted = Predicted(plan.units, wires, assumed.tokens_per_rank, sequence, assumed.flops, assumed.recompute)
        self._collective = functools.lru_cache(maxsize=None)(self._predicted.collective)

    def compute(self, verb: Verb, unit: int) -> float:
        """Seconds of a unit's own part of forward or backward."""
        return self._predicted.compute(verb, unit)

    def collective(self, kind: str, units: tuple[int, ...]) -> tuple[str, float]:
        """The link of a collective, and its seconds alone."""
        verb = {"all-gather": Verb.GATHER, "reduce-scatter": Verb.SCATTER, "all-reduce": Verb.ALL_REDUCE}[kind]
        link = "replicate" if kind == "all-reduce" and not self._predicted.shared else "shard"
        return link, self._collective(Planned(verb, units))


class Compute(torch.autograd.Function):
    """A part of a unit's work on the recorder's compute stream; its weight gets a gradient."""

    @staticmethod
    def forward(ctx: Any, unit: PlannedUnit, share: float, x: Tensor, weight: Tensor) -> Tensor:
        ctx.unit, ctx.share = unit, share
        ctx.save_for_backward(weight)
        unit.compute("forward", Verb.FORWARD, share)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.unit.compute("backward", Verb.BACKWARD, ctx.share)
        return None, None, grad, torch.ones_like(ctx.saved_tensors[0])


class PlannedUnit(nn.Module):
    """A unit of a plan: it computes, then the units in it do. The root looks its tokens up first and computes last."""

    def __init__(self, recorder: Recorder, times: Times, index: int, columns: int) -> None:
        super().__init__()
        self.recorder, self.times, self.index = recorder, times, index
        self.table = nn.Parameter(torch.zeros(WORLD, columns)) if index == 0 else None
        self.weight = nn.Parameter(torch.zeros(WORLD, columns))

    def compute(self, kind: str, verb: Verb, share: float) -> None:
        """Puts a share of its work on the compute stream."""
        self.recorder.add(kind, (self.index,), COMPUTE, share * self.times.compute(verb, self.index))

    def forward(self, x: Tensor) -> Tensor:
        x = Compute.apply(self, 0.0, x, self.table) if self.table is not None else self._own(x)
        for child in self.children():
            x = child(x)
        return x if self.table is None else self._own(x)

    def _own(self, x: Tensor) -> Tensor:
        return Compute.apply(self, 1.0, x, self.weight)


def sizes_of(plan: Plan) -> list[int]:
    """Bytes of each gathered unit of a plan."""
    return [unit.total("whole_bytes") for unit in plan.units]


def _model(plan: Plan, recorder: Recorder, times: Times) -> list[PlannedUnit]:
    """Units as large as the plan's in proportion. No two are of one size, which tells FSDP2's collectives apart."""
    sizes = sizes_of(plan)
    columns = [_COLUMNS * size // max(sizes[1:]) + index + 1 for index, size in enumerate(sizes)]
    columns[0] = 2 * _COLUMNS
    units = [PlannedUnit(recorder, times, index, count) for index, count in enumerate(columns)]
    for index, unit in enumerate(plan.units):
        if unit.facts.parent is not None:
            units[unit.facts.parent].add_module(f"unit{index}", units[index])
    return units


def _by_hsdp(units: list[PlannedUnit], mesh: DeviceMesh, recorder: Recorder, times: Times, two: bool, policy: Any) -> Any:
    for unit in reversed(units):
        hsdp.fully_shard(unit, mesh=mesh, comm_policy=policy)
    model: Any = units[0]
    shard, scatter, replicate = (Communicator(recorder, times) for _ in range(3))
    for unit in model._units():
        if two:
            unit.scatter_comm = copy.copy(unit.shard_comm)
        for comm, group in ((unit.shard_comm, shard), (unit.replicate_comm, replicate), (unit.scatter_comm, scatter)):
            if comm.group is not None and comm.__class__ is not LinkComm:
                comm.__class__ = LinkComm
                comm.use_group(group)
    return model


def _by_fsdp2(
    units: list[PlannedUnit], mesh: DeviceMesh, recorder: Recorder, times: Times, two: bool, patches: pytest.MonkeyPatch
) -> Any:
    shard, scatter, replicate = (Communicator(recorder, times) for _ in range(3))
    groups = {"all-gather": shard, "reduce-scatter": scatter if two else shard, "all-reduce": replicate}
    shards = mesh.size(mesh.ndim - 1)
    of_size = {sum(param.numel() for param in unit.parameters(recurse=False)): unit.index for unit in units}

    def start(kind: str, operands: list[Tensor]) -> None:
        numel = max(one.numel() for one in operands) * (shards if kind == "all-reduce" else 1)
        groups[kind].start(kind, (of_size[numel],))

    divert_fsdp2(patches, recorder, start)
    for unit in reversed(units):
        fsdp.fully_shard(unit, mesh=mesh)
    return units[0]


def record(
    library: Library,
    plan: Plan,
    *,
    two_communicators: bool = False,
    micro_batches: int = 1,
    policy: hsdp.CommPolicy | None = None,
) -> list[Work]:
    """The work of one steady step, as the library issues it.

    Args:
        library: whose schedule.
        plan: of the model on its mesh: what takes how long.
        two_communicators: reduce-scatters have one of their own.
        micro_batches: forwards and backwards of the step; replicas are summed in the last one only.
        policy: hsdp's. None: its default.
    """
    recorder, times = Recorder(), Times(plan)
    with pytest.MonkeyPatch.context() as patches, fake_world(WORLD) as env:
        use_device(patches, recorder)  # type: ignore[arg-type]
        mesh = env.mesh((WORLD,) if plan.replicas == 1 else (2, 2))
        units = _model(plan, recorder, times)
        if library == "hsdp":
            model = _by_hsdp(units, mesh, recorder, times, two_communicators, policy or hsdp.CommPolicy())
        else:
            model = _by_fsdp2(units, mesh, recorder, times, two_communicators, patches)
        for _ in range(3):
            recorder.restart()
            for micro in range(micro_batches):
                model.set_requires_all_reduce(micro == micro_batches - 1)
                model.set_is_last_backward(micro == micro_batches - 1)
                model(torch.zeros(1, requires_grad=True)).sum().backward()
            model.zero_grad()
    return recorder.works


# -- time passes --------------------------------------------------------------------------------------------------------


def run(works: Sequence[Work]) -> float:
    """Lets works run; sets when they start and end, and returns when the last one does."""
    after: dict[Work, list[Work]] = {work: [] for work in works}
    for work in works:
        for need in work.needs:
            if need in after:  # else of an earlier step, which is over
                after[need].append(work)
    waits = {work: sum(need in after for need in work.needs) for work in works}
    left = {work: work.duration for work in works}
    running: dict[str, list[Work]] = {work.resource: [] for work in works}
    now, ended = 0.0, 0
    ready = [work for work in works if not waits[work]]
    while ready or any(running.values()):
        for work in ready:
            work.start = now
            running[work.resource].append(work)
        # Until the first one ends, each resource serves all that are under way on it equally.
        first = min(
            (work for on in running.values() for work in on), key=lambda one: left[one] * len(running[one.resource])
        )
        step = left[first] * len(running[first.resource])
        now, ready = now + step, []
        for resource, on in running.items():
            for work in on:
                left[work] -= step / len(on)
            done = [work for work in on if work is first or left[work] <= 1e-15]
            running[resource] = [work for work in on if work not in done]
            for work in done:
                work.end = now
                ended += 1
                for other in after[work]:
                    waits[other] -= 1
                    if not waits[other]:
                        ready.append(other)
    assert ended == len(works), f"{len(works) - ended} works wait for each other"
    return now


def bound(works: Sequence[Work], sizes: Sequence[float], room: float) -> float:
    """What no schedule of these works can beat that gathers units in the order of their use and has `room` for them.

    Only what data and memory need is kept: compute is a chain, a gather comes before the compute that reads it and behind
    the one that is done with what it takes the place of, a reduction comes behind the compute that makes it. For each
    resource, the works on it are then taken one at a time, those with the longest way to go first, and may be interrupted:
    Jackson's preemptive one-machine bound.

    Args:
        works: as `record` returns them.
        sizes: of each unit when it is gathered; the root (unit 0) stays whole, and needs no room.
        room: for gathered units at a time, in the same measure.
    """
    needs = _data_needs(works)
    _add_needs_of_memory(works, needs, sizes, room)
    head: dict[Work, float] = {}
    tail = dict.fromkeys(works, 0.0)
    order = _in_order(works, needs)
    for work in order:
        head[work] = max((head[need] + need.duration for need in needs[work]), default=0.0)
    for work in reversed(order):
        for need in needs[work]:
            tail[need] = max(tail[need], tail[work] + work.duration)
    resources = {work.resource for work in works}
    return max(_one_machine([work for work in works if work.resource == one], head, tail) for one in resources)


def _data_needs(works: Sequence[Work]) -> dict[Work, list[Work]]:
    needs: dict[Work, list[Work]] = {work: [] for work in works}
    gathered: list[Work] = []
    computed: Work | None = None
    before: dict[str, Work] = {}
    made: dict[tuple[str, int], Work] = {}
    for work in works:
        if work.resource == COMPUTE:
            if computed is not None:
                needs[work].append(computed)
            computed = work
            needs[work] += [gather for gather in gathered if gather.units == work.units]
            gathered = [gather for gather in gathered if gather.units != work.units]
            made[COMPUTE, work.units[0]] = work
        elif work.kind == "all-gather":
            gathered.append(work)
        else:
            for unit in work.units:
                scattered = made.get(("reduce-scatter", unit)) if work.kind == "all-reduce" else None
                needs[work].append(scattered or made[COMPUTE, unit])
                made[work.kind, unit] = work
            if work.kind in before:
                needs[work].append(before[work.kind])
            before[work.kind] = work
    return needs


def _add_needs_of_memory(works: Sequence[Work], needs: dict[Work, list[Work]], sizes: Sequence[float], room: float) -> None:
    """Gathers wait until units that were used before are done with, as far as there is no room beside them."""
    users = {work: [other for other in needs if work in needs[other]] for work in works if work.kind == "all-gather"}
    computed = [work for work in works if work.resource == COMPUTE]
    place = {work: at for at, work in enumerate(computed)}
    gathers = sorted((work for work in users if work.units != (0,)), key=lambda work: place[users[work][0]])
    again: dict[int, int] = {}
    last_use: dict[Work, int] = {}
    for gather in reversed(gathers):
        (unit,) = gather.units
        until = again.get(unit, len(computed))
        last_use[gather] = max(at for at in range(place[users[gather][0]], until) if computed[at].units == gather.units)
        again[unit] = place[users[gather][0]]
    held: list[tuple[int, int, Work]] = []
    taken, before = 0.0, None
    for gather in gathers:
        taken += sizes[gather.units[0]]
        while held and taken > room:
            until, _, other = heapq.heappop(held)
            if until >= place[users[gather][0]]:
                break  # it is still there when this one is used: there has to be room for both
            taken -= sizes[other.units[0]]
            needs[gather].append(computed[until])
        if before is not None:
            needs[gather].append(before)
        before = gather
        heapq.heappush(held, (last_use[gather], len(held), gather))


def _in_order(works: Sequence[Work], needs: dict[Work, list[Work]]) -> list[Work]:
    """Each behind what it needs."""
    placed: dict[Work, None] = {}

    def place(work: Work) -> None:
        todo: list[tuple[Work, bool]] = [(work, False)]
        while todo:
            one, ready = todo.pop()
            if one in placed:
                continue
            if ready:
                placed[one] = None
            else:
                todo.append((one, True))
                todo += [(need, False) for need in needs[one]]

    for work in works:
        place(work)
    return list(placed)


def _one_machine(works: list[Work], head: dict[Work, float], tail: dict[Work, float]) -> float:
    coming = sorted(works, key=head.__getitem__)
    ready: list[tuple[float, int]] = []
    left = [work.duration for work in coming]
    now = best = 0.0
    at = 0
    while at < len(coming) or ready:
        if not ready:
            now = max(now, head[coming[at]])
        while at < len(coming) and head[coming[at]] <= now:
            heapq.heappush(ready, (-tail[coming[at]], at))
            at += 1
        longest, one = ready[0]
        until = head[coming[at]] if at < len(coming) else float("inf")
        if now + left[one] <= until:
            heapq.heappop(ready)
            now += left[one]
            best = max(best, now - longest)
        else:
            left[one] -= until - now
            now = until
    return best

"""One steady step in the order in which the library carries it out: what bytes, memory and time are read from.

    GATHER 0, GATHER 1, OPEN 0, GATHER 2, OPEN 1, FORWARD 1, FREE 1, ... BACKWARD 2, FILL 2, SCATTER 2, ...

What is gathered ahead, and which reduction starts, waits and lands, is decided by the objects that the engine asks:
`GatherOrder`, `BackwardGatherOrder` and `ReduceQueue`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hsdp.planning.layouts import UnitPlan
from hsdp.policies import CommPolicy
from hsdp.schedule.gather_order import BackwardGatherOrder, BackwardGathers, GatherOrder, RankSet, RankSets
from hsdp.schedule.reduce_queue import Bucket, ReduceQueue
from hsdp.schedule.sequence_numbers import BEFORE_ALL
from hsdp.unit.dtype_group import unpacks_first


class Verb(enum.Enum):
    """What happens to a unit, or to the units of a bucket."""

    GATHER = "starts to gather its shards"
    REGATHER = "starts to gather the parts that it kept after forward"
    OPEN = "waits for its gather"
    FORWARD = "computes its own part of forward"
    KEEP_PART = "keeps a part of its whole parameters and frees the rest"
    FREE = "frees its whole parameters"
    BACKWARD = "computes its own part of backward; most of its gradients are there"
    EMBED = "makes the gradients of its embeddings"
    STASH = "adds its gradients to the sums on this rank"
    FILL = "turns its gradients into the operands of a reduction"
    SCATTER = "starts a reduce-scatter"
    RELEASE = "waits for the reduce-scatter and frees its inputs"
    DEFER = "adds the shards to sums that are all-reduced later"
    ALL_REDUCE = "starts an all-reduce, joined by what was deferred"
    SUM_EARLY = "starts an all-reduce of sums that are kept: in a tree micro-batches are added behind ranks"
    LAND = "waits for the all-reduce; its gradients are there"
    COMMIT = "ends its backward: what it would go back to is freed"


class Event(NamedTuple):
    """Something that happens to units, given by their indices."""

    verb: Verb
    units: tuple[int, ...]


def simulate_step(units: Sequence[UnitPlan], micro_batches: int, device: bool) -> list[Event]:
    """The events of a step.

    Args:
        units: of one model, as `UnitFacts` orders them.
        micro_batches: how many forwards and backwards, each within `accumulate(last=...)`.
        device: whether streams order the work (CUDA) or the host does (gloo).
    """
    simulation = _StepSimulation(units, device)
    for left in reversed(range(micro_batches)):
        simulation.forward()
        simulation.backward(last=left == 0)
    return simulation.events


_ALL: RankSet = frozenset()
"""The rank set of all units: one root's units have one mesh."""


@dataclass(eq=False)
class _Unit:
    """A unit, as the orders of gathers need to know it."""

    key: int  # its index
    whole_bytes: int
    mesh_ranks: RankSet = _ALL


class _StepSimulation:
    """Plays a step; the methods bear the names of what they stand for."""

    def __init__(self, units: Sequence[UnitPlan], device: bool) -> None:
        self.units = units
        self.events: list[Event] = []
        self._policy = units[0].facts.comm_policy
        self._children: list[list[int]] = [[] for _ in units]
        for index, unit in enumerate(units):
            if unit.facts.parent is not None:
                self._children[unit.facts.parent].append(index)
        # Gradients flow through a unit if something trains that is used before it begins, or in it.
        first = min((p.behind for unit in units for p in unit.facts.params if p.trainable), default=len(units))
        self._in_backward = [
            index >= first or any(inner.trains for inner in units[index : self._last_in(index) + 1])
            for index in range(len(units))
        ]
        self._whole: set[int] = set()  # gathered, or being gathered
        self._waiting: set[int] = set()  # being gathered
        self._parted: set[int] = set()
        self._queue = _Queue(self._policy, device, self._emit)
        self._places = [_Unit(index, unit.total("whole_bytes")) for index, unit in enumerate(units)]
        self._forward_order: GatherOrder[_Unit] = GatherOrder(_ALL)
        self._gathers = self._begin_gathers([])
        self._forward_order.begin()
        for place in self._places:  # as the step before it recorded them
            self._forward_order.enter(place, 0)
        self._forward_order.end()
        self._opened: list[int] = []  # in backward, not freed yet
        self._last = True

    def _last_in(self, unit: int) -> int:
        """The last of the units in a unit, or itself."""
        return max((self._last_in(child) for child in self._children[unit]), default=unit)

    def _emit(self, verb: Verb, *units: int) -> None:
        self.events.append(Event(verb, units))

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """The root's forward."""
        self._forward_order.begin()
        self._forward_of(0)
        self._forward_order.end()

    def _forward_of(self, unit: int) -> None:
        self._open(unit, self._forward_order.enter(self._places[unit], self._window(unit)))
        for child in self._children[unit]:
            self._forward_of(child)
        self._emit(Verb.FORWARD, unit)
        # Where it was left open, the last one stays too: its backward comes first.
        left_open = self.units[unit].facts.reshard_after_forward is None
        is_last = left_open and self._forward_order.last is self._places[unit]
        if self.units[unit].keeps or is_last:
            return
        if self.units[unit].parts > 1:
            self._emit(Verb.KEEP_PART, unit)
            self._whole.discard(unit)
            self._parted.add(unit)
        else:
            self._free(unit)

    def _window(self, unit: int) -> int:
        return self.units[unit].facts.comm_policy.prefetch

    def _open(self, unit: int, ahead: list[_Unit]) -> None:
        """Gathers it, unless it was gathered ahead, and the units of the window behind it."""
        self._gather(unit)
        if unpacks_first(self.units[unit].total("staging_bytes"), self.units[unit].total("whole_bytes")):
            self._await(unit)
        for place in ahead:
            self._gather(place.key)
        self._await(unit)

    def _gather(self, unit: int) -> None:
        if unit not in self._whole:
            self._emit(Verb.REGATHER if unit in self._parted else Verb.GATHER, unit)
            self._whole.add(unit)
            self._waiting.add(unit)

    def _await(self, unit: int) -> None:
        if unit in self._waiting:
            self._emit(Verb.OPEN, unit)
            self._waiting.discard(unit)

    def _free(self, unit: int) -> None:
        if unit in self._whole or unit in self._parted:
            self._emit(Verb.FREE, unit)
            self._whole.discard(unit)
            self._parted.discard(unit)

    # -- backward ------------------------------------------------------------------------------------------------

    def backward(self, last: bool) -> None:
        """The backward of everything; `last`: of the step's last micro-batch, in which everything is communicated."""
        if not any(self._in_backward):
            for unit in range(len(self.units)):
                self._free(unit)
            return
        self._last = last
        self._opened = []
        self._gathers = self._begin_gathers([self._places[unit] for unit in self._backward_order(0)])
        self._backward_of(0)
        self._queue.drain()
        for unit in range(len(self.units)):
            self._free(unit)
        self._emit(Verb.COMMIT, 0)

    def _begin_gathers(self, in_turn: list[_Unit]) -> BackwardGathers[_Unit]:
        order = BackwardGatherOrder[_Unit]()
        order.serve(RankSets([_ALL]))
        return order.begin([(unit, BEFORE_ALL) for unit in in_turn])

    def _backward_order(self, unit: int) -> list[int]:
        """Units in the order in which their backward begins."""
        if not self._in_backward[unit]:
            return []
        inner = [index for child in reversed(self._children[unit]) for index in self._backward_order(child)]
        return [unit, *inner]

    def _backward_of(self, unit: int) -> None:
        if not self._in_backward[unit]:
            return
        # Units that ran after this one in forward are through with their backward.
        done = [index for index in self._opened if index > unit and not self._inside(index, unit)]
        for index in done:
            self._opened.remove(index)
            self._free(index)
        self._gathers.move_to(self._places[unit])
        self._open(unit, self._gathers.next_units(self._places[unit], self._window(unit)))
        self._opened.append(unit)
        self._emit(Verb.BACKWARD, unit)
        for child in reversed(self._children[unit]):
            self._backward_of(child)
        if self.units[unit].trains:
            self._emit(Verb.EMBED, unit)
            self._reduce(unit)

    def _inside(self, unit: int, other: int) -> bool:
        """Whether `unit` lies in `other`."""
        parent = self.units[unit].facts.parent
        return parent is not None and (parent == other or self._inside(parent, other))

    # -- reductions ----------------------------------------------------------------------------------------------

    def _reduce(self, unit: int) -> None:
        if not self._last and self._policy.accumulate == "local":
            self._emit(Verb.STASH, unit)
            return
        self._queue.make_room(self.units[unit].scattered_bytes)
        self._emit(Verb.FILL, unit)
        self._queue.submit(_Reduction(unit, self.units[unit], all_reduce=self._last))


class _Reduction:
    """The reduction of a unit, as `ReduceQueue` needs to know it."""

    def __init__(self, source: int, unit: UnitPlan, all_reduce: bool) -> None:
        self.source = source
        self.all_reduce = all_reduce
        self.replicas = unit.replicas
        self.in_tree = unit.in_tree
        self._unit = unit

    def scatter_bytes(self) -> int:
        """Bytes of unsharded gradients that it holds."""
        return self._unit.scattered_bytes

    def reduce_bytes(self) -> int:
        """Bytes of its reduction buffers."""
        return self._unit.total("operands")

    def fits(self, other: _Reduction) -> bool:
        """Whether it may share a collective with another one: one root's units have one mesh."""
        return self.all_reduce == other.all_reduce


class _Queue(ReduceQueue[_Reduction, Bucket[_Reduction]]):
    """Carries out what the queue decides by writing it down."""

    def __init__(self, policy: CommPolicy, device: bool, emit: Callable[..., None]) -> None:
        super().__init__(policy, streams=device)
        self._emit = emit

    def _bucket(self, verb: Verb | None, items: list[_Reduction]) -> Bucket[_Reduction]:
        if verb is not None:
            self._emit(verb, *(item.source for item in items))
        return Bucket(items)

    def start_scatter(self, items: list[_Reduction]) -> Bucket[_Reduction]:
        """See `ReduceQueue`, here and below."""
        return self._bucket(Verb.SCATTER, items)

    def release(self, bucket: Bucket[_Reduction]) -> None:
        """The rows that were sent go."""
        self._emit(Verb.RELEASE, *(item.source for item in bucket.items))

    def start_all_reduce(self, items: list[_Reduction], behind: Bucket[_Reduction]) -> Bucket[_Reduction]:
        """With one replica nothing is under way."""
        bucket = self._bucket(Verb.ALL_REDUCE if items[0].all_reduce else Verb.SUM_EARLY, items)
        bucket.at_rest = items[0].replicas == 1 and not self.ordered_by_streams
        return bucket

    def start_deferral(self, item: _Reduction, behind: Bucket[_Reduction]) -> Bucket[_Reduction]:
        """The sums are added where they land."""
        bucket = self._bucket(None, [item])
        bucket.at_rest = not self.ordered_by_streams
        return bucket

    def land(self, bucket: Bucket[_Reduction]) -> None:
        """Gradients, or sums that are all-reduced later."""
        all_reduced = bucket.items[0].all_reduce
        self._emit(Verb.LAND if all_reduced else Verb.DEFER, *(item.source for item in bucket.items))

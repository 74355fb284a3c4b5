"""One steady step in the order in which the library carries it out: what bytes, memory and time are read from.

    GATHER 0, GATHER 1, OPEN 0, GATHER 2, OPEN 1, FORWARD 1, FREE 1, ... BACKWARD 2, FILL 2, SCATTER 2, ...

The rules are those of `Runtime` (orders, windows, turns) and `ReductionPipeline` (bounds, buckets) once the order of units
is known, with queues as full as their bounds allow: nothing lands before it has to.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hsdp.planning.layouts import UnitPlan


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
    LAND = "waits for the all-reduce; its gradients are there"
    COMMIT = "ends its backward: what it would go back to is freed"


class Event(NamedTuple):
    """Something that happens to units, given by their indices."""

    verb: Verb
    units: tuple[int, ...]


def rehearse(units: Sequence[UnitPlan], micro_batches: int, device: bool) -> list[Event]:
    """The events of a step.

    Args:
        units: of one model, as `UnitFacts` orders them.
        micro_batches: how many forwards and backwards, each within `accumulate(last=...)`.
        device: whether streams order the work (CUDA) or the host does (gloo).
    """
    rehearsal = _Rehearsal(units, device)
    for left in reversed(range(micro_batches)):
        rehearsal.forward()
        rehearsal.backward(last=left == 0)
    return rehearsal.events


class _Rehearsal:
    """Plays a step; the methods bear the names of what they stand for."""

    def __init__(self, units: Sequence[UnitPlan], device: bool) -> None:
        self.units = units
        self.events: list[Event] = []
        self._device = device
        self._policy = units[0].facts.comm_policy
        self._children: list[list[int]] = [[] for _ in units]
        for index, unit in enumerate(units):
            if unit.facts.parent is not None:
                self._children[unit.facts.parent].append(index)
        # Gradients flow through a unit if something trains that runs before it, or in it.
        first = next((index for index, unit in enumerate(units) if unit.trains), len(units))
        self._in_backward = [first <= self._last_in(index) for index in range(len(units))]
        self._whole: set[int] = set()  # gathered, or being gathered
        self._waiting: set[int] = set()  # being gathered
        self._parted: set[int] = set()
        self._filling: list[int] = []
        self._holding: deque[tuple[int, ...]] = deque()
        self._scattered: list[int] = []
        self._reducing: deque[tuple[int, ...]] = deque()
        self._order: list[int] = []  # in which units are still to be gathered in this pass
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
        self._order = list(range(len(self.units)))
        self._forward_of(0)

    def _forward_of(self, unit: int) -> None:
        self._open(unit)
        for child in self._children[unit]:
            self._forward_of(child)
        self._emit(Verb.FORWARD, unit)
        # Where it was left open, the last one stays too: its backward comes first.
        is_last = unit == len(self.units) - 1 and self.units[unit].facts.reshard_after_forward is None
        if self.units[unit].keeps or is_last:
            return
        if self.units[unit].parts > 1:
            self._emit(Verb.KEEP_PART, unit)
            self._whole.discard(unit)
            self._parted.add(unit)
        else:
            self._free(unit)

    def _open(self, unit: int) -> None:
        """Gathers it, unless it was gathered ahead, and the units of the window behind it."""
        window = self.units[unit].facts.comm_policy.prefetch
        if unit in self._order:
            at = self._order.index(unit) + 1
            del self._order[:at]
        for index in (unit, *self._order[:window]):
            if index not in self._whole:
                self._emit(Verb.REGATHER if index in self._parted else Verb.GATHER, index)
                self._whole.add(index)
                self._waiting.add(index)
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
        # What stayed whole is no part of the order of gathers.
        self._order = [unit for unit in self._backward_order(0) if unit not in self._whole]
        self._backward_of(0)
        self._drain()
        for unit in range(len(self.units)):
            self._free(unit)
        self._emit(Verb.COMMIT, 0)

    def _backward_order(self, unit: int) -> list[int]:
        """Units in the order in which their backward begins."""
        if not self._in_backward[unit]:
            return []
        inner = [index for child in reversed(self._children[unit]) for index in self._backward_order(child)]
        return [unit, *inner]

    def _backward_of(self, unit: int) -> None:
        if not self._in_backward[unit]:
            return
        self._advance()
        # Units that ran after this one in forward are through with their backward.
        done = [index for index in self._opened if index > unit and not self._inside(index, unit)]
        for index in done:
            self._opened.remove(index)
            self._free(index)
        self._open(unit)
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

    # -- the pipeline --------------------------------------------------------------------------------------------

    def _reduce(self, unit: int) -> None:
        if not self._last and self._policy.accumulate == "local":
            self._emit(Verb.STASH, unit)
            return
        if not self._device and not self._policy.reduce_scatter_bucket_bytes:
            while len(self._holding) >= self._policy.max_inflight_reduce_scatters:
                self._release()
            while len(self._reducing) >= self._policy.max_inflight_all_reduces:
                self._land()
        self._emit(Verb.FILL, unit)
        self._filling.append(unit)
        if self._bytes(self._filling, "scatter_inputs") >= self._policy.reduce_scatter_bucket_bytes:
            self._start_scatter()
        self._advance()

    def _bytes(self, units: Sequence[int], name: str) -> int:
        return sum(self.units[unit].total(name) for unit in units)

    def _start_scatter(self) -> None:
        while len(self._holding) >= self._policy.max_inflight_reduce_scatters:
            self._release()
        bucket, self._filling = tuple(self._filling), []
        self._emit(Verb.SCATTER, *bucket)
        self._holding.append(bucket)
        if self._device:
            self._queue_all_reduce(bucket)

    def _release(self) -> None:
        bucket = self._holding.popleft()
        self._emit(Verb.RELEASE, *bucket)
        if not self._device:
            self._queue_all_reduce(bucket)

    def _queue_all_reduce(self, bucket: tuple[int, ...]) -> None:
        for unit in bucket:
            if not self._last:
                self._emit(Verb.DEFER, unit)
            elif self.units[unit].replicas == 1:
                self._start_all_reduce((unit,))
            else:
                self._scattered.append(unit)
                if self._bytes(self._scattered, "operands") >= self._policy.all_reduce_bucket_bytes:
                    self._start_all_reduce(tuple(self._scattered))
                    self._scattered = []

    def _start_all_reduce(self, bucket: tuple[int, ...]) -> None:
        while len(self._reducing) >= self._policy.max_inflight_all_reduces:
            self._land()
        self._emit(Verb.ALL_REDUCE, *bucket)
        self._reducing.append(bucket)

    def _advance(self) -> None:
        """Lands what needs no waiting: on the host, sums that have no replica to meet."""
        while not self._device and self._reducing and self.units[0].replicas == 1:
            self._land()

    def _land(self) -> None:
        self._emit(Verb.LAND, *self._reducing.popleft())

    def _drain(self) -> None:
        if self._filling:
            self._start_scatter()
        while self._holding:
            self._release()
        if self._scattered:
            self._start_all_reduce(tuple(self._scattered))
            self._scattered = []
        while self._reducing:
            self._land()

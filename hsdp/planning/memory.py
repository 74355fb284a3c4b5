"""Bytes alive on one rank through a step, by what they are for, and the moment at which most of them are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hsdp.planning.activations import UnitActivations
from hsdp.planning.layouts import GroupPlan, UnitPlan
from hsdp.planning.replica_sums import SharedSums
from hsdp.planning.schedule import Event, Verb

TERMS = {
    "parameters": "the shards",
    "optimizer": "its state for them",
    "activations": "what autograd keeps from forward to backward, and recomputes",
    "gathered": "whole parameters, used or on their way",
    "staging": "of gathers under way: rows of packed parameters",
    "made": "whole gradients that wait for their unit's reduction",
    "sums": "of micro-batches: whole ones, or shards whose all-reduce was deferred",
    "reduction": "operands of reductions under way",
    "gradients": "the sharded ones that the optimizer will see",
}
"""The terms of a peak, and what they mean."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the rank that holds most.

    Attributes:
        peak: by term, at the moment at which their sum is largest.
        at: what happens at that moment, and to which unit.
        largest: the largest that each term gets at any moment.
        host: bytes in host memory, or files, of units that are offloaded: shards, optimizer state and gradients.
        step: bytes alive at most in the optimizer's step: shards, states, gradients, and what the step makes beside them.
    """

    peak: dict[str, int]
    at: str
    largest: dict[str, int]
    host: int = 0
    step: int = 0

    @property
    def total(self) -> int:
        """The peak of forward and backward."""
        return sum(self.peak.values())

    @property
    def most(self) -> int:
        """The peak, the optimizer's step included: what has to fit."""
        return max(self.total, self.step)

    @property
    def persistent(self) -> int:
        """What is there between steps, when gradients were set to None."""
        return self.peak["parameters"] + self.peak["optimizer"]

    @property
    def communication(self) -> int:
        """The peak without activations and what persists."""
        return self.total - self.persistent - self.peak["activations"]


def replay(
    events: Sequence[Event],
    units: Sequence[UnitPlan],
    state_bytes: Callable[[UnitPlan, GroupPlan], int],
    activations: Sequence[UnitActivations],
    backend: str,
    over_replicas: bool = False,
    step_bytes: int = 0,
) -> MemoryPlan:
    """The peak of a step.

    Args:
        events: the step.
        units: its units.
        state_bytes: of the optimizer's state for a dtype group.
        activations: of each unit.
        backend: "gloo" receives reduce-scatters beside their inputs.
        over_replicas: replicas share gradients out.
        step_bytes: what the optimizer's step makes beside what it steps.
    """
    ledger = _Ledger(units, backend, over_replicas)
    ledger.now["parameters"] = sum(unit.total("device_bytes") for unit in units)
    dtype_groups = [(unit, group) for unit in units for group in unit.dtype_groups]
    ledger.now["optimizer"] = sum(state_bytes(unit, group) for unit, group in dtype_groups if not group.offloaded)
    host = sum(
        group.shard_bytes + state_bytes(unit, group) + group.gradient_bytes_with(ledger.shared_sums(unit, group))
        for unit, group in dtype_groups
        if group.offloaded
    )
    # A unit without a backward leaves nothing for it.
    holding = {index for event in events if event.verb is Verb.BACKWARD for index in event.units}
    ledger.activations = [one if at in holding else UnitActivations(0) for at, one in enumerate(activations)]
    ledger.expect(events)
    ledger.note("between steps")
    for event in events:
        for index in event.units:
            ledger.play(event.verb, index)
    stepped = sum(ledger.now[term] for term in ("parameters", "optimizer", "gradients"))
    return MemoryPlan(ledger.peak, ledger.at, ledger.largest, host, stepped + step_bytes)


class _Ledger:
    """Bytes alive now, by term."""

    def __init__(self, units: Sequence[UnitPlan], backend: str, over_replicas: bool) -> None:
        self.units = units
        self._over_replicas = over_replicas
        self.now = dict.fromkeys(TERMS, 0)
        self.peak = dict(self.now)
        self.largest = dict(self.now)
        self.at = ""
        self.activations: list[UnitActivations] = []
        self._here = ""
        self._fills: Counter[int] = Counter()  # reductions to come
        # An all-to-all receives beside what it sends.
        self._copies = 2 if backend == "gloo" or units[0].in_tree else 1
        self._stashed: set[int] = set()
        self._deferred: set[int] = set()
        self._early: set[int] = set()  # of those, what is summed over replicas first
        self._joined: set[int] = set()
        self._replaced = 0  # bytes of deferred sums that are kept until their backward has ended, in case it fails
        self._packed: set[int] = set()  # being gathered from all ranks: packed ones by way of staging
        self._parted: set[int] = set()
        self._apart: set[int] = set()  # of those, what has not been gathered from its parts again
        self._verbs: dict[Verb, Callable[[UnitPlan, int], None]] = {
            Verb.GATHER: self._gather,
            Verb.REGATHER: self._regather,
            Verb.OPEN: self._open,
            Verb.FORWARD: self._forward,
            Verb.KEEP_PART: self._keep_part,
            Verb.FREE: self._free,
            Verb.BACKWARD: self._backward,
            Verb.EMBED: self._embed,
            Verb.STASH: self._stash,
            Verb.FILL: self._fill,
            Verb.SCATTER: self._scatter,
            Verb.RELEASE: self._release,
            Verb.DEFER: self._defer,
            Verb.ALL_REDUCE: self._all_reduce,
            Verb.SUM_EARLY: self._sum_early,
            Verb.LAND: self._land,
            Verb.COMMIT: self._commit,
        }

    def expect(self, events: Sequence[Event]) -> None:
        """Counts what is to come."""
        self._fills = Counter(index for event in events if event.verb is Verb.FILL for index in event.units)

    def play(self, verb: Verb, index: int) -> None:
        """Something happens to a unit."""
        unit = self.units[index]
        self._here = f"{unit.facts.name} {verb.value}"
        self._verbs[verb](unit, index)
        self.note(self._here)

    def note(self, at: str) -> None:
        """Compares with the peak."""
        for term, nbytes in self.now.items():
            self.largest[term] = max(self.largest[term], nbytes)
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak, self.at = dict(self.now), at

    def _add(self, term: str, nbytes: int) -> None:
        self.now[term] += nbytes
        assert self.now[term] >= 0, f"{self._here}: {term} below 0"

    def _for_a_moment(self, term: str, nbytes: int) -> None:
        self._add(term, nbytes)
        self.note(self._here)
        self._add(term, -nbytes)

    # -- parameters ----------------------------------------------------------------------------------------------

    def _gather(self, unit: UnitPlan, index: int) -> None:
        self._add("gathered", unit.total("whole_bytes") - unit.total("unpacked_bytes"))
        self._add("staging", unit.total("staging_bytes"))
        self._packed.add(index)
        self._for_a_moment("staging", unit.total("arriving_bytes"))

    def _regather(self, unit: UnitPlan, index: int) -> None:
        self._apart.discard(index)
        self._add("gathered", unit.total("whole_bytes"))

    def _open(self, unit: UnitPlan, index: int) -> None:
        if index in self._packed:
            self._packed.discard(index)
            for group in unit.dtype_groups:
                self._add("gathered", group.unpacked_bytes)
                self.note(self._here)
                self._add("staging", -group.staging_bytes)

    def _keep_part(self, unit: UnitPlan, index: int) -> None:
        self._add("gathered", unit.total("part_bytes"))
        self.note(self._here)
        self._add("gathered", -unit.total("whole_bytes"))
        self._parted.add(index)
        self._apart.add(index)

    def _free(self, unit: UnitPlan, index: int) -> None:
        part = unit.total("part_bytes") if index in self._parted else 0
        whole = 0 if index in self._apart else unit.total("whole_bytes")  # without a backward there is its part alone
        self._parted.discard(index)
        self._apart.discard(index)
        self._add("gathered", -whole - part)

    def _forward(self, unit: UnitPlan, index: int) -> None:
        self._add("activations", self.activations[index].kept)

    # -- gradients -----------------------------------------------------------------------------------------------

    def _backward(self, unit: UnitPlan, index: int) -> None:
        self._make(unit, late=False)
        if again := self.activations[index].again:
            self._for_a_moment("activations", again)
        self._add("activations", -self.activations[index].kept)

    def _embed(self, unit: UnitPlan, index: int) -> None:
        self._make(unit, late=True)

    def _make(self, unit: UnitPlan, late: bool) -> None:
        self._add("made", sum(group.made_bytes(late) for group in unit.dtype_groups))

    def _stash(self, unit: UnitPlan, index: int) -> None:
        made = {group: group.made_bytes(False) + group.made_bytes(True) for group in unit.dtype_groups}
        if index not in self._stashed:  # the first gradients are the sums, where their dtype is right
            for group in unit.dtype_groups:
                self._add("sums", group.stash_bytes)
                if group.kind.compute == group.kind.accumulate:
                    self._add("made", -made.pop(group))
            self.note(self._here)
        self._add("made", -sum(made.values()))
        self._stashed.add(index)

    def _fill(self, unit: UnitPlan, index: int) -> None:
        stashed = index in self._stashed
        self._stashed.discard(index)
        held = "sums" if stashed else "made"
        if stashed:  # the gradients of this micro-batch are added to the sums
            self._add(
                "made",
                -sum(group.made_bytes(False) + group.made_bytes(True) for group in unit.dtype_groups),
            )
        for group in unit.dtype_groups:
            dtype = group.kind.accumulate if stashed else group.kind.compute
            self._add("reduction", group.buffer_bytes)
            for numel in group.handed_over:  # each is an operand as it is, or cast and let go
                self._add("reduction", numel * group.kind.reduce.itemsize)
                if dtype != group.kind.reduce:
                    self.note(self._here)
                self._add(held, -numel * dtype.itemsize)
            self._add("reduction", group.copies)
            self.note(self._here)
            self._add(held, -group.copied_numel * dtype.itemsize)
        self._fills[index] -= 1
        if not self._fills[index]:  # the last micro-batch's go on to the replicas
            self._add("reduction", self._shared_bytes(unit))

    def _scatter(self, unit: UnitPlan, index: int) -> None:
        self._add("reduction", (self._copies - 1) * unit.total("scatter_inputs") + self._received_parts(unit))

    def _release(self, unit: UnitPlan, index: int) -> None:
        uneven = unit.total("uneven_inputs") + self._received_parts(unit)
        self._add("reduction", -self._copies * unit.total("scatter_inputs") - uneven)

    def _received_parts(self, unit: UnitPlan) -> int:
        """What ranks receive beside gradients that they hold in different parts: in a tree they do."""
        return unit.total("received_parts") if unit.in_tree else 0

    def _sum_early(self, unit: UnitPlan, index: int) -> None:
        self._add("reduction", unit.received_bytes)
        self._early.add(index)

    def _defer(self, unit: UnitPlan, index: int) -> None:
        if index in self._early:
            self._early.discard(index)
            self._add("reduction", -unit.received_bytes)
        if index in self._deferred:
            self._replaced += unit.total("partial_bytes")
        for group in unit.dtype_groups:
            self._add("sums", group.partial_bytes)
            if group.kind.accumulate != group.kind.reduce:
                self.note(self._here)
            self._add("reduction", -sum(group.operands))
        self._deferred.add(index)

    def _all_reduce(self, unit: UnitPlan, index: int) -> None:
        self._add("reduction", unit.received_bytes + self._arriving_bytes(unit))
        if index in self._deferred:
            self._replaced += unit.total("partial_bytes")
            self._deferred.discard(index)
            self._joined.add(index)

    def _shared_bytes(self, unit: UnitPlan) -> int:
        """What a reduce-scatter over replicas packs and leaves, beside the sums that it takes."""
        total = 0
        for group in unit.dtype_groups:
            if sums := self.shared_sums(unit, group):
                total += (sums.left + sums.replicas * sums.row) * group.kind.reduce.itemsize
        return total

    def _arriving_bytes(self, unit: UnitPlan) -> int:
        """What it receives on gloo."""
        shared = [(group, self.shared_sums(unit, group)) for group in unit.dtype_groups]
        inputs = sum(sum(sums.inputs) * group.kind.reduce.itemsize for group, sums in shared if sums)
        return (self._copies - 1) * inputs

    def shared_sums(self, unit: UnitPlan, group: GroupPlan) -> SharedSums | None:
        """The reduce-scatter over replicas of a dtype group's sums; None: they are all-reduced."""
        return group.shared_sums if self._over_replicas and not unit.in_tree else None

    def _commit(self, unit: UnitPlan, index: int) -> None:
        self._add("sums", -self._replaced)
        self._replaced = 0

    def _land(self, unit: UnitPlan, index: int) -> None:
        if index in self._joined:
            self._joined.discard(index)
            if unit.in_tree:  # what was deferred is added at the root, in its own dtype
                groups = [group for group in unit.dtype_groups if group.kind.accumulate != group.kind.reduce]
                self._for_a_moment("reduction", sum(group.partial_bytes for group in groups))
        self._add("reduction", -unit.received_bytes - self._arriving_bytes(unit) - self._shared_bytes(unit))
        for group in unit.dtype_groups:
            operands = sum(group.operands)
            if group.offloaded:
                self._for_a_moment("reduction", group.landing_bytes)
            else:
                self._add("gradients", group.gradient_bytes_with(self.shared_sums(unit, group)))
                if group.landing_bytes:
                    self.note(self._here)
            self._add("reduction", -operands)

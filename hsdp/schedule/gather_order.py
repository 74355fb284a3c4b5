"""The orders in which a root's units are gathered.

    forward     as recorded in the last pass, until this one deviates: prefetches guess, and ranks agree on the guess
    backward    the reverse of the forwards behind it: known before it begins, whatever a rank's own loss uses

A rank whose loss does not reach a unit passes over it in backward: it joins the all-gather that the others need, and
reshards.

The ranks of a unit's mesh, its *rank set*, must gather it in one order among others, whatever units only some of these
ranks have. So each rank set has an order of its own, of the units that all its ranks enter:

    dense layers on ranks 0-3      A     B     C     experts do not show: ranks that have others may skip others
    experts on ranks 0 and 2       A  e  B  f  C     dense layers do: where e is gathered depends on A

Decisions alone, without tensors: the engine and the planner (`hsdp.planning`) ask the same objects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from hsdp.schedule.byte_budget import units_in_budget
from hsdp.schedule.sequence_numbers import SequenceNumber

RankSet = frozenset[int]
"""The ranks that gather a unit together."""


class Gathered(Protocol):
    """A unit, as far as gather orders need to know it."""

    key: int
    """Identifies it, on all ranks alike."""
    whole_bytes: int
    """Bytes of its unsharded parameters."""
    mesh_ranks: RankSet
    """The ranks that have the unit; equal sets are one object."""


UnitT = TypeVar("UnitT", bound=Gathered)


class RankSets:
    """The rank sets of some units.

    Attributes:
        supersets: for each the rank sets that hold all its ranks, itself included: its ranks agree on the units of those.
        subsets: for each the rank sets that it is a superset of.
    """

    def __init__(self, rank_sets: Iterable[RankSet]) -> None:
        found = list(dict.fromkeys(rank_sets))
        self.supersets = {one: {other for other in found if one <= other} for one in found}
        self.subsets = {one: [other for other in found if other <= one] for one in found}


class GatherOrders(Generic[UnitT]):
    """The order of each rank set in forwards, of this rank's rank sets.

    Attributes:
        of: the order of each rank set.
    """

    def __init__(self) -> None:
        self.of: dict[RankSet, GatherOrder[UnitT]] = {}
        self._subsets: dict[RankSet, list[GatherOrder[UnitT]]] = {}

    def serve(self, rank_sets: RankSets) -> None:
        """Makes orders for these rank sets; rank sets that have one keep it."""
        self.of = {one: self.of.get(one) or GatherOrder(one) for one in rank_sets.subsets}
        self._subsets = {one: [self.of[other] for other in subsets] for one, subsets in rank_sets.subsets.items()}

    def identity(self, rank_set: RankSet) -> int:
        """The identity of a rank set's order."""
        return self.of[rank_set].identity

    def begin(self) -> None:
        """Starts a pass."""
        for order in self.of.values():
            order.begin()

    def enter(self, unit: UnitT, window: int) -> list[UnitT]:
        """Records that `unit` is entered; returns the units behind it to be gathered ahead from here, of all rank sets."""
        orders = self._subsets[unit.mesh_ranks]
        if len(orders) == 1:
            return orders[0].enter(unit, window)
        return [other for order in orders for other in order.enter(unit, window)]

    def leave(self) -> None:
        """Ends a pass that failed."""
        for order in self.of.values():
            order.leave()

    def end(self) -> None:
        """Ends a pass."""
        for order in self.of.values():
            order.end()


class GatherOrder(Generic[UnitT]):
    """The order in which the units of a rank set's supersets were gathered in the last full pass; where this pass is in it.

    Attributes:
        identity: a hash of the order, the same on all ranks that have it; 0 before one was recorded.
        last: the unit with which a pass ends that has kept to the order; None before it is entered.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self._expected: list[UnitT] = []
        self._windows: _Windows[UnitT] = _Windows([], rank_set)
        self._seen: list[UnitT] = []
        self._follows = False
        self.identity = 0
        self.last: UnitT | None = None

    def begin(self) -> None:
        """Starts a pass."""
        self._seen, self.last = [], None
        self._follows = bool(self._expected)
        self._windows = self._windows.of(self._expected)

    def enter(self, unit: UnitT, window: int) -> list[UnitT]:
        """Records that `unit` is entered; returns the window of units behind it, or none once the pass left the order."""
        at = len(self._seen)
        self._seen.append(unit)
        if self._follows and (at >= len(self._expected) or self._expected[at] is not unit):
            self._follows = False
        self.last = unit if self._follows and at + 1 == len(self._expected) else None
        return self._windows[at + 1, window] if self._follows else []

    def leave(self) -> None:
        """Ends a pass that failed: the expected order stays."""
        self._seen, self.last = [], None
        self._follows = False

    def end(self) -> None:
        """Ends a pass: the next one expects its order."""
        if self._seen and self._seen != self._expected:
            self._expected = self._seen
            self.identity = hash(tuple(unit.key for unit in self._seen))
        self.leave()


class BackwardGatherOrder(Generic[UnitT]):
    """What backwards learn about the units to gather, from one to the next.

    Units that ran without gradients inside of a forward with them are recomputed, or never come back: which of both is
    what the last backward showed, and at first they are expected.
    """

    def __init__(self) -> None:
        self._absent: set[UnitT] = set()
        self._rank_sets = RankSets(())
        self._windows: dict[RankSet, _Windows[UnitT]] = {}
        self._identities: dict[RankSet, int] = {}

    def serve(self, rank_sets: RankSets) -> None:
        """Sets the rank sets of its units."""
        self._rank_sets = rank_sets
        self._windows = {one: self._windows.get(one) or _Windows([], one) for one in rank_sets.supersets}

    def identity(self, rank_set: RankSet) -> int:
        """The identity of a rank set's order in the last backward, as in `GatherOrder`; 0 before the first one."""
        return self._identities.get(rank_set, 0)

    def begin(self, units: Iterable[tuple[UnitT, SequenceNumber | None]]) -> BackwardGathers[UnitT]:
        """The backward of a forward begins, with `units` to be gathered.

        Each has the sequence number of its last forward's first autograd node; None: gradients cannot enter it.
        """
        gathers = BackwardGathers(dict(units), self._absent, self._rank_sets, self._windows)
        self._windows = gathers.windows
        return gathers

    def end(self, gathers: BackwardGathers[UnitT]) -> None:
        """The backward is over."""
        self._absent -= gathers.entered
        self._absent.update(u for u, began in gathers.began.items() if began is None and u not in gathers.entered)
        for rank_set, windows in gathers.windows.items():
            if windows.order:
                self._identities[rank_set] = hash(tuple(unit.key for unit in windows.order))


class BackwardGathers(Generic[UnitT]):
    """The order in which units are gathered in the backward of one forward, and where this rank is in it.

    Attributes:
        began: the units, with when the last forward of each began; None: gradients cannot enter it.
        expected: those that are gathered, in order, `windows`: of that order, as each rank set has it. The windows of the
            last backward are passed in, which often are the same.
        entered: those that this rank has entered.
    """

    def __init__(
        self,
        began: dict[UnitT, SequenceNumber | None],
        absent: Collection[UnitT],
        rank_sets: RankSets,
        windows: dict[RankSet, _Windows[UnitT]],
    ) -> None:
        self.began = began
        self.expected = [unit for unit, number in began.items() if number is not None or unit not in absent]
        self.windows: dict[RankSet, _Windows[UnitT]] = {}
        self._subsets = rank_sets.subsets
        self._behind: dict[RankSet, list[int]] = {}  # of a rank set's order, how much lies before a place in `expected`
        for rank_set, supersets in rank_sets.supersets.items():
            shows = [unit.mesh_ranks in supersets for unit in self.expected]
            order = self.expected if all(shows) else [u for u, shown in zip(self.expected, shows, strict=True) if shown]
            self.windows[rank_set] = windows[rank_set].of(order)
            self._behind[rank_set] = list(accumulate(shows, initial=0))
        self.entered: set[UnitT] = set()
        self._places = {unit: place for place, unit in enumerate(self.expected)}
        self._at = 0

    def enter(self, unit: UnitT, node: SequenceNumber) -> list[UnitT]:
        """Records that this rank is about to enter `unit`; returns the units that other ranks may have entered before.

        These are the units before it in the order. Where its place is no help, as it was passed already, has no place, or
        was called once more later in the forward, they are those that the engine is behind when it runs `node`:
        `unit` is one of them if other ranks have entered it for the later call.
        """
        place, began = self._places.get(unit), self.began.get(unit)
        if place is not None and place >= self._at and (began is None or began <= node):
            passed = self._between(place)
        else:
            passed = [u for u in self.rest() if self._places[u] < (place or 0) or self._is_behind(u, node)]
        if place is not None:
            self.entered.add(unit)
        return passed

    def _is_behind(self, unit: UnitT, node: SequenceNumber) -> bool:
        began = self.began[unit]
        return began is not None and began > node

    def rest(self) -> list[UnitT]:
        """The units that are left, and that other ranks may have entered."""
        return self._between(len(self.expected))

    def _between(self, stop: int) -> list[UnitT]:
        between = self.expected[self._at : stop]
        return [unit for unit in between if self.began[unit] is not None and unit not in self.entered]

    def move_to(self, unit: UnitT) -> None:
        """`unit` is entered or passed over now."""
        place = self._places.get(unit, -1)
        if place >= self._at:
            self._at = place + 1

    def next_units(self, unit: UnitT, window: int) -> list[UnitT]:
        """The units of the window that are gathered next, from `unit` on, at which the backward is."""
        subsets, at = self._subsets[unit.mesh_ranks], self._at
        if len(subsets) == 1:
            return self.windows[subsets[0]][self._behind[subsets[0]][at], window]
        return [other for one in subsets for other in self.windows[one][self._behind[one][at], window]]


class _Windows(dict[tuple[int, int], list[UnitT]]):
    """The windows of a rank set's order: by place and bound, its units from there on that are gathered ahead.

    Each is worked out when it is asked for the first time, and is not to be changed. Units of its supersets take room
    in a window; their own order says where they are gathered.
    """

    def __init__(self, order: list[UnitT], rank_set: RankSet) -> None:
        super().__init__()
        self.order = order
        self._rank_set = rank_set
        self._sizes = [unit.whole_bytes for unit in order]

    def __missing__(self, key: tuple[int, int]) -> list[UnitT]:
        at, bound = key
        found = self.order[at : at + units_in_budget(self._sizes[at:], bound)]
        window = self[key] = [unit for unit in found if unit.mesh_ranks is self._rank_set]
        return window

    def of(self, order: list[UnitT]) -> _Windows[UnitT]:
        """The windows of another order, or of the same order with other sizes; `self` if nothing changed."""
        same = order == self.order and self._sizes == [unit.whole_bytes for unit in order]
        return self if same else _Windows(order, self._rank_set)

"""The orders in which a root's units are gathered.

    forward     as recorded in the last pass, until this one deviates: prefetches guess, and ranks agree on the guess
    backward    the reverse of the forwards behind it: known before it begins, whatever a rank's own loss uses

A rank whose loss does not reach a unit passes over it in backward: it joins the all-gather that the others need, and
reshards.

The ranks of a unit's mesh, its *circle*, must gather it in one order among others, whatever units there are that only some
of them have. So each circle has an order of its own, of the units that all its ranks enter:

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

Circle = frozenset[int]
"""The ranks that gather a unit together."""


class Gathered(Protocol):
    """A unit, as far as the order of gathers depends on it."""

    key: int
    """Identifies it, on all ranks alike."""
    whole_bytes: int
    """Of its unsharded parameters."""
    circle: Circle
    """Whose units they are; equal ones are one object."""


UnitT = TypeVar("UnitT", bound=Gathered)


class Circles:
    """The circles of some units.

    Attributes:
        around: for each the circles that hold all its ranks, itself included: its ranks agree on the units of those.
        inside: for each the circles that it holds so.
    """

    def __init__(self, circles: Iterable[Circle]) -> None:
        found = list(dict.fromkeys(circles))
        self.around = {one: {other for other in found if one <= other} for one in found}
        self.inside = {one: [other for other in found if other <= one] for one in found}


class GatherOrders(Generic[UnitT]):
    """The order of each circle in forwards, of this rank's circles."""

    def __init__(self) -> None:
        self._orders: dict[Circle, GatherOrder[UnitT]] = {}
        self._inside: dict[Circle, list[GatherOrder[UnitT]]] = {}

    def serve(self, circles: Circles) -> None:
        """These circles have orders from now on, those that had one theirs."""
        self._orders = {one: self._orders.get(one) or GatherOrder(one) for one in circles.inside}
        self._inside = {one: [self._orders[other] for other in inside] for one, inside in circles.inside.items()}

    def identity(self, circle: Circle) -> int:
        """That of the order of a circle."""
        return self._orders[circle].identity

    def begin(self) -> None:
        """Starts a pass."""
        for order in self._orders.values():
            order.begin()

    def enter(self, unit: UnitT, window: int) -> list[UnitT]:
        """Records that `unit` is entered; returns the units behind it to be gathered ahead from here, of all circles."""
        orders = self._inside[unit.circle]
        if len(orders) == 1:
            return orders[0].enter(unit, window)
        return [other for order in orders for other in order.enter(unit, window)]

    def is_last(self, unit: UnitT) -> bool:
        """Whether `unit` is where a pass that kept to the order of its circle ends."""
        return self._orders[unit.circle].is_last(unit)

    def leave(self) -> None:
        """Ends a pass that failed."""
        for order in self._orders.values():
            order.leave()

    def end(self) -> None:
        """Ends a pass."""
        for order in self._orders.values():
            order.end()


class GatherOrder(Generic[UnitT]):
    """The order in which the units around a circle were gathered in the last full pass, and where this pass is in it.

    Attributes:
        identity: stands for the order, the same number on all ranks that have it; 0 before one was recorded.
    """

    def __init__(self, circle: Circle) -> None:
        self._expected: list[UnitT] = []
        self._windows: _Windows[UnitT] = _Windows([], circle)
        self._seen: list[UnitT] = []
        self._follows = False
        self.identity = 0

    def begin(self) -> None:
        """Starts a pass."""
        self._seen = []
        self._follows = bool(self._expected)
        self._windows = self._windows.of(self._expected)

    def enter(self, unit: UnitT, window: int) -> list[UnitT]:
        """Records that `unit` is entered; returns the window of units behind it, or none once the pass left the order."""
        at = len(self._seen)
        self._seen.append(unit)
        if self._follows and (at >= len(self._expected) or self._expected[at] is not unit):
            self._follows = False
        return self._windows[at + 1, window] if self._follows else []

    def is_last(self, unit: UnitT) -> bool:
        """Whether `unit` is where a pass that kept to the order ends."""
        return self._follows and len(self._seen) == len(self._expected) and self._expected[-1] is unit

    def leave(self) -> None:
        """Ends a pass that failed: what is expected stays."""
        self._seen = []
        self._follows = False

    def end(self) -> None:
        """Ends a pass: what was seen is what the next one expects."""
        if self._seen and self._seen != self._expected:
            self._expected = self._seen
            self.identity = hash(tuple(unit.key for unit in self._seen))
        self.leave()


class BackwardGatherOrder(Generic[UnitT]):
    """What is known about the units that backwards gather, from one to the next.

    Units that ran without gradients inside of a forward with them are recomputed, or never come back: which of both is
    what the last backward showed, and at first they are expected.
    """

    def __init__(self) -> None:
        self._absent: set[UnitT] = set()
        self._circles = Circles(())
        self._windows: dict[Circle, _Windows[UnitT]] = {}
        self._identities: dict[Circle, int] = {}

    def serve(self, circles: Circles) -> None:
        """Its units are of these circles from now on."""
        self._circles = circles
        self._windows = {one: self._windows.get(one) or _Windows([], one) for one in circles.around}

    def identity(self, circle: Circle) -> int:
        """As in `GatherOrder`, of the order of a circle in the last backward; 0 before the first one."""
        return self._identities.get(circle, 0)

    def begin(self, units: Iterable[tuple[UnitT, SequenceNumber | None]]) -> BackwardGathers[UnitT]:
        """The backward of a forward begins, with `units` to be gathered.

        With each goes when its last forward began, by its first autograd node; None: gradients cannot enter it.
        """
        gathers = BackwardGathers(dict(units), self._absent, self._circles, self._windows)
        self._windows = gathers.windows
        return gathers

    def end(self, gathers: BackwardGathers[UnitT]) -> None:
        """That backward is over."""
        self._absent -= gathers.entered
        self._absent.update(u for u, began in gathers.began.items() if began is None and u not in gathers.entered)
        for circle, windows in gathers.windows.items():
            if windows.order:
                self._identities[circle] = hash(tuple(unit.key for unit in windows.order))


class BackwardGathers(Generic[UnitT]):
    """The order in which units are gathered in the backward of one forward, and where this rank is in it.

    Attributes:
        began: the units, with when the last forward of each began; None: gradients cannot enter it.
        expected: those that are gathered, in order, `windows`: of that order, as each circle has it; given are those of the
            one before it, which often is the same.
        entered: those that this rank has entered.
    """

    def __init__(
        self,
        began: dict[UnitT, SequenceNumber | None],
        absent: Collection[UnitT],
        circles: Circles,
        windows: dict[Circle, _Windows[UnitT]],
    ) -> None:
        self.began = began
        self.expected = [unit for unit, number in began.items() if number is not None or unit not in absent]
        self.windows: dict[Circle, _Windows[UnitT]] = {}
        self._inside = circles.inside
        self._behind: dict[Circle, list[int]] = {}  # of a circle's order, how much lies before a place in `expected`
        for circle, around in circles.around.items():
            shows = [unit.circle in around for unit in self.expected]
            order = self.expected if all(shows) else [u for u, shown in zip(self.expected, shows, strict=True) if shown]
            self.windows[circle] = windows[circle].of(order)
            self._behind[circle] = list(accumulate(shows, initial=0))
        self.entered: set[UnitT] = set()
        self._places = {unit: place for place, unit in enumerate(self.expected)}
        self._at = 0

    def enter(self, unit: UnitT, node: SequenceNumber) -> list[UnitT]:
        """Records that this rank is about to enter `unit`; returns the units that other ranks may have entered before.

        These are the ones that come before it in the order. Where its place does not tell, as it was passed already, has no
        place, or was called once more later in the forward, they are those that the engine is behind when it runs `node`:
        `unit` itself is one of them if others have entered it for the later call.
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
        inside, at = self._inside[unit.circle], self._at
        if len(inside) == 1:
            return self.windows[inside[0]][self._behind[inside[0]][at], window]
        return [other for one in inside for other in self.windows[one][self._behind[one][at], window]]


class _Windows(dict[tuple[int, int], list[UnitT]]):
    """The windows of a circle's order: by place and bound, its units from there on that are gathered ahead.

    Each is worked out when it is asked for the first time, and is not to be changed. Units of circles around it take room
    in a window; their own order says where they are gathered.
    """

    def __init__(self, order: list[UnitT], circle: Circle) -> None:
        super().__init__()
        self.order = order
        self._circle = circle
        self._sizes = [unit.whole_bytes for unit in order]

    def __missing__(self, key: tuple[int, int]) -> list[UnitT]:
        at, bound = key
        found = self.order[at : at + units_in_budget(self._sizes[at:], bound)]
        window = self[key] = [unit for unit in found if unit.circle is self._circle]
        return window

    def of(self, order: list[UnitT]) -> _Windows[UnitT]:
        """Those of another order, or of the same one when its units may have other sizes: these if nothing changed."""
        same = order == self.order and self._sizes == [unit.whole_bytes for unit in order]
        return self if same else _Windows(order, self._circle)

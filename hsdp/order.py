"""The order in which a root's units run: recorded in one pass, expected in the next, left at the first deviation."""

from __future__ import annotations

from collections.abc import Iterable

from hsdp.unit import Unit


class Order:
    """The order in which units were gathered in the last full pass, and where this pass is in it.

    Attributes:
        plan: identifies the order; 0 before one was recorded.
    """

    def __init__(self) -> None:
        self._expected: list[Unit] = []
        self._seen: list[Unit] = []
        self._follows = False
        self.plan = 0

    def begin(self, guess: Iterable[Unit] = ()) -> None:
        """Starts a pass; `guess` serves where none was recorded."""
        if not self._expected:
            self._expected = list(guess)
        self._seen = []
        self._follows = bool(self._expected)

    def visit(self, unit: Unit, window: int) -> list[Unit]:
        """Records that `unit` is entered; returns the next `window` units, or none once the pass left the order."""
        at = len(self._seen)
        self._seen.append(unit)
        if self._follows and (at >= len(self._expected) or self._expected[at] is not unit):
            self._follows = False
        return self._expected[at + 1 : at + 1 + window] if self._follows else []

    def peek(self, window: int) -> list[Unit]:
        """The units that would be next, for a unit that is whole already: it is no part of an order of gathers."""
        at = len(self._seen)
        return self._expected[at : at + window] if self._follows else []

    def is_last(self, unit: Unit) -> bool:
        """Whether `unit` is where a pass that kept to the order ends."""
        return self._follows and len(self._seen) == len(self._expected) and self._expected[-1] is unit

    def skip(self, unit: Unit) -> None:
        """`unit` will not be gathered in the passes to come, should they have expected it."""
        if unit in self._expected:
            self._expected = [other for other in self._expected if other is not unit]

    def cancel(self) -> None:
        """Ends a pass that failed: what is expected stays."""
        self._seen = []
        self._follows = False

    def end(self) -> None:
        """Ends a pass: what was seen is what the next one expects."""
        if self._seen and self._seen != self._expected:
            self._expected = self._seen
            self.plan = hash(tuple(unit.op for unit in self._seen))
        self.cancel()

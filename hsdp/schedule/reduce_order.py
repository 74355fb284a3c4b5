"""Whose turn it is to be reduced: the same units in the same order on all ranks, whatever each rank used of them.

    forward     0  1  2          units as they are entered
    backward    2  1  0          each is reduced in its turn, once the last of its visits is over

A *visit* is the backward of one forward of a unit. A rank knows when its own gradients of a unit are complete, and then
reduces at once. One that used none of the unit's parameters, or used them in some of its visits only, cannot know it so;
it goes by the visits, which all ranks make alike. How many there will be is what there was the last time that as many
forwards waited for theirs, and at first all of those. Visited after its turn, a unit is reduced again at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from hsdp.torch_private import retains_graph
from hsdp.unit.unit import Unit

_MOST_RECORDS = 64


class ReduceOrder:
    """The turns of one root's units.

    Attributes:
        awaited: forwards of the root whose backward, by what the program did, is still to come.
    """

    def __init__(self) -> None:
        self.awaited = 0
        self._entered: dict[Unit, bool] = {}  # with gradients? Without, it may be recomputed: that counts for the order
        self._calls: dict[Unit, int] = {}
        self._visits: dict[Unit, int] = {}
        self._expected: dict[Unit, int] = {}
        self._queue: deque[Unit] = deque()
        self._again: list[Unit] = []
        self._before: tuple[dict[Unit, bool], dict[Unit, int]] = {}, {}
        self._retained = False

    # -- forward -------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the root begins."""
        if not self.awaited:
            self._entered, self._calls = {}, {}
        self._before = dict(self._entered), dict(self._calls)

    def enter(self, unit: Unit) -> None:
        """A forward of `unit` begins."""
        grad = torch.is_grad_enabled()
        self._entered[unit] = self._entered.get(unit, False) or grad
        self._calls[unit] = self._calls.get(unit, 0) + grad

    def end_forward(self) -> None:
        """The root's forward ended."""
        self.awaited += torch.is_grad_enabled()

    def forget_forward(self) -> None:
        """The root's forward raised: its backward will not come, those of earlier forwards may."""
        self._entered, self._calls = self._before

    # -- backward ------------------------------------------------------------------------------------------------

    def begin(self, answers: bool) -> None:
        """The root's backward begins. Called inside its graph task.

        `answers`: it is that of a forward that ended, and not one inside a forward (`autograd.grad` for forces, say).
        """
        self._queue = deque(unit for unit in reversed(self._entered) if any(unit.trainable))
        self._again, self._visits, self._expected = [], {}, {}
        for unit in self._queue:
            unit.queued = True
            calls = self._calls[unit]
            self._expected[unit] = unit.visits.get(calls, calls)
        # With its graph kept, the same forward may have another backward.
        self._retained = retains_graph()
        if answers and not self._retained:
            self.awaited = max(0, self.awaited - 1)

    def visit(self, unit: Unit) -> None:
        """A visit of `unit` begins. Until it is over the unit is not complete, whatever it was before."""
        unit.ready = False
        self._visits[unit] = self._visits.get(unit, 0) + 1
        if not unit.queued and unit in self._expected:
            unit.queued = True
            self._again.append(unit)

    def expects(self, unit: Unit) -> bool:
        """Whether `unit` will be visited again before its turn."""
        return unit.queued and self._visits.get(unit, 0) < self._expected[unit]

    def take(self) -> Iterator[Unit]:
        """The units whose turn has come."""
        queue = self._queue
        while queue and queue[0].ready and not self.expects(queue[0]):
            unit = queue.popleft()
            unit.queued = False
            yield unit

    def end(self) -> list[Unit]:
        """The backward is over. Returns the units still to be reduced: not those that ran without gradients only."""
        left = [unit for unit in (*self._queue, *self._again) if self._entered[unit] or unit.remaining]
        for unit in self._expected:
            calls, visits = self._calls[unit], self._visits.get(unit, 0)
            if len(unit.visits) > _MOST_RECORDS:
                unit.visits.clear()
            unit.visits[calls] = visits
            if not self._retained:
                self._calls[unit] = max(0, calls - visits)
        self.clear()
        return left

    def clear(self) -> None:
        """Forgets the backward under way."""
        for unit in self._expected:
            unit.queued = False
        self._queue.clear()
        self._again, self._expected = [], {}

"""The order of reductions: the same units in the same order on all ranks, whatever each rank used of them.

    forward     0  1  2          units as they are entered
    backward    2  1  0          each is reduced in its turn, once the last of its visits is over

A *visit* is the backward of one forward of a unit. A unit is complete after its last visit, and is reduced as soon as its
turn comes: not with the last gradient that a rank makes of it, as ranks use different parameters, and as users' hooks may
edit gradients until the backward has left the unit. All ranks count the same visits: one that a rank does not make is over
when the engine has come behind it. There is one visit for each forward that gradients can enter.
Forwards without gradients that are recomputed have visits, too, which no forward tells of: they are taken to be as many as
the last time the same number of forwards awaited their backward. A unit that is visited after its turn is reduced again at
the end.

Turns are taken among the units of one rank set (gather_order.py): units of other rank sets may differ between these ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from hsdp.schedule.gather_order import RankSet
from hsdp.schedule.sequence_numbers import SequenceNumber
from hsdp.torch_private import retains_graph
from hsdp.unit.unit import Unit

_MOST_RECORDS = 64


class ReduceTurns:
    """The turns of one backward, which drops them at its end.

    Args:
        expected: how many visits each unit will have, in the order of the turns: those of forwards that gradients can
            enter, and those of recomputations. One must never be taken for the other: an incomplete gradient of this rank
            would be reduced with complete ones of other ranks.
    """

    def __init__(self, expected: dict[Unit, tuple[int, int]]) -> None:
        self.expected = expected
        self.visits: dict[Unit, set[SequenceNumber]] = {}
        self.recomputed: dict[Unit, int] = {}
        self._queues: dict[RankSet, deque[Unit]] = {}
        for unit in expected:
            self._queues.setdefault(unit.mesh_ranks, deque()).append(unit)
        self.waiting = set(expected)
        self._ready: set[Unit] = set()
        self._again: list[Unit] = []

    def visit(self, unit: Unit, forward: SequenceNumber | None) -> None:
        """A visit of `unit` begins. Until it is over the unit is not complete, whatever it was before.

        Args:
            unit: the unit.
            forward: the sequence number of the first autograd node of its forward; None: a recomputation's.
        """
        self._ready.discard(unit)
        if forward is None:
            self.recomputed[unit] = self.recomputed.get(unit, 0) + 1
        else:
            self.visits.setdefault(unit, set()).add(forward)
        if unit not in self.waiting and unit in self.expected:
            self.waiting.add(unit)
            self._again.append(unit)

    def skip(self, unit: Unit, forwards: Iterable[SequenceNumber]) -> None:
        """The visits of these forwards of `unit` are over, and this rank made none of them."""
        self.visits.setdefault(unit, set()).update(forwards)

    def expects(self, unit: Unit) -> bool:
        """Whether `unit` will be visited again before its turn."""
        if unit not in self.waiting:
            return False
        visits, recomputed = self.expected[unit]
        return len(self.visits.get(unit, ())) < visits or self.recomputed.get(unit, 0) < recomputed

    def complete(self, unit: Unit) -> list[Unit]:
        """`unit` is complete; returns the units whose turn has come."""
        self._ready.add(unit)
        queue, come = self._queues[unit.mesh_ranks], []
        while queue and queue[0] in self._ready and not self.expects(queue[0]):
            first = queue.popleft()
            self.waiting.discard(first)
            self._ready.discard(first)
            come.append(first)
        return come

    def outstanding(self) -> Iterator[Unit]:
        """The units whose turn did not come, and behind them those that were visited after theirs."""
        yield from chain.from_iterable(self._queues.values())
        yield from self._again


class ReduceOrder:
    """The turns of one root's units, from one backward to the next.

    Attributes:
        awaited: forwards of the root whose backward, by what the program did, is still to come.
        calls: for each unit its forwards that gradients can enter, of which the runtime tells.
        retained: the last backward keeps its graph, or makes a new one, so that the same forward may have another one.
    """

    def __init__(self) -> None:
        self.awaited = 0
        # In the order of their first forwards, whether units ran with gradients: without, they may be recomputed.
        self._ran_with_grad: dict[Unit, bool] = {}
        self.calls: dict[Unit, int] = {}
        self._before: tuple[dict[Unit, bool], dict[Unit, int]] = {}, {}
        # How often backwards visited recomputations of a unit, by how many of its forwards awaited theirs.
        self._recomputed: dict[Unit, dict[int, int]] = {}
        self.retained = False

    # -- forward -------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the root begins."""
        self._before = dict(self._ran_with_grad), dict(self.calls)
        if not self.awaited:
            self._ran_with_grad, self.calls = {}, {}

    def enter(self, unit: Unit) -> None:
        """A forward of `unit` begins."""
        self._ran_with_grad[unit] = self._ran_with_grad.get(unit, False) or torch.is_grad_enabled()

    def end_forward(self) -> None:
        """The root's forward ended."""
        self.awaited += torch.is_grad_enabled()

    def forget_forward(self) -> None:
        """The root's forward raised: its backward will not come, those of earlier forwards may."""
        self._ran_with_grad, self.calls = self._before

    # -- backward ------------------------------------------------------------------------------------------------

    def begin(self, answers: bool) -> ReduceTurns:
        """The root's backward begins. Called inside its graph task.

        `answers`: the backward is that of an ended forward, and not one inside a forward (`autograd.grad` for forces).
        """
        # With its graph kept, the same forward may have another backward, and so it may through a new graph of gradients:
        # with create_graph=True gradients are enabled here, and `torch.func.grad` keeps no graph but that one.
        self.retained = retains_graph() or torch.is_grad_enabled()
        if answers and not self.retained:
            self.awaited = max(0, self.awaited - 1)
        expected = {}
        for unit in reversed(self._ran_with_grad):
            if any(unit.trainable):
                calls = self.calls.get(unit, 0)
                records = self._recomputed.get(unit)
                expected[unit] = calls, 0 if records is None else records.get(calls, 0)
        return ReduceTurns(expected)

    def end(self, turns: ReduceTurns) -> list[Unit]:
        """The backward is over. Returns the units still to be reduced: not those that ran without gradients only."""
        for unit in turns.expected:
            calls = self.calls.get(unit, 0)
            if (visits := turns.recomputed.get(unit, 0)) or unit in self._recomputed:
                records = self._recomputed.setdefault(unit, {})
                if len(records) > _MOST_RECORDS:
                    records.clear()
                records[calls] = visits
            if not self.retained:
                self.calls[unit] = max(0, calls - len(turns.visits.get(unit, ())))
        return [unit for unit in turns.outstanding() if self._ran_with_grad[unit] or unit.remaining]

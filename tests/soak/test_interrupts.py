"""A share of the interrupts of `tests.soak.interrupts`: lines far apart, others in each setup."""

from __future__ import annotations

import sys
from math import prod

import pytest

from tests.soak.interrupts import SETUPS, Interrupt, interrupted, interrupting
from tests.support.rig import Pool

_ALL = list(SETUPS)


@pytest.mark.parametrize("setup", SETUPS)
def test_an_interrupt_at_a_line_of_the_engine_leaves_nothing_behind(request: pytest.FixtureRequest, setup: str) -> None:
    pool: Pool = request.getfixturevalue(f"pool{prod(SETUPS[setup][0])}")
    first = 1 + 31 * _ALL.index(setup)
    lines, wrong = pool.run(interrupted, setup, first, 601, timeout=120.0)[0]
    assert lines > 5000, "the engine's lines are seen"
    assert not wrong, "\n".join(wrong)


def test_lines_outside_of_the_engine_are_not_interrupted() -> None:
    before = sys.gettrace()
    interrupt = Interrupt(1)
    with interrupting(interrupt):
        sorted([2, 1])
    assert interrupt.where is None and not interrupt.lines
    assert sys.gettrace() is before

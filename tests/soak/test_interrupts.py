"""A share of the interrupts of `tests.soak.interrupts`: lines far apart, others in each setup and act."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from math import prod

import pytest

from tests.soak.interrupts import ITERATION, SETUPS, Interrupt, interrupted, interrupting
from tests.support.rig import Pool

pytestmark = pytest.mark.beside

_ALL = list(SETUPS)


@pytest.mark.parametrize("setup", SETUPS)
def test_an_interrupted_iteration_leaves_nothing_behind(request: pytest.FixtureRequest, setup: str) -> None:
    ranks = prod(SETUPS[setup][0])
    shared: Pool | None = request.getfixturevalue(f"pool{ranks}") if ranks > 1 else None
    first = 1 + 31 * _ALL.index(setup)
    with Pool(1) if shared is None else nullcontext(shared) as pool:
        lines, wrong = pool.run(interrupted, setup, ITERATION, first, 601, timeout=120.0)[0]
    assert lines > 5000, "the engine's lines are seen"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("act", "stride"),
    [("full_params", 97), ("unshard", 53), ("unshard, asynchronously", 59), ("to", 1009), ("step", 1511)],
)
def test_something_else_that_is_interrupted_leaves_nothing_behind(pool2: Pool, act: str, stride: int) -> None:
    lines, wrong = pool2.run(interrupted, "plain", act, 17, stride, timeout=120.0)[0]
    assert lines > 4 * stride
    assert not wrong, "\n".join(wrong)


def test_lines_outside_of_the_engine_are_not_interrupted() -> None:
    before = sys.gettrace()
    interrupt = Interrupt(1)
    with interrupting(interrupt):
        sorted([2, 1])
    assert interrupt.where is None and not interrupt.lines
    assert sys.gettrace() is before

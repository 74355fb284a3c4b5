"""Random schedules of micro-batches against the twin, in float64: sums are never lost, doubled or leaked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.mutants.engine import MUTANTS
from tests.soak.random_schedules import run_schedule
from tests.soak.schedules import SCHEDULE_BUGS, runs, search
from tests.support.rig import Pool
from tests.support.share import share

pytestmark = pytest.mark.beside


@settings(max_examples=share(120))
@given(runs(2))
def test_schedules_on_two_ranks(pool2: Pool, args: tuple[Any, ...]) -> None:
    pool2.run(run_schedule, *args)


@settings(max_examples=share(60))
@given(runs(4))
def test_schedules_on_four_ranks(pool4: Pool, args: tuple[Any, ...]) -> None:
    pool4.run(run_schedule, *args)


@pytest.mark.parametrize("bug", ["drops deferred sums", "lands twice", "does not sweep"])
def test_schedules_find_planted_bugs(pool2: Pool, bug: str) -> None:
    """A few of those that the soak plants, of which all were found: `benchmarks/results/schedule_mutants.log`."""
    ran, found = search(pool2, bug, 300, 0)
    assert found.startswith("AssertionError"), f"{ran} schedules: {found}"


def test_the_planted_bugs_are_registered() -> None:
    assert len(SCHEDULE_BUGS) >= 15
    assert set(SCHEDULE_BUGS) <= set(MUTANTS)

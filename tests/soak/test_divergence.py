"""Ranks that build different models, take different branches or lose step: each gets an error that names unit and ranks.

`benchmarks/results/divergence.log` has a soak of 500 random cases.
"""

from __future__ import annotations

import pytest

from tests.soak.divergence import BUILDING, HARMLESS, RUNNING, Case, disagree, verdict
from tests.support.rig import Pool

pytestmark = pytest.mark.beside

GROUP_TIMEOUT = 4.0

ONE, REPLICA = (1,), (2, 3)
CASES = [
    # different models
    Case("other shape", (2,), ONE),
    Case("other dtype", (2, 2), REPLICA),
    Case("extra layer", (2,), ONE),
    Case("unit left out", (2, 2), ONE),
    Case("on meta", (2,), ONE),
    Case("other param dtype", (2,), ONE),
    Case("other fusion", (2, 2), REPLICA),
    # different branches in forward
    Case("skips a unit", (2,), ONE),
    Case("skips a unit", (2, 2), REPLICA),
    Case("runs units in another order", (2, 2), ONE),
    Case("eval instead", (2,), ONE),
    # different branches in backward
    Case("toggles requires_grad", (2,), ONE),
    Case("toggles requires_grad", (2, 2), REPLICA),
    Case("without sync", (2,), ONE),
    # different steps
    Case("other reduce op", (2,), ONE),
    Case("extra model", (2, 2), ONE),
    Case("skips the step", (2,), ONE),
    Case("skips the step", (2, 2), REPLICA),
    Case("one micro-batch more", (2,), ONE),
    Case("clips alone", (2,), ONE),
    Case("clips alone", (2, 2), REPLICA),
    Case("eval instead", (2, 2), REPLICA),
    # backwards that fail, of ranks that catch the error and go on
    Case("fails inside a backward", (2,), ONE),
    Case("fails inside a backward", (2, 2), REPLICA),
    Case("fails at the end of a backward", (2,), ONE),
    Case("fails at the end of a backward", (2, 2), REPLICA),
]


def _id(case: Case) -> str:
    return f"{case.way}-{'x'.join(map(str, case.shape))}-{'+'.join(map(str, case.who))}"


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_ranks_that_disagree_are_told(request: pytest.FixtureRequest, case: Case) -> None:
    pool: Pool = request.getfixturevalue("pool4" if len(case.shape) == 2 else "pool2")
    outcomes = pool.run_raw(disagree, case, group_timeout=GROUP_TIMEOUT, timeout=4 * GROUP_TIMEOUT + 20.0)
    assert verdict(outcomes, GROUP_TIMEOUT) == "ok", [one.error for one in outcomes]


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_nobody_waits_for_a_rank_whose_backward_failed(pool2: Pool, shape: tuple[int, ...]) -> None:
    """It does nothing more; the other one is told at its next look, and not by the time-out of the group."""
    case = Case("fails inside a backward and stops", shape, ONE)
    outcomes = pool2.run_raw(disagree, case, group_timeout=60.0, timeout=50.0)
    other = outcomes[0]
    assert other.error == "DivergenceError", other
    assert "The backward of rank(s) [1] failed behind number" in other.message


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_ranks_that_agree_are_left_alone(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    """The same loop with nobody who deviates: no error, so the errors above are about what deviates."""
    pool: Pool = request.getfixturevalue("pool4" if len(shape) == 2 else "pool2")
    results = pool.run(disagree, Case("nobody deviates", shape, ()))
    assert set(results) == {"no error in 6 steps"}


@pytest.mark.parametrize("way", HARMLESS)
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_ranks_that_may_differ_are_left_alone(request: pytest.FixtureRequest, shape: tuple[int, ...], way: str) -> None:
    pool: Pool = request.getfixturevalue("pool4" if len(shape) == 2 else "pool2")
    results = pool.run(disagree, Case(way, shape, ONE))
    assert set(results) == {"no error in 6 steps"}


def test_the_cases_are_ways_that_exist() -> None:
    assert {case.way for case in CASES} <= {*BUILDING, *RUNNING}

"""A few random programs of pipelines against the plain model, in float64; `tests.soak.pipelines` runs more."""

from __future__ import annotations

import pytest

from tests.soak.actions.soak import run_all
from tests.soak.pipelines.play import play
from tests.soak.pipelines.programs import PER_RANK, draw, smaller
from tests.soak.verdicts import run_each
from tests.support.rig import Pool
from tests.support.share import share

pytestmark = pytest.mark.beside


@pytest.mark.parametrize(("ranks", "count"), [(2, 20), (4, 20)])
def test_programs_end_equal(request: pytest.FixtureRequest, ranks: int, count: int) -> None:
    _check(request.getfixturevalue(f"pool{ranks}"), ranks, share(count))


def test_programs_on_the_emulated_device(device2: Pool) -> None:
    """With delays, and without races."""
    _check(device2, 2, share(15))


def _check(pool: Pool, ranks: int, count: int) -> None:
    programs = [draw(f"ci:{number}", ranks) for number in range(count)]
    tally = run_all(pool, programs, stop_at=2, runner=(run_each, play))
    assert not tally.failures, "\n".join(f"{p}\n{told}" for found in tally.failed.values() for p, told in found)


def test_programs_have_all_actions_and_schedules() -> None:
    drawn = [draw(f"all:{number}", 4) for number in range(300)]
    assert draw("all:0", 4) == drawn[0]
    assert {program.schedule for program in drawn} == {*PER_RANK}
    assert len({action[0] for program in drawn for action in program.actions}) == 13


def test_shrinking_ends() -> None:
    program = draw("0:3", 4)
    for _ in range(1000):
        program = next(smaller(program), program)
    assert program.actions == ()
    assert not list(smaller(program))

"""A few random programs of persistence against the twin, in float64; `tests.soak.persistence` runs more."""

from __future__ import annotations

import pytest

from tests.soak.persistence.programs import draw, smaller
from tests.soak.persistence.soak import run
from tests.support.rig import Pool
from tests.support.share import share

pytestmark = pytest.mark.beside


@pytest.mark.parametrize(("ranks", "count"), [(2, 36), (4, 9)])
def test_programs_end_equal_or_with_a_name(request: pytest.FixtureRequest, ranks: int, count: int) -> None:
    _check(request.getfixturevalue(f"pool{ranks}"), share(count))


def test_programs_of_one_rank() -> None:
    with Pool(1) as pool:
        _check(pool, share(15))


def _check(pool: Pool, count: int) -> None:
    tally = run(pool, [draw(f"ci:{number}", pool.world_size) for number in range(count)], stop_at=2)
    assert not tally.failures, "\n".join(f"{p}\n{told}" for found in tally.failed.values() for p, told in found)


def test_programs_have_all_actions() -> None:
    drawn = [draw(f"all:{number}", 4) for number in range(300)]
    kinds = {action[0] for program in drawn for action in program.actions}
    assert len(kinds) == 10, sorted(kinds)


def test_shrinking_ends() -> None:
    program = draw("0:3", 2)
    for _ in range(1000):
        program = next(smaller(program), program)
    assert program.actions == ()
    assert not list(smaller(program))

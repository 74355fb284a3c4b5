"""A few random programs of optimizers against the twin, in float64; `tests.soak.optimizers` runs more."""

from __future__ import annotations

import pytest

from tests.soak.optimizers.programs import VARIANTS, draw, smaller
from tests.soak.optimizers.soak import meshes, run
from tests.support.rig import Pool
from tests.support.share import share

pytestmark = pytest.mark.beside


@pytest.mark.parametrize(("ranks", "mesh", "count"), [(2, "1d", 24), (2, "2d", 24), (4, "2d", 6), (4, "tp", 12)])
def test_programs_end_equal_or_with_a_name(request: pytest.FixtureRequest, ranks: int, mesh: str, count: int) -> None:
    _check(request.getfixturevalue(f"pool{ranks}"), meshes(ranks, mesh), share(count))


@pytest.mark.parametrize(("ranks", "mesh", "count"), [(2, "1d", 12), (4, "2d", 3)])
def test_programs_on_the_emulated_device(request: pytest.FixtureRequest, ranks: int, mesh: str, count: int) -> None:
    """With delays, and without races."""
    _check(request.getfixturevalue(f"device{ranks}"), meshes(ranks, mesh), share(count))


def _check(pool: Pool, meant: tuple[tuple[int, ...], int], count: int) -> None:
    tally = run(pool, [draw(f"ci:{number}", *meant) for number in range(count)], stop_at=2)
    assert not tally.failures, "\n".join(f"{p}\n{told}" for found in tally.failed.values() for p, told in found)


def test_a_seed_tells_its_program() -> None:
    assert draw("0:1", (2,)) == draw("0:1", (2,))
    assert draw("0:1", (2,)) != draw("0:2", (2,))


def test_programs_have_all_actions_and_optimizers() -> None:
    drawn = [draw(f"all:{number}", (2, 1)) for number in range(500)]
    kinds = {action[0] for program in drawn for action in program.actions}
    assert len(kinds) == 21, sorted(kinds)
    assert {spec.name for program in drawn for spec in program.optimizers} == {*VARIANTS}


def test_shrinking_ends() -> None:
    program = draw("0:3", (2, 1))
    for _ in range(1000):
        program = next(smaller(program), program)
    assert program.actions == ()
    assert not list(smaller(program))

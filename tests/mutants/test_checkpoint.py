"""Every bug planted in hsdp.checkpoint is found by the test that is there for it, and by what it is there for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants.checkpoint import MUTANTS, Mutant, run_mutated
from tests.support.rig import Pool
from tests.support.share import some

GROUP_TIMEOUT = 3.0  # for mutants that leave a rank waiting; a busy machine needs more than one second for a collective
_CHECKS = list(dict.fromkeys((mutant.check, mutant.world) for mutant in MUTANTS.values() if mutant.world > 1))


@pytest.mark.parametrize(("check", "world"), _CHECKS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_checks_on_ranks_end_well_without_a_mutant(
    request: pytest.FixtureRequest, tmp_path: Path, check: object, world: int
) -> None:
    pool: Pool = request.getfixturevalue(f"pool{world}")
    pool.run(check, str(tmp_path))  # type: ignore[arg-type]


def _told(request: pytest.FixtureRequest, mutant: Mutant, directory: Path) -> list[str]:
    """The errors, as "Type: message", that the check ends with under the mutant."""
    if mutant.world > 1:
        pool: Pool = request.getfixturevalue(f"pool{mutant.world}")
        outcomes = pool.run_raw(run_mutated, mutant.name, str(directory), group_timeout=GROUP_TIMEOUT, timeout=30.0)
        return [f"{one.error}: {one.message}" for one in outcomes if not one.ok]
    try:
        with mutant.plant():
            mutant.check(directory)
    except BaseException as error:  # pytest's own failures too
        return [f"{type(error).__name__}: {error}"]
    return []


@pytest.mark.parametrize("name", some(MUTANTS))
def test_mutants_are_killed(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    mutant = MUTANTS[name]
    told = _told(request, mutant, tmp_path)
    assert told, "the mutant lives: its check ended as it does without it"
    assert any(re.search(mutant.kill, text, re.DOTALL) for text in told), f"killed for another reason: {told}"

"""Planted bugs are found by the tests that are there for them, by what those look at: a share, or all (share.py)."""

from __future__ import annotations

import re

import pytest

from tests.mutants.actions import PLANTS
from tests.mutants.engine import run_mutated
from tests.mutants.persistence import PLANTS as PLANTS_OF_PERSISTENCE
from tests.mutants.planting import MUTANTS, Check, Mutant
from tests.mutants.states import PLANTS as PLANTS_OF_STATES
from tests.support.rig import Outcome, Pool, describe
from tests.support.share import some

GROUP_TIMEOUT = 3.0  # where a rank may be left waiting
_CHOSEN = some(MUTANTS)
_CHECKS = some(list(dict.fromkeys(MUTANTS[name].check for name in _CHOSEN)))
"""Nearly all are what other tests run, which pass."""


def _run(request: pytest.FixtureRequest, check: Check, mutant: Mutant | None) -> list[Outcome]:
    pool: Pool = request.getfixturevalue(f"pool{check.world}")
    run, args = (run_mutated, (mutant.name,)) if mutant is not None else (check.run, check.args)
    hurried = GROUP_TIMEOUT if mutant is not None or check.ends is not None else None
    return pool.run_raw(run, *args, group_timeout=hurried, timeout=30.0)


def test_every_bug_can_be_planted() -> None:
    """A patch of a name that is gone raises AttributeError, which may pass for the failure that the bug is to cause."""
    planted = [mutant.plant for mutant in MUTANTS.values()]
    planted += PLANTS_OF_PERSISTENCE.values()
    for plant in (*planted, *(plant for plant, *_ in (*PLANTS.values(), *PLANTS_OF_STATES.values()))):
        with plant():
            pass


@pytest.mark.parametrize("check", _CHECKS, ids=lambda check: f"{check.run.__name__}-{check.world}")
def test_checks_end_well_without_a_mutant(request: pytest.FixtureRequest, check: Check) -> None:
    outcomes = _run(request, check, None)
    assert all(one.error == check.ends for one in outcomes), describe(outcomes)


@pytest.mark.parametrize("name", _CHOSEN)
def test_mutants_are_killed(request: pytest.FixtureRequest, name: str) -> None:
    mutant = MUTANTS[name]
    outcomes = _run(request, mutant.check, mutant)
    messages = [f"{one.error}: {one.message}" for one in outcomes if one.error != mutant.check.ends]
    assert messages, "the mutant lives: its check ended as it does without it"
    assert any(re.search(mutant.kill, text, re.DOTALL) for text in messages), f"killed for another reason: {messages}"

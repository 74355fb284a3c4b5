"""`kill -9` of one rank, three times while training and three times while saving; more on demand.

HSDP_CRASH_KILLS=20 kills that often in each, HSDP_CRASH_SEED chooses another seed; `python -m tests.soak.checkpoint_crash`
does the same and writes a log.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.soak.checkpoint_crash import crash_run

pytestmark = pytest.mark.beside


def test_nothing_is_lost_when_a_rank_is_killed(tmp_path: Path) -> None:
    kills = int(os.environ.get("HSDP_CRASH_KILLS", "3"))
    steps = crash_run(tmp_path, kills, kills, seed=int(os.environ.get("HSDP_CRASH_SEED", "6")))
    assert steps >= 6

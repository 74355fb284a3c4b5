"""A share of the hostile checkpoints in each run of the tests; `python -m tests.soak.checkpoint_fuzz` runs many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError
from tests.soak.checkpoint_hostile import Target, make_case, make_good
from tests.support.rig import Pool
from tests.support.worker import RankEnv

pytestmark = pytest.mark.beside

ROOT = Path(__file__).parents[2]


def test_hostile_checkpoints_do_no_harm() -> None:
    command = [sys.executable, "-m", "tests.soak.checkpoint_fuzz", "--cases", "150", "--first", "900000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "150 hostile and damaged checkpoints; 0 processes died; 0 things went wrong" in done.stdout


def load_together(env: RankEnv, path: str) -> str:
    target = Target()
    before = target.content()
    try:
        checkpoint.load(path, target.model, target.optimizer)
    except CheckpointError as error:
        assert target.content() == before
        return str(error)
    return "loaded"


def test_two_ranks_refuse_the_same(pool2: Pool, tmp_path: Path) -> None:
    count = int(os.environ.get("HSDP_FUZZ_ON_RANKS", "15"))
    good = make_good(tmp_path / "good")
    for seed in range(800_000, 800_000 + count):
        kind, _ = make_case(seed, good, tmp_path / "case")
        if kind != "tensors":
            results = pool2.run(load_together, str(tmp_path / "case"))
            assert results[0] == results[1], f"case {seed}"

"""Checkpoints made by torchtitan, Lightning and accelerate themselves load bit for bit. With the extra `ecosystem`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("library", ["torchtitan", "lightning", "accelerate"])
def test_it_loads(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'hsdp[ecosystem]'")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.checkpoint.foreign_run", library],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{library} " in done.stdout and "settings equal" in done.stdout

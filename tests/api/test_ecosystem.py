"""Lightning and accelerate treat hsdp's models as FSDP2's: the same losses and parameters. With the extra `ecosystem`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGE = {"trainer": "lightning", "fabric": "lightning", "accelerate": "accelerate"}


def _run(run: str, library: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.api.ecosystem_run", run, library],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    told: dict[str, Any] = json.loads(line)
    return told


@pytest.mark.parametrize("run", PACKAGE)
def test_it_trains_as_with_fsdp2(run: str) -> None:
    if importlib.util.find_spec(PACKAGE[run]) is None:
        pytest.skip(f"{PACKAGE[run]} is not installed: pip install 'hsdp[ecosystem]'")
    ours, theirs = _run(run, "hsdp"), _run(run, "torch.distributed.fsdp")
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-11)
    assert len(set(ours["losses"])) == len(ours["losses"]) >= 6
    assert ours["params"] == pytest.approx(theirs["params"], rel=1e-11)

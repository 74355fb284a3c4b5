"""Every feature with a device side, on the emulated device: numbers as on one device, and no races.

`python -m tests.soak.device` runs all cases in all delay modes and with many seeds.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from tests.soak.device_cases import CASES, Shape, run_case
from tests.support.device import MODES, why_not
from tests.support.rig import Pool
from tests.support.sharded import mesh_id
from tests.support.share import FULL

RUNS = [(name, shape) for name, case in CASES.items() for shape in case.shapes]
SHARE = RUNS if FULL else RUNS[::5]
"""What runs here: each case has several meshes, and the soak runs all of them."""


@pytest.mark.parametrize(("name", "shape"), SHARE, ids=lambda value: value if isinstance(value, str) else mesh_id(value))
def test_numbers_are_right_and_nothing_races(request: pytest.FixtureRequest, name: str, shape: Shape) -> None:
    at = RUNS.index((name, shape))
    pool: Pool = request.getfixturevalue(f"device{math.prod(shape)}")
    pool.run(run_case, name, shape, list(MODES)[at % len(MODES)], at)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_command_runs_too() -> None:
    """Its workers import its main module, and hsdp with it, before they choose a mode."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.device", "--runs", "1", "--only", "trains tiny"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "HSDP_DEBUG"},
    )
    assert "1 runs: 1 right and without races" in done.stdout, done.stdout + done.stderr

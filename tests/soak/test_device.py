"""Every feature with a device side, on the emulated device: numbers as on one device, and no races.

`python -m tests.soak.device` runs all cases in all delay modes and with many seeds.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.soak.device_cases import CASES, Conditions, Shape, run_case
from tests.support.device import MODES, load, why_not
from tests.support.fragile import Fragile, fail
from tests.support.graphs import tokens
from tests.support.models import make_case
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, shard
from tests.support.share import some

pytestmark = pytest.mark.beside

RUNS = [(name, shape) for name, case in CASES.items() for shape in case.shapes]
SHARE = some(RUNS)
"""What runs here: each case has several meshes, and the soak runs all of them."""


@pytest.mark.parametrize(("name", "shape"), SHARE, ids=lambda value: value if isinstance(value, str) else mesh_id(value))
def test_numbers_are_right_and_nothing_races(request: pytest.FixtureRequest, name: str, shape: Shape) -> None:
    at = RUNS.index((name, shape))
    pool: Pool = request.getfixturevalue(f"device{math.prod(shape)}")
    pool.run(run_case, name, shape, Conditions(list(MODES)[at % len(MODES)], at, strict=at % 2 == 0, away=at % 3 == 0))


def _goes_on(env: RankEnv, shape: Shape) -> None:
    case = make_case("mlp")
    model = shard(case.model(), env.mesh(shape))
    batch = tuple(x.to(env.device) for x in case.batch(0, env.rank))
    case.loss(model, batch).backward()  # what comes is known from here on
    loss = case.loss(model, batch)
    torch.get_device_module(env.device).synchronize()
    release = load().hold()
    held = threading.Timer(10.0, release)
    held.start()
    loss.backward()
    assert held.is_alive(), "the host has waited for the device"
    held.cancel()
    release()


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_the_host_does_not_wait_in_a_backward(device2: Pool, shape: Shape) -> None:
    device2.run(_goes_on, shape)


def _lists_parameters_behind_a_failure(env: RankEnv) -> None:
    model: Any = shard(Fragile().double(), env.mesh((2,)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # this thread keeps the interpreter, which the engine's needs to drop its callbacks
    try:
        for _ in range(10):
            fail("backward of 1", ValueError, model(tokens(env.rank, 0).to(env.device)).sum().backward)
            whole = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
            assert not whole, f"whole behind a backward that failed: {whole}"
    finally:
        sys.setswitchinterval(interval)


def test_parameters_are_sharded_behind_a_backward_that_failed(device2: Pool) -> None:
    device2.run(_lists_parameters_behind_a_failure)


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

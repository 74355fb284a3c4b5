"""What a step costs the host does not depend on the number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import nn

import hsdp
from hsdp.clip import clip_grad_norm_
from tests.support.rig import fake_world

UNITS, DIM = 4, 3  # no world divides it: uneven shards, which cost a little more, everywhere
WORLDS = (8, 512, 8192)


def calls_of(run: Callable[[], object]) -> int:
    """How many functions of hsdp's files and C functions called by them `run` calls."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        if event in ("call", "c_call") and "/hsdp/" in frame.f_code.co_filename:
            count += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def calls_per_step(world: int, replicas: int) -> int:
    with fake_world(world) as env:
        mesh = env.mesh((replicas, world // replicas) if replicas > 1 else (world,))
        model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(UNITS)))
        for unit in model:
            hsdp.fully_shard(unit, mesh=mesh)
        hsdp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.zeros(2, DIM)).sum().backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        return calls_of(step)


@pytest.mark.parametrize("replicas", [1, 4])
def test_host_cost_of_a_step_is_the_same_for_any_world_size(replicas: int) -> None:
    found = [calls_per_step(world, replicas) for world in WORLDS]
    assert min(found) > 50 * UNITS, "this test shows nothing"
    assert max(found) <= 1.03 * min(found), dict(zip(WORLDS, found, strict=True))

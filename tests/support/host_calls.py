"""Function calls of a step: what it costs the host, counted instead of timed, and so the same on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import nn

import hsdp
from hsdp.clip import clip_grad_norm_
from tests.support.rig import fake_world

DIM = 3
"""No world divides it: uneven shards, which cost a little more, everywhere."""


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


def calls_per_step(world: int, replicas: int, units: int) -> int:
    """Those of a steady step, with clipping, of one of so many ranks: a model of `units` units and the root."""
    with fake_world(world) as env:
        mesh = env.mesh((replicas, world // replicas) if replicas > 1 else (world,))
        model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(units)))
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

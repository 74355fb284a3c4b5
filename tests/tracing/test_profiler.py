"""torch.profiler shows what hsdp starts, waits for and runs, under the names of units."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hsdp
from tests.support.deep import DIM, Deep, floats, seeded
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import shard


class Options(nn.Module):
    """A unit that is called with arguments of any name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.linear(x) * kwargs["name"] * kwargs["call"] * kwargs["what"]


def labels_of(env: RankEnv) -> set[str]:
    model = shard(seeded(Deep), env.mesh((2, 2)))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(floats(env.rank)).sum().backward()
    return {event.key for event in profiled.key_averages() if event.key.startswith("hsdp::")}


def test_labels_name_units(pool4: Pool) -> None:
    for found in pool4.run(labels_of):
        for what in ("forward", "all_gather", "reduce_scatter", "all_reduce", "wait all-gather", "wait all-reduce"):
            assert f"hsdp::{what} blocks.2" in found, sorted(found)
        assert "hsdp::forward Deep (root)" in found


def test_labels_take_no_names_from_users() -> None:
    with fake_world(2) as env:
        model = hsdp.fully_shard(Options().double(), mesh=env.mesh((2,)))
        for profiled in (False, True):
            with profile(activities=[ProfilerActivity.CPU]) if profiled else torch.enable_grad():
                assert model(floats(0), name=1.0, call=2.0, what=3.0).shape == (3, DIM)

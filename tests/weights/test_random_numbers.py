"""Random numbers of units on several meshes: one stream where ranks are in one state, else experts have their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
from tests.support.rig import Pool, RankEnv
from tests.support.twin import full_params


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A router, two experts of this rank, and a layer that is initialised behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(2))
        self.out = nn.Linear(4, 4)


def _init(env: RankEnv, seeds: str, others: bool) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(Block(), Block())
    mesh = env.mesh((2, 2), ("rows", "experts"))
    for block in model:
        hsdp.fully_shard(block.experts[0], mesh=mesh["rows"])
        hsdp.fully_shard(block.experts[1], mesh=mesh["rows"])
    hsdp.fully_shard(model, mesh=env.mesh((4,)))
    seed = {"one": 3, "experts": 3 + env.rank % 2, "ranks": 3 + env.rank}[seeds]
    torch.manual_seed(seed)
    hsdp.init_sharded(model)
    after = torch.get_rng_state()
    mine = full_params(model)
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, mine)
    for name, value in found[0].items():
        assert torch.equal(value, found[2][name]), f"{name} on the ranks of one mesh"
        assert torch.equal(value, found[1][name]) == (not others or "experts" not in name), name
    values = [value.flatten() for rank in found[:2] for value in rank.values()]
    if others:  # no numbers twice, also not those of dense layers in experts
        weights = {tuple(value.tolist()) for value in values if len(value) == 16}
        assert len(weights) == 2 * 2 + 2 * 4, len(weights)
    else:
        torch.manual_seed(seed)
        for name, value in nn.Sequential(Block(), Block()).state_dict().items():
            assert torch.equal(value, mine[name]), name
    torch.manual_seed(seed)
    untouched = torch.equal(after, torch.get_rng_state())
    assert untouched == (seed != 3), "ranks in other states get them back"


@pytest.mark.parametrize("seeds", ["one", "experts", "ranks"])
def test_experts_are_drawn_as_ranks_are_seeded(pool4: Pool, seeds: str) -> None:
    pool4.run(_init, seeds, seeds != "one")

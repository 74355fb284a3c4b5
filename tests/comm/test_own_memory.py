"""Users' collectives whose `allocate` keeps its memory, as memory that is registered with a network card is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
from tests.support.deep import DIM, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, shard


class Pairs(nn.Module):
    """Units of two layers of one size, whose transfers have one size too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Kept:
    """One buffer for each size; with `pooled`, one for all sizes."""

    def __init__(self, pooled: bool = False) -> None:
        self.held: dict[Any, Tensor] = {}
        self.pooled = pooled

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (count,) = size
        if not self.pooled:
            return self.held.setdefault((count, dtype), torch.empty(count, dtype=dtype, device=device))
        pool = self.held.setdefault("all", torch.empty(1 << 16, dtype=torch.uint8, device=device))
        return pool[: count * dtype.itemsize].view(dtype)


class Gather(Kept):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class Scatter(Kept):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


POLICIES = {
    "each parameter alone": hsdp.CommPolicy(fusion="direct"),
    "gathered ahead": hsdp.CommPolicy(fusion="packed", prefetch=2),
    "reductions in flight": hsdp.CommPolicy(fusion="direct", max_inflight_reduce_scatters=3),
    "alone": hsdp.CommPolicy(fusion="packed", prefetch=0),
}


def check_kept(env: RankEnv, kind: str, policy: str, pooled: bool, shared: bool) -> None:
    """Gradients are right, whether units share one object, and its memory, or have one each."""
    plain = seeded(Pairs)
    model: Any = shard(copy.deepcopy(plain), env.mesh((2,)), comm_policy=POLICIES[policy])
    one: Any = Gather(pooled) if kind == "gather" else Scatter(pooled)
    for unit in (*model.blocks, model):
        own = one if shared else type(one)(pooled)
        (unit.set_custom_all_gather if kind == "gather" else unit.set_custom_reduce_scatter)(own)
    for _ in range(2):
        check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("shared", [False, True], ids=["one each", "one for all"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "pooled"), [("gather", False), ("gather", True), ("scatter", False)])
def test_memory_that_is_kept_is_not_overwritten(pool2: Pool, kind: str, pooled: bool, policy: str, shared: bool) -> None:
    pool2.run(check_kept, kind, policy, pooled, shared)


def check_refused(env: RankEnv) -> None:
    """Input and output of a reduce-scatter in one memory: told, before anything is computed with it."""
    plain = seeded(Pairs)
    model: Any = shard(copy.deepcopy(plain), env.mesh((2,)))
    model.blocks[1].set_custom_reduce_scatter(Scatter(pooled=True))
    with pytest.raises(
        hsdp.StateError, match=r"reduce-scatter of unit '.*blocks\.1.*: Scatter\.allocate.*a buffer for each size"
    ):
        step(model, env.rank)
    model.blocks[1].set_custom_reduce_scatter(None)
    check_grads(model, plain, step, env.rank, env.world_size)


def test_one_memory_for_input_and_output_is_told(pool2: Pool) -> None:
    pool2.run(check_refused)

"""`torch.autocast` around sharded models: the bits of a plain model on each rank whose gradients are averaged.

Autocast keeps the casts of weights until its block ends, by the identity of the parameter: over several forwards, with and
without gradients, through recomputations, and while the weights themselves are freed and gathered again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hsdp import FSDPModule, fully_shard
from tests.support.rig import Pool, RankEnv
from tests.support.twin import full

DIM = 16


class Residual(nn.Module):
    """Blocks that autocast computes in bf16 but for their norms; the head may have the weight of the first layer."""

    def __init__(self, recomputes: bool, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.LayerNorm(2 * DIM), nn.Linear(2 * DIM, DIM)) for _ in range(3)
        )
        self.head = nn.Linear(DIM, DIM)
        if tied:
            self.head.weight = self.first.weight
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        out: Tensor = self.head(x)
        return out


class Loop:
    """What a training loop has in hand: a model, sharded or not, and the loss of a batch."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model: Any = model
        self.rank = rank

    def loss(self, k: int) -> Tensor:
        data = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1009 * self.rank + k))
        out: Tensor = self.model(data)
        assert out.dtype == torch.bfloat16, "autocast is on"
        return out.float().square().mean()

    def sync(self, on: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(on)


def _backward_outside(loop: Loop, k: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loop.loss(k)
    loss.backward()


def _micro_batches_inside(loop: Loop, k: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for micro in range(2):
            loop.sync(micro == 1)
            loop.loss(10 * k + micro).backward()


def _two_forwards_then_backwards(loop: Loop, k: int) -> None:
    """The casts are nodes that both graphs share."""
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loop.loss(k), loop.loss(k + 50)]
        for at, loss in enumerate(losses):
            loop.sync(at == 1)
            loss.backward()


def _evaluates_between(loop: Loop, k: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loop.loss(k)
        with torch.inference_mode():
            loop.loss(k + 70)
        loss.backward()


def _without_cache(loop: Loop, k: int) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loop.loss(k).backward()


LOOPS: list[Callable[[Loop, int], None]] = [
    _backward_outside,
    _micro_batches_inside,
    _two_forwards_then_backwards,
    _evaluates_between,
    _without_cache,
]


def check_autocast(env: RankEnv, recomputes: bool, tied: bool) -> None:
    for run in LOOPS:
        torch.manual_seed(3)
        plain = Residual(recomputes, tied)
        torch.manual_seed(3)
        sharded = Residual(recomputes, tied)
        for block in sharded.blocks:
            fully_shard(block, mesh=env.mesh((2,)), reshard_after_forward=True)
        fully_shard(sharded, mesh=env.mesh((2,)))
        for model in (plain, sharded):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
            for k in range(3):
                run(Loop(model, env.rank), k)
                for param in plain.parameters() if model is plain else ():
                    assert param.grad is not None
                    dist.all_reduce(param.grad)
                    param.grad /= env.world_size
                optimizer.step()
                optimizer.zero_grad()
        for (name, param), mine in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert torch.equal(full(mine), param), (run.__name__, name)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["", "checkpointed"])
def test_autocast_gives_the_bits_of_a_plain_model(pool2: Pool, recomputes: bool, tied: bool) -> None:
    pool2.run(check_autocast, recomputes, tied)

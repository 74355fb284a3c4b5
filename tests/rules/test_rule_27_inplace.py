"""Rule 27: in-place operations on outputs and inputs, also where they are views, leave gradients right."""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor, nn

import hsdp
from tests.support.deep import DIM, floats, seeded
from tests.support.rig import RankEnv
from tests.support.sharded import check_grads, check_rest, mesh_id, pool_for, shard


class InPlace(nn.Module):
    """Units in a row whose outputs are views (`nn.Linear` of 3-D inputs) and are changed in place by whoever calls them."""

    def __init__(self, how: str, frozen: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.last = nn.Linear(DIM, DIM)
        self.how = how
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            if self.how == "residual":
                y += x
            elif self.how == "relu":
                y = nn.functional.relu(y, inplace=True)
            elif self.how == "scale, twice":
                y.mul_(0.5).add_(1.0)
            elif self.how == "view":
                y.view(-1)[::2].mul_(0.5)
            elif self.how == "slice":
                y[..., 0].add_(x[..., 1])
            x = y
        return self.last(x)


def run(model: nn.Module, rank: int) -> None:
    logits = model(floats(rank).unsqueeze(1) * 1.0)
    logits /= 3.0
    logits.square().sum().backward()


def check(env: RankEnv, shape: tuple[int, ...], how: str, frozen: tuple[int, ...], reshard: bool | None) -> None:
    plain, model = (seeded(partial(InPlace, how, frozen)) for _ in range(2))
    shard(model, env.mesh(shape), reshard_after_forward=reshard, comm_policy=hsdp.CommPolicy(prefetch=2))
    for _ in range(3):
        check_grads(model, plain, run, env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("how", ["residual", "relu", "scale, twice", "view", "slice"])
@pytest.mark.parametrize("frozen", [(), (0, 1, 2), (2,)])
@pytest.mark.parametrize("reshard", [True, None])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_27_outputs(
    request: pytest.FixtureRequest, shape: tuple[int, ...], how: str, frozen: tuple[int, ...], reshard: bool | None
) -> None:
    pool_for(request, shape).run(check, shape, how, frozen, reshard)

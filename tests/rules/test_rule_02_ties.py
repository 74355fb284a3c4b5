"""Rule 2: weights tied inside a unit are one DTensor under all names; tied across units they are refused by both names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.support.deep import DIM, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded


class Tied(nn.Module):
    """Two blocks with one weight, and a block of their own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(DIM, DIM) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def check_tied(env: RankEnv) -> None:
    """The common ancestor owns what is tied, though a nested unit lies between the two names."""
    plain, model = seeded(Tied), seeded(Tied)
    hsdp.fully_shard(model.middle, mesh=env.mesh(2))  # type: ignore[type-var]
    hsdp.fully_shard(model, mesh=env.mesh(2))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for _ in range(2):
        assert model.first.weight is model.last.weight, "untied"
        check_sharded(model)
        check_grads(model, plain, step, env.rank, env.world_size)
        for param in plain.parameters():
            assert param.grad is not None
            param.grad /= env.world_size
        for optimizer in optimizers:
            optimizer.step()
    check_rest(model)


def test_rule_02_weights_tied_in_a_unit_stay_tied(pool2: Pool) -> None:
    pool2.run(check_tied)


def check_across(env: RankEnv) -> None:
    model = seeded(Tied)
    hsdp.fully_shard(model.first, mesh=env.mesh(2))  # type: ignore[type-var]
    for module in (model.last, model):
        with pytest.raises(ValueError, match=r"'(last\.)?weight'.* is tied to 'weight' of unit 'Linear'"):
            hsdp.fully_shard(module, mesh=env.mesh(2))  # type: ignore[type-var]
        assert not isinstance(module, hsdp.HSDPModule)


def test_rule_02_weights_tied_across_units_are_refused_by_both_names(pool2: Pool) -> None:
    pool2.run(check_across)

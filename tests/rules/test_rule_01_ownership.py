"""Rule 1: every parameter below a unit and not below a nested unit belongs to it, the module's direct ones included."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hsdp
from tests.support.deep import DIM, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded
from tests.support.twin import full_params


class Owners(nn.Module):
    """Parameters of the root itself, in a list, in a module that is no unit, in a unit, and in a unit inside that."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(DIM))
        self.shifts = nn.ParameterList(nn.Parameter(torch.rand(DIM)) for _ in range(2))
        self.plain = nn.Linear(DIM, DIM)
        self.outer = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Sequential(nn.Linear(DIM, DIM)))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.plain(x * self.gain + self.shifts[0])) + self.shifts[1]


def check_owners(env: RankEnv) -> None:
    plain, model = seeded(Owners), seeded(Owners)
    for module in (model.outer[2], model.outer, model):  # type: ignore[index]
        hsdp.fully_shard(module, mesh=env.mesh(2))  # type: ignore[type-var]
    check_sharded(model)
    owned = [[param.fqn for param in unit.params] for unit in model._units()]  # type: ignore[operator]
    assert owned == [
        ["gain", "shifts.0", "shifts.1", "plain.weight", "plain.bias"],
        ["0.weight", "0.bias"],
        ["0.weight", "0.bias"],
    ], owned
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def test_rule_01_parameters_belong_to_the_innermost_unit_around_them(pool2: Pool) -> None:
    pool2.run(check_owners)


def check_alone(env: RankEnv) -> None:
    plain = seeded(lambda: nn.Linear(DIM, 3))
    model = hsdp.fully_shard(seeded(lambda: nn.Linear(DIM, 3)), mesh=env.mesh(2))
    check_sharded(model)
    before = full_params(model)
    assert all(torch.equal(before[name], param) for name, param in plain.named_parameters())
    check_grads(model, plain, step, env.rank, env.world_size)


def test_rule_01_a_layer_alone_is_a_unit(pool2: Pool) -> None:
    pool2.run(check_alone)

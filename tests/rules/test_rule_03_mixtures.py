"""Rule 3: frozen and trained parameters and dtypes mix freely in a unit, `requires_grad` may change; nothing is cast."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.deep import DIM, floats
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, shard


class Mixture(nn.Linear):
    """A float64 weight and scalar, a float32 bias, a frozen bfloat16 gain."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.weight.data = self.weight.data.double()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.gain = nn.Parameter(torch.rand(DIM, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias.double()) * self.scale * self.gain


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def step(model: nn.Module, rank: int) -> None:
    """One forward and backward."""
    model(floats(rank)).square().sum().backward()


def check_mixture(env: RankEnv) -> None:
    torch.manual_seed(0)
    plain = Mixtures()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    toggles = [{}, {"blocks.0.weight": False, "blocks.1.gain": True}, {"blocks.0.weight": True, "blocks.2": False}]
    for toggle in toggles:
        for prefix, wanted in toggle.items():
            for one in (model, plain):
                for name, param in one.named_parameters():
                    if name.startswith(prefix):
                        param.requires_grad_(wanted)
        # A sum in float32 or bfloat16 is rounded: so far as they go, the order of sums shows.
        check_grads(model, plain, step, env.rank, env.world_size, 1e-2 if toggle else 1e-6)
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert mine.dtype == theirs.dtype, f"{name} was cast to {mine.dtype}"
            assert mine.grad is None or mine.grad.dtype == theirs.dtype, f"gradient of {name} is {mine.grad.dtype}"
            assert mine.requires_grad == theirs.requires_grad, name
    check_rest(model)


def test_rule_03_dtypes_and_frozen_parameters_mix_in_a_unit(pool2: Pool) -> None:
    pool2.run(check_mixture)

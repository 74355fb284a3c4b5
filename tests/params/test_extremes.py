"""Largest and smallest elements, and norms, of parameters of which some ranks have no row: torch's refuse empty tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hsdp
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id
from tests.support.twin import full

COMPUTED: dict[str, Callable[[Any], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "largest absolute value": lambda x: x.abs().max(),
    "amax along rows": lambda x: x.amax(0),
    "amin along rows": lambda x: x.amin(0, keepdim=True),
    "amax along the last dim": lambda x: x.amax(-1),
    "norm of order inf": lambda x: x.norm(math.inf),
    "norm of order -inf": lambda x: x.norm(-math.inf),
    "norm of order 2": lambda x: x.norm(),
    "of integers": lambda x: (x * 100).int().max(),
}


class StepsByTheLargest(torch.optim.Optimizer):
    """Divides by the largest gradient of each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad, alpha=-0.1 / float(param.grad.abs().max()))


def _check(env: RankEnv, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 3).double()
    model = copy.deepcopy(plain)
    hsdp.fully_shard(model, mesh=env.mesh(shape))
    for one in (plain, model):
        one(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    of_clip = [nn.utils.clip_grad_norm_(one.parameters(), 0.1, math.inf) for one in (model, plain)]
    torch.testing.assert_close(full(of_clip[0]), of_clip[1])
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        for what, compute in COMPUTED.items():
            for tensor, expected in ((mine.detach(), theirs.detach()), (mine.grad, theirs.grad)):
                torch.testing.assert_close(full(compute(tensor)), compute(expected), msg=what)
    StepsByTheLargest(model.parameters()).step()
    StepsByTheLargest(plain.parameters()).step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(mine), theirs.detach())


@pytest.mark.parametrize("shape", [(4,), (1, 4)], ids=mesh_id)
def test_ranks_without_rows_have_no_extremes(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(_check, shape)

"""Sums of norms of sharded tensors, such as a group lasso's: of whole norms, in an optimizer's step and elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hsdp
from tests.support.computed import check_computed
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, pool_for

SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "columns": lambda a, b: a.norm(dim=0).sum(),
    "columns, as a row": lambda a, b: a.norm(dim=0).sum(0, keepdim=True),
    "columns of order 3": lambda a, b: a.norm(3, dim=0).sum(),
    "columns of order 1": lambda a, b: a.norm(1, dim=0).sum(),
    "the largest of columns": lambda a, b: a.norm(float("inf"), dim=0).sum(),
    "rows": lambda a, b: a.norm(dim=1).sum(),
    "two tensors": lambda a, b: torch.stack([a.norm(), b.norm()]).sum(),
    "two tensors, one behind the other": lambda a, b: torch.cat([a.norm(dim=0), b.norm(dim=0)]).sum(),
    "foreach": lambda a, b: torch.stack(torch._foreach_norm([a, b])).sum(),
    "reshaped": lambda a, b: a.norm(dim=0).view(-1, 1).sum(),
    "without NaN": lambda a, b: a.norm(dim=0).nansum(),
    "mean": lambda a, b: a.norm(dim=0).mean(),
}


def _sums(env: RankEnv, shape: tuple[int, ...], name: str) -> None:
    check_computed(env, shape, lambda layers, given: SUMS[name](layers[0].weight, layers[1].weight))


@pytest.mark.parametrize("name", list(SUMS))
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_sums_of_norms(request: pytest.FixtureRequest, shape: tuple[int, ...], name: str) -> None:
    pool_for(request, shape).run(_sums, shape, name)


class _Scaled(torch.optim.SGD):
    """Scales its rate by the sum of the norms of the gradients' columns."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad * (0.1 / param.grad.norm(dim=0).sum().item()))


def _steps(env: RankEnv) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 5, bias=False).double(), nn.Linear(3, 5, bias=False).double()
    plain.load_state_dict(model.state_dict())
    hsdp.fully_shard(model, mesh=env.mesh(2))
    for one in (model, plain):
        optimizer = _Scaled(one.parameters(), lr=1.0)
        one(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    whole: Any = model.weight
    torch.testing.assert_close(whole.full_tensor(), plain.weight, rtol=1e-12, atol=1e-12)


def test_an_optimizer_that_steps_by_sums_of_norms(pool2: Pool) -> None:
    pool2.run(_steps)

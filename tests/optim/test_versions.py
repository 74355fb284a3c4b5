"""To autograd a step is a write to the parameters, too: who saved them does not go backward through stepped ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp.optim import Muon, local
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import shard

STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "stock": lambda params: torch.optim.SGD(params, lr=0.1),
    "local": lambda params: local(torch.optim.SGD(params, lr=0.1)),
    "flat": lambda params: local(torch.optim.SGD(params, lr=0.1), flat=True),
    "over replicas": lambda params: local(torch.optim.SGD(params, lr=0.1), over_replicas=True),
    "muon": lambda params: Muon([param for param in params if param.ndim == 2], lr=0.1),
}


def _penalty_goes_backward_late(env: RankEnv, name: str) -> None:
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double(), env.mesh((2, 1)))
    optimizer = STEPS[name](list(model.parameters()))
    model(torch.ones(2, 6, dtype=torch.float64)).square().mean().backward()
    weights: list[Any] = [param for param in model.parameters() if param.ndim == 2]
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    penalties: list[Any] = [weight.square().sum() for weight in weights]
    penalties += [weight.detach().mul(scale).square().sum() for weight in weights]
    if name != "stock":  # torch does not count what DTensors do to their local tensors
        penalties += [(weight.to_local().detach() * scale).square().sum() for weight in weights]
    optimizer.step()
    for penalty in penalties:
        loss: Tensor = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", STEPS)
def test_what_was_saved_before_a_step_is_refused_behind_it(pool2: Pool, name: str) -> None:
    pool2.run(_penalty_goes_backward_late, name)

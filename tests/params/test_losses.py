"""Losses between sharded tensors, which pull weights towards others: as of plain ones, whatever the sizes of the parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

import hsdp
from tests.support.rig import RankEnv
from tests.support.sharded import mesh_id, pool_for

LOSSES: dict[str, Callable[..., Any]] = {
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "smooth_l1": F.smooth_l1_loss,
    "l1": F.l1_loss,
    "soft_margin": F.soft_margin_loss,
    "bce": lambda weight, target, reduction: F.binary_cross_entropy(weight.sigmoid(), target, reduction=reduction),
    "weighted bce": lambda weight, target, reduction: F.binary_cross_entropy(
        weight.sigmoid(), target, weight=target, reduction=reduction
    ),
    "bce_with_logits": lambda weight, target, reduction: F.binary_cross_entropy_with_logits(
        weight, target, pos_weight=target, reduction=reduction
    ),
}


def _equals_plain(env: RankEnv, shape: tuple[int, ...], name: str, reduction: str) -> None:
    loss = LOSSES[name]
    torch.manual_seed(0)
    model = nn.Linear(3, 5).double()
    plain = nn.Linear(3, 5).double()
    plain.load_state_dict(model.state_dict())
    hsdp.fully_shard(model, mesh=env.mesh(shape))
    for (fqn, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        target = torch.rand(theirs.shape, dtype=torch.float64)
        expected = loss(theirs, target, reduction=reduction)
        expected.sum().backward()
        for placements in (mine.placements, (Replicate(),) * mine.device_mesh.ndim):  # type: ignore[attr-defined]
            mesh = mine.device_mesh  # type: ignore[attr-defined]
            mine.grad = None
            found: Any = loss(mine, distribute_tensor(target, mesh, placements, src_data_rank=None), reduction=reduction)
            found.sum().backward()
            torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-12, msg=f"the loss of {fqn}")
            assert mine.grad is not None
            grad: Tensor = mine.grad.full_tensor()
            torch.testing.assert_close(grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=f"the gradient of {fqn}")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_losses_between_sharded_tensors(
    request: pytest.FixtureRequest, shape: tuple[int, ...], name: str, reduction: str
) -> None:
    pool_for(request, shape).run(_equals_plain, shape, name, reduction)

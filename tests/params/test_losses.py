"""Losses between sharded tensors, which pull weights towards others: as of plain ones, whatever the sizes of the parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.computed import COLUMNS, ROWS, Given, check_computed
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


def _losses(env: RankEnv, shape: tuple[int, ...], name: str, reduction: str) -> None:
    torch.manual_seed(1)
    target = torch.rand(ROWS, COLUMNS, dtype=torch.float64)
    for shards in (True, False):

        def loss(layers: Any, given: Given, shards: bool = shards) -> Any:
            weight = layers[0].weight
            return LOSSES[name](weight, given(target, like=weight) if shards else given(target), reduction=reduction)

        check_computed(env, shape, loss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_losses_between_sharded_tensors(
    request: pytest.FixtureRequest, shape: tuple[int, ...], name: str, reduction: str
) -> None:
    pool_for(request, shape).run(_losses, shape, name, reduction)

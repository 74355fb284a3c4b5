"""Elements of sharded tensors that are read, filled or added to where a replicated tensor says, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.computed import COLUMNS, ROWS, check_computed
from tests.support.rig import RankEnv
from tests.support.sharded import mesh_id, pool_for

WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "few rows": lambda weight, index: weight.gather(1, index[:3]),
    "as many rows": lambda weight, index: weight.gather(1, index),
    "along the rows": lambda weight, index: weight.gather(0, index[:2]),
    "along the rows, more": lambda weight, index: weight.gather(0, torch.cat([index, index])),
    "along_dim": lambda weight, index: weight.take_along_dim(index, 1),
    "masked_fill_ by a tensor": lambda weight, index: (weight * 2.0).masked_fill_(index[:, :1] > 1, index.double().mean()),
    "scatter_add": lambda weight, index: weight.scatter_add(1, index[:3], weight.detach()),
    "scatter_add of itself": lambda weight, index: (weight * 2.0).scatter_add(0, index, weight[:, :3]),
}


def _by_index(env: RankEnv, shape: tuple[int, ...], name: str) -> None:
    torch.manual_seed(1)
    index = torch.randint(0, COLUMNS, (ROWS, 3))
    check_computed(env, shape, lambda layers, given: WAYS[name](layers[0].weight, given(index)))


@pytest.mark.parametrize("name", list(WAYS))
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_elements_by_index(request: pytest.FixtureRequest, shape: tuple[int, ...], name: str) -> None:
    pool_for(request, shape).run(_by_index, shape, name)

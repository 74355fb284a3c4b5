"""Elements of sharded tensors that are read, filled or added to where a replicated tensor says, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

import hsdp
from tests.support.rig import RankEnv
from tests.support.sharded import mesh_id, pool_for

ROWS, COLUMNS = 7, 5
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


def _equals_plain(env: RankEnv, shape: tuple[int, ...], name: str) -> None:
    torch.manual_seed(0)
    model, plain = (nn.Linear(COLUMNS, ROWS).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    mesh = env.mesh(shape)
    hsdp.fully_shard(model, mesh=mesh)
    index = torch.randint(0, COLUMNS, (ROWS, 3))
    expected = WAYS[name](plain.weight, index)
    found = WAYS[name](model.weight, distribute_tensor(index, mesh, (Replicate(),) * mesh.ndim, src_data_rank=None))
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    for one in (found, expected):
        one.square().sum().backward()
    grad: Any = model.weight.grad
    torch.testing.assert_close(grad.full_tensor(), plain.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(WAYS))
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_elements_by_index(request: pytest.FixtureRequest, shape: tuple[int, ...], name: str) -> None:
    pool_for(request, shape).run(_equals_plain, shape, name)

"""What users compute with sharded weights, against the same of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

import hsdp
from tests.support.rig import RankEnv

ROWS, COLUMNS = 7, 5
Given = Callable[..., Any]
"""Makes of a plain tensor what may stand beside weights: replicated, or with `like` distributed as that weight is."""


def check_computed(env: RankEnv, shape: tuple[int, ...], compute: Callable[[Any, Given], Any]) -> None:
    """`compute(layers, given)` and its gradients are those of plain layers, whose rows do not go evenly over ranks."""
    torch.manual_seed(0)
    layers, plain = (nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Linear(ROWS, COLUMNS)).double() for _ in range(2))
    plain.load_state_dict(layers.state_dict())
    mesh = env.mesh(shape)
    hsdp.fully_shard(layers, mesh=mesh)

    def given(tensor: Tensor, like: Any = None) -> Any:
        placements = (Replicate(),) * mesh.ndim if like is None else like.placements
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    found, expected = compute(layers, given), compute(plain, lambda tensor, like=None: tensor)
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    for one in (found, expected):
        one.square().sum().backward()
    for (name, mine), theirs in zip(layers.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            whole = mine.grad.full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(whole, theirs.grad, rtol=1e-12, atol=1e-12, msg=f"the gradient of {name}")

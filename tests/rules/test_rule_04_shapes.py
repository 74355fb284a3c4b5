"""Rule 4: scalars, empty, tiny, large, strided and odd parameters are sharded right; empty shards take part in all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.support.deep import DIM, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded, mesh_id
from tests.support.twin import assert_same, full_params


class Shapes(nn.Module):
    """Every shape that a parameter may have, and strides that are not those of its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.rand(1))
        self.three_rows = nn.Parameter(torch.rand(3, DIM))
        self.no_rows = nn.Parameter(torch.rand(0, DIM))
        self.no_columns = nn.Parameter(torch.rand(5, 0))
        self.transposed = nn.Parameter(torch.rand(DIM, DIM).t())
        self.strided = nn.Parameter(torch.rand(DIM, 3 * DIM)[:, ::3])
        self.large = nn.Parameter(torch.rand(DIM, 257, 5) / 257)
        self.channels = nn.Parameter(torch.rand(2, 3, 2, DIM).contiguous(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.one + self.three_rows[: len(x)] @ self.transposed) @ self.strided
        x = x + (x @ self.large.flatten(1)).mean(1, keepdim=True) * self.scalar
        return x + self.channels.sum((0, 1, 2)) + self.no_rows.sum() + self.no_columns.sum()


def check_shapes(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain = seeded(Shapes)
    model = hsdp.fully_shard(copy.deepcopy(plain), mesh=env.mesh(shape))
    check_sharded(model)
    assert_same(dict(full_params(model)), dict(full_params(plain)), 0.0, 0.0)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, foreach=True) for one in (model, plain)]
    for _ in range(2):
        check_grads(model, plain, step, env.rank, env.world_size)
        for param in plain.parameters():
            assert param.grad is not None
            param.grad /= env.world_size
        filled = [param for param in plain.parameters() if param.numel()]  # torch refuses the others with order inf
        expected = nn.utils.clip_grad_norm_(filled, 0.1, torch.inf)
        torch.testing.assert_close(hsdp.clip_grad_norm_(model, 0.1, torch.inf), expected)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(dict(full_params(model)), dict(full_params(plain)))
    state: Any = model.state_dict()
    model.load_state_dict(state)
    check_rest(model)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_rule_04_every_shape_is_sharded_right(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_shapes, shape)


def check_refused(env: RankEnv) -> None:
    """What cannot be sharded is refused by name, and the module is as it was."""
    model = nn.Linear(4, 4)
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"'codes' of shape \(3,\) has dtype torch.float8_e4m3fn and wants gradients"):
        hsdp.fully_shard(model, mesh=env.mesh(2))
    assert type(model) is nn.Linear
    assert type(model.weight) is nn.Parameter


def test_rule_04_what_cannot_be_sharded_is_refused_by_name(pool2: Pool) -> None:
    pool2.run(check_refused)

"""Rule 17: `clip_grad_norm_` counts every element once, on mixed meshes, with replicas and with empty shards.

`tests/test_clip.py` has the other cases: half precision, norms that are not finite, sums that wait.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
from tests.support.counting import CollectiveCounter
from tests.support.deep import DIM, Deep, mean_grads, mean_into, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, shard
from tests.support.twin import assert_same, full_grads


class Mixed(nn.Module):
    """A block for a mesh of its own, one row that most ranks have nothing of, a replicated scale."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(DIM, DIM)
        self.row = nn.Parameter(torch.rand(1, DIM))
        self.scale = nn.Parameter(torch.rand(DIM))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.block(x)) * self.row * self.scale)


def check_norm(env: RankEnv, order: float) -> None:
    plain, model = seeded(Mixed), seeded(Mixed)
    hsdp.fully_shard(model.block, mesh=env.mesh(4))  # type: ignore[type-var]
    hsdp.fully_shard(model, mesh=env.mesh((2, 2)), replicate_params=[model.scale])  # type: ignore[list-item]
    step(model, env.rank)
    mean_into(plain, step, env.world_size)
    for limit in (0.05, 1e9):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), limit, order)
        norm = hsdp.clip_grad_norm_(model, limit, order)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0, msg=lambda m: f"norms differ: {m}")
        assert_same(full_grads(model), full_grads(plain))
    if order < math.inf:  # torch's own function has no such norm of an empty shard
        nn.utils.clip_grad_norm_(plain.block.parameters(), 0.01, order)  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.block.parameters(), 0.01, order)  # type: ignore[union-attr]
    assert_same(full_grads(model), full_grads(plain))


@pytest.mark.parametrize("order", [2.0, 1.0, 3.5, math.inf])
def test_rule_17_norms_are_those_of_one_device(pool4: Pool, order: float) -> None:
    pool4.run(check_norm, order)


def check_clip_with_empty_shards(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Of six numbers the last of four ranks holds none."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape))
    for order in (1.0, 2.0, float("inf")):
        model.zero_grad()
        step(model, env.rank)
        grads = mean_grads(plain, step, env.world_size)
        for name, param in plain.named_parameters():
            param.grad = grads[name]
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, order)
        norm = hsdp.clip_grad_norm_(model, 1e-3, order)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-11, atol=0)
        assert_same(full_grads(model), full_grads(plain))


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_rule_17_all_ranks_take_part_in_clipping(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_clip_with_empty_shards, shape)


def check_forgotten_root(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Of a model whose root is in no unit the gradients of the last layer are each rank's own."""
    mesh = env.mesh(shape)
    model = seeded(Deep)
    for block in model.blocks:  # type: ignore[union-attr]
        hsdp.fully_shard(block, mesh=mesh)
    step(model, env.rank)
    before = full_grads(model)
    for given, name in ((model, "'last.weight', 'last.bias'"), (model.parameters(), r"number 0 of shape \(6, 6\), ")):
        with pytest.raises(
            hsdp.StateError, match=rf"2 parameter\(s\) beside sharded ones are in no unit \({name}.*the root"
        ):
            hsdp.clip_grad_norm_(given, 1e-3)
    assert_same(full_grads(model), before)
    for param in model.last.parameters():  # type: ignore[union-attr]
        dist.all_reduce(param.grad)
    norms: list[Any] = [None] * env.world_size
    dist.all_gather_object(norms, hsdp.clip_grad_norm_(model, 1e-3).item())
    assert len(set(norms)) == 1, norms


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_rule_17_gradients_of_each_rank_alone_are_refused(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(check_forgotten_root, shape)


def check_ignored(env: RankEnv) -> None:
    """Nobody compares parameters that the user takes care of."""
    model = seeded(Deep)
    hsdp.fully_shard(model, mesh=env.mesh((2,)), ignored_params=set(model.last.parameters()))  # type: ignore[union-attr]
    step(model, env.rank)
    with CollectiveCounter() as counter:
        hsdp.clip_grad_norm_(model, 1e-3)
    assert counter.counts() == {"all_reduce": 1}


def test_rule_17_ignored_parameters_are_not_compared(pool2: Pool) -> None:
    pool2.run(check_ignored)

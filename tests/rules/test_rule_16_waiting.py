"""Rule 16: the end of backward waits for every stage of every reduction, or the optimizer and clipping join them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hsdp
from hsdp.clip import clip_grad_norm_
from tests.support.deep import Deep, mean_grads, never_done, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, shard
from tests.support.twin import assert_same, full_grads, full_params


def _in_flight(model: nn.Module) -> int:
    return len(model._units()[0].runtime.pipeline)  # type: ignore[operator]


def check_end_of_backward(env: RankEnv, shape: tuple[int, ...], policy: hsdp.CommPolicy) -> None:
    means = mean_grads(seeded(Deep), step, env.world_size)
    model = shard(seeded(Deep), env.mesh(shape), comm_policy=policy)
    # The hook runs when its collective is waited for: whatever landed before was not doubled.
    for module in (*model.blocks, model):  # type: ignore[misc]
        module.set_all_reduce_hook(lambda tensor: tensor.mul_(2.0))
    for backwards in (1, 2):  # the second time gradients are added, not assigned
        with never_done():
            step(model, env.rank)
            assert _in_flight(model) == 0
        expected = {name: 2 * backwards * grad for name, grad in means.items() if grad is not None}
        assert_same(full_grads(model), expected)


POLICIES = {
    "default": hsdp.CommPolicy(),
    "deep queues": hsdp.CommPolicy(max_inflight_reduce_scatters=9, max_inflight_all_reduces=9),
    "shallow queues": hsdp.CommPolicy(max_inflight_reduce_scatters=1, max_inflight_all_reduces=1),
    "buckets": hsdp.CommPolicy(reduce_scatter_bucket_bytes=1000, all_reduce_bucket_bytes=1 << 20),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_rule_16_the_end_of_backward_waits(pool4: Pool, shape: tuple[int, ...], policy: str) -> None:
    pool4.run(check_end_of_backward, shape, POLICIES[policy])


def _step_with(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.step()


def _clip_first(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    clip_grad_norm_(model, 1e-3)
    optimizer.step()


JOINS: dict[str, Callable[[torch.optim.Optimizer, nn.Module], None]] = {"step": _step_with, "clip": _clip_first}


def check_joined(env: RankEnv, shape: tuple[int, ...], how: str) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for k in range(3):
        grads = mean_grads(plain, lambda m, rank, k=k: step(m, rank, k), env.world_size)  # type: ignore[misc]
        for name, param in plain.named_parameters():
            param.grad = grads[name]
        if how == "clip":
            nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        with never_done():
            step(model, env.rank, k)
            model.set_is_last_backward(False)  # type: ignore[operator]
            if k:
                assert _in_flight(model), "nothing was left running: this test shows nothing"
            JOINS[how](optimizers[0], model)
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_same(dict(full_params(model)), dict(full_params(plain)))


@pytest.mark.parametrize("how", JOINS)
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_rule_16_who_reads_gradients_joins_what_runs_on(pool2: Pool, shape: tuple[int, ...], how: str) -> None:
    pool2.run(check_joined, shape, how)


def check_set_before_first_forward(env: RankEnv) -> None:
    model = shard(seeded(Deep), env.mesh(2))
    model.set_is_last_backward(False)  # type: ignore[operator]
    with never_done():
        step(model, env.rank)
        assert _in_flight(model), "set_is_last_backward(False) before the first forward was ignored"
    model.flush()  # type: ignore[operator]
    assert_same(full_grads(model), mean_grads(seeded(Deep), step, env.world_size))


def test_rule_16_it_may_be_set_before_the_first_forward(pool2: Pool) -> None:
    pool2.run(check_set_before_first_forward)

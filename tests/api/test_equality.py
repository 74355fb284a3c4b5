"""Training equals the single-device twin, and FSDP2 on the same mesh."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Shard

import hsdp
from tests.support.models import CASES, make_case
from tests.support.rig import RankEnv
from tests.support.sharded import MESHES, check_rest, check_sharded, mesh_id, pool_for, shard
from tests.support.twin import Twin, adamw, assert_close_to_twin, assert_same, full_params, sgd, train, twin_of

OPTIMIZERS = {
    "sgd": sgd,
    "sgd-foreach": partial(sgd, foreach=True),
    "adamw": adamw,
    "adamw-foreach": partial(adamw, foreach=True),
    "adamw-fused": partial(adamw, fused=True),
}  # DTensor has no fused SGD


@cache
def _twin(
    name: str,
    world: int,
    steps: int,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    accumulate: int = 1,
    reduce: Literal["mean", "sum"] = "mean",
) -> Twin:
    return twin_of(make_case(name), world, steps, {"sgd": sgd, "adamw": adamw}[optimizer], accumulate, reduce)


def _optimizer(name: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](params)


def _train_as_twin(
    env: RankEnv,
    name: str,
    shape: tuple[int, ...],
    optimizer: str,
    twin: Twin,
    tolerance: float,
    options: dict[str, Any],
) -> None:
    case = make_case(name)
    model = shard(case.model(), env.mesh(shape), **options)
    losses = train(model, case, env.rank, len(twin.losses), _optimizer(optimizer, model.parameters()))
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=tolerance, atol=tolerance)
    assert_close_to_twin(model, twin, tolerance, tolerance, grads=True)
    check_sharded(model)
    check_rest(model)


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_steps_equal_the_twin(request: pytest.FixtureRequest, optimizer: str, shape: tuple[int, ...]) -> None:
    pool = pool_for(request, shape)
    twin = _twin("odd", pool.world_size, 10, "sgd" if optimizer.startswith("sgd") else "adamw")
    pool.run(_train_as_twin, "odd", shape, optimizer, twin, 1e-11, {})


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [name for name in CASES if name != "odd"])
def test_every_kind_of_model_equals_the_twin(request: pytest.FixtureRequest, name: str, shape: tuple[int, ...]) -> None:
    pool = pool_for(request, shape)
    tolerance = 1e-5 if name == "mixed" else 1e-11  # it has float32 parameters
    pool.run(_train_as_twin, name, shape, "sgd", _twin(name, pool.world_size, 4), tolerance, {})


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)], ids=mesh_id)
def test_two_ranks_equal_the_twin_bit_by_bit(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    # The sum of two does not depend on their order.
    pool_for(request, shape).run(_train_as_twin, "transformer", shape, "sgd", _twin("transformer", 2, 4), 0.0, {})


OPTIONS: dict[str, dict[str, Any]] = {
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "packed": {"comm_policy": hsdp.CommPolicy(fusion="packed")},
    "direct": {"comm_policy": hsdp.CommPolicy(fusion="direct")},
    "direct-gather": {"comm_policy": hsdp.CommPolicy(direct_gather_bytes=0)},
    "no-prefetch": {"comm_policy": hsdp.CommPolicy(prefetch=0)},
    "deep-prefetch": {"comm_policy": hsdp.CommPolicy(prefetch=7), "reshard_after_forward": True},
    "deep-queue": {"comm_policy": hsdp.CommPolicy(max_inflight_reduce_scatters=3, max_inflight_all_reduces=1)},
}


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_changes_the_numbers(request: pytest.FixtureRequest, option: str, shape: tuple[int, ...]) -> None:
    twin = _twin("transformer", 4, 3, "adamw")
    pool_for(request, shape).run(_train_as_twin, "transformer", shape, "adamw", twin, 1e-11, OPTIONS[option])


def _train_as_fsdp2(env: RankEnv, name: str, shape: tuple[int, ...]) -> None:
    case = make_case(name)
    mesh = env.mesh(shape)
    ours, theirs = shard(case.model(), mesh), case.model()
    for module in (*theirs.blocks, theirs):
        fsdp.fully_shard(module, mesh=mesh)
    for (name_, mine), (name_2, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name_ == name_2
        assert mine.placements == other.placements, name_
        assert torch.equal(mine.to_local(), other.to_local()), name_
    losses = [train(m, case, env.rank, 10, adamw(m.parameters(), foreach=True)) for m in (ours, theirs)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-11, atol=1e-11)
    assert_same(dict(full_params(ours)), dict(full_params(theirs)))


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", ["odd", "tied"])
def test_ten_steps_equal_fsdp2(request: pytest.FixtureRequest, name: str, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_train_as_fsdp2, name, shape)


# -- reductions, accumulation ---------------------------------------------------------------------------------------


def _accumulate(env: RankEnv, how: str, op: Literal["avg", "sum"], twin: Twin) -> None:
    case = make_case("odd")
    model = shard(case.model(), env.mesh((2, 2)))
    model.set_reduce_op_type(op)
    setters = {"full": None, "no-sync": "set_requires_grad_sync", "scatter-only": "set_requires_all_reduce"}

    def before_micro(model: nn.Module, is_last: bool) -> None:
        if (setter := setters[how]) is not None:
            getattr(model, setter)(is_last)

    losses = train(model, case, env.rank, 3, sgd(model.parameters()), 3, before_micro=before_micro)
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)
    check_rest(model)


@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("how", ["full", "no-sync", "scatter-only"])
def test_accumulation_equals_the_twin(request: pytest.FixtureRequest, how: str, op: str) -> None:
    twin = _twin("odd", 4, 3, "sgd", 3, "mean" if op == "avg" else "sum")
    pool_for(request, (2, 2)).run(_accumulate, how, op, twin)


def _scale(env: RankEnv, shape: tuple[int, ...]) -> None:
    case = make_case("odd")
    model = shard(case.model(), env.mesh(shape))
    case.loss(model, case.batch(0, env.rank)).backward()
    before = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    for factor, op, expected in ((0.5, "avg", 0.5), (0.25, "sum", 0.25 * env.world_size)):
        model.zero_grad()
        model.set_gradient_scaling_factor(factor)
        model.set_reduce_op_type(op)
        case.loss(model, case.batch(0, env.rank)).backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), before[name] * expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_scaling_factor_and_reduce_op_are_applied_once(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_scale, shape)


# -- placements and meshes ------------------------------------------------------------------------------------------


def _last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def _last_dim_from_the_end(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.ndim > 1 else None


PLACEMENTS = {"last": _last_dim, "negative": _last_dim_from_the_end}


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
@pytest.mark.parametrize("name", ["odd", "conv", "tiny"])
@pytest.mark.parametrize("choice", PLACEMENTS)
def test_other_shard_dims_equal_the_twin(
    request: pytest.FixtureRequest, choice: str, name: str, shape: tuple[int, ...]
) -> None:
    options = {"shard_placement_fn": PLACEMENTS[choice]}
    pool_for(request, shape).run(_train_as_twin, name, shape, "sgd", _twin(name, 4, 3), 1e-11, options)


def _train_without_mesh(env: RankEnv, twin: Twin) -> None:
    case = make_case("odd")
    model = shard(case.model(), None)
    mesh = next(model.parameters()).device_mesh
    assert (mesh.ndim, mesh.size()) == (1, env.world_size)
    train(model, case, env.rank, 3, sgd(model.parameters()))
    assert_close_to_twin(model, twin)
    for axis in range(mesh.ndim):  # the rig does not know this mesh: leave its ranks in step
        torch.distributed.barrier(mesh.get_group(axis))


def test_no_mesh_stands_for_all_ranks(request: pytest.FixtureRequest) -> None:
    pool_for(request, (4,)).run(_train_without_mesh, _twin("odd", 4, 3))


def _train_on_a_slice(env: RankEnv, twin: Twin) -> None:
    mesh = env.mesh((2, 1, 2), ("other", "replicate", "shard"))["replicate", "shard"]
    case = make_case("odd")
    model = shard(case.model(), mesh)
    train(model, case, env.rank % 2, 3, sgd(model.parameters()))
    assert_close_to_twin(model, twin)


def test_a_slice_of_a_bigger_mesh_trains_by_itself(request: pytest.FixtureRequest) -> None:
    pool_for(request, (4,)).run(_train_on_a_slice, _twin("odd", 2, 3))


def _ignore_params(env: RankEnv) -> None:
    case = make_case("mlp")
    model = case.model()
    ignored = [model.blocks[0].bias]
    shard(model, env.mesh(2), ignored_params=ignored)
    assert model.blocks[0].bias is ignored[0]
    plain = case.model()
    case.loss(model, case.batch(0, env.rank)).backward()
    case.loss(plain, case.batch(0, env.rank)).backward()
    torch.testing.assert_close(ignored[0].grad, plain.blocks[0].bias.grad)


def test_ignored_parameters_are_left_alone(request: pytest.FixtureRequest) -> None:
    pool_for(request, (2,)).run(_ignore_params)

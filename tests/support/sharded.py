"""What the engine's tests share: sharding a model, plain autograd as oracle for gradients, and the state of rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import hsdp
from tests.support.rig import Pool, RankEnv
from tests.support.twin import assert_same, full_grads

MESHES: list[tuple[int, ...]] = [(2,), (4,), (2, 2), (4, 1), (1, 4)]

Run = Callable[[nn.Module, int], Sequence[Tensor] | None]
"""What a rank does with a model: (model, rank) -> tensors that must be the plain model's, local to the rank."""


def mesh_id(shape: tuple[int, ...]) -> str:
    """A mesh shape in a test's name."""
    return "x".join(map(str, shape))


def pool_for(request: pytest.FixtureRequest, shape: Sequence[int]) -> Pool:
    """The session's pool with as many ranks as a mesh of this shape."""
    pool = request.getfixturevalue(f"pool{math.prod(shape)}")
    assert isinstance(pool, Pool)
    return pool


def shard(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> nn.Module:
    """One unit for each of what `model.units()` gives, or of `model.blocks`, and one for the rest."""
    units: Any = model.units() if hasattr(model, "units") else getattr(model, "blocks", ())
    for unit in units:
        hsdp.fully_shard(unit, mesh=mesh, **options)
    return hsdp.fully_shard(model, mesh=mesh, **options)


def check_grads(model: nn.Module, plain: nn.Module, run: Run, rank: int, world: int, tolerance: float = 1e-11) -> None:
    """Gradients of `run(model, rank)` are the mean of those that `run(plain, r)` makes for each rank r."""
    model.zero_grad()
    plain.zero_grad()
    told = run(model, rank) or ()
    for r in range(world):
        expected = run(plain, r) or ()
        if r == rank:
            torch.testing.assert_close(list(told), list(expected), rtol=tolerance, atol=tolerance)
    means = {name: None if p.grad is None else p.grad / world for name, p in plain.named_parameters()}
    assert_same(full_grads(model), means, tolerance, tolerance)


def backward_beside(env: RankEnv, model: nn.Module, plain: nn.Module, batch: Callable[[int], Tensor]) -> None:
    """A backward of this rank's batch on a sharded model, and of every rank's on the plain one, in the mean."""
    model(batch(env.rank)).square().mean().backward()
    for rank in range(env.world_size):
        (plain(batch(rank)).square().mean() / env.world_size).backward()


def check_rest(model: nn.Module) -> None:
    """Nothing is left of an iteration: no whole parameter shows or takes memory, no gradient waits."""
    for name, module in model.named_modules():
        shown = module._parameters.keys() & module.__dict__.keys()
        assert not shown, f"whole parameters still show in {name!r}: {shown}"
    for unit in model._units():
        assert unit.residency.value == "sharded" and not unit.open, f"{unit.name}: {unit.residency}, open {unit.open}"
        assert not unit.gradients.arrivals.leaves, f"{unit.name} holds gradients"
        for group in unit.dtype_groups:
            held = [kind for kind, flat_buffer in group.flat_buffers.items() if flat_buffer.held]
            assert not held, f"{unit.name} holds {held} memory"
        assert unit.runtime is None or len(unit.runtime.pipeline) == 0, f"{unit.name}: reductions did not land"


def check_sharded(model: nn.Module) -> None:
    """What users see are sharded DTensors: parameters, gradients (or None) and state_dict entries."""
    state = model.state_dict()
    for name, param in model.named_parameters():
        assert isinstance(param, nn.Parameter), f"{name}: {type(param)}"
        for what, tensor in {"parameter": param, "gradient": param.grad, "state": state[name]}.items():
            if tensor is not None:
                assert isinstance(tensor, DTensor), f"{what} {name} is a {type(tensor).__name__}"
                assert tensor.placements == param.placements, f"{what} {name}: {tensor.placements}"
                assert tensor.to_local().shape == param.to_local().shape, f"{what} {name}: local shape"

"""Parameters that torch.chunk cuts unevenly travel without padding: few experts on many ranks, under every option."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import hsdp
import hsdp.checkpoint
from hsdp import CommPolicy, MixedPrecisionPolicy
from hsdp.comm import backends
from tests.support.models import Case, mse
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, check_sharded, mesh_id, pool_for
from tests.support.twin import Twin, assert_close_to_twin, sgd, train, twin_of

DIM = 8


class Experts(nn.Module):
    """Soft mixture: every expert sees every token, weighted by a router; `spare` is used by no forward."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, DIM) / DIM)
        self.up = nn.Parameter(torch.randn(experts, DIM, 16) / DIM)
        self.down = nn.Parameter(torch.randn(experts, 16, DIM) / 16)
        self.bias = nn.Parameter(torch.zeros(experts, 3))
        self.spare = nn.Parameter(torch.randn(experts, 2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ self.router.T).softmax(-1)
        hidden = torch.tanh(torch.einsum("nd,edh->enh", x, self.up))
        told = torch.einsum("enh,ehd->end", hidden, self.down) * self.bias.exp().mean(-1)[:, None, None]
        return x + torch.einsum("end,ne->nd", told, weights)


class Net(nn.Module):
    """Blocks of 1, 3 and 5 experts: on 4 ranks (1 -) (1 1 1 -) (2 2 1 -)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(count) for count in (1, 3, 5))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 3, DIM, generator=generator, dtype=torch.float64)
    return x, y


CASE = Case("uneven experts", Net, draw, mse, torch.float64)
DIRECT = CommPolicy(fusion="direct")


@pytest.fixture(scope="module")
def pool3() -> Iterator[Pool]:
    with Pool(3) as pool:
        yield pool


@contextlib.contextmanager
def for_small_ones() -> Iterator[None]:
    """Padding is spared however small it is."""
    with patch.object(backends, "UNEVEN_BYTES", 1):
        yield


def build(env: RankEnv, shape: tuple[int, ...], model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = CASE.model() if model is None else model
    options = {"comm_policy": DIRECT} | options
    with for_small_ones():
        for module in (*model.blocks, model):  # type: ignore[misc,operator]
            hsdp.fully_shard(module, mesh=env.mesh(shape), **options)
    return model


def uneven_names(model: nn.Module) -> set[str]:
    """Of all parameters that travel so."""
    groups = [(unit.name, group) for unit in model._units() for group in unit.dtype_groups]  # type: ignore[operator]
    found = [(name, *pair) for name, group in groups for pair in zip(group.params, group.layout.pieces, strict=True)]
    return {f"{name}.{param.fqn}" for name, param, piece in found if piece.uneven}


def twin(world: int, steps: int = 3, accumulate: int = 1) -> Twin:
    return twin_of(CASE, world, steps, sgd, accumulate)


def check_training(env: RankEnv, shape: tuple[int, ...], expected: Twin, options: dict[str, Any]) -> None:
    model = build(env, shape, **options)
    losses = train(model, CASE, env.rank, len(expected.losses), sgd(model.parameters()))
    assert bool(uneven_names(model)) == (shape[-1] > 1)
    torch.testing.assert_close(losses, expected.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, expected, grads=True)
    check_sharded(model)
    check_rest(model)


MESHES = [(2,), (4,), (2, 2), (1, 2), (1, 4), (4, 1)]


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_training_equals_the_twin(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool = pool_for(request, shape)
    pool.run(check_training, shape, twin(pool.world_size), {})


@pytest.mark.parametrize("shape", [(3,), (1, 3)], ids=mesh_id)
def test_training_on_three_ranks_equals_the_twin(pool3: Pool, shape: tuple[int, ...]) -> None:
    pool3.run(check_training, shape, twin(3), {})


OPTIONS: dict[str, dict[str, Any]] = {
    "some packed": {"comm_policy": CommPolicy(direct_gather_bytes=256, direct_reduce_bytes=1024)},
    "buckets": {"comm_policy": replace(DIRECT, reduce_scatter_bucket_bytes=1 << 20, all_reduce_bucket_bytes=1 << 20)},
    "tree": {"comm_policy": replace(DIRECT, reduction="tree")},
    "kept whole": {"reshard_after_forward": False},
    "kept in parts": {"reshard_after_forward": 2},
    "no prefetch": {"comm_policy": replace(DIRECT, prefetch=0)},
    "cast": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)},
}


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_changes_the_numbers(request: pytest.FixtureRequest, name: str, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(check_training, shape, twin(4), OPTIONS[name])

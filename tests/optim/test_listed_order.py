"""Ranks may list parameters in different orders: those of a set come in another one in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
from hsdp import check_replicas, clip_grad_norm_
from hsdp.optim import Muon, local
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import backward_beside, mesh_id, pool_for
from tests.support.twin import assert_same, full_params

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def _adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def _muon(params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    return Muon(params, lr=0.02, ns_dtype=None, **options)


WAYS: dict[str, tuple[Make, Make]] = {
    "adamw": (_adamw, _adamw),
    "local": (_adamw, lambda params: local(_adamw(params))),
    "flat": (_adamw, lambda params: local(_adamw(params), flat=True)),
    "local over replicas": (_adamw, lambda params: local(_adamw(params), over_replicas=True)),
    "flat over replicas": (_adamw, lambda params: local(_adamw(params), flat=True, over_replicas=True)),
    "muon": (_muon, _muon),
    "muon over replicas": (_muon, lambda params: _muon(params, over_replicas=True)),
}
"""What steps the plain model, and the sharded one."""


def _block() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))  # alike: a swap shows in nothing but numbers


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(_block(), nn.Tanh(), _block(), nn.Tanh(), _block()).double()


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def _in_any_order(env: RankEnv, shape: tuple[int, ...]) -> None:
    for name, (plain_way, way) in WAYS.items():
        plain, model = _model(), _model()
        for block in (model[0], model[2], model[4]):
            hsdp.fully_shard(block, mesh=env.mesh(shape))
        hsdp.fully_shard(model, mesh=env.mesh(shape))
        listed: list[Any] = list(model.parameters())
        # Other units first, and within a unit other matrices.
        listed = listed[env.rank :] + listed[: env.rank] if env.rank % 2 else listed[::-1]
        optimizer, twins = way(listed), plain_way(plain.parameters())
        for step in range(3):
            backward_beside(env, model, plain, partial(_batch, step=step))
            clip_grad_norm_(model, 0.1)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            for one in (optimizer, twins):
                one.step()
                one.zero_grad()
        try:
            assert_same(full_params(model), dict(plain.named_parameters()), 1e-11, 1e-11)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        if len(shape) > 1:
            check_replicas(model, optimizer)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2), (4,)], ids=mesh_id)
def test_a_step_does_not_depend_on_the_order_of_parameters(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_in_any_order, shape)


def _by_a_list(env: RankEnv) -> None:
    model = _model()
    for block in (model[0], model[2], model[4]):
        hsdp.fully_shard(block, mesh=env.mesh((2, 1)))
    hsdp.fully_shard(model, mesh=env.mesh((2, 1)))
    listed: list[Any] = list(model.parameters())
    for step in range(5):
        model(_batch(env.rank, step)).square().mean().backward()
        norm = clip_grad_norm_(listed[::-1] if env.rank else listed, 0.1)
        norms = [torch.empty_like(norm) for _ in range(2)]
        dist.all_gather(norms, norm)
        assert torch.equal(*norms), "replicas scale by factors that differ in the last bit"
        model.zero_grad()


def test_norms_are_the_same_to_the_last_bit(pool2: Pool) -> None:
    pool2.run(_by_a_list)

"""A unit that is a root of its own in one pass and below another root in the next: no gradient stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hsdp
from tests.support.deep import DIM, Deep, floats, mean_grads, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, shard
from tests.support.twin import assert_same, full_grads, full_params


def _head(model: Any, rank: int, k: int) -> None:
    model.blocks[-1](floats(rank, k)).square().sum().backward()


def _whole(model: Any, rank: int, k: int) -> None:
    model(floats(rank, k)).square().sum().backward()


def _around(model: Any, rank: int, k: int) -> None:
    loss = model(floats(rank, k)).square().sum()
    _head(model, rank, k + 1)
    loss.backward()


STEPS: dict[str, list[Any]] = {
    "its own, then the model": [_head, _whole],
    "the model, then its own": [_whole, _head],
    "its own between the model's forward and backward": [_head, _around],
}


def _lands(env: RankEnv, shape: tuple[int, ...], parts: list[Any], last: bool) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape))
    both: Any = (model, plain)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in both]
    head = both[0].blocks[-1]
    for step in range(3):
        for part in parts:
            both[0].set_is_last_backward(False)
            part(model, env.rank, 10 * step)
            for rank in range(env.world_size):
                part(plain, rank, 10 * step)
        if last:
            with torch.no_grad():
                both[0](floats(env.rank))  # the unit is below the model again
        for param in plain.parameters():
            if param.grad is not None:
                param.grad /= env.world_size
        if not last:  # of an optimizer that steps the unit alone
            optimizers[0].param_groups[0]["params"] = list(head.parameters())
            optimizers[1].param_groups[0]["params"] = list(both[1].blocks[-1].parameters())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        plain.zero_grad()
        assert_same(dict(full_params(model)), full_params(plain))
    both[0].flush()
    check_rest(model)


@pytest.mark.parametrize("last", [False, True], ids=["", "seen by the model"])
@pytest.mark.parametrize("parts", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_what_runs_on_lands_whichever_root_it_was_of(
    pool2: Pool, shape: tuple[int, ...], parts: list[Any], last: bool
) -> None:
    pool2.run(_lands, shape, parts, last)


def _of_several(env: RankEnv) -> None:
    """A unit of several modules without a model around it."""

    def build() -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    plain, sharded = seeded(build), seeded(build)
    hsdp.fully_shard(list(sharded), mesh=env.mesh((2,)))  # type: ignore[arg-type]
    for modules, ranks in ((sharded, [env.rank]), (plain, range(env.world_size))):
        optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
        for step in range(3):
            for rank in ranks:
                first, second = modules
                (second(torch.tanh(first(floats(rank, step)))).square().sum() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same({name: param.full_tensor() for name, param in sharded.named_parameters()}, full_params(plain))  # type: ignore[attr-defined]


def test_a_unit_of_several_modules_is_a_root_too(pool2: Pool) -> None:
    pool2.run(_of_several)


def _flushed(env: RankEnv) -> None:
    """The unit comes below the model between its own forward and its own backward, whose reductions run on."""

    def run(model: Any, rank: int) -> None:
        loss = model.blocks[-1](floats(rank)).square().sum()
        with torch.no_grad():
            model(floats(rank, 1))
        loss.backward()

    model: Any = shard(seeded(Deep), env.mesh((2,)))
    model.set_is_last_backward(False)
    run(model, env.rank)
    model.flush()
    assert_same(full_grads(model), mean_grads(seeded(Deep), run, env.world_size))


def test_a_flush_lands_what_an_earlier_root_reduced(pool2: Pool) -> None:
    pool2.run(_flushed)

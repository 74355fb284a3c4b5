"""State that is nested: lists, tuples, dicts of any keys and empty ones come back, with shards at any depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hsdp import checkpoint, fully_shard
from tests.checkpoint import models as cm
from tests.checkpoint.nested import Nested, check_shards, moments, same, states
from tests.support.rig import Pool
from tests.support.twin import full
from tests.support.worker import RankEnv


def made(env: RankEnv | None, shape: cm.Shape, seed: int = 0) -> tuple[nn.Module, Nested]:
    model = cm.build(cm.mesh_of(env, shape), seed)
    return model, Nested(model.parameters())


def save_nested(env: RankEnv, directory: str) -> tuple[dict[str, Any], list[float]]:
    model, optimizer = made(env, (1, 2))
    cm.train(model, optimizer, range(2), env.rank, env.world_size)
    checkpoint.save(directory, model, optimizer, step=2, async_=True).wait()
    held = states(model, optimizer)
    return held, cm.train(model, optimizer, range(2, 4), env.rank, env.world_size)


def load_nested(env: RankEnv | None, directory: str, shape: cm.Shape, expected: dict[str, Any]) -> list[float]:
    for seed, steps in ((5, 0), (6, 1)):  # into a fresh optimizer, and into one that has stepped
        model, optimizer = made(env, shape, seed)
        place = (env.rank, env.world_size) if env is not None else (0, 1)
        cm.train(model, optimizer, range(steps), *place)
        checkpoint.load(directory, model, optimizer)
        found = states(model, optimizer)
        assert found.keys() == expected.keys()
        assert [name for name in found if not same(found[name], expected[name])] == []
        check_shards(model, optimizer)
    return cm.train(model, optimizer, range(2, 4), *place)


def test_nested_state_comes_back_as_it_was_on_any_mesh(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    (expected, _), losses = (ranks := pool2.run(save_nested, str(tmp_path)))[0], [one for _, one in ranks]
    mean = [sum(step) / len(step) for step in zip(*losses, strict=True)]
    for shape in cm.SHAPES.values():
        pool = pool4 if shape and shape[0] * shape[1] == 4 else pool2
        if shape:
            found = pool.run(load_nested, str(tmp_path), shape, expected)
        else:
            found = [load_nested(None, str(tmp_path), shape, expected)]
        assert found == losses or shape != (1, 2)
        again = [sum(step) / len(step) for step in zip(*found, strict=True)]
        assert again == pytest.approx(mean, rel=1e-12)


def from_one_process(env: RankEnv, directory: str, expected: dict[str, Any]) -> None:
    load_nested(env, directory, (1, 2), expected)


def test_nested_state_of_one_process_is_sharded_where_it_is_loaded(pool2: Pool, tmp_path: Path) -> None:
    model, optimizer = made(None, ())
    cm.train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer, step=2)
    pool2.run(from_one_process, str(tmp_path), states(model, optimizer))


def full_and_back(env: RankEnv) -> None:
    model, optimizer = made(env, (1, 2))
    cm.train(model, optimizer, range(2), env.rank, env.world_size)
    expected = states(model, optimizer)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    assert bool(state) == (env.rank == 0)
    if env.rank == 0:
        assert state["state"].keys() == expected.keys()
        assert [name for name in expected if not same(state["state"][name], expected[name])] == []
    everywhere = checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    for entries in everywhere["state"].values():
        for held in moments(entries):
            held.zero_()  # copies: the optimizer does not notice
    assert same(states(model, optimizer), expected)
    weights = checkpoint.full_state_dict(model)
    for shape in ((1, 2), (2, 1)):
        other, fresh = made(env, shape, seed=3)
        checkpoint.load_full_state_dict(other, weights)
        checkpoint.load_full_optimizer_state_dict(other, fresh, state)
        assert same(states(other, fresh), expected)
        check_shards(other, fresh)
    other, fresh = made(env, (1, 2), seed=3)
    checkpoint.load_full_state_dict(other, weights)
    checkpoint.load_full_optimizer_state_dict(other, fresh, state)
    later = [cm.train(m, o, range(2, 4), env.rank, env.world_size) for m, o in ((model, optimizer), (other, fresh))]
    assert later[0] == later[1]


def test_full_optimizer_states_are_whole_at_any_depth_and_dealt_out_again(pool2: Pool) -> None:
    pool2.run(full_and_back)


# -- LBFGS -------------------------------------------------------------------------------------------------------------


def lbfgs(env: RankEnv, shape: cm.Shape) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8, dtype=torch.float64), mesh=env.mesh(shape))
    x = torch.randn(8, 8, dtype=torch.float64)  # the same on all ranks, as LBFGS decides by the loss
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, history_size=3, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    return model, optimizer, closure


def save_lbfgs(env: RankEnv, directory: str) -> dict[str, Tensor]:
    model, optimizer, closure = lbfgs(env, (1, 2))
    for _ in range(2):
        optimizer.step(closure)
    checkpoint.save(directory, model, optimizer, step=2)
    whole_state = checkpoint.full_optimizer_state_dict(model, optimizer)
    for _ in range(2):
        optimizer.step(closure)
    uninterrupted = {name: full(value) for name, value in model.state_dict().items()}
    model, optimizer, closure = lbfgs(env, (1, 2))
    checkpoint.load(directory, model)
    checkpoint.load_full_optimizer_state_dict(model, optimizer, whole_state)
    for _ in range(2):
        optimizer.step(closure)
    cm.assert_equal({name: full(value) for name, value in model.state_dict().items()}, uninterrupted)
    return uninterrupted


def resume_lbfgs(env: RankEnv, directory: str, shape: cm.Shape, exact: bool, expected: dict[str, Tensor]) -> None:
    model, optimizer, closure = lbfgs(env, shape)
    checkpoint.load(directory, model, optimizer)
    for _ in range(2):
        optimizer.step(closure)
    found = {name: full(value) for name, value in model.state_dict().items()}
    if exact:
        cm.assert_equal(found, expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_lbfgs_goes_on_as_if_it_had_not_been_interrupted(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    expected = pool2.run(save_lbfgs, str(tmp_path))[0]
    pool2.run(resume_lbfgs, str(tmp_path), (1, 2), True, expected)
    for pool, shape in ((pool2, (2, 1)), (pool4, (2, 2)), (pool4, (1, 4))):
        pool.run(resume_lbfgs, str(tmp_path), shape, False, expected)

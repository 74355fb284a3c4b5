"""Any mesh to any mesh: saved on one, loaded on another, training goes on as if it had not stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hsdp import checkpoint
from hsdp.errors import StaleParametersError
from tests.checkpoint import models as cm
from tests.support.rig import Pool
from tests.support.worker import RankEnv

SAVED_AT, MORE = 3, 5
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def on_mesh(name: str, pools: dict[int, Pool], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs `fn(env, shape, *args)` on every rank of the mesh; "1" is this process, without a process group."""
    shape = cm.SHAPES[name]
    if not shape:
        return [fn(None, shape, *args)]
    return pools[shape[0] * shape[1]].run(fn, shape, *args)


def save_and_go_on(env: RankEnv | None, shape: cm.Shape, directory: str, make: MakeOptimizer) -> tuple[Any, list[float]]:
    """Trains, saves, trains on; returns what was saved and the later losses."""
    rank, world = (env.rank, env.world_size) if env is not None else (0, 1)
    model = cm.build(cm.mesh_of(env, shape))
    optimizer = make(model)
    cm.train(model, optimizer, range(SAVED_AT), rank, world)
    state = cm.whole_state(model, optimizer)
    checkpoint.save(directory, model, optimizer, {"rank": rank, "loader": torch.arange(3)}, step=SAVED_AT)
    cm.assert_equal(cm.whole_state(model, optimizer), state)  # saving changes nothing
    return state, cm.train(model, optimizer, range(SAVED_AT, SAVED_AT + MORE), rank, world)


def load_and_go_on(
    env: RankEnv | None, shape: cm.Shape, directory: str, make: MakeOptimizer, stepped: bool
) -> tuple[Any, list[float]]:
    """Loads into a model with other weights; returns what it then has and the losses of the steps after."""
    rank, world = (env.rank, env.world_size) if env is not None else (0, 1)
    model = cm.build(cm.mesh_of(env, shape), seed=99)
    optimizer = make(model)
    if stepped:
        cm.train(model, optimizer, range(2), rank, world)
    optimizer.register_step_pre_hook(_refuse)
    loaded = checkpoint.load(directory, model, optimizer)
    optimizer._optimizer_step_pre_hooks.clear()
    assert loaded.step == SAVED_AT
    assert loaded.extra["rank"] == (rank if loaded.world_size == world else 0)
    assert torch.equal(loaded.extra["loader"], torch.arange(3))
    state = cm.whole_state(model, optimizer)
    return state, cm.train(model, optimizer, range(SAVED_AT, SAVED_AT + MORE), rank, world)


def _refuse(*_: object) -> None:
    raise AssertionError("loading took an optimizer step")


def mean(outcomes: list[tuple[Any, list[float]]]) -> torch.Tensor:
    return torch.tensor([losses for _, losses in outcomes], dtype=torch.float64).mean(0)


@pytest.fixture(scope="module")
def pools(pool2: Pool, pool4: Pool) -> dict[int, Pool]:
    return {2: pool2, 4: pool4}


@pytest.fixture(scope="module")
def saved(pools: dict[int, Pool], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any, torch.Tensor]]:
    """By mesh: the directory, what was saved, the losses of the uninterrupted run."""
    found = {}
    for name in cm.SHAPES:
        directory = tmp_path_factory.mktemp(f"from-{name}")
        outcomes = on_mesh(name, pools, save_and_go_on, str(directory), cm.two_groups)
        found[name] = (directory, outcomes[0][0], mean(outcomes))
    return found


@pytest.mark.parametrize("target", cm.SHAPES)
@pytest.mark.parametrize("source", cm.SHAPES)
def test_any_mesh_to_any_mesh(
    saved: dict[str, tuple[Path, Any, torch.Tensor]], pools: dict[int, Pool], source: str, target: str
) -> None:
    directory, state, losses = saved[source]
    stepped = (len(source) + len(target)) % 2 == 0  # half of the optimizers have a state of their own before
    outcomes = on_mesh(target, pools, load_and_go_on, str(directory), cm.two_groups, stepped)
    for found, _ in outcomes:
        cm.assert_equal(found, state)
    torch.testing.assert_close(mean(outcomes), losses, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "make", [cm.sgd_momentum, cm.adamw_fused, cm.adamw_foreach, cm.adamw_amsgrad], ids=lambda make: make.__name__
)
@pytest.mark.parametrize(("source", "target"), [("1x4", "2x2"), ("2x1", "1x2"), ("1", "2x2")])
def test_an_optimizer_goes_on_on_another_mesh(
    pools: dict[int, Pool], tmp_path: Path, make: MakeOptimizer, source: str, target: str
) -> None:
    outcomes = on_mesh(source, pools, save_and_go_on, str(tmp_path), make)
    loaded = on_mesh(target, pools, load_and_go_on, str(tmp_path), make, False)
    cm.assert_equal(loaded[0][0], outcomes[0][0])
    torch.testing.assert_close(mean(loaded), mean(outcomes), rtol=1e-11, atol=1e-11)


def load_by_other_kind(env: RankEnv, directory: str) -> bool | None:
    """A checkpoint of foreach AdamW goes into fused AdamW, which stays fused."""
    model = cm.build(env.mesh((1, 2)), seed=5)
    optimizer = cm.adamw_fused(model)
    checkpoint.load(directory, model, optimizer)
    cm.train(model, optimizer, range(3, 5), env.rank, 2)
    return optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]


def test_implementation_flags_are_the_loading_optimizers_own(pools: dict[int, Pool], tmp_path: Path) -> None:
    on_mesh("2x1", pools, save_and_go_on, str(tmp_path), cm.adamw_foreach)
    assert pools[2].run(load_by_other_kind, str(tmp_path)) == [(True, None)] * 2


def save_fresh(env: RankEnv, shape: cm.Shape, directory: str) -> None:
    model = cm.build(env.mesh(shape))
    optimizer = cm.two_groups(model)
    checkpoint.save(directory, model, optimizer, step=0)
    assert not optimizer.state


def load_fresh(env: RankEnv, shape: cm.Shape, directory: str) -> None:
    model = cm.build(env.mesh(shape), seed=4)
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, range(2), env.rank, env.world_size)
    checkpoint.load(directory, model, optimizer)
    assert not optimizer.state
    cm.assert_equal(cm.whole_state(model), cm.whole_state(cm.build(None)))


def test_fresh_optimizer_saves_and_loads_as_fresh(pools: dict[int, Pool], tmp_path: Path) -> None:
    on_mesh("1x2", pools, save_fresh, str(tmp_path))
    on_mesh("2x1", pools, load_fresh, str(tmp_path))


def two_jobs(env: RankEnv, directory: str) -> None:
    """Ranks 0, 1 and ranks 2, 3 hold a model each, and save and load without the others."""
    mesh = env.mesh((2, 2), ("job", "shard"))["shard"]
    job, group = env.rank // 2, mesh.get_group()
    model = cm.build(mesh, seed=job)
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, range(job + 1), env.rank % 2, 2)
    expected = cm.whole_state(model, optimizer)
    mine = f"{directory}/{job}"
    if job == 1:  # the other job is long done, or has not begun
        checkpoint.save(mine, model, optimizer, step=1, process_group=group, async_=True).wait()
    dist.barrier()
    if job == 0:
        checkpoint.save(mine, model, optimizer, step=1, process_group=group)
    other = cm.build(mesh, seed=7)
    fresh = cm.two_groups(other)
    checkpoint.load(mine, other, fresh, process_group=group)
    cm.assert_equal(cm.whole_state(other, fresh), expected)
    checkpoint.load_full_state_dict(other, checkpoint.full_state_dict(model), src_rank=2 * job, process_group=group)
    checkpoint.save_safetensors(mine, model, process_group=group)
    cm.assert_equal(cm.whole_state(other), cm.whole_state(model))


def test_models_on_other_ranks_do_not_take_part(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(two_jobs, str(tmp_path))


def stale_backward(env: RankEnv, directory: str) -> None:
    model = cm.build(env.mesh((1, 2)))
    checkpoint.save(directory, model, step=1)
    loss = model(torch.zeros(1, 2, dtype=torch.int64)).sum()
    checkpoint.load(directory, model)
    with pytest.raises(StaleParametersError):
        loss.backward()


def test_loading_between_a_forward_and_its_backward_is_noticed(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(stale_backward, str(tmp_path))


def save_once(env: RankEnv, shape: cm.Shape, directory: str) -> None:
    model = cm.build(env.mesh(shape))
    checkpoint.save(directory, model, cm.two_groups(model), step=1)


@pytest.mark.parametrize(("name", "writers"), [("2x2", [0, 1]), ("4x1", [0]), ("1x4", [0, 1, 2, 3])])
def test_only_the_first_replica_writes(pools: dict[int, Pool], tmp_path: Path, name: str, writers: list[int]) -> None:
    on_mesh(name, pools, save_once, str(tmp_path))
    files = sorted(path.name for path in (tmp_path / "step-000001").glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in writers]

"""PyTorch's own functions on hsdp's models, and checkpoints that go to FSDP2 and come from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as fsdp2

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError
from tests.checkpoint import models as cm
from tests.support.deep import Deep, seeded, step
from tests.support.rig import Pool
from tests.support.sharded import check_grads, mesh_id, shard
from tests.support.twin import assert_same, full_params
from tests.support.worker import RankEnv


class Ordinary(nn.Module):
    """What both libraries can shard: no scalar, no empty parameter, but odd sizes, a frozen and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(cm.Layer(6, 7) for _ in range(2))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_fsdp2(env: RankEnv, shape: cm.Shape, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Ordinary().double()
    mesh = env.mesh(shape)
    for block in model.blocks:
        fsdp2(block, mesh=mesh)
    return fsdp2(model, mesh=mesh)


def by_hsdp(env: RankEnv, shape: cm.Shape, seed: int = 0) -> nn.Module:
    return cm.build(env.mesh(shape), seed, Ordinary)


def trained(model: nn.Module, env: RankEnv, steps: range = range(2)) -> torch.optim.Optimizer:
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, steps, env.rank, env.world_size)
    return optimizer


def save_by_fsdp2(env: RankEnv, directory: str, layout: str, flatten: bool) -> Any:
    model = by_fsdp2(env, (2, 2))
    optimizer = trained(model, env)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    if layout == "flat":
        state: dict[str, Any] = {**model_state, **optim_state}
    elif layout == "app":
        state = {"app": {"model": model_state, "optim": optim_state}, "step": 2}
    else:
        state = {"model": model_state, "optimizer": optim_state}
    dcp.save(state, checkpoint_id=directory)
    return cm.whole_state(model, optimizer)


def load_by_hsdp(env: RankEnv, directory: str, shape: cm.Shape) -> Any:
    model = by_hsdp(env, shape, seed=9)
    optimizer = cm.two_groups(model)
    loaded = checkpoint.load(directory, model, optimizer)
    assert (loaded.step, loaded.extra, loaded.world_size) == (None, None, None)
    state = cm.whole_state(model, optimizer)
    cm.train(model, optimizer, range(2, 4), env.rank, env.world_size)
    return state, cm.whole_state(model, optimizer)


def go_on_by_fsdp2(env: RankEnv) -> Any:
    model = by_fsdp2(env, (2, 2))
    optimizer = trained(model, env, range(4))
    return cm.whole_state(model, optimizer)


@pytest.mark.parametrize(("layout", "flatten"), [("", False), ("app", False), ("app", True), ("flat", True)])
def test_fsdp2_checkpoints_load(pool4: Pool, tmp_path: Path, layout: str, flatten: bool) -> None:
    state = pool4.run(save_by_fsdp2, str(tmp_path), layout, flatten)[0]
    found, later = pool4.run(load_by_hsdp, str(tmp_path), (1, 4))[0]
    cm.assert_equal(found, state)
    if not layout:
        expected = pool4.run(go_on_by_fsdp2)[0]
        for name, value in later.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-11)


def save_by_hsdp(env: RankEnv, directory: str) -> Any:
    model = by_hsdp(env, (2, 2))
    optimizer = trained(model, env)
    path = checkpoint.save(directory, model, optimizer, step=2).path
    return str(path), cm.whole_state(model, optimizer)


def load_by_fsdp2(env: RankEnv, path: str) -> Any:
    model = by_fsdp2(env, (1, 4), seed=9)
    optimizer = cm.two_groups(model)
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optim_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return cm.whole_state(model, optimizer)


def test_fsdp2_loads_hsdp_checkpoints(pool4: Pool, tmp_path: Path) -> None:
    path, state = pool4.run(save_by_hsdp, str(tmp_path))[0]
    cm.assert_equal(pool4.run(load_by_fsdp2, path)[0], state)


def roundtrip_by_torch(env: RankEnv, directory: str, in_background: bool) -> None:
    """get_/set_state_dict, dcp.save, async_save and load, as users have them, on hsdp models."""
    model = by_hsdp(env, (1, 2))
    optimizer = trained(model, env)
    state = cm.whole_state(model, optimizer)
    model_state, optim_state = get_state_dict(model, optimizer)
    state_dict = {"model": model_state, "optim": optim_state}
    if in_background:
        dcp.async_save(state_dict, checkpoint_id=directory).result()
    else:
        dcp.save(state_dict, checkpoint_id=directory)
    other = by_hsdp(env, (2, 1), seed=5)
    fresh = cm.two_groups(other)
    loaded = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, fresh)}
    dcp.load(loaded, checkpoint_id=directory)
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, fresh, loaded["optim"])
    cm.assert_equal(cm.whole_state(other, fresh), state)
    cm.train(other, fresh, range(2, 4), env.rank, 2)
    cm.train(model, optimizer, range(2, 4), env.rank, 2)
    found, expected = cm.whole_state(other, fresh), cm.whole_state(model, optimizer)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("in_background", [False, True], ids=["save", "async_save"])
def test_torchs_own_functions_work_on_hsdp_models(pool2: Pool, tmp_path: Path, in_background: bool) -> None:
    pool2.run(roundtrip_by_torch, str(tmp_path), in_background)


def full_by_torch(env: RankEnv) -> None:
    """PyTorch's full state dicts, out of one hsdp model and into another, from rank 0."""
    model = by_hsdp(env, (1, 2))
    optimizer = trained(model, env)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    assert bool(model_state) == (env.rank == 0)
    other = by_hsdp(env, (2, 1), seed=5)
    fresh = cm.two_groups(other)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, model_state, options=options)
    set_optimizer_state_dict(other, fresh, optim_state, options=options)
    found, expected = cm.whole_state(other, fresh), cm.whole_state(model, optimizer)
    for index in range(2):  # torch turns the tuple into a list on the way
        found[f"group.{index}.betas"] = tuple(found[f"group.{index}.betas"])
    cm.assert_equal(found, expected)


def test_torchs_full_state_dicts(pool2: Pool) -> None:
    pool2.run(full_by_torch)


def load_misfit(env: RankEnv, directory: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(directory, cm.build(env.mesh((1, 2))))
    return str(caught.value)


def save_plain(env: RankEnv, directory: str) -> None:
    dcp.save({"net": by_hsdp(env, (1, 2)).state_dict()}, checkpoint_id=directory)


def test_a_plain_checkpoint_of_another_model_is_refused(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(save_plain, str(tmp_path))
    results = pool2.run(load_misfit, str(tmp_path))
    assert results[0] == results[1]
    assert "under no prefix does it have all of the model's names 'blocks.0.calls', 'blocks.0.down.bias', " in results[0]
    assert "; it has 'net.embedding.weight', 'net.blocks.0.up.weight', " in results[0]
    assert "under 'net.' it lacks 'frozen.bias', 'frozen.weight', 'nothing' and 3 more" in results[0]


def _from_rank_0(env: RankEnv, shape: tuple[int, ...], policy: Any) -> None:
    """Rank 0 alone has weights, and the others the model on the meta device: how trainers spare memory at a load."""
    plain = seeded(Deep)
    model: Any = seeded(Deep)
    whole = model.state_dict() if env.rank == 0 else {}
    if env.rank:
        model.to("meta")
    shard(model, env.mesh(shape), replica_policy=policy)
    if env.rank:
        model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    check_grads(model, plain, step, env.rank, env.world_size)
    assert_same(dict(full_params(model)), dict(full_params(plain)))


@pytest.mark.parametrize("policy", ["broadcast", "check", "trust"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_rank_0_has_the_weights_and_the_others_are_on_meta(pool2: Pool, shape: tuple[int, ...], policy: str) -> None:
    pool2.run(_from_rank_0, shape, policy)

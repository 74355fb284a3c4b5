"""Checkpoints as torchtitan, Lightning and accelerate lay them out load into hsdp, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError
from tests.checkpoint import models as cm
from tests.checkpoint.test_torch import by_fsdp2, by_hsdp, trained
from tests.support.rig import Pool
from tests.support.worker import RankEnv


class Wrapped(nn.Module):
    """The user's model inside of a library's module, as Lightning has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def write(layout: str, directory: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As the library does: these are the state dicts that it hands to DCP."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    if layout == "torchtitan":
        state: dict[str, Any] = {**get_model_state_dict(model)}
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=flat)
        state |= {
            "train_state": {"step": torch.tensor(3)},
            "lr_scheduler": {"last_epoch": 3},
            "dataloader": {"dp_rank_0": b"x"},
        }
        dcp.save(state, checkpoint_id=f"{directory}/step-10")
    elif layout == "lightning":
        module = Wrapped(model)
        state = {"state_dict": get_model_state_dict(module), "optimizer_0": get_optimizer_state_dict(module, optimizer)}
        dcp.save(state, checkpoint_id=f"{directory}/step-10")
    else:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{directory}/step-10/pytorch_model_fsdp_0")
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{directory}/step-10/optimizer_0")


def save_by_library(env: RankEnv, directory: str, layout: str) -> Any:
    model = by_fsdp2(env, (1, 2))
    optimizer = trained(model, env)
    write(layout, directory, model, optimizer)
    return cm.whole_state(model, optimizer)


def load_by_hsdp(env: RankEnv, path: str) -> Any:
    model = by_hsdp(env, (2, 1), seed=9)
    optimizer = cm.two_groups(model)
    assert checkpoint.load(path, model, optimizer).step is None
    return cm.whole_state(model, optimizer)


@pytest.mark.parametrize("layout", ["torchtitan", "lightning", "accelerate"])
def test_a_checkpoint_in_the_layout_of_another_library_loads(pool2: Pool, tmp_path: Path, layout: str) -> None:
    state = pool2.run(save_by_library, str(tmp_path), layout)[0]
    cm.assert_equal(pool2.run(load_by_hsdp, str(tmp_path / "step-10"))[0], state)


def test_what_is_laid_out_otherwise_is_told_by_prefixes(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = {"ema": {"net": nn.Linear(2, 2).state_dict()}, "live": {"net": model.state_dict()}}
    optimizer = {"opt.a.param_groups.0.lr": 1, "opt.b.param_groups.0.lr": 2}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({**state, **optimizer}, checkpoint_id=tmp_path)
    checkpoint.load(tmp_path, other, prefix="live.net.")
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(CheckpointError, match=r"has 2 optimizers: 'opt.a.', 'opt.b.'; tell which by optimizer_prefix="):
        checkpoint.load(tmp_path, other, torch.optim.SGD(other.parameters()), prefix="live.net.")
    with pytest.raises(CheckpointError, match=r"the model has 'weight', 'bias', which the checkpoint does not have"):
        checkpoint.load(tmp_path, other, prefix="dead.")

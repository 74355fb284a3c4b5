"""What ranks hold under one name, and what only some have: saved as a whole, or refused before anything is written."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hsdp
from hsdp import checkpoint
from hsdp.errors import CheckpointError
from tests.support.rig import Pool, RankEnv


def _experts(env: RankEnv, seed: int) -> nn.Module:
    """A module that each rank shards over itself alone, under the same names."""
    mesh = init_device_mesh(env.device, (1, 2), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(seed)
    return hsdp.fully_shard(nn.Linear(4, 4), mesh=mesh["edp"])


def _names_of_others(env: RankEnv, path: str) -> None:
    other = _experts(env, seed=env.rank)
    with pytest.raises(
        CheckpointError, match=r"ranks \[0\] and \[1\] hold different tensors under one name, 'model\.(weight|bias)'"
    ):
        checkpoint.save(path, other, step=1)
    assert checkpoint.latest(path) is None
    alike = _experts(env, seed=7)  # copies that somebody keeps equal
    optimizer = torch.optim.AdamW(alike.parameters())
    alike(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(path, alike, optimizer, step=2)
    before = alike.weight.to_local().detach().clone()  # type: ignore[operator,union-attr]
    with torch.no_grad():
        alike.weight.zero_()  # type: ignore[operator,union-attr]
    checkpoint.load(path, alike, optimizer)
    assert torch.equal(alike.weight.to_local(), before)  # type: ignore[operator,union-attr]


def _stages(env: RankEnv, path: str) -> None:
    """A pipeline of two stages with an optimizer each."""
    mesh = init_device_mesh(env.device, (2, 1), mesh_dim_names=("pp", "dp"))

    def stage() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Sequential()
        module.add_module(str(env.rank), nn.Linear(4, 4))
        hsdp.fully_shard(module, mesh=mesh["dp"])
        return module, torch.optim.AdamW(module.parameters())

    module, optimizer = stage()
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(
        CheckpointError, match=r"optimizers of ranks 0 and 1 have different parameters \('0.bias', .*process_group="
    ):
        checkpoint.save(path, module, optimizer, step=1)
    checkpoint.save(path, module, step=1)  # names of their own: the whole model can be put together of it
    group = mesh["dp"].get_group()
    checkpoint.save(f"{path}/stage{env.rank}", module, optimizer, step=1, process_group=group)
    again, resumed = stage()
    loaded = checkpoint.resume(f"{path}/stage{env.rank}", again, resumed, process_group=group)
    assert loaded is not None
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())  # type: ignore[operator]
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[one][name].to_local(), resumed.state[other][name].to_local())


class FlatMomentum(torch.optim.Optimizer):
    """Momentum as a plain vector, as optimizers with fused kernels keep it: of this rank's rows, or of its own making."""

    def __init__(self, params: Any, own_rows: bool) -> None:
        super().__init__(params, {"own_rows": own_rows})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            momentum: Tensor = self.state[param].setdefault("momentum", torch.zeros(param.to_local().numel()))
            momentum += param.grad.to_local().flatten() if self.param_groups[0]["own_rows"] else 1.0


def _plain_state(env: RankEnv, path: str) -> None:
    torch.manual_seed(0)
    model = hsdp.fully_shard(nn.Linear(4, 4, bias=False), mesh=env.mesh(2))
    model(torch.eye(4)).square().sum().backward()
    optimizer = FlatMomentum(model.parameters(), own_rows=True)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"'momentum of weight' as a plain tensor, with other values on rank 1"):
        checkpoint.save(path, model, optimizer, step=1)
    equal = FlatMomentum(model.parameters(), own_rows=False)
    equal.step()
    checkpoint.save(path, model, equal, step=1)


def _whole_with_experts(env: RankEnv, path: str, refused: str, place: int, seed: int) -> None:
    """A dense layer of all ranks, and an expert of each rank's own that is called `place`."""
    edp = init_device_mesh(env.device, (1, 2), mesh_dim_names=("edp", "ep"))["edp"]
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    torch.manual_seed(seed)
    model.add_module(str(place), nn.Linear(4, 4, bias=False))
    hsdp.fully_shard(model[1], mesh=edp)
    hsdp.fully_shard(model, mesh=env.mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    whole = {name: param.full_tensor().detach().clone() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    saves = [
        lambda: checkpoint.full_state_dict(model),
        lambda: checkpoint.full_state_dict(model, rank0_only=False),
        lambda: list(checkpoint.iter_full_state_dict(model)),
        lambda: checkpoint.full_optimizer_state_dict(model, optimizer),
        lambda: checkpoint.save_safetensors(path, model),
    ]
    for save in saves:
        with pytest.raises(CheckpointError, match=refused) if refused else nullcontext():
            save()
    with pytest.raises(CheckpointError, match=refused) if "names" in refused else nullcontext():
        checkpoint.load_full_state_dict(model, whole)


def _experts_of_one_name(env: RankEnv, path: str) -> None:
    _whole_with_experts(env, path, r"different tensors under one name \('(momentum_buffer of )?1\.weight'\)", 1, env.rank)


def _experts_of_different_names(env: RankEnv, path: str) -> None:
    refused = r"models of different names \('(momentum_buffer of )?1\.weight', '(momentum_buffer of )?2\.weight' on some"
    _whole_with_experts(env, path, refused, 1 + env.rank, 0)


def _copies(env: RankEnv, path: str) -> None:
    _whole_with_experts(env, path, "", 1, 0)


@pytest.mark.parametrize("case", [_experts_of_one_name, _experts_of_different_names, _copies])
def test_whole_states_are_refused_where_they_would_not_be_whole(pool2: Pool, tmp_path: Path, case: Any) -> None:
    pytest.importorskip("safetensors")
    pool2.run(case, str(tmp_path))


@pytest.mark.parametrize("case", [_names_of_others, _stages, _plain_state], ids=["experts", "pipeline", "flat state"])
def test_what_would_be_lost_is_refused(pool2: Pool, tmp_path: Path, case: Any) -> None:
    pool2.run(case, str(tmp_path))

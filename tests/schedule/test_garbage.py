"""Memory ends with its owner. No call leaves a cycle of references behind that holds tensors: they would be there
until Python looks for garbage, which may be never in a loop that makes few objects. So would those of a deleted model.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import hsdp
from hsdp import checkpoint
from tests.support.deep import seeded
from tests.support.rig import Pool
from tests.support.worker import RankEnv

SHAPES = [(2,), (2, 1)]
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "bf16": lambda: {"mp_policy": hsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": lambda: {"offload_policy": hsdp.CPUOffloadPolicy(pin_memory=False)},
    "stays": lambda: {"reshard_after_forward": False},
    "local": lambda: {"comm_policy": hsdp.CommPolicy(accumulate="local", fusion="direct")},
    "tree": lambda: {"comm_policy": hsdp.CommPolicy(reduction="tree", shared_memory=False)},
}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)  # type: ignore[no-any-return]


def _shard(model: Any, env: RankEnv, shape: tuple[int, ...], options: str) -> Any:
    for block in model.blocks:
        hsdp.fully_shard(block, mesh=env.mesh(shape), **OPTIONS[options]())
    return hsdp.fully_shard(model, mesh=env.mesh(shape), **OPTIONS[options]())


def _backward(model: Any) -> None:
    model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()


def _fails(model: Any) -> None:
    with pytest.raises(Exception, match=r"linear\(\): argument"):
        model("no tensor")
    model.zero_grad()


def _accumulates(model: Any) -> None:
    for last in (False, True):
        with model.accumulate(last=last):
            _backward(model)


def _materialised(env: RankEnv, shape: tuple[int, ...], options: str) -> None:
    with torch.device("meta"):
        model = _Net()
    hsdp.init_sharded(_shard(model, env, shape, options))


def _calls(
    env: RankEnv, shape: tuple[int, ...], options: str, path: Path, model: Any, made: dict[str, Any]
) -> dict[str, Callable[[], object]]:
    """The calls by their names, in this order."""

    def muon() -> Any:
        sharded = [param for param in model.parameters() if param.ndim == 2]
        return hsdp.optim.Muon(sharded, over_replicas=len(shape) > 1)

    def full() -> None:
        whole, states = checkpoint.full_state_dict(model), checkpoint.full_optimizer_state_dict(model, made["adamw"])
        checkpoint.load_full_state_dict(model, whole)
        checkpoint.load_full_optimizer_state_dict(model, made["adamw"], states)

    def opened() -> None:
        with hsdp.full_params(model, writeback="rank0"), torch.no_grad():
            model.norm.weight.mul_(2.0)

    def exported() -> None:
        checkpoint.save_safetensors(path / "export", model)
        checkpoint.load_safetensors(path / "export", model)

    return {
        "shard": lambda: _shard(model, env, shape, options),
        "init": lambda: _materialised(env, shape, options),
        "optimizers": lambda: made.update(
            adamw=torch.optim.AdamW(model.parameters()),
            flat=hsdp.optim.local(torch.optim.AdamW(model.parameters()), flat=True, over_replicas=len(shape) > 1),
            muon=muon(),
        ),
        "train": lambda: _backward(model),
        "clip": lambda: hsdp.clip_grad_norm_(model, 1.0),
        "AdamW": lambda: made["adamw"].step(),
        "flat": lambda: made["flat"].step(),
        "Muon": lambda: made["muon"].step(),
        "again": lambda: _backward(model),
        "accumulate": lambda: _accumulates(model),
        "pending": lambda: model.pending_gradients(),
        "eval": lambda: torch.no_grad()(model)(torch.ones(2, 4, dtype=torch.float64)),
        "fail": lambda: _fails(model),
        "save": lambda: checkpoint.save(path / "saved", model, made["adamw"], step=1).wait(),
        "load": lambda: checkpoint.load(path / "saved", model, made["adamw"]),
        "full": full,
        "each": lambda: list(checkpoint.iter_full_state_dict(model)),
        "export": exported if find_spec("safetensors") else lambda: None,
        "full_params": opened,
        "describe": lambda: hsdp.describe(model),
        "plan": lambda: hsdp.plan(model, tokens_per_rank=8),
        "check": lambda: hsdp.check_replicas(model, made["adamw"]),
        "sync": lambda: hsdp.sync_module_states(model),
        "cast": lambda: model.to(torch.bfloat16),
    }


def check_garbage(env: RankEnv, shape: tuple[int, ...], options: str, path: Path) -> None:
    model: Any = seeded(_Net)
    made: dict[str, Any] = {}
    calls = _calls(env, shape, options, path, model, made)
    for name in calls:
        gc.collect()
        gc.disable()
        try:
            calls[name]()
            gc.set_debug(gc.DEBUG_SAVEALL)  # what would be freed is kept
            gc.collect()
            garbage = [one for one in gc.garbage if isinstance(one, torch.Tensor) and not one.is_meta]
            found = [f"{type(one).__name__} {tuple(one.shape)}" for one in garbage if not isinstance(one, FakeTensor)]
            makers = {one.__qualname__ for one in gc.garbage if callable(one) and hasattr(one, "__qualname__")}
        finally:
            garbage = []
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not found, f"{name}: {found} in cycles of references, beside {sorted(makers)}"
    gc.disable()
    try:
        watched = [(name, weakref.ref(param), weakref.ref(param.to_local())) for name, param in model.named_parameters()]
        del model, made, calls
        alive = [name for name, *refs in watched if any(ref() is not None for ref in refs)]
    finally:
        gc.enable()
    assert not alive, f"still there when their model is not: {alive}"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_cycle_of_references_holds_memory(pool2: Pool, shape: tuple[int, ...], options: str, tmp_path: Path) -> None:
    pool2.run(check_garbage, shape, options, tmp_path)

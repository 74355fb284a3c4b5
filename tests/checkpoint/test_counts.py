"""Other people's optimizers: how they call moments and counts, how they count, and what is for all parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError
from hsdp.optim import local
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import shard
from tests.support.twin import full_params

LOCAL: dict[str, dict[str, bool] | None] = {
    "DTensors": None,
    "local": {},
    "flat": {"flat": True},
    "over replicas": {"over_replicas": True},
}


class Counting(torch.optim.Optimizer):
    """Steps that get smaller, by a count of some shape; the moment is called as optax has it."""

    def __init__(self, params: Any, shape: tuple[int, ...]) -> None:
        super().__init__(params, {"lr": 0.1})
        self._shape = shape

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if not state:
                state.update(count=torch.zeros(self._shape), mu=torch.zeros_like(param))
            state["count"] += 1
            state["mu"].lerp_(param.grad, 0.5)
            param.sub_(state["mu"], alpha=0.1 / state["count"].item())


class Together(torch.optim.Optimizer):
    """Counts once for all parameters, in a number and in a dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] = self.state.get("steps", 0) + 1
        told = self.state["all"]
        told["count"] = told.get("count", 0) + 1
        assert told["count"] == self.state["steps"]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            mean = self.state[param].setdefault("mean", torch.zeros_like(param))
            mean.lerp_(param.grad, 0.5)
            param.sub_(mean, alpha=0.1 / told["count"])


def _layers() -> nn.Sequential:
    """On two ranks each has one row of the last bias: its moment has as many elements as a count."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def _steps(env: RankEnv, sides: list[tuple[Any, Any]], first: int, count: int) -> None:
    for step in range(first, first + count):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + env.rank))
        for model, optimizer in sides:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected, *others = (full_params(model) for model, _ in sides)
    for name, value in expected.items():
        for other in others:
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-13, msg=name)


def _side(env: RankEnv, kind: dict[str, bool] | None, make: Any) -> tuple[Any, Any]:
    model = shard(_layers(), env.mesh((2, 1) if kind and "over_replicas" in kind else (2,)))
    optimizer = make(model.parameters())
    return model, optimizer if kind is None else local(optimizer, elementwise=True, **kind)


def _counts(env: RankEnv, kind: dict[str, bool] | None, shape: tuple[int, ...], path: Path) -> None:
    def make(params: Any) -> Counting:
        return Counting(params, shape)

    sides = [_side(env, one, make) for one in (None, kind)]
    _steps(env, sides, 0, 2)
    for model, _ in sides:
        model[0].requires_grad_(False)  # so that targets are planned anew
    _steps(env, sides, 2, 2)
    model, optimizer = sides[1]
    for entries in optimizer.state.values():
        assert isinstance(entries["mu"], DTensor) and not isinstance(entries["count"], DTensor)
    checkpoint.save(path / "whole", model, optimizer, step=4)
    whole = checkpoint.full_optimizer_state_dict(model, optimizer)
    for by_file in (True, False):
        _, fresh = loaded = _side(env, kind, make)
        loaded[0][0].requires_grad_(False)
        checkpoint.load(path / "whole", loaded[0], fresh if by_file else None)
        if not by_file:
            checkpoint.load_full_optimizer_state_dict(loaded[0], fresh, whole)
        for entries in fresh.state.values():
            assert isinstance(entries["mu"], DTensor) and not isinstance(entries["count"], DTensor)
        _steps(env, [_copy_of(env, sides[0], make), loaded], 4, 2)


def _copy_of(env: RankEnv, side: tuple[Any, Any], make: Any) -> tuple[Any, Any]:
    """Another model and optimizer in the same state, by PyTorch's own functions."""
    model, optimizer = _side(env, None, make)
    model.load_state_dict(side[0].state_dict())
    model[0].requires_grad_(False)
    optimizer.load_state_dict(copy.deepcopy(side[1].state_dict()))
    return model, optimizer


@pytest.mark.parametrize("shape", [(), (1,)], ids=["number", "one element"])
@pytest.mark.parametrize("kind", LOCAL)
def test_counts_stay_counts_and_moments_moments(pool2: Pool, tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    pool2.run(_counts, LOCAL[kind], shape, tmp_path)


def _together(env: RankEnv, kind: dict[str, bool]) -> None:
    sides = [_side(env, one, Together) for one in (None, kind)]
    _steps(env, sides, 0, 2)
    for model, _ in sides:
        model[0].requires_grad_(False)
    _steps(env, sides, 2, 2)
    model, optimizer = sides[1]
    assert optimizer.state["steps"] == optimizer.state["all"]["count"] == 4
    for _, one in sides:
        one.state["steps"], one.state["all"] = 7, {"count": 7}
    _steps(env, sides, 4, 1)
    assert optimizer.state["all"] == {"count": 8}
    fresh = _side(env, kind, Together)
    fresh[0].load_state_dict(model.state_dict())
    fresh[0][0].requires_grad_(False)
    fresh[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _steps(env, [sides[0], fresh], 5, 2)
    with pytest.raises(CheckpointError, match="keeps state under 'steps', 'all', which is no parameter"):
        checkpoint.full_optimizer_state_dict(*fresh)


@pytest.mark.parametrize("kind", [kind for kind, settings in LOCAL.items() if settings is not None])
def test_state_for_all_parameters_is_kept_and_shown(pool2: Pool, kind: str) -> None:
    pool2.run(_together, LOCAL[kind])


def _rows_alone_are_refused(env: RankEnv, path: Path, entry: str) -> None:
    """Something for each row that a rank has: of the last weight that is one element, but no count."""
    model = shard(_layers(), env.mesh((2,)))
    optimizer = torch.optim.Optimizer(model.parameters(), {"lr": 0.1})
    for param in model.parameters():
        optimizer.state[param][entry] = torch.zeros(param.to_local().shape[0])  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=rf"'{entry}' of the optimizer's state of '0.bias' is a plain tensor"):
        checkpoint.save(path, model, optimizer, step=1)


@pytest.mark.parametrize("entry", ["seen", "step"])
def test_state_of_each_row_is_not_taken_for_a_count(pool2: Pool, tmp_path: Path, entry: str) -> None:
    pool2.run(_rows_alone_are_refused, tmp_path, entry)


def _rows_come_back(env: RankEnv, path: Path) -> None:
    """Something for each row, of a matrix with one row too."""
    model = shard(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)), env.mesh((2,)))
    optimizer, fresh = (torch.optim.Optimizer(model.parameters(), {"lr": 0.1}) for _ in range(2))
    for param in (model[0].weight, model[1].weight):  # type: ignore[index]
        optimizer.state[param]["seen"] = param.detach().norm(dim=1)
    checkpoint.load(checkpoint.save(path, model, optimizer, step=1).path, model, fresh)
    for param, entries in fresh.state.items():
        assert torch.equal(entries["seen"].full_tensor(), param.detach().norm(dim=1).full_tensor())


def test_state_of_each_row_comes_back_for_one_row_too(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(_rows_come_back, tmp_path)

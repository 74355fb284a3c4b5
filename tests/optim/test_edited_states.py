"""Users reset momenta and counts of steps, entry by entry, and optimizers replace entries: nobody's change is lost."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hsdp
from hsdp.errors import StateError
from hsdp.optim import local
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import shard
from tests.support.twin import full_params

Edit = Callable[[Any, Any], Any]

KINDS: dict[str, dict[str, bool]] = {"": {}, "flat": {"flat": True}, "over replicas": {"over_replicas": True}}

EDITS: dict[str, Edit] = {
    "an empty dict": lambda state, p: state.__setitem__(p, {}),
    "cleared": lambda state, p: state[p].clear(),
    "a copy": lambda state, p: state.__setitem__(p, {name: value.clone() for name, value in state[p].items()}),
    "zeros": lambda state, p: state[p].__setitem__("exp_avg", torch.zeros_like(p)),
    "halved": lambda state, p: state[p].update({n: 0.5 * v for n, v in state[p].items() if n != "step"}),
    "another count": lambda state, p: state[p].__setitem__("step", torch.tensor(7.0)),
    "one count more": lambda state, p: state[p].__setitem__("step", state[p]["step"] + 1),
}


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).double()


def _models(env: RankEnv, make: Callable[[Any], Any], **kind: bool) -> tuple[Any, Any, list[Any]]:
    models = [shard(copy.deepcopy(_layers()), env.mesh((2, 1))) for _ in range(2)]
    ours, stock = (make(model.parameters()) for model in models)
    return models[0], models[1], [local(ours, elementwise=True, **kind), stock]


def _steps(env: RankEnv, models: tuple[Any, Any], optimizers: list[Any], count: int = 2) -> None:
    for step in range(count):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + env.rank))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    mine = full_params(models[0])
    for name, value in full_params(models[1]).items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-13, msg=name)


def _is_edited(env: RankEnv, kind: dict[str, bool]) -> None:
    for name, edit in EDITS.items():
        for everywhere in (True, False):
            ours, stock, optimizers = _models(env, lambda params: torch.optim.AdamW(params, lr=0.01), **kind)
            _steps(env, (ours, stock), optimizers)
            for model, optimizer in zip((ours, stock), optimizers, strict=True):
                for param in list(model.parameters())[: None if everywhere else 1]:
                    edit(optimizer.state, param)
            try:
                _steps(env, (ours, stock), optimizers)
            except AssertionError as error:
                raise AssertionError(f"{name}, {everywhere}: {error}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_entries_that_users_assign_are_stepped_with(pool2: Pool, kind: str) -> None:
    pool2.run(_is_edited, KINDS[kind])


def _is_kept(env: RankEnv, kind: dict[str, bool]) -> None:
    ours, stock, optimizers = _models(env, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), **kind)
    kept = [[optimizer.state[p] for p in m.parameters()] for m, optimizer in zip((ours, stock), optimizers, strict=True)]
    _steps(env, (ours, stock), optimizers)
    for entries in (entries for some in kept for entries in some):
        del entries["momentum_buffer"]
    _steps(env, (ours, stock), optimizers)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dict_of_a_parameter_stays_the_same(pool2: Pool, kind: str) -> None:
    pool2.run(_is_kept, KINDS[kind])


class _Own(torch.optim.Optimizer):
    """An optimizer as many write it, parameter by parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            self.step_one(param, self.state[param])

    def step_one(self, param: Any, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Averaging(_Own):
    """It counts in a plain number, replaces its tensors, and starts averaging late."""

    def step_one(self, param: Any, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        state["mean"] = 0.9 * state["mean"] + 0.1 * param.grad if "mean" in state else param.grad.clone()
        if state["step"] == 3:
            state["average"] = param.detach().clone()
        param.sub_(0.1 * state["mean"])


def _is_shown(env: RankEnv, kind: dict[str, bool]) -> None:
    ours, stock, optimizers = _models(env, Averaging, **kind)
    for count in (1, 1, 2):
        _steps(env, (ours, stock), optimizers, count)
        shown, expected = (optimizer.state_dict()["state"] for optimizer in optimizers)
        for number, entries in expected.items():
            assert shown[number].keys() == entries.keys()
            for name, value in entries.items():
                mine = shown[number][name]
                assert isinstance(mine, DTensor) == isinstance(value, DTensor)
                both = [one.full_tensor() if isinstance(one, DTensor) else one for one in (mine, value)]
                torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-13, msg=name)
                assert not isinstance(value, Tensor) or isinstance(mine, DTensor)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_that_a_step_replaces_are_shown(pool2: Pool, kind: str) -> None:
    pool2.run(_is_shown, KINDS[kind])


class Remembering(_Own):
    """It keeps its last gradients in a list, and of each the scale in a dict beside a number and a queue of weights."""

    def step_one(self, param: Any, state: dict[str, Any]) -> None:
        last = state.setdefault("last", [])
        last.append(param.grad.clone())
        del last[:-2]
        beside = state.setdefault("beside", {"weights": deque(maxlen=2), "factors": [1.0, torch.tensor(1.0)]})
        beside["weights"].append(param.clone())
        beside["factors"][1].mul_(0.9)
        param.sub_(sum(last) + 0.1 * beside["weights"][0], alpha=0.1 * float(beside["factors"][1]))


def _remembers(env: RankEnv, kind: dict[str, bool]) -> None:
    ours, stock, optimizers = _models(env, Remembering, **kind)
    _steps(env, (ours, stock), optimizers, 3)
    for model, optimizer in zip((ours, stock), optimizers, strict=True):
        state = optimizer.state[model[0].weight]
        state["last"][0] = torch.zeros_like(state["last"][0])
        optimizer.state[model[2].bias]["last"].pop()
    _steps(env, (ours, stock), optimizers)
    for model in (ours, stock):
        model[2].weight.requires_grad_(False)
    _steps(env, (ours, stock), optimizers)
    for model, optimizer in zip((ours, stock), optimizers, strict=True):
        model[2].weight.requires_grad_(True)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _steps(env, (ours, stock), optimizers)
    shown, expected = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for number, entries in expected.items():
        mine, beside, theirs = shown[number], shown[number]["beside"], entries["beside"]
        assert (type(mine["last"]), type(beside["weights"])) == (list, deque) and beside["factors"] == theirs["factors"]
        for one, other in zip([*mine["last"], *beside["weights"]], [*entries["last"], *theirs["weights"]], strict=True):
            assert isinstance(one, DTensor)
            torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_lists_of_a_state_is_stepped_with_and_shown(pool2: Pool, kind: str) -> None:
    pool2.run(_remembers, KINDS[kind])


def _whole_states(env: RankEnv, kind: str, nested: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    options = {"flat": {"flat": True}, "over replicas": {"over_replicas": True}}.get(kind, {})
    alone = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    alone.step()
    held = alone.state_dict()
    if nested:
        for entries in held["state"].values():
            entries["exp_avg"] = [entries["exp_avg"]]
    hsdp.fully_shard(model, mesh=env.mesh((2, 1) if options.get("over_replicas") else (2,)))
    optimizer = local(torch.optim.AdamW(model.parameters(), lr=0.1), **options)
    optimizer.load_state_dict(held)
    before = full_params(model)
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(StateError, match=r"entry 'exp_avg' of the state of parameter '0\.weight' .*load it with"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in full_params(model).items())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["", "flat", "over replicas"])
def test_states_of_an_unsharded_model_are_refused_by_name(pool2: Pool, kind: str, nested: bool) -> None:
    """Muon refuses them, too; torch's kernels tell of sizes that do not fit."""
    pool2.run(_whole_states, kind, nested)

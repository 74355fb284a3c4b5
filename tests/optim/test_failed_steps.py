"""A step that raises half-way: the next one has whole states, and weights from before it are told from those behind it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hsdp import check_replicas
from hsdp.errors import StaleParametersError
from hsdp.optim import Muon, local
from tests.support.models import language
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, shard

CASE = language("failed", vocab=19, dim=12, heads=2, hidden=20, layers=2, rows=2, length=6)  # odd sizes: padding
WRAPS: dict[str, dict[str, bool]] = {
    "local": {},
    "flat": {"flat": True},
    "over replicas": {"over_replicas": True},
    "flat over replicas": {"flat": True, "over_replicas": True},
}


class _Memory:
    """`torch.zeros_like`, with memory for so many of the states that an optimizer begins."""

    def __init__(self, calls: int) -> None:
        self.left = calls
        self.zeros_like = torch.zeros_like

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.left -= "memory_format" in kwargs
        if self.left < 0:
            raise MemoryError
        return self.zeros_like(*args, **kwargs)


def _step_without_memory(optimizer: torch.optim.Optimizer, calls: int) -> None:
    with mock.patch.object(torch, "zeros_like", _Memory(calls)), pytest.raises(MemoryError):
        optimizer.step()


def _made(env: RankEnv, wrap: str) -> tuple[nn.Module, Any]:
    """A model with gradients and its AdamW"""
    model = shard(CASE.model(), env.mesh((2, 1)))
    params = list(model.parameters())
    groups = [{"params": params[:4]}, {"params": params[4:], "amsgrad": True}]
    optimizer = local(torch.optim.AdamW(groups, lr=0.01), **WRAPS[wrap])
    CASE.loss(model, CASE.batch(0, env.rank)).backward()
    return model, optimizer


def _same(one: Any, other: Any) -> None:
    """The same states, and the same weights."""
    for mine, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
        states = [made[1].state.get(param, {}) for made, param in ((one, mine), (other, theirs))]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            parts = [getattr(held, "_local_tensor", held) for held in (value, states[1][name])]
            assert torch.equal(*parts), name


def check_half_a_step(env: RankEnv, shape: tuple[int, ...], closure: bool) -> None:
    """To the foreach operations of DTensors that step the first group, autograd's counters are blind."""
    models: list[Any] = [shard(CASE.model(), env.mesh(shape)) for _ in range(2)]
    for model in models:
        params = list(model.parameters())
        CASE.loss(model, CASE.batch(0, env.rank)).backward()
        waits = CASE.loss(model, CASE.batch(1, env.rank))
        optimizer = torch.optim.SGD([{"params": params[:3]}, {"params": params[3:]}], lr=0.1, foreach=True)
        if model is models[0]:
            optimizer.param_groups[1]["lr"] = "fast"
            with pytest.raises(TypeError):
                optimizer.step((lambda: 0.0) if closure else None)
            with pytest.raises(StaleParametersError, match="were changed"):
                waits.backward()
        else:
            optimizer.param_groups.pop()
            optimizer.step()
    ours, twins = (CASE.loss(model, CASE.batch(1, env.rank)) for model in models)
    assert torch.equal(ours, twins), "a forward has not seen the first group's step"


@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_weights_have_a_new_version_behind_half_a_step(pool2: Pool, shape: tuple[int, ...], closure: bool) -> None:
    pool2.run(check_half_a_step, shape, closure)


class _Twice(torch.optim.SGD):
    """Computes the loss again behind a step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


def check_warned(env: RankEnv, shape: tuple[int, ...]) -> None:
    """The forward behind a step that raised warns, once; none behind steps that end, however often they call a closure."""
    model: Any = shard(CASE.model(), env.mesh(shape))
    params = list(model.parameters())
    batch = CASE.batch(0, env.rank)
    CASE.loss(model, batch).backward()
    optimizer = torch.optim.SGD([{"params": params[:3]}, {"params": params[3:]}], lr=0.1)
    closing = _Twice(params, lr=0.01)

    def closure() -> Tensor:
        model.zero_grad()
        loss = CASE.loss(model, batch)
        loss.backward()
        return loss

    rates: tuple[Any, ...] = 0.1, "fast"
    for step, rate in enumerate([*rates, *rates]):
        optimizer.param_groups[1]["lr"] = rate
        with pytest.raises(TypeError) if rate == "fast" else nullcontext():
            optimizer.step()
        if step == 3:  # the step is repeated
            optimizer.param_groups[1]["lr"] = 0.1
            optimizer.step()
        raised = rate == "fast" and step != 3
        with pytest.warns(UserWarning, match="a step of SGD .* raised") if raised else warnings.catch_warnings():
            if not raised:
                warnings.simplefilter("error")
            CASE.loss(model, batch).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            closing.step(closure)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_a_forward_behind_half_a_step_warns_of_it(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(check_warned, shape)


def check_begun_anew(env: RankEnv, wrap: str) -> None:
    """Memory ends at the second moments of the first parameter: the weights are as they were, and so is the next step."""
    failed, twin = _made(env, wrap), _made(env, wrap)
    _step_without_memory(failed[1], 1)
    assert not any(failed[1].state.values()), "half a state is left"
    for _ in range(2):
        failed[1].step()
        twin[1].step()
    _same(failed, twin)


@pytest.mark.parametrize("wrap", WRAPS)
def test_states_that_a_failed_first_step_has_begun_are_begun_anew(pool2: Pool, wrap: str) -> None:
    pool2.run(check_begun_anew, wrap)


def check_others_stay(env: RankEnv, wrap: str) -> None:
    """Memory ends at the first step of a parameter that gets its first gradient late."""
    _, failed = _made(env, wrap)
    late = [param for group in failed.param_groups for param in group["params"][-1:]]
    grads = [param.grad for param in late]
    for param in late:
        param.grad = None
    failed.step()
    for param, grad in zip(late, grads, strict=True):
        param.grad = grad
    held = {id(param) for param, state in failed.state.items() if state}
    _step_without_memory(failed, 1)
    assert {id(param) for param, state in failed.state.items() if state} == held
    failed.step()
    assert all((int(failed.state[param]["step"]) > 1) is (id(param) in held) for param in failed.state), "other counts"
    names = {"step", "exp_avg", "exp_avg_sq"}
    for group in failed.param_groups:
        for param in group["params"]:
            assert failed.state[param].keys() == names | ({"max_exp_avg_sq"} if group["amsgrad"] else set())
            assert param.to_local().isfinite().all()


@pytest.mark.parametrize("wrap", WRAPS)
def test_states_that_were_there_outlive_a_failed_step(pool2: Pool, wrap: str) -> None:
    pool2.run(check_others_stay, wrap)


def check_beside_matrices(env: RankEnv) -> None:
    model = shard(CASE.model(), env.mesh((2, 1)))
    params = list(model.parameters())
    matrices = [param for param in params if param.ndim == 2]
    others = [param for param in params if param.ndim != 2]
    optimizer = Muon([{"params": matrices}, {"params": others, "algorithm": "adamw"}])
    CASE.loss(model, CASE.batch(0, env.rank)).backward()
    optimizer.step()
    for param in others:
        optimizer.state.pop(param)
    _step_without_memory(optimizer, 1)
    assert not any(optimizer.state.get(param) for param in others)
    optimizer.step()
    assert all(int(optimizer.state[param]["step"]) == 1 for param in others)


def test_groups_of_adamw_beside_matrices_begin_anew_too(pool2: Pool) -> None:
    pool2.run(check_beside_matrices)


def check_muon_goes_on(env: RankEnv, shape: tuple[int, ...], operators: tuple[str, str]) -> None:
    """A step fails at the rank's operator of the two, and others come behind it."""
    model: Any = shard(CASE.model(), env.mesh(shape))
    optimizer = Muon([param for param in model.parameters() if param.ndim == 2], lr=0.01)
    for step in range(4):
        CASE.loss(model, CASE.batch(step, env.rank)).backward()
        if step == 1:
            failing = mock.patch.object(torch, operators[env.rank], side_effect=MemoryError)
            with failing, pytest.raises(MemoryError):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert operators[0] == operators[1], "no rank was told"
    check_replicas(model, optimizer)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_ranks_that_failed_at_one_operator_go_on(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(check_muon_goes_on, shape, ("_foreach_lerp", "_foreach_lerp"))


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_ranks_that_failed_at_different_operators_are_told(pool2: Pool, shape: tuple[int, ...]) -> None:
    """One has moved its momenta, the other one has not."""
    outcomes = pool2.run_raw(check_muon_goes_on, shape, ("_foreach_lerp", "_foreach_lerp_"))
    for one in outcomes:
        assert one.error == "DivergenceError" and "behind a step that failed after" in one.message, one

"""`hsdp.optim.local`: equal to stock optimizers, seen as one by everybody else, refused where shards would be wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import hsdp
from hsdp.optim import ELEMENTWISE, elementwise, local
from hsdp.optim.targets import Target
from tests.support.models import language
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_sharded, pool_for, shard
from tests.support.twin import adamw, assert_close_to_twin, full_params, train, twin_of

CASE = language("optim", vocab=19, dim=12, heads=2, hidden=20, layers=2, rows=2, length=6)  # odd sizes: padding
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

KINDS: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam foreach": partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),  # has state before its first step
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """As everybody does: no decay for vectors."""
    named = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in named if param.ndim > 1]},
        {"params": [param for param in named if param.ndim < 2], "weight_decay": 0.0, "lr": 0.003},
    ]


def _same(actual: Any, expected: Any) -> None:
    mine = full_params(actual)
    for name, value in full_params(expected).items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-14, msg=name)


def _same_state(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    a, b = actual.state_dict(), expected.state_dict()
    assert [{k: v for k, v in g.items() if k != "params"} for g in a["param_groups"]] == [
        {k: v for k, v in g.items() if k != "params"} for g in b["param_groups"]
    ]
    assert a["state"].keys() == b["state"].keys()
    for number, entries in b["state"].items():
        assert a["state"][number].keys() == entries.keys()
        for name, value in entries.items():
            mine = a["state"][number][name]
            assert type(mine) is type(value), f"{name}: {type(mine)}"
            if isinstance(value, DTensor):
                assert (mine.placements, mine.shape, mine.dtype) == (value.placements, value.shape, value.dtype)
                torch.testing.assert_close(mine.full_tensor(), value.full_tensor(), rtol=0, atol=1e-14, msg=name)
            else:
                torch.testing.assert_close(mine, value, rtol=0, atol=0, msg=name)


def _equals_stock(env: RankEnv, shape: tuple[int, ...], flat: bool, name: str) -> None:
    models = [shard(CASE.model(), env.mesh(shape)) for _ in range(2)]
    stock = KINDS[name](_groups(models[0]))  # for-loop, foreach or fused on DTensors
    ours = local(KINDS[name](_groups(models[1])), flat=flat)
    assert isinstance(ours, type(stock)) and type(ours).__name__ == f"Local{type(stock).__name__}"
    for model, optimizer in zip(models, (stock, ours), strict=True):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(3):
            CASE.loss(model, CASE.batch(step, env.rank)).backward()
            if step == 1:  # parameters without a gradient are not stepped, and count their own steps
                for param in list(model.parameters())[::3]:
                    param.grad = None
            hsdp.clip_grad_norm_(model, 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    _same(models[1], models[0])
    _same_state(ours, stock)
    check_sharded(models[1])
    _same_units_whole_buffers_stay_clean(models[1])


def _same_units_whole_buffers_stay_clean(model: Any) -> None:
    """Padding in the shard buffers is still zero."""
    for unit in model._units():
        for dtype_group in unit.dtype_groups:
            rest = dtype_group.shard.clone()
            for param, piece in zip(dtype_group.params, dtype_group.layout.pieces, strict=True):
                rest[piece.offset : piece.offset + param.local.numel()] = 0
            assert not rest.any(), f"{unit.name}: padding was stepped"


@pytest.mark.parametrize("flat", [False, True], ids=["views", "flat"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.parametrize("name", KINDS)
def test_local_steps_equal_those_of_the_stock_optimizer(
    request: pytest.FixtureRequest, shape: tuple[int, ...], flat: bool, name: str
) -> None:
    pool_for(request, shape).run(_equals_stock, shape, flat, name)


def equals_stock(env: RankEnv, shape: tuple[int, ...], flat: bool) -> None:
    """Every kind."""
    for name in KINDS:
        _equals_stock(env, shape, flat, name)


def _equals_twin(env: RankEnv, twin: Any, flat: bool) -> None:
    model = shard(CASE.model(), env.mesh((2, 2)))
    train(model, CASE, env.rank, 3, local(adamw(model.parameters()), flat=flat), accumulate=2)
    assert_close_to_twin(model, twin)


@pytest.mark.parametrize("flat", [False, True], ids=["views", "flat"])
def test_equals_the_twin(pool4: Pool, flat: bool) -> None:
    pool4.run(_equals_twin, twin_of(CASE, 4, 3, adamw, 2), flat)


def _round_trips(env: RankEnv, folder: str, flat: bool) -> None:
    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        model = shard(CASE.model(), env.mesh((2,)))
        return model, local(torch.optim.AdamW(_groups(model), lr=0.01), flat=flat)

    def step(model: Any, optimizer: torch.optim.Optimizer, at: int) -> None:
        CASE.loss(model, CASE.batch(at, env.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = fresh()
    step(model, optimizer, 0)
    own = copy.deepcopy(optimizer.state_dict())
    theirs = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    hsdp.checkpoint.save(folder, model, optimizer, step=1)
    shards = {name: param.detach().clone() for name, param in model.named_parameters()}
    step(model, optimizer, 1)
    for how in ("own", "torch", "hsdp", "own, into one that runs"):
        other, loaded = (model, optimizer) if "runs" in how else fresh()
        if how == "torch":
            set_optimizer_state_dict(other, loaded, copy.deepcopy(theirs))
        elif how == "hsdp":
            hsdp.checkpoint.load(Path(folder, "step-000001"), other, loaded)
        else:
            loaded.load_state_dict(copy.deepcopy(own))
        expected = full_params(model)
        with torch.no_grad():
            for name, param in other.named_parameters():
                param.copy_(shards[name])
        step(other, loaded, 1)
        for name, value in full_params(other).items():
            assert torch.equal(value, expected[name]), f"{how}: {name}"


@pytest.mark.parametrize("flat", [False, True], ids=["views", "flat"])
def test_checkpoints_round_trip(pool2: Pool, tmp_path: Path, flat: bool) -> None:
    pool2.run(_round_trips, str(tmp_path), flat)


class Lamb(torch.optim.AdamW):
    """Stands for optimizers that somebody wrote: not known to be elementwise, though made from one that is."""


def test_optimizers_that_local_cannot_step_are_refused() -> None:
    with fake_world(2) as env:
        model = shard(CASE.model(), env.mesh((2,)))
        matrices = [param for param in model.parameters() if param.ndim == 2]
        whole = [torch.optim.Adafactor(matrices), Lamb(matrices)]
        if hasattr(torch.optim, "Muon"):
            whole.append(torch.optim.Muon(matrices))
        for optimizer in whole:
            for flat in (False, True):
                with pytest.raises(TypeError, match=f"{type(optimizer).__name__}.*unsharded parameters"):
                    local(optimizer, flat=flat)
        assert isinstance(local(Lamb(matrices), elementwise=True), Lamb)
        with pytest.raises(TypeError, match="not Linear"):
            local(nn.Linear(2, 2))  # type: ignore[type-var]
        optimizer = local(torch.optim.SGD(matrices, lr=0.1))
        with pytest.raises(ValueError, match="already"):
            local(optimizer)
        with pytest.raises(TypeError, match="load this one's state_dict"):
            copy.deepcopy(optimizer)
        late = torch.optim.SGD(matrices, lr=0.1)
        torch.optim.lr_scheduler.StepLR(late, 1)
        with pytest.raises(ValueError, match="make the scheduler afterwards"):
            local(late)
        with pytest.raises(ValueError, match="differentiable=True"):
            local(torch.optim.SGD(matrices, lr=0.1, differentiable=True))
        matrices[0].grad = torch.zeros(matrices[0].shape, dtype=matrices[0].dtype)
        with pytest.raises(hsdp.StateError, match="not sharded as the parameter"):
            optimizer.step()
        assert all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"])
        assert not {torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam} & set(ELEMENTWISE)


def test_closures_hooks_and_gradients_that_are_let_go() -> None:
    with fake_world(2) as env:
        model = shard(CASE.model(), env.mesh((2,)))
        optimizer = local(torch.optim.SGD(model.parameters(), lr=0.1))
        seen: list[Any] = []
        optimizer.register_step_pre_hook(lambda one, args, kwargs: seen.append(one.param_groups[0]["params"][0]))
        weights_versions = [unit.weights_version for unit in model._units()]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = CASE.loss(model, CASE.batch(0, 0))
            loss.backward()
            return loss

        assert torch.is_tensor(optimizer.step(closure))
        assert seen == [next(iter(model.parameters()))] and isinstance(seen[0], DTensor)
        for unit, version in zip(model._units(), weights_versions, strict=True):
            assert unit.weights_version > version
        stepper: Any = optimizer._hsdp_stepper
        assert all(target.tensor.grad is None for targets in stepper._groups for target in targets)


def test_an_interrupt_behind_a_step_leaves_every_group_its_parameters() -> None:
    """Else a group would keep what was stepped in their place, which gets no gradient: nobody would train it any more."""
    with fake_world(2) as env:
        model = shard(CASE.model(), env.mesh((2,)))
        params = list(model.parameters())
        optimizer = local(torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1))
        CASE.loss(model, CASE.batch(0, 0)).backward()
        with mock.patch.object(Target, "free", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            optimizer.step()
        held = [param for group in optimizer.param_groups for param in group["params"]]
        assert all(one is other for one, other in zip(held, params, strict=True))


class Asks(torch.optim.SGD):
    """Steps what is trained, and asks the parameters which are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in [param for param in group["params"] if param.requires_grad and param.grad is not None]:
                param.add_(param.grad, alpha=-group["lr"])


@pytest.mark.parametrize("flat", [False, True])
def test_an_optimizer_may_ask_which_parameters_are_trained(flat: bool) -> None:
    with fake_world(2) as env:
        model = hsdp.fully_shard(nn.Linear(4, 4), mesh=env.mesh(2))
        optimizer = hsdp.optim.local(Asks(model.parameters(), lr=0.5), flat=flat, elementwise=True)
        before = [param.to_local().clone() for param in model.parameters()]
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        for param, was in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(param.to_local(), was - 0.5)


class Replaces(torch.optim.Optimizer):
    """Puts new tensors into its states, and raises behind them if it is told to."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = self.state[param].get("sum", 0) + param.grad
            if group["fails"]:
                raise MemoryError


def test_a_step_that_raises_shows_what_it_put_into_states() -> None:
    with fake_world(2) as env:
        model = shard(CASE.model(), env.mesh((2,)))
        optimizer = local(Replaces(model.parameters(), {"fails": False}), elementwise=True)
        CASE.loss(model, CASE.batch(0, 0)).backward()
        optimizer.step()
        optimizer.param_groups[0]["fails"] = True
        with pytest.raises(MemoryError):
            optimizer.step()
        for param in model.parameters():
            torch.testing.assert_close(optimizer.state[param]["sum"], 2 * param.grad)  # type: ignore[operator]


def test_half_a_plan_is_not_stepped_with() -> None:
    """Where memory ends while states are laid out anew, parameters would begin with states of zeros in the next step."""
    with fake_world(2) as env:
        model = shard(CASE.model(), env.mesh((2,)))
        optimizer = local(torch.optim.AdamW(model.parameters()), flat=True)
        first, *others = model.parameters()
        for used in (True, False):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            if used:
                optimizer.step()
        first.grad = None  # it is stepped by itself from now on, and others lie otherwise
        with mock.patch.object(elementwise, "gathered_state", side_effect=MemoryError), pytest.raises(MemoryError):
            optimizer.step()
        optimizer.step()
        assert [int(optimizer.state[param]["step"]) for param in (first, *others)] == [1, *(2 for _ in others)]


def test_flat_buffers_are_few() -> None:
    with fake_world(2) as env:
        model = shard(CASE.model(), env.mesh((2,)))
        optimizer = local(torch.optim.AdamW(model.parameters()), flat=True)
        CASE.loss(model, CASE.batch(0, 0)).backward()
        for param in model.parameters():
            param.grad._local_tensor.fill_(1.0)  # type: ignore[union-attr]
        bases = {id(param.grad._local_tensor._base) for param in model.parameters()}  # type: ignore[union-attr]
        optimizer.step()
        stepper: Any = optimizer._hsdp_stepper
        targets = [target for group in stepper._groups for target in group if target.tensor.numel()]
        assert len(targets) == len(bases) == len(model._units())

"""`step(closure)`: the gradients that a closure makes are joined, refused and gathered as others are before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.support.deep import Deep, floats, mean_into, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, shard
from tests.support.twin import assert_same, full_params

LOCAL: dict[str, dict[str, bool] | None] = {
    "stock": None,
    "local": {},
    "flat": {"flat": True},
    "over replicas": {"over_replicas": True},
}


def _loss(model: nn.Module, rank: int, seed: int) -> Tensor:
    return model(floats(rank, seed)).square().mean()  # type: ignore[no-any-return]


def _optimizer(model: nn.Module, how: str) -> torch.optim.Optimizer:
    made, options = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), LOCAL[how]
    return made if options is None else hsdp.optim.local(made, **options)


def _closure(model: nn.Module, rank: int, seed: int) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        model.zero_grad()
        loss = _loss(model, rank, seed)
        loss.backward()
        return loss

    return closure


def check_late_landings(env: RankEnv, shape: tuple[int, ...], how: str, by_name: bool) -> None:
    """Reductions that run past the end of the closure's backward."""
    model: Any = shard(seeded(Deep), env.mesh(shape))
    plain = seeded(Deep)
    model.set_is_last_backward(False)
    ours, theirs = _optimizer(model, how), _optimizer(plain, "stock")
    for seed in range(3):
        closure: Any = _closure(model, env.rank, seed)
        told = ours.step(closure=closure) if by_name else ours.step(closure)  # type: ignore[call-overload]
        plain.zero_grad()
        mean_into(plain, lambda one, rank, seed=seed: _loss(one, rank, seed).backward(), env.world_size)
        theirs.step()
        assert isinstance(told, Tensor)
    assert_same(full_params(model), full_params(plain))


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
@pytest.mark.parametrize(("how", "by_name"), [*((how, False) for how in LOCAL), ("stock", True), ("flat", True)])
def test_a_closures_reductions_land_before_the_step(pool2: Pool, shape: tuple[int, ...], how: str, by_name: bool) -> None:
    pool2.run(check_late_landings, shape, how, by_name)


def check_pending(env: RankEnv, how: str) -> None:
    """A closure that leaves sums pending is refused, and nothing has been stepped."""
    model: Any = shard(seeded(Deep), env.mesh((2,)))
    optimizer, before = _optimizer(model, how), full_params(seeded(Deep))
    with model.no_sync(), pytest.raises(hsdp.StateError, match="that were not summed over all ranks"):
        optimizer.step(_closure(model, env.rank, 0))
    assert_same(full_params(model), before)
    model.zero_grad()
    optimizer.step(_closure(model, env.rank, 0))
    assert not torch.equal(full_params(model)["last.weight"], before["last.weight"])


@pytest.mark.parametrize("how", LOCAL)
def test_a_closure_that_leaves_sums_pending_is_refused(pool2: Pool, how: str) -> None:
    pool2.run(check_pending, how)


def check_shares(env: RankEnv, how: str) -> None:
    """Another optimizer than the one that shares its step out among replicas gets whole gradients of its closure."""
    model: Any = shard(seeded(Deep), env.mesh((2, 1)))
    plain = seeded(Deep)
    _optimizer(model, "over replicas")
    ours, theirs = _optimizer(model, how), _optimizer(plain, "stock")
    ours.step(_closure(model, env.rank, 0))
    mean_into(plain, lambda one, rank: _loss(one, rank, 0).backward(), env.world_size)
    theirs.step()
    assert_same(full_params(model), full_params(plain))


@pytest.mark.parametrize("how", ["stock", "local", "flat"])
def test_another_optimizer_gets_whole_gradients_of_its_closure(pool2: Pool, how: str) -> None:
    pool2.run(check_shares, how)


class Twice(torch.optim.Optimizer):
    """Steps the gradients that are there, then those of the closure, as SAM's optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._move(0.3)
        with torch.enable_grad():
            closure(backward=True)
        self._move(0.1)

    @torch.no_grad()
    def _move(self, rate: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=rate)


def check_twice(env: RankEnv) -> None:
    """Gradients from before the closure are ready, too; and what is called gets the arguments that it is called with."""
    model: Any = shard(seeded(Deep), env.mesh((2,)))
    plain = seeded(Deep)
    model.set_is_last_backward(False)
    ours, theirs = Twice(model.parameters()), Twice(plain.parameters())

    def gradients(one: nn.Module, seed: int) -> None:
        one.zero_grad()
        if one is model:
            _loss(one, env.rank, seed).backward()
        else:
            mean_into(plain, lambda twin, rank: _loss(twin, rank, seed).backward(), env.world_size)

    for one, optimizer in ((model, ours), (plain, theirs)):
        gradients(one, 0)
        optimizer.step(lambda backward, one=one: gradients(one, 1))
    assert_same(full_params(model), full_params(plain))
    model.zero_grad()
    with model.no_sync():
        _loss(model, env.rank, 2).backward()
    with pytest.raises(hsdp.StateError, match="that were not summed over all ranks"):
        ours.step(lambda backward: gradients(model, 3))


def test_gradients_from_before_a_closure_are_ready_too(pool2: Pool) -> None:
    pool2.run(check_twice)


class Ruled(torch.optim.Optimizer):
    """Its step takes a model, a function that is no closure, and perhaps a closure behind them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, model: nn.Module, rate: Any, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for name, param in model.named_parameters():
            param.sub_(param.grad, alpha=rate(name))


class Wrapped(torch.optim.SGD):
    """Its step hides which parameters it has."""

    def step(self, *args: Any, **named: Any) -> Any:
        if args and isinstance(args[0], nn.Module):
            assert dict(args[0].named_parameters()), "the model itself, not a function around it"
            args = args[1:]
        return super().step(*args, **named)


def _rate(name: str) -> float:
    return 0.1 if name.endswith("weight") else 0.3


def check_other_callables(env: RankEnv, kind: str, closes: bool) -> None:
    model: Any = shard(seeded(Deep), env.mesh((2,)))
    plain = seeded(Deep)
    model.set_is_last_backward(False)
    ours, theirs = (
        Ruled(one.parameters()) if kind == "ruled" else Wrapped(one.parameters(), lr=0.1) for one in (model, plain)
    )
    for seed in range(2):
        closure: Any = _closure(model, env.rank, seed)
        plain.zero_grad()
        mean_into(plain, lambda one, rank, seed=seed: _loss(one, rank, seed).backward(), env.world_size)
        if not closes:
            closure()
        behind = (closure,) if closes else ()
        if kind == "ruled":
            ours.step(model, _rate, *behind)
            theirs.step(plain, _rate)
        elif closes:
            ours.step(closure)
            theirs.step()
        else:
            ours.step(model)
            theirs.step(plain)
    assert_same(full_params(model), full_params(plain))


@pytest.mark.parametrize("closes", [False, True], ids=["without a closure", "with a closure"])
@pytest.mark.parametrize("kind", ["ruled", "wrapped"])
def test_other_callables_come_to_a_step_as_they_are(pool2: Pool, kind: str, closes: bool) -> None:
    pool2.run(check_other_callables, kind, closes)

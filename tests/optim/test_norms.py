"""Optimizers of torch's that look at whole parameters: their norms and means are those over all ranks, as on one device."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import backward_beside, mesh_id, pool_for
from tests.support.twin import assert_same, full_params


class Lars(torch.optim.Optimizer):
    """With the trust ratio as most write it: by numbers on the host."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(this, closure: Any = None) -> Any:  # noqa: N805  (whatever its name)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in this.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    ratio = param.norm().item() / math.sqrt(float(param.grad.square().mean().sqrt_()) + 1.0)
                    param.add_(param.grad, alpha=-group["lr"] * ratio)
        return loss


WAYS: dict[str, Any] = {
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1, weight_decay=0.1),
    "lars": lambda params: Lars(params, lr=0.01),
}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.experts = nn.Parameter(torch.randn(4, 7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.norm(self.up(x))) @ self.experts).mean(0)  # type: ignore[no-any-return]


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def _trains(env: RankEnv, shape: tuple[int, ...]) -> None:
    for name, way in WAYS.items():
        plain, model = _Net().double(), _Net().double()
        hsdp.fully_shard(model.up, mesh=env.mesh(shape))
        hsdp.fully_shard(model, mesh=env.mesh(shape))
        optimizer, twins = way(model.parameters()), way(plain.parameters())
        for step in range(3):
            backward_beside(env, model, plain, partial(_batch, step=step))
            for one in (optimizer, twins):
                one.step()
                one.zero_grad()
        try:
            assert_same(full_params(model), dict(plain.named_parameters()), 1e-11, 1e-11)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1), (2, 2), (4,)], ids=mesh_id)
def test_training_equals_the_twin(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_trains, shape)


def _alone(env: RankEnv) -> None:
    """What one rank asks for outside of a step, in a closure too, is its own part: nobody would answer it."""
    model = _Net().double()
    hsdp.fully_shard(model, mesh=env.mesh((2,)))
    optimizer = Lars(model.parameters(), lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(_batch(env.rank, 0)).square().mean()
        loss.backward()
        if env.rank == 0:
            model.up.weight.grad.norm().item()
        return loss  # type: ignore[no-any-return]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(closure)
        if env.rank == 0:
            float(model.up.weight.norm())
    messages = [one for one in caught if "gives this rank's part of it" in str(one.message)]
    assert len(messages) == (2 if env.rank == 0 else 0)


def test_one_rank_may_ask_outside_of_a_step(pool2: Pool) -> None:
    pool2.run(_alone)


def _in_other_orders(env: RankEnv) -> None:
    """A norm of one parameter would be added to that of another one."""
    for way in WAYS.values():
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))).double()
        hsdp.fully_shard(model, mesh=env.mesh((2,)))
        listed: list[Any] = list(model.parameters())
        optimizer = way(listed[::-1] if env.rank else listed)
        for _ in range(2):
            model(_batch(env.rank, 0)).square().mean().backward()
            before = full_params(model)
            with pytest.raises(hsdp.errors.StateError, match=r"step: .* list the parameters in different orders"):
                optimizer.step()
            assert_same(full_params(model), before)
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:hsdp. a step")
def test_orders_that_differ_are_refused_before_anything_is_stepped(pool2: Pool) -> None:
    pool2.run(_in_other_orders)

"""Recipes: methods as papers describe them, of which each step has several passes, models or draws of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hsdp
from tests.ordinary.program import (
    DIM,
    MESHES,
    Program,
    Results,
    Scenario,
    adamw,
    blocks,
    check,
    mean,
    results,
    scenario_id,
    scenarios_in,
    sgd,
)
from tests.support.sharded import mesh_id, pool_for

Pair = tuple[nn.Module, nn.Module]


class _Coupled(torch.autograd.Function):
    """Pairs of blocks in a row, whose inputs are computed back from their outputs in backward."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        ctx.pairs = pairs
        with torch.no_grad():
            for one, other in pairs:
                first = first + one(second)
                second = second + other(first)
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (first, second), (to_first, to_second) = ctx.saved_tensors, grads
        for one, other in reversed(ctx.pairs):
            second, to_first = _undone(other, first, second, to_first, to_second)
            first, to_second = _undone(one, second, first, to_second, to_first)
        return to_first, to_second, None


def _undone(block: nn.Module, x: Tensor, out: Tensor, to_x: Tensor, to_out: Tensor) -> tuple[Tensor, Tensor]:
    """What `out` was before `block(x)` was added to it, and the gradient of x; goes backward through the block."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        added = block(leaf)
    added.backward(to_out)
    assert leaf.grad is not None
    return (out - added).detach(), to_x + leaf.grad


class _Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.ones, self.others = blocks(2), blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.before(x).chunk(2, -1)
        out: Tensor = self.after(torch.cat(_Coupled.apply(*halves, list(zip(self.ones, self.others, strict=True))), -1))
        return out


def computes_inputs_back_in_backward(program: Program) -> Results:
    """Calls units without gradients in forward, and anew in a function's backward, with a backward for each (RevNet)."""
    model = _Reversible()
    return program.fit(model, [*model.ones, *model.others])


class _Adapted(nn.Module):
    """A frozen layer with a low-rank addition that can be turned off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, DIM) / 3), nn.Parameter(torch.zeros(DIM, 2))
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return torch.tanh(out + x @ self.down.T @ self.up.T if self.is_on else out)


@contextmanager
def _without_adapters(model: nn.Sequential) -> Iterator[None]:
    for layer in model:
        layer.is_on = False
    yield
    for layer in model:
        layer.is_on = True


def prefers_by_a_reference_without_adapters(program: Program) -> Results:
    """Compares preferences with those of the same model without adapters, before and behind the forward (DPO)."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, nn.Sequential)
        with torch.no_grad(), _without_adapters(model):
            expected = model(x).sum(-1)
        given = model(x).sum(-1)
        with torch.no_grad(), _without_adapters(model):
            expected = expected + model(x.flip(0)).sum(-1)
        return -F.logsigmoid((given - expected) * torch.tensor([1.0, -1.0, 1.0])).mean()

    model = nn.Sequential(_Adapted(), _Adapted(), _Adapted())
    return program.fit(model, model, loss_of=loss)


class _Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = blocks(2)
        self.policy, self.value = nn.Linear(DIM, 4), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        features = self.trunk(x)
        return torch.distributions.Categorical(logits=self.policy(features)), self.value(features).squeeze(-1)


def learns_from_rollouts(program: Program) -> Results:
    """Acts in inference mode, and takes several clipped steps from what it saw then (PPO)."""
    model = _Actor().double()
    program.shard(model, model.trunk)
    optimizer = adamw(model)
    for k in range(2):
        seen = program.batches(k, (6, DIM))
        with torch.inference_mode():
            acted = [(policy.probs.argmax(-1), policy.logits.amax(-1), value) for policy, value in map(model, seen)]
        acted = [(action.clone(), likelihood.clone(), value.clone()) for action, likelihood, value in acted]
        for _ in range(3):
            losses = []
            for x, (action, likelihood, before) in zip(seen, acted, strict=True):
                policy, value = model(x)
                gained = x.sum(-1).tanh()
                ratio, advantage = (policy.log_prob(action) - likelihood).exp(), gained - before
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                losses.append(F.mse_loss(value, gained) - surrogate.mean() - 0.01 * policy.entropy().mean())
            mean(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
    return results(model)


def caches_gradients_of_features(program: Program) -> Results:
    """Contrasts features of all micro-batches without gradients, and goes through each of these by itself (GradCache)."""
    model = blocks()
    program.shard(model, model)
    optimizer = sgd(model)
    for k in range(3):
        micros = [program.batches(3 * k + micro) for micro in range(3)]
        whole = [torch.cat(parts) for parts in zip(*micros, strict=True)]
        with torch.no_grad():
            features = [model(x) for x in whole]
        for feature in features:
            unit = F.normalize(feature.requires_grad_())
            F.cross_entropy(unit @ unit.T, torch.arange(9).roll(1)).backward()
        for micro, parts in enumerate(micros):
            rows = slice(3 * micro, 3 * micro + 3)
            with model.accumulate(last=micro == 2) if isinstance(model, hsdp.HSDPModule) else nullcontext():
                outs = [model(x) * feature.grad[rows] for x, feature in zip(parts, features, strict=True)]
                mean([out.sum() for out in outs]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def solves_a_differential_equation(program: Program) -> Results:
    """Has derivatives of the second and the third order by the input in its loss, beside the values (PINN)."""

    def residual(model: nn.Module, x: Tensor) -> Tensor:
        at = x.clone().requires_grad_()
        u = model(at)
        derivative, orders = u.sum(), []
        for _ in range(3):
            (grad,) = torch.autograd.grad(derivative, at, create_graph=True)
            orders.append(grad[:, 0])
            derivative = grad[:, 0].sum()
        return (orders[1] + u[:, 0]).square().mean() + orders[2].square().mean() + model(x + 1).square().mean()

    model = blocks()
    return program.fit(model, model, loss_of=residual)


def draws_a_new_head(program: Program) -> Results:
    """Initialises a layer again, and adds noise to gradients, on ranks that have other seeds; replicas stay equal."""
    model = nn.Sequential(*blocks(2), nn.Linear(DIM, DIM)).double()
    program.shard(model, list(model)[:2])
    optimizer, shards = sgd(model), program.mesh.size(-1)
    program.train(model, optimizer)
    torch.manual_seed(100 + program.rank * program.sharded)
    with hsdp.full_params(model, writeback="rank0") if program.sharded else nullcontext():
        model[2].reset_parameters()
    for k in range(3):
        program.loss(model, k).backward()
        with torch.random.fork_rng():
            if program.sharded:
                torch.manual_seed(k * shards + program.mesh.get_local_rank("shard"))
                noise = [torch.randn_like(param.grad) for param in model.parameters()]  # type: ignore[arg-type]
            else:
                noise = _drawn_by_shard(model, k, shards)
        for param, drawn in zip(model.parameters(), noise, strict=True):
            assert param.grad is not None
            param.grad.add_(drawn, alpha=0.01)
        optimizer.step()
        optimizer.zero_grad()
    if program.sharded:
        hsdp.check_replicas(model)
    return results(model)


def _drawn_by_shard(model: nn.Module, k: int, shards: int) -> list[Tensor]:
    """The noise that the ranks of one replica draw, each for its own rows."""
    drawn = []
    for place in range(shards):
        torch.manual_seed(k * shards + place)
        drawn.append([torch.randn_like(param.chunk(shards)[place]) for param in model.parameters()])
    return [torch.cat(rows) for rows in zip(*drawn, strict=True)]


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_recipes_equal_their_twins(request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario) -> None:
    pool_for(request, shape).run(check, shape, scenario)

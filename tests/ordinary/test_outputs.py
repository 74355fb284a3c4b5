"""Outputs, inputs and side channels: the ways in which tensors come into units and leave them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.ordinary.program import (
    DIM,
    MESHES,
    ROWS,
    Program,
    Results,
    Scenario,
    blocks,
    check,
    mean,
    results,
    scenario_id,
    scenarios_in,
    sgd,
)
from tests.support.sharded import mesh_id, pool_for


class _Linear(nn.Module):
    """A unit with a linear layer inside, whose forward is given."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.run = run

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.run(self.linear, *args, **options)


class _Around(nn.Module):
    """Units, and a forward that is given for what is around them."""

    def __init__(self, units: list[nn.Module], run: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.units, x)


def _fit(
    program: Program, count: int, inner: Callable[..., Any], outer: Callable[[nn.ModuleList, Tensor], Tensor]
) -> Results:
    """Trains a model of `count` units whose forwards are `inner`, driven by `outer`."""
    model = _Around([_Linear(inner) for _ in range(count)], outer)
    return program.fit(model, model.units)


class _Prompt(nn.Module):
    """A learnt prompt, handed out in some way by a module without inputs."""

    def __init__(self, hand_out: Callable[..., Any]) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(1, DIM))
        self.hand_out = hand_out

    def forward(self, **options: Any) -> Any:
        return self.hand_out(self.prompt, **options)


def _fit_prompt(program: Program, hand_out: Callable[..., Any], take: Callable[[nn.Module], Tensor]) -> Results:
    """Trains a model that adds what it takes from its prompt's module to the input."""
    model = _Around([_Prompt(hand_out), *blocks(2)], lambda units, x: units[2](units[1](x + take(units[0]))))
    return program.fit(model, model.units)


def returns_a_parameter(program: Program) -> Results:
    """Has a unit that returns its parameter itself."""
    return _fit_prompt(program, lambda prompt: prompt, lambda unit: unit())


def returns_an_expanded_parameter(program: Program) -> Results:
    """Has a unit that returns a view of its parameter for the whole batch."""
    return _fit_prompt(program, lambda prompt: prompt.expand(3, DIM), lambda unit: unit())


def returns_a_detached_parameter(program: Program) -> Results:
    """Has a unit that returns a view of its parameter without gradients."""
    return _fit_prompt(program, lambda prompt: prompt[0].detach(), lambda unit: unit())


def returns_a_parameter_and_its_double(program: Program) -> Results:
    """Has a unit that returns its parameter and something computed of it."""
    return _fit_prompt(program, lambda prompt: (prompt, prompt * 2), lambda unit: sum(unit()))  # type: ignore[arg-type]


def has_inputs_by_keyword_alone(program: Program) -> Results:
    """Has a unit whose forward takes a number by keyword, and no tensor."""
    return _fit_prompt(program, lambda prompt, scale: prompt * scale, lambda unit: unit(scale=2.0))


def passes_a_weight_on(program: Program) -> Results:
    """Returns a view of its weight beside the result, and multiplies by it behind later units."""

    def inner(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(linear(x)), linear.weight.t()

    def outer(units: nn.ModuleList, x: Tensor) -> Tensor:
        hidden, weight = units[0](x)
        hidden, _ = units[1](hidden)
        return hidden @ weight

    return _fit(program, 2, inner, outer)


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class _Record:
    first: Tensor
    second: Tensor


class _Holder:
    """An object of the user's own, with a list inside."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first = first
        self.held = [second]

    @property
    def second(self) -> Tensor:
        return self.held[0]


def _returns(program: Program, kind: Callable[[Tensor, Tensor], Any]) -> Results:
    def inner(linear: nn.Linear, x: Tensor) -> Any:
        out = linear(x)
        return kind(out, out.square())

    def outer(units: nn.ModuleList, x: Tensor) -> Tensor:
        auxiliary = torch.zeros((), dtype=x.dtype)
        for unit in units:
            told = unit(x)
            x, auxiliary = torch.tanh(told.first), auxiliary + told.second.mean()
        return x + auxiliary

    return _fit(program, 2, inner, outer)


def returns_named_tuples(program: Program) -> Results:
    """Returns named tuples from its units."""
    return _returns(program, _Pair)


def returns_dataclasses(program: Program) -> Results:
    """Returns dataclasses from its units."""
    return _returns(program, _Record)


def returns_objects(program: Program) -> Results:
    """Returns objects that no tree knows from its units."""
    return _returns(program, _Holder)


@dataclass
class _State:
    hidden: Tensor
    auxiliary: Tensor


def hands_a_state_around(program: Program) -> Results:
    """Hands an object to its units, which replace the tensors in it and return nothing."""

    def inner(linear: nn.Linear, state: _State) -> None:
        state.hidden = torch.tanh(linear(state.hidden))
        state.auxiliary = state.auxiliary + state.hidden.square().mean()

    def outer(units: nn.ModuleList, x: Tensor) -> Tensor:
        state = _State(x, torch.zeros((), dtype=x.dtype))
        for unit in units:
            unit(state)
        return state.hidden + state.auxiliary

    return _fit(program, 2, inner, outer)


def changes_a_dict_in_place(program: Program) -> Results:
    """Hands a dict to its units, which add to the tensor in it in place."""

    def inner(linear: nn.Linear, state: dict[str, Tensor]) -> None:
        state["hidden"].add_(linear(state["hidden"].clone()))

    def outer(units: nn.ModuleList, x: Tensor) -> Tensor:
        state = {"hidden": x.clone()}
        for unit in units:
            unit(state)
            state["hidden"] = torch.tanh(state["hidden"]).clone()
        return state["hidden"]

    return _fit(program, 2, inner, outer)


def fills_a_tensor_of_outputs(program: Program) -> Results:
    """Has each unit write its result into a tensor made before, and return nothing."""

    def inner(linear: nn.Linear, x: Tensor, out: Tensor, index: int) -> None:
        out[index] = torch.tanh(linear(x))

    def outer(units: nn.ModuleList, x: Tensor) -> Tensor:
        out = torch.zeros(len(units), *x.shape, dtype=x.dtype)
        for index, unit in enumerate(units):
            unit(x, out, index)
        return out.sum(0)

    return _fit(program, 2, inner, outer)


def caches_keys_in_a_list(program: Program) -> Results:
    """Appends what it computes to a list that all later units read."""

    def inner(linear: nn.Linear, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(linear(x))
        return torch.tanh(linear(x) + torch.stack(cache).mean(0))

    def outer(units: nn.ModuleList, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        for unit in units:
            x = unit(x, cache)
        return x

    return _fit(program, 3, inner, outer)


def remembers_what_it_saw(program: Program) -> Results:
    """Keeps a detached state for each sequence in an attribute, from step to step."""
    held: dict[tuple[int, int], Tensor] = {}

    def remember(key: tuple[int, int], module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        held[key] = out.detach()

    model = blocks(2)
    program.shard(model, model)
    optimizer = sgd(model)
    for k in range(3):
        losses = []
        for sequence, x in enumerate(program.batches(k)):
            handles = [block.register_forward_hook(partial(remember, (sequence, at))) for at, block in enumerate(model)]
            state = held.get((sequence, 1), torch.zeros_like(x)) + held.get((sequence, 0), torch.zeros_like(x))
            losses.append(model(x + state).square().mean())
            for handle in handles:
                handle.remove()
        mean(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def penalises_features_of_hooks(program: Program) -> Results:
    """Collects the units' outputs in forward hooks, and adds a penalty on them to the loss."""
    model, features = blocks(), {}
    for index, block in enumerate(model):
        block.register_forward_hook(lambda module, args, out, index=index: features.update({index: out}))

    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss + 0.1 * torch.stack(list(features.values())).abs().mean()

    return program.fit(model, model, loss_of=penalised)


class _Found(Exception):  # noqa: N818  (it is no error: it ends a forward early)
    pass


class _Early(nn.Module):
    """Ends its second layer's forward when it has what it wants of it, and goes on with that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = blocks(1), _Linear(self._give_up), blocks(1)
        self.found: list[Tensor] = []

    def _give_up(self, linear: nn.Module, x: Tensor) -> Tensor:
        self.found.append(torch.relu(linear(x)))
        raise _Found

    def forward(self, x: Tensor) -> Tensor:
        self.found.clear()
        with suppress(_Found):
            self.inner(self.first(x))
        out: Tensor = self.last(self.found[0])
        return out


def ends_a_unit_s_forward_early(program: Program) -> Results:
    """Trains on what came inside of a unit whose forward an exception has ended, which the root caught."""
    model = _Early()
    return program.fit(model, [model.inner])


class _Beside(nn.Module):
    """Returns what it has early, and leaves what comes later somewhere else."""

    def __init__(self, leave: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.early, self.middle, self.late = (nn.Linear(DIM, DIM) for _ in range(3))
        self.leave = leave
        self.register_buffer("penalty", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.early(x)
        self.calls += 1
        self.leave(self, torch.tanh(self.late(torch.tanh(self.middle(x)))))
        return out


def _leaves(program: Program, leave: Callable[[Any, Tensor], None], penalty: Callable[[Any], Tensor]) -> Results:
    model = nn.Sequential(nn.Linear(DIM, DIM), _Beside(leave), nn.Linear(DIM, DIM))

    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss + penalty(model[1])  # type: ignore[index]

    return program.fit(model, model, loss_of=penalised)


def leaves_a_penalty_in_a_buffer(program: Program) -> Results:
    """Assigns a penalty, which is computed behind the output, to a registered buffer."""

    def leave(unit: Any, late: Tensor) -> None:
        unit.penalty = late.square().mean()

    return _leaves(program, leave, lambda unit: unit.penalty)


def leaves_a_distribution(program: Program) -> Results:
    """Leaves one of torch's distributions on the unit, around what is computed behind the output."""

    def leave(unit: Any, late: Tensor) -> None:
        unit.policy = torch.distributions.Categorical(logits=late)

    return _leaves(program, leave, lambda unit: -unit.policy.log_prob(torch.zeros(ROWS[0])).mean())


def leaves_it_under_another_name_each_time(program: Program) -> Results:
    """Leaves a penalty under one of two names, in turns, and takes the other one away."""

    def leave(unit: Any, late: Tensor) -> None:
        for name in ("even", "odd"):
            unit.__dict__.pop(name, None)
        unit.__dict__[("even", "odd")[unit.calls % 2]] = late.square().mean()

    return _leaves(program, leave, lambda unit: unit.__dict__[("even", "odd")[unit.calls % 2]])


def writes_to_its_argument(program: Program) -> Results:
    """Adds to its input in place and returns something else; the caller goes on with both."""

    def inner(linear: nn.Linear, x: Tensor) -> Tensor:
        early = x.mean(-1, keepdim=True)
        x.add_(torch.tanh(linear(torch.tanh(x))))
        return early

    def outer(units: nn.ModuleList, x: Tensor) -> Tensor:
        for unit in units:
            x = x * 2.0
            x = x + unit(x)
        return x

    return _fit(program, 2, inner, outer)


def weighs_losses_by_a_feature_s_gradient(program: Program) -> Results:
    """Takes the gradient of a loss by a hidden feature first, and retains the graph for the backward."""
    model, seen = blocks(), []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out))

    def weighed(model: nn.Module, x: Tensor) -> Tensor:
        seen.clear()
        loss: Tensor = model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, seen[0], retain_graph=True)
        return loss * (1 + grad.norm())

    return program.fit(model, model, loss_of=weighed)


def changes_values_in_hooks(program: Program) -> Results:
    """Changes inputs, outputs and their gradients in all four kinds of module hooks."""
    model = blocks()
    program.shard(model, model)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    model[1].register_forward_hook(lambda module, args, out: out + args[0])
    model[2].register_full_backward_hook(lambda module, grads, out_grads: (grads[0] * 0.5,))
    model.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 3,))
    program.train(model, sgd(model))
    return results(model)


def passes_an_input_through(program: Program) -> Results:
    """Has a unit that returns its input as it is at one of its two calls."""

    def inner(linear: nn.Linear, x: Tensor, computes: bool) -> Tensor:
        return torch.tanh(linear(x)) if computes else x

    def outer(units: nn.ModuleList, x: Tensor) -> Tensor:
        for unit in units:
            x = unit(unit(x, computes=False), computes=True)
        return x

    return _fit(program, 2, inner, outer)


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_outputs_equal_their_twins(request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario) -> None:
    pool_for(request, shape).run(check, shape, scenario)

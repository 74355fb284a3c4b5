"""Functions of autograd that hold weights, transforms around the model, and states that are carried from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.nn.functional as global_ops
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vmap

from tests.ordinary.program import (
    DIM,
    MESHES,
    Program,
    Results,
    Scenario,
    blocks,
    check,
    results,
    scenario_id,
    scenarios_in,
    sgd,
)
from tests.support.sharded import mesh_id, pool_for


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, None, grads[0].T @ x


class _Holds(_Saves):
    """Keeps the layer, and reads its weight in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, weight: Tensor) -> Tensor:
        ctx.x, ctx.layer = x, layer
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.layer.weight, None, grads[0].T @ ctx.x


class _Recomputes(_Holds):
    """Computes again in backward, and goes backward there."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x, weight = ctx.x.detach().requires_grad_(), ctx.layer.weight
            found = torch.autograd.grad(F.linear(x, weight), (x, weight), grads)
        return found[0], None, found[1]


class _Layer(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.function.apply(x, self, self.weight))


def _fit_function(program: Program, function: Any) -> Results:
    model = nn.Sequential(*(_Layer(function) for _ in range(3)))
    return program.fit(model, model)


def saves_a_weight_for_backward(program: Program) -> Results:
    """Has a function that saves the weight."""
    return _fit_function(program, _Saves)


def reads_a_weight_in_backward(program: Program) -> Results:
    """Has a function whose backward asks the layer for its weight."""
    return _fit_function(program, _Holds)


def computes_again_in_backward(program: Program) -> Results:
    """Has a function whose backward computes its forward with gradients."""
    return _fit_function(program, _Recomputes)


def _fit_transformed(program: Program, loss: Callable[[nn.Module, Tensor], Tensor]) -> Results:
    model = blocks(2)
    return program.fit(model, model, loss_of=loss)


def maps_over_rows(program: Program) -> Results:
    """Calls the model by `vmap`."""
    return _fit_transformed(program, lambda model, x: vmap(model)(x).square().mean())


def takes_directional_derivatives(program: Program) -> Results:
    """Calls the model by `jvp`, and trains on the derivative."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out, tangent = jvp(model, (x,), (torch.ones_like(x),))
        return (out + tangent).square().mean()  # type: ignore[no-any-return]

    return _fit_transformed(program, loss)


def differentiates_forward(program: Program) -> Results:
    """Calls the model with dual numbers."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        assert tangent is not None
        return (out + tangent).square().mean()

    return _fit_transformed(program, loss)


def _again(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(2 * x)  # type: ignore[no-any-return]


def maps_over_rows_and_calls_again(program: Program) -> Results:
    """Calls the model by `vmap`, and again without gradients before the backward, as guidance without a classifier does."""
    return _fit_transformed(program, lambda model, x: (vmap(model)(x) - _again(model, x)).square().mean())


def derives_and_calls_again(program: Program) -> Results:
    """Calls the model by `jvp`, and once more as it is: a mean flow's loss and a flow's."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        _, tangent = jvp(model, (x,), (torch.ones_like(x),))
        return (tangent - _again(model, x) + model(x)).square().mean()  # type: ignore[no-any-return]

    return _fit_transformed(program, loss)


def nests_transforms(program: Program) -> Results:
    """Has second derivatives forward, derivatives of a map, and a map of derivatives in its loss."""

    def derived(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: jvp(call, (x,), (torch.ones_like(x),))[1]  # type: ignore[no-any-return]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nested = derived(derived(model))(x) + derived(vmap(model))(x) + vmap(derived(model))(x)
        return (nested - _again(model, x)).square().mean()

    return _fit_transformed(program, loss)


def trains_on_tangents_alone(program: Program) -> Results:
    """Calls the model twice with dual numbers, and trains on nothing but their tangents."""

    def tangent(model: nn.Module, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert found is not None
        return found

    return _fit_transformed(
        program, lambda model, x: (tangent(model, x) * tangent(model, 2 * x) - _again(model, x)).square().mean()
    )


def uses_gradients_of_transforms(program: Program) -> Results:
    """Multiplies its outputs with gradients that `torch.func.grad` made, as numbers."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        scores = grad(lambda z: model(z).square().sum())(x).detach()
        return (scores * model(x)).mean()  # type: ignore[no-any-return]

    return _fit_transformed(program, loss)


def trains_through_gradients_of_transforms(program: Program) -> Results:
    """Has a penalty of what `torch.func.grad` made in its loss, one example at a time, and of a hessian."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        slope = grad(lambda z: model(z).square().sum())
        curved = hessian(lambda z: model(z).sum())(x[0])
        again = _again(model, x)
        return (slope(x) - vmap(slope)(2 * x) + model(x) - again).square().mean() + curved.square().mean()  # type: ignore[no-any-return]

    return _fit_transformed(program, loss)


def trains_on_curvature(program: Program) -> Results:
    """Has a product of the hessian by the input in its loss."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        given = x.clone().requires_grad_()
        _, product = torch.autograd.functional.hvp(
            lambda z: model(z).square().sum(), given, torch.ones_like(x), create_graph=True
        )
        return product.square().mean() + model(given).square().mean()

    return _fit_transformed(program, loss)


class _Perturbed(nn.Module):
    """Computes with its layers' weights, with other ones in their place, and with other biases behind a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        larger = {name: param * 1.5 for name, param in self.layers.named_parameters()}
        x = self.layers(x) + functional_call(self.layers, larger, (x,))
        self.state_dict()
        out: Tensor = functional_call(self.layers, {"2.bias": larger["2.bias"]}, (x,))
        return out


def computes_with_other_weights(program: Program) -> Results:
    """Calls parts of units by `functional_call`, with weights computed of their own."""
    model = nn.Sequential(_Perturbed(), _Perturbed())
    return program.fit(model, model)


class _Adapts(nn.Module):
    """Computes with weights behind two steps of an inner loop (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        with torch.enable_grad():
            for _ in range(2):
                loss = functional_call(self.net, weights, (x,)).square().mean()
                grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {name: weights[name] - 0.1 * grad for name, grad in zip(weights, grads, strict=True)}
        out: Tensor = functional_call(self.net, weights, (x + 1,))
        return out


def adapts_to_each_batch(program: Program) -> Results:
    """Trains through the gradient steps that a unit takes inside of its forward."""
    model = nn.Sequential(_Adapts(), nn.Linear(DIM, DIM))
    return program.fit(model, [model[0]])


class _Hyper(nn.Module):
    """Has a layer whose weight another one computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hyper, self.layer = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weight = self.hyper(x.mean(0)).view(DIM, DIM)
        out: Tensor = functional_call(self.layer, {"weight": weight}, (torch.tanh(x),))
        return out


def computes_weights_of_its_input(program: Program) -> Results:
    """Has a network whose outputs are the weights of a layer of the root."""
    model = _Hyper()
    return program.fit(model, [model.first, model.hyper])


class _Cached(nn.Module):
    """Attends to what it saw in earlier calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(DIM, DIM) for _ in range(3))
        self.seen: dict[int, Tensor] = {}

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        keys = self.key(x)
        before = self.seen.get(sequence)
        self.seen[sequence] = keys.detach()
        keys = keys if before is None else torch.cat([before, keys])
        return self.out(torch.softmax(self.query(x) @ keys.T, -1) @ keys)  # type: ignore[no-any-return]


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Cached() for _ in range(2))

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, sequence)
        return x


def keeps_keys_of_earlier_steps(program: Program) -> Results:
    """Has a cache of detached keys in each unit, by sequence."""
    model = _Reader().double()
    program.shard(model, model.layers)
    optimizer = sgd(model)
    ranks = [program.rank] if program.sharded else range(program.world_size)
    for k in range(4):
        losses = [model(x, rank).square().mean() for rank, x in zip(ranks, program.batches(k), strict=True)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


class _GlobalNorm(nn.Module):
    """Subtracts the mean over the rows of all ranks, and keeps a moving one in a buffer."""

    def __init__(self, sharded: bool, world_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.register_buffer("moving", torch.zeros(DIM))
        self._sharded, self._world_size = sharded, world_size

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        if self._sharded:
            mean = global_ops.all_reduce(mean) / self._world_size  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.moving.mul_(0.9).add_(mean, alpha=0.1)  # type: ignore[operator,union-attr]
        return (x - mean) * self.weight


def normalises_over_all_ranks(program: Program) -> Results:
    """Has a differentiable all-reduce of its own inside of units."""
    norms = [_GlobalNorm(program.sharded, program.world_size) for _ in range(2)]
    model = nn.Sequential(nn.Linear(DIM, DIM), norms[0], nn.Linear(DIM, DIM), norms[1]).double()
    program.shard(model, model[:3])
    optimizer = sgd(model)
    for k in range(3):
        model(torch.cat(program.batches(k))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, scale: Tensor) -> Any:
        return iter([self.linear(x) * scale, self.linear(2.0 * x)])


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            one, other = part(x, scale=x.new_ones(()).requires_grad_())
            x = one + torch.tanh(other)
        return x


def replaces_keywords_in_hooks(program: Program) -> Results:
    """Computes a keyword argument from the weight in a hook, and has units that return iterators."""
    model = _Chain()

    def scale(module: Any, args: Any, options: dict[str, Tensor]) -> Any:
        return args, {"scale": options["scale"] * module.linear.weight.sum().tanh()}

    for part in model.parts:
        part.register_forward_pre_hook(scale, with_kwargs=True)
    return program.fit(model, model.parts)


def scales_gradients_in_place(program: Program) -> Results:
    """Halves gradients of inputs and outputs in place, by hooks on tensors, and by both hooks on modules."""
    model = blocks()
    program.shard(model, model)

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        for tensor in (args[0], out):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: grad.mul_(0.5))

    for block in model:
        block.register_forward_hook(watch)
        block.register_full_backward_pre_hook(lambda module, grads: (grads[0] * module[0].weight.detach().sum(),))
    program.train(model, sgd(model))
    return results(model)


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_functions_equal_their_twins(request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario) -> None:
    pool_for(request, shape).run(check, shape, scenario)

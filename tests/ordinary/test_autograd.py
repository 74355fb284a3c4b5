"""Checkpointing and autograd's tools: graphs whose saved tensors, order or functions are the user's own."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.ordinary.program import (
    DIM,
    MESHES,
    Program,
    Results,
    Scenario,
    blocks,
    check,
    mean,
    mean_square,
    results,
    scenario_id,
    scenarios_in,
    sgd,
)
from tests.support.sharded import mesh_id, pool_for


class _Pair(nn.Module):
    """Two layers, computed as a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.computed(x)

    def computed(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.second(torch.tanh(self.first(x))))
        return out


class _SavesCopies(_Pair):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda saved: saved):
            return self.computed(x)


def _policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    is_product = operator == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class _SavesProducts(_Pair):
    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        out: Tensor = checkpoint(self.computed, x, use_reentrant=False, context_fn=contexts)
        return out


def _all_but_tanh(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    is_tanh = operator == torch.ops.aten.tanh.default
    return CheckpointPolicy.PREFER_RECOMPUTE if is_tanh else CheckpointPolicy.MUST_SAVE


def _all_but_views(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    left_out = ("aten.tanh", "aten.add", "aten.t.", "aten.view", "aten.as_strided", "aten.detach", "aten.mean", "aten.sum")
    return CheckpointPolicy.PREFER_RECOMPUTE if str(operator).startswith(left_out) else CheckpointPolicy.MUST_SAVE


class _Blocks(nn.Module):
    """Blocks that subclasses checkpoint in their ways."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.before = nn.Linear(DIM, DIM)
        self.blocks = blocks(count)


class _AroundUnits(_Blocks):
    """Each checkpoint keeps what `policy` says of so many units."""

    def __init__(self, policy: Any, units: int) -> None:
        super().__init__()
        contexts = partial(create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=True)
        self.around = partial(checkpoint, use_reentrant=False, context_fn=contexts)
        self.units = units

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.blocks), self.units):
            x = self.around(self._run, x, first)
        out: Tensor = self.before(x)
        return out

    def _run(self, x: Tensor, first: int) -> Tensor:
        for block in self.blocks[first : first + self.units]:
            x = block(x)
        return x


class _Nested(_Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for first in (0, 2):
            x = checkpoint(self._two, x, first, use_reentrant=False)
        out: Tensor = self.before(x)
        return out

    def _two(self, x: Tensor, first: int) -> Tensor:
        one, other = (checkpoint(self.blocks[first + at], x, use_reentrant=False) for at in range(2))
        out: Tensor = one + other
        return out


class _WithoutEarlyStop(_Blocks):
    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.before(x)
        return out


class _Reentrant(_Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[:2], self.before(x), use_reentrant=True)
        out: Tensor = self.blocks[3](self.blocks[2](x))
        return out


class _Forces(_Blocks):
    """An energy, and the forces that are its gradient by the positions."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            positions = x.clone().requires_grad_()
            energy = self.blocks(self.before(positions)).square().sum()
            (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy * 0.01 + forces


def saves_activations_on_the_cpu(program: Program) -> Results:
    """Wraps the forward in `save_on_cpu`."""

    def saved_elsewhere(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return mean_square(model, x)

    model = blocks()
    return program.fit(model, model, loss_of=saved_elsewhere)


def saves_copies_of_all_tensors(program: Program) -> Results:
    """Wraps the forward in hooks that keep a copy of each saved tensor, weights too."""

    def copied(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda saved: saved * 1):
            return mean_square(model, x)

    model = blocks()
    return program.fit(model, model, loss_of=copied)


def saves_copies_inside_units(program: Program) -> Results:
    """Does the same inside of the units' forwards."""
    model = nn.Sequential(_SavesCopies(), _SavesCopies())
    return program.fit(model, model)


def wraps_blocks_before_sharding(program: Program) -> Results:
    """Wraps each block for activation checkpointing, and shards the wrappers."""
    model = blocks()
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is block for block in model))
    return program.fit(model, model)


def wraps_blocks_after_sharding(program: Program) -> Results:
    """Shards blocks, wraps them for activation checkpointing, and shards what is around the wrappers."""
    model = nn.Sequential(*blocks(), nn.Linear(DIM, DIM)).double()
    layers = list(model)[:3]
    for layer in layers:
        program.shard(layer)
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is layer for layer in layers))
    return program.fit(model)


def saves_products_alone(program: Program) -> Results:
    """Checkpoints selectively: products of matrices are kept, the rest is computed again."""
    model = nn.Sequential(_SavesProducts(), _SavesProducts())
    return program.fit(model, model)


def keeps_nearly_all_of_each_unit(program: Program) -> Results:
    """Checkpoints each unit from outside, and keeps what all operators but one computed."""
    model = _AroundUnits(_all_but_tanh, 1)
    return program.fit(model, model.blocks)


def keeps_nearly_all_of_two_units(program: Program) -> Results:
    """Checkpoints two units together, and keeps what all operators but cheap ones computed."""
    model = _AroundUnits(_all_but_views, 2)
    return program.fit(model, model.blocks)


def nests_checkpoints(program: Program) -> Results:
    """Checkpoints pairs of blocks, and each block in them."""
    model = _Nested()
    return program.fit(model, model.blocks)


def computes_checkpoints_to_their_end(program: Program) -> Results:
    """Turns the early stop of recomputations off."""
    model = _WithoutEarlyStop(3)
    return program.fit(model, model.blocks)


def checkpoints_reentrantly_over_units(program: Program) -> Results:
    """Puts a reentrant checkpoint around two units."""
    model = _Reentrant()
    return program.fit(model, model.blocks)


def trains_on_forces(program: Program) -> Results:
    """Has gradients of an energy among the model's outputs."""
    model = _Forces(3).double()
    program.shard(model, model.blocks)
    program.train(model, sgd(model))
    evaluated = program.evaluate(model, 9)
    program.train(model, sgd(model), range(3, 5))  # frees what the evaluation's inner graph kept whole
    return results(model, evaluated=evaluated)


def penalises_gradients(program: Program) -> Results:
    """Adds a penalty on the gradient by the input, made with `create_graph=True` around the model."""

    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        loss = mean_square(model, leaf)
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return loss + 10 * grad.square().sum()

    model = blocks()
    return program.fit(model, model, loss_of=penalised)


def takes_jacobians(program: Program) -> Results:
    """Moves the input along the jacobian of the model."""

    def moved(model: nn.Module, x: Tensor) -> Tensor:
        jacobian = torch.autograd.functional.jacobian(lambda leaf: model(leaf).sum(0), x)
        return mean_square(model, x + 0.01 * jacobian.sum(0))

    model = blocks(2)
    return program.fit(model, model, loss_of=moved)


def detects_anomalies(program: Program) -> Results:
    """Trains under `detect_anomaly`."""
    model = blocks(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=True):
            return program.fit(model, model)


def turns_multithreading_off(program: Program) -> Results:
    """Trains with autograd's threads turned off."""
    model = blocks(2)
    with torch.autograd.set_multithreading_enabled(False):
        return program.fit(model, model)


def looks_at_gradients_when_backward_ends(program: Program) -> Results:
    """Queues a callback in the backward of a function of its own behind the model, which reads the input's gradient."""
    model, seen = blocks(), []
    leaves = [x.requires_grad_() for x in program.batches(0)]

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: seen.append(mean([leaf.grad for leaf in leaves if leaf.grad is not None])))
            return grad * 2

    program.shard(model, model)
    optimizer = sgd(model)
    for _ in range(3):
        mean([Watched.apply(model(leaf)).square().mean() for leaf in leaves]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) >= 3, "the callback did not run"
    return results(model)


def goes_backward_inside_a_backward(program: Program) -> Results:
    """Has a function of its own behind the model whose backward differentiates another model."""
    model, frozen = blocks(), nn.Linear(DIM, DIM).double().requires_grad_(False)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                ctx.leaf = x.detach().requires_grad_()
                ctx.out = frozen(ctx.leaf).tanh()
            out: Tensor = ctx.out.detach()
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.autograd.grad(ctx.out, ctx.leaf, grad)[0]

    def through_it(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = Inner.apply(model(x)).square().mean()
        return loss

    return program.fit(model, model, loss_of=through_it)


class _InParts(torch.autograd.Function):
    """A layer whose backward goes through it part by part, and adds up the weights' gradients by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, by_hooks: bool) -> Tensor:
        ctx.layer, ctx.by_hooks = layer, by_hooks
        ctx.save_for_backward(x)
        return layer.computed(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,), params = ctx.saved_tensors, list(ctx.layer.parameters())
        sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        for param in params:
            param.grad = None
        leaves = [part.detach().requires_grad_() for part in x.chunk(3)]

        def total(grad: Tensor, at: int, last: bool) -> Tensor | None:
            sums[at] = sums[at] + grad
            if not last:
                return None
            params[at].grad = None  # else this would be added to what the other parts left there
            return sums[at]

        for number, (leaf, part) in enumerate(zip(leaves, grad.chunk(3), strict=True)):
            handles = []
            if ctx.by_hooks:
                handles = [p.register_hook(partial(total, at=at, last=number == 2)) for at, p in enumerate(params)]
            with torch.enable_grad():
                out = ctx.layer.computed(leaf)
            torch.autograd.backward(out, part)
            for handle in handles:
                handle.remove()
            for at, param in enumerate(params if not ctx.by_hooks else ()):
                assert param.grad is not None, "a gradient that a backward made is there"
                sums[at], param.grad = sums[at] + param.grad, None
        for param, value in zip(params if not ctx.by_hooks else (), sums, strict=False):
            param.grad = value
        return torch.cat([leaf.grad for leaf in leaves]), None, None  # type: ignore[misc]


class _Parted(_Pair):
    by_hooks = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _InParts.apply(x, self, self.by_hooks)
        return out


class _PartedByHand(_Parted):
    by_hooks = False


def adds_up_gradients_by_hooks_inside_a_backward(program: Program) -> Results:
    """Layers whose backward runs one for each part, takes gradients away between them, and hands on the sum in a hook."""
    model = nn.Sequential(nn.Linear(DIM, DIM), _Parted(), _Parted())
    return program.fit(model, [model[1]])


def adds_up_gradients_by_hand_inside_a_backward(program: Program) -> Results:
    """The same with sums that are put in the place of the gradients."""
    model = nn.Sequential(nn.Linear(DIM, DIM), _PartedByHand(), nn.Linear(DIM, DIM), _PartedByHand())
    return program.fit(model, [model[1]])


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_autograd_s_tools_equal_their_twins(
    request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario
) -> None:
    pool_for(request, shape).run(check, shape, scenario)

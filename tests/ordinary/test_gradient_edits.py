"""What users do to gradients while a backward runs, from hooks and from autograd functions of their own.

Hooks see the gradients of their rank before they are averaged, so the twin makes them rank by rank, and takes the mean.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ordinary.program import DIM, Program, Results, Scenario, blocks, check, results, scenario_id, scenarios_in, sgd
from tests.support.sharded import mesh_id, pool_for


def _halve(module: nn.Module) -> None:
    for param in module.parameters():
        _halve_one(param)


def _halve_one(param: Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


def _train(program: Program, model: nn.Module) -> Results:
    optimizer = sgd(model)
    params = list(model.parameters())
    for k in range(3):
        of_ranks: list[list[Tensor | None]] = []
        for x in program.batches(k):
            optimizer.zero_grad()
            model(x.requires_grad_()).square().mean().backward()
            of_ranks.append([param.grad for param in params])
        for param, *grads in zip(params, *of_ranks, strict=True) if not program.sharded else ():
            arrived = [grad for grad in grads if grad is not None]
            param.grad = torch.stack(arrived).sum(0) / program.world_size if arrived else None
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def halves_them_in_a_full_backward_hook(program: Program) -> Results:
    """Halves the gradients of each block in its backward hook."""
    model = blocks()
    program.shard(model, model)
    for block in model:
        block.register_full_backward_hook(lambda block, *_: _halve(block))
    return _train(program, model)


def drops_them_in_a_full_backward_hook(program: Program) -> Results:
    """Takes the gradients of one block away as it ends."""
    model = blocks()
    program.shard(model, model)
    model[1].register_full_backward_hook(lambda block, *_: block.zero_grad())
    return _train(program, model)


def replaces_them_in_a_hook_of_an_inner_layer(program: Program) -> Results:
    """Puts another tensor in the place of a weight's gradient, from the hook of a layer below the unit."""
    model = blocks()
    program.shard(model, model)

    def replace(layer: nn.Module, *_: Any) -> None:
        if (grad := layer.weight.grad) is not None:
            layer.weight.grad = grad + 0.25

    for block in model:
        block[0].register_full_backward_hook(replace)
    return _train(program, model)


def halves_them_in_a_hook_on_the_block_s_input(program: Program) -> Results:
    """Halves the gradients of a block as its input gets one."""
    model = blocks()
    program.shard(model, model)

    def watch(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda _: _halve(block))

    for block in model:
        block.register_forward_pre_hook(watch)
    return _train(program, model)


class HooksItself(nn.Linear):
    """Registers hooks behind the accumulation of its gradients, in its first forward."""

    hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            for param in self.parameters():
                param.register_post_accumulate_grad_hook(_halve_one)
        return super().forward(x)


def halves_them_in_hooks_of_its_forward(program: Program) -> Results:
    """Registers hooks on its own weights in its first forward."""
    model = nn.Sequential(*[HooksItself(DIM, DIM) for _ in range(3)]).double()
    program.shard(model, model)
    return _train(program, model)


class _Fused(torch.autograd.Function):
    """A product whose backward adds the weight's gradient to `.grad` itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x @ layer.weight.detach().T + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.layer.weight
        mine = grad.T @ x
        weight.grad = mine if weight.grad is None else weight.grad + mine
        return grad @ weight.detach(), grad.sum(0), None


class Fused(nn.Linear):
    """A layer that makes its weight's gradient itself."""

    def forward(self, x: Tensor) -> Tensor:
        return _Fused.apply(x, self.bias, self)  # type: ignore[no-any-return]


def makes_a_weight_s_gradient_itself(program: Program) -> Results:
    """Has layers whose autograd functions write the gradients of their weights."""
    model = nn.Sequential(*[Fused(DIM, DIM) for _ in range(3)]).double()
    program.shard(model, model)
    return _train(program, model)


def adds_to_a_gradient_that_was_reduced(program: Program) -> Results:
    """Puts a gradient on the last block's weight as the first block's backward ends."""
    model = blocks()
    program.shard(model, model)
    last = model[2][0]

    def put(*_: Any) -> None:
        more = torch.full_like(last.weight, 0.25)
        last.weight.grad = more if last.weight.grad is None else last.weight.grad + more

    model[0].register_full_backward_hook(put)
    return _train(program, model)


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2), (2, 2)], ids=mesh_id)
def test_gradient_edits_equal_their_twins(
    request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario
) -> None:
    pool_for(request, shape).run(check, shape, scenario)

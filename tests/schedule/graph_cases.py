"""What a rank does with the models of `tests.support.graphs`: orders of forwards and backwards, other gradients.

Every case is a model and a function (model, rank) that runs forwards and backwards; what it returns is local to the rank.
`tests/schedule/test_graphs.py` compares the gradients with plain autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.graphs import (
    Chain,
    Checkpointed,
    CheckpointedTogether,
    CheckpointedTwice,
    Detached,
    GainedLayer,
    Inner,
    InPlace,
    Layer,
    Looped,
    Mixed,
    Nested,
    Net,
    Shuffled,
    Unused,
    floats,
    loss,
    step,
    tokens,
)
from tests.support.sharded import Run


def _set_rank(model: nn.Module, rank: int) -> None:
    for module in model.modules():
        module.rank = rank


def by_rank(model: nn.Module, rank: int) -> None:
    """Two steps in which ranks do different things."""
    _set_rank(model, rank)
    step(model, rank)
    step(model, rank, 1)


def _freeze(model: nn.Module, rank: int) -> None:
    blocks: Any = model.blocks
    blocks[1].requires_grad_(False)
    for name, param in blocks[2].named_parameters():
        param.requires_grad_(name.startswith("up"))
    step(model, rank)
    step(model, rank, 1)
    model.requires_grad_(True)
    blocks[0].requires_grad_(False)
    step(model, rank, 2)
    model.requires_grad_(True)


def _inner_loss(model: nn.Module, rank: int) -> None:
    model(tokens(rank))["inner"][1].square().sum().backward()


def _losses_one_by_one(model: nn.Module, rank: int) -> None:
    out = model(tokens(rank))
    out["inner"][0].square().sum().backward(retain_graph=True)
    out["inner"][1].square().sum().backward(retain_graph=True)
    out["logits"].sum().backward()


def _frozen_inner(model: nn.Module, rank: int) -> None:
    stages: Any = model.blocks
    for stage in stages:
        stage.layers[1].requires_grad_(False)
    step(model, rank)
    stages[0].requires_grad_(False)
    step(model, rank, 1)
    model.requires_grad_(True)


def _ffbb(model: nn.Module, rank: int) -> None:
    first, second = loss(model, rank), loss(model, rank, 1)
    second.backward()
    first.backward()


def _ffbb_first_in_first_out(model: nn.Module, rank: int) -> None:
    first, second = loss(model, rank), loss(model, rank, 1)
    first.backward()
    second.backward()


def _fbb(model: nn.Module, rank: int) -> None:
    value = loss(model, rank)
    value.backward(retain_graph=True)
    value.backward()


def _ffb(model: nn.Module, rank: int) -> None:
    (loss(model, rank) + 2 * loss(model, rank, 1)).backward()


def _ffb_first_only(model: nn.Module, rank: int) -> None:
    value, _ = loss(model, rank), loss(model, rank, 1)
    value.backward()


def _ffb_last_only(model: nn.Module, rank: int) -> None:
    loss(model, rank)
    step(model, rank, 1)


def _ffbfbb(model: nn.Module, rank: int) -> None:
    first, second = loss(model, rank), loss(model, rank, 1)
    first.backward()
    third = loss(model, rank, 2)
    second.backward()
    third.backward()


def _eval_between(model: nn.Module, rank: int) -> None:
    value = loss(model, rank)
    with torch.no_grad():
        loss(model, rank, 1)
    value.backward()
    with torch.inference_mode():
        loss(model, rank, 2)
    step(model, rank, 3)


def _accumulate(setter: str, model: nn.Module, rank: int) -> None:
    for k in range(3):
        if hasattr(model, setter):
            getattr(model, setter)(k == 2)
        step(model, rank, k)


def _five_steps(model: nn.Module, rank: int) -> None:
    model.calls = 0
    for k in range(5):
        step(model, rank, k)


def _checkpointed_root(reentrant: bool, model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    return [x.grad]


def _input_grads(model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    model(x).square().sum().backward()
    return [x.grad]


def _grad_of_inputs_only(model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    found = torch.autograd.grad(model(x).square().sum(), x)
    y = floats(rank, 1)
    model(y).square().sum().backward(inputs=[y])
    return [*found, y.grad]


def _grad_then_backward(model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    value = model(x).square().sum()
    found = torch.autograd.grad(value, x, retain_graph=True)
    value.backward()
    return found


def _gradient_penalty(model: nn.Module, rank: int) -> None:
    x = floats(rank)
    value = model(x).square().sum()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    (value + slope.square().sum()).backward()


def _penalty_alone(model: nn.Module, rank: int) -> None:
    x = floats(rank)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    _input_grads(model, rank)


def _backward_with_graph(model: nn.Module, rank: int) -> None:
    x = floats(rank)
    model(x).square().sum().backward(create_graph=True)
    _input_grads(model, rank)


def _child_alone(model: nn.Module, rank: int) -> None:
    blocks: Any = model.blocks
    blocks[1](floats(rank)).sum().backward()
    step(model, rank)
    blocks[0](floats(rank, 1)).sum().backward()
    step(model, rank, 1)


def _child_between(model: nn.Module, rank: int) -> None:
    blocks: Any = model.blocks
    value = loss(model, rank)
    blocks[1](floats(rank)).sum().backward()
    value.backward()


def _child_across(model: nn.Module, rank: int) -> None:
    blocks: Any = model.blocks
    value = blocks[1](floats(rank)).sum()
    step(model, rank)
    value.backward()


def _child_and_root_together(model: nn.Module, rank: int) -> None:
    blocks: Any = model.blocks
    (loss(model, rank) + blocks[1](floats(rank)).sum()).backward()


def _module_hooks(model: nn.Module, rank: int) -> Sequence[Tensor]:
    seen: list[Tensor] = []
    blocks: Any = model.blocks
    handles = [
        blocks[0].register_full_backward_hook(lambda module, grads_in, grads_out: seen.append(grads_out[0])),
        blocks[1].register_full_backward_pre_hook(lambda module, grads_out: seen.append(grads_out[0])),
        blocks[2].register_forward_hook(lambda module, args, out: out * 2),
        blocks[2].register_forward_pre_hook(lambda module, args: (args[0] + module.scale,)),
    ]
    step(model, rank)
    for handle in handles:
        handle.remove()
    return seen


@dataclass(frozen=True)
class Graph:
    """A case: how to build the model, and what to do with it."""

    build: Callable[[], nn.Module]
    run: Run


GRAPHS: dict[str, Graph] = {
    "plain": Graph(Net, step),
    "unused parameters, modules, units": Graph(Unused, step),
    "parameters used on one rank each": Graph(partial(Net, GainedLayer), by_rank),
    "units in units": Graph(Nested, step),
    "frozen units in units": Graph(Nested, _frozen_inner),
    "frozen and thawed": Graph(Net, _freeze),
    "loss from an inner output": Graph(Inner, _inner_loss),
    "one backward per output": Graph(Inner, _losses_one_by_one),
    "cut off and without grad": Graph(Detached, step),
    "F F B B": Graph(Net, _ffbb),
    "F F B B, first in first out": Graph(Net, _ffbb_first_in_first_out),
    "F B B": Graph(Net, _fbb),
    "F F B": Graph(Net, _ffb),
    "F F, backward of the first": Graph(Net, _ffb_first_only),
    "F F, backward of the last": Graph(Net, _ffb_last_only),
    "F F B F B B": Graph(Net, _ffbfbb),
    "eval between": Graph(Net, _eval_between),
    "without sync": Graph(Net, partial(_accumulate, "set_requires_grad_sync")),
    "without all-reduce": Graph(Net, partial(_accumulate, "set_requires_all_reduce")),
    "blocks twice": Graph(Looped, step),
    "blocks twice, F F B B": Graph(Looped, _ffbb),
    "another order each time": Graph(Shuffled, _five_steps),
    "inputs that need grad": Graph(Chain, _input_grads),
    "gradients of inputs only": Graph(Chain, _grad_of_inputs_only),
    "autograd.grad, then backward": Graph(Chain, _grad_then_backward),
    "gradient penalty": Graph(Chain, _gradient_penalty),
    "penalty alone": Graph(Chain, _penalty_alone),
    "backward(create_graph=True)": Graph(Chain, _backward_with_graph),
    "in place": Graph(InPlace, _input_grads),
    "a child alone": Graph(Net, _child_alone),
    "a child between forward and backward": Graph(Net, _child_between),
    "a child across an iteration": Graph(Net, _child_across),
    "a child and the root in one backward": Graph(Net, _child_and_root_together),
    "hooks on modules": Graph(Net, _module_hooks),
}


for kind, reentrant in (("reentrant", True), ("not reentrant", False)):
    around, together = partial(Checkpointed, reentrant), partial(CheckpointedTogether, reentrant)
    inside = partial(Net, partial(Layer, reentrant))
    GRAPHS |= {
        f"checkpoint around units, {kind}": Graph(around, step),
        f"checkpoint around units, {kind}, F F B B": Graph(around, _ffbb),
        f"checkpoint around units, {kind}, F F B": Graph(around, _ffb),
        f"checkpoint around units, {kind}, no sync": Graph(around, partial(_accumulate, "set_requires_grad_sync")),
        f"checkpoint around several units, {kind}": Graph(together, step),
        f"checkpoint in checkpoint, {kind}": Graph(partial(CheckpointedTwice, reentrant), step),
        f"checkpoint inside units, {kind}": Graph(inside, step),
        f"checkpoint inside units, {kind}, F F B B": Graph(inside, _ffbb),
        f"checkpoint of a part of a unit, {kind}": Graph(partial(Net, partial(Mixed, reentrant)), step),
        f"checkpoint around the root, {kind}": Graph(Chain, partial(_checkpointed_root, reentrant)),
    }

"""Graphs that a unit may find itself in: small token models and what a rank does with them.

Every case is a model and a function (model, rank) that runs forwards and backwards; what it returns is local to the rank.
`tests/test_graphs.py` compares the gradients with plain autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.sharded import Run

VOCAB, DIM = 11, 8


class Layer(nn.Module):
    """A residual block with a norm, odd sizes and a scalar."""

    def __init__(self, inner_checkpoint: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM + 1)
        self.down = nn.Linear(2 * DIM + 1, DIM)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.inner_checkpoint = inner_checkpoint  # reentrant or not; None: no checkpoint inside

    def forward(self, x: Tensor) -> Tensor:
        if self.inner_checkpoint is None:
            return x + self.branch(x)
        return x + checkpoint(self.branch, x, use_reentrant=self.inner_checkpoint)  # type: ignore[no-any-return]

    def branch(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    """Tokens in, logits out; `walk` is what variants change."""

    def __init__(self, make_layer: Callable[[], nn.Module] = Layer, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(make_layer() for _ in range(num_layers))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.walk(self.embedding(tokens)))  # type: ignore[no-any-return]

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tokens(rank: int, k: int = 0) -> Tensor:
    """Batch k of a rank: [4, 5]."""
    return torch.randint(VOCAB, (4, 5), generator=torch.Generator().manual_seed(97 * rank + k))


def floats(rank: int, k: int = 0) -> Tensor:
    """Activations [4, DIM], float64, that need gradients."""
    generator = torch.Generator().manual_seed(97 * rank + k)
    return torch.randn(4, DIM, generator=generator, dtype=torch.float64).requires_grad_()


def loss(model: nn.Module, rank: int, k: int = 0) -> Tensor:
    """Cross-entropy on batch k."""
    batch = tokens(rank, k)
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def step(model: nn.Module, rank: int, k: int = 0) -> None:
    """One forward and backward."""
    loss(model, rank, k).backward()


# -- unused and hidden ----------------------------------------------------------------------------------------------


class Unused(Net):
    """Parameters, a submodule and a unit that no forward uses; a unit whose output is thrown away."""

    def __init__(self) -> None:
        super().__init__(num_layers=5)
        self.blocks[1].extra = nn.Parameter(torch.ones(7, 3))
        self.blocks[2].extra = nn.Linear(3, 3)

    def walk(self, x: Tensor) -> Tensor:
        self.blocks[3](x)
        for block in self.blocks[:3]:  # never blocks[4]
            x = block(x)
        return x


class GainedLayer(Layer):
    """Uses one of its four gains: that of the rank."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.full((DIM,), 1.0 + i / 8)) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gains[self.rank]


def _set_rank(model: nn.Module, rank: int) -> None:
    for module in model.modules():
        module.rank = rank  # type: ignore[assignment]


def by_rank(model: nn.Module, rank: int) -> None:
    """Two steps in which ranks do different things."""
    _set_rank(model, rank)
    step(model, rank)
    step(model, rank, 1)


class SkipsByRank(Net):
    """Ranks throw different blocks' outputs away: all run, but each rank's backward leaves another one out."""

    rank = 0

    def walk(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            out = block(x)
            x = x if index == self.rank else out
        return x


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


class Inner(Net):
    """Also hands out what is inside."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        outs = [x := block(x) for block in self.blocks]
        return {"logits": self.head(x), "inner": outs}


def _losses_one_by_one(model: nn.Module, rank: int) -> None:
    out = model(tokens(rank))
    out["inner"][0].square().sum().backward(retain_graph=True)
    out["inner"][1].square().sum().backward(retain_graph=True)
    out["logits"].sum().backward()


class Detached(Net):
    """The first block is cut off from the loss, and the second frozen by `no_grad`."""

    def walk(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x).detach()
        with torch.no_grad():
            x = self.blocks[1](x)
        return self.blocks[2](x)  # type: ignore[no-any-return]


class Stage(nn.Module):
    """A unit of units, which hands its last one's output on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for layer in self.layers:
            x = layer(x)
        return x


class Nested(Net):
    """Units in units in units."""

    def __init__(self) -> None:
        super().__init__(Stage, 2)

    def units(self) -> list[nn.Module]:
        stages: Any = self.blocks
        return [unit for stage in stages for unit in (*stage.layers, stage)]


def _frozen_inner(model: nn.Module, rank: int) -> None:
    stages: Any = model.blocks
    for stage in stages:
        stage.layers[1].requires_grad_(False)
    step(model, rank)
    stages[0].requires_grad_(False)
    step(model, rank, 1)
    model.requires_grad_(True)


# -- orders of forwards and backwards -------------------------------------------------------------------------------


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


class Looped(Net):
    """Runs its blocks twice."""

    def walk(self, x: Tensor) -> Tensor:
        return super().walk(super().walk(x))


class Shuffled(Net):
    """Runs its blocks in another order, and other blocks, each time."""

    calls = 0

    def walk(self, x: Tensor) -> Tensor:
        orders = [(0, 1, 2), (2, 1, 0), (0, 2), (0, 1, 2), (1,)]
        for index in orders[self.calls % len(orders)]:
            x = self.blocks[index](x)
        self.calls += 1
        return x


def _five_steps(model: nn.Module, rank: int) -> None:
    model.calls = 0  # type: ignore[assignment]
    for k in range(5):
        step(model, rank, k)


# -- checkpoints ----------------------------------------------------------------------------------------------------


class Checkpointed(Net):
    """Each block recomputed by itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedTogether(Checkpointed):
    """Several units in one recomputation."""

    def walk(self, x: Tensor) -> Tensor:
        return checkpoint(super(Checkpointed, self).walk, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class CheckpointedTwice(Checkpointed):
    """A recomputation inside a recomputation."""

    def walk(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.blocks[1](checkpoint(self.blocks[0], x, use_reentrant=self.reentrant))  # type: ignore[no-any-return]

        x = checkpoint(inner, x, use_reentrant=self.reentrant)
        return self.blocks[2](x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """A layer of which a part is recomputed, the rest not, with a parameter in both."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda z: torch.tanh(self.linear(z)), x, use_reentrant=self.reentrant)
        return x + self.linear(y)  # type: ignore[no-any-return]


def _checkpointed_root(reentrant: bool, model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    return [x.grad]  # type: ignore[list-item]


# -- inputs, outputs, other gradients -------------------------------------------------------------------------------


class Chain(nn.Module):
    """Floats in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _input_grads(model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    model(x).square().sum().backward()
    return [x.grad]  # type: ignore[list-item]


def _grad_of_inputs_only(model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    found = torch.autograd.grad(model(x).square().sum(), x)
    y = floats(rank, 1)
    model(y).square().sum().backward(inputs=[y])
    return [*found, y.grad]  # type: ignore[list-item]


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


class InPlace(nn.Module):
    """Units whose first op changes their input, and callers who change their output."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2).relu_())  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Unit() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x).add_(1.0)
        return x


# -- child, siblings ------------------------------------------------------------------------------------------------


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

"""Small models for every graph that a unit may find itself in, with tokens or floats as inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
        return x + checkpoint(self.branch, x, use_reentrant=self.inner_checkpoint)

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
        return self.head(self.walk(self.embedding(tokens)))

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


class SkipsByRank(Net):
    """Ranks throw different blocks' outputs away: all run, but each rank's backward leaves another one out."""

    rank = 0

    def walk(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            out = block(x)
            x = x if index == self.rank else out
        return x


class Inner(Net):
    """Also hands out what is inside."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        outs = [x := block(x) for block in self.blocks]
        return {"logits": self.head(x), "inner": outs}


class Detached(Net):
    """The first block is cut off from the loss, and the second frozen by `no_grad`."""

    def walk(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x).detach()
        with torch.no_grad():
            x = self.blocks[1](x)
        return self.blocks[2](x)


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
        return checkpoint(super(Checkpointed, self).walk, x, use_reentrant=self.reentrant)


class CheckpointedTwice(Checkpointed):
    """A recomputation inside a recomputation."""

    def walk(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.blocks[1](checkpoint(self.blocks[0], x, use_reentrant=self.reentrant))

        x = checkpoint(inner, x, use_reentrant=self.reentrant)
        return self.blocks[2](x)


class Mixed(nn.Module):
    """A layer of which a part is recomputed, the rest not, with a parameter in both."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda z: torch.tanh(self.linear(z)), x, use_reentrant=self.reentrant)
        return x + self.linear(y)


class Chain(nn.Module):
    """Floats in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class InPlace(nn.Module):
    """Units whose first op changes their input, and callers who change their output."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2).relu_())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Unit() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x).add_(1.0)
        return x

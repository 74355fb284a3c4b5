"""Small models with batches and a loss; together they have every kind of parameter and call a unit meets.

Every model has `blocks`, the modules that tests make units of, before the root. A `Case` builds the same
model and batches on every rank: values are drawn in float32 from fixed seeds, then cast, so that runs in
several dtypes start from the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Case:
    """A model with its data; picklable.

    `dtype` is that of all parameters and float inputs; None keeps what the model was built with.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Loss
    dtype: torch.dtype | None = torch.float64

    def model(self, seed: int = 0) -> nn.Module:
        """The model; the same on every rank and at every call. Draws nothing from the global generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
        return model.to(self.dtype) if self.dtype else model

    def batch(self, step: int, rank: int, micro: int = 0) -> Batch:
        """The batch of one data-parallel rank, step and micro-batch, different for each."""
        generator = torch.Generator().manual_seed(step * 10_007 + rank * 101 + micro)
        batch = self.draw(generator)
        return tuple(x.to(self.dtype) if self.dtype and x.is_floating_point() else x for x in batch)


def mse(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of `model(x)`, where batch = (x, y)."""
    x, y = batch
    return (model(x) - y).square().mean()


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of `model(tokens)`, where batch = (tokens, targets), both int64 [rows, length]."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class MLP(nn.Module):
    """Linear layers with GELU between them; `dims` = sizes from input to output."""

    def __init__(self, dims: Sequence[int] = (8, 16, 16, 8), bias: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(i, o, bias=bias) for i, o in pairwise(dims))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(F.gelu(x) if index else x)
        return x


class Block(nn.Module):
    """A transformer block of 9 parameters: 2 norms, q, k, v, o, gate, up, down."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.norm2 = nn.RMSNorm(dim)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (self._split_heads(layer(normed)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _split_heads(self, x: Tensor) -> Tensor:  # [rows, length, dim] -> [rows, heads, length, dim / heads]
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Transformer(nn.Module):
    """A small causal language model: int tokens [rows, length] to logits [rows, length, vocab]."""

    def __init__(
        self,
        vocab: int = 32,
        dim: int = 16,
        heads: int = 2,
        hidden: int = 32,
        layers: int = 2,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PartlyFrozen(MLP):
    """Frozen and trained parameters in one unit, a unit frozen as a whole, one trained as a whole."""

    def __init__(self) -> None:
        super().__init__((8, 16, 16, 16, 8))
        self.blocks[0].weight.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].bias.requires_grad_(False)


class MixedLinear(nn.Linear):
    """A float64 weight and a float32 bias; computes in float64."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        self.weight.data = self.weight.data.double()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.double(), self.weight, self.bias.double())


class MixedDtypes(MLP):
    """Two dtypes in each unit."""

    def __init__(self) -> None:
        super().__init__(())
        self.blocks.extend([MixedLinear(8, 16), MixedLinear(16, 8)])


class Scaled(nn.Module):
    """Parameters with fewer rows than ranks, one row, no rows and, if `scalar`, no dimensions."""

    def __init__(self, dim: int, scalar: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(1))
        self.shift = nn.Parameter(torch.rand(3, dim) / 3)
        self.nothing = nn.Parameter(torch.empty(0, dim))
        self.temperature = nn.Parameter(torch.tensor(0.75)) if scalar else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain + self.shift.sum(0) + self.nothing.sum()
        return x if self.temperature is None else x * self.temperature


class TinyParams(nn.Module):
    """Units of tiny parameters around a larger one."""

    def __init__(self, scalar: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(8, scalar), nn.Linear(8, 8), Scaled(8, scalar)])
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


class ConvNet(nn.Module):
    """A convolution, a transposed one, a group norm; channel counts that 2 or 4 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.ConvTranspose2d(6, 5, 2, stride=2)]
        )
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.silu(block(x))
        return self.last(x.mean((2, 3)))


class PartlyUsed(nn.Module):
    """`skip` is never used, `rare` only when the first input is positive: so on some ranks only."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.skip = nn.Linear(dim, dim)
        self.rare = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        positive = bool(x.flatten()[0] > 0)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.rare(x) if positive else x


class CalledTwice(nn.Module):
    """The first block runs before and after the second."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return first(torch.tanh(second(torch.tanh(first(x)))))


def _draw_floats(x_shape: Sequence[int], y_shape: Sequence[int], generator: torch.Generator) -> Batch:
    return torch.randn(*x_shape, generator=generator), torch.randn(*y_shape, generator=generator)


def _draw_tokens(vocab: int, rows: int, length: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(vocab, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def regression(
    name: str,
    build: Callable[[], nn.Module],
    x_shape: Sequence[int] = (4, 8),
    y_shape: Sequence[int] = (4, 8),
) -> Case:
    """A case with float inputs and the mean squared error."""
    return Case(name, build, partial(_draw_floats, tuple(x_shape), tuple(y_shape)), mse)


def language(name: str, *, vocab: int = 32, rows: int = 2, length: int = 8, **sizes: int) -> Case:
    """A case with int tokens and a transformer of these sizes."""
    build = partial(Transformer, vocab=vocab, **sizes)
    return Case(name, build, partial(_draw_tokens, vocab, rows, length), next_token)


_ALL = [
    regression("mlp", MLP),
    regression("odd", partial(MLP, (7, 13, 5, 3)), (4, 7), (4, 3)),
    regression("frozen", PartlyFrozen),
    replace(regression("mixed", MixedDtypes), dtype=None),
    regression("tiny", TinyParams, y_shape=(4, 1)),
    regression("scalar", partial(TinyParams, scalar=True), y_shape=(4, 1)),
    regression("conv", ConvNet, (2, 3, 5, 5), (2, 4)),
    regression("partly_used", PartlyUsed),
    regression("called_twice", CalledTwice),
    language("transformer"),
    language("tied", tied=True),
]
CASES = {case.name: case for case in _ALL}


def make_case(name: str, dtype: torch.dtype | None = torch.float64) -> Case:
    """The case of this name in this dtype ("mixed" keeps its own)."""
    case = CASES[name]
    return case if case.dtype is None else replace(case, dtype=dtype)

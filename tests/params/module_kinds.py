"""Modules that hold parameters or hand out tensors in their own ways, and what a rank does with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.support.graphs import DIM, Chain, Net, floats, step
from tests.support.sharded import Run

# -- modules with parameters of their own kind ----------------------------------------------------------------------


class Recurrent(nn.Module):
    """RNNs keep a flat list of their weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        lstm = nn.LSTM(DIM, DIM, 2, batch_first=True, **options)
        width = DIM * (2 if options.get("bidirectional") else 1)
        self.blocks = nn.ModuleList([lstm, nn.GRU(options.get("proj_size", width), DIM, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        for block in self.blocks:
            x, _ = block(x)
        return x


class Attention(nn.Module):
    """Attention reads its projections' weights without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.MultiheadAttention(DIM, 2, batch_first=True),
                nn.MultiheadAttention(DIM, 2, batch_first=True, kdim=DIM, vdim=DIM, add_bias_kv=True),
            ]
        )
        self.encoder = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        for block in self.blocks:
            x = block(x, x, x)[0]
        return self.encoder(x)


class Lists(nn.Module):
    """Parameters in lists and dicts, at several depths."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.ParameterList(nn.Parameter(torch.rand(DIM)) for _ in range(3))
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.rand(DIM, DIM)), "b": nn.Parameter(torch.rand(1))})

        def forward(self, x: Tensor) -> Tensor:
            for gain in self.gains:
                x = x * gain
            for _, value in self.named.items():
                x = x @ value if value.ndim == 2 else x * value
            return x * self.named["b"] + self.gains[-1]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Part(), self.Part()])
        self.more = nn.ParameterList([nn.Parameter(torch.rand(DIM))])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.more[0]


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def _parametrized() -> nn.Module:
    model = Chain()
    blocks: Any = model.blocks
    parametrize.register_parametrization(blocks[0].up, "bias", nn.Tanh())
    parametrizations.weight_norm(blocks[1].up)
    parametrizations.weight_norm(blocks[1].down, dim=1)
    linear = nn.Linear(DIM, DIM)
    parametrize.register_parametrization(linear, "weight", _Symmetric())
    blocks.append(linear)
    return model


def _weight_norm_of_old() -> nn.Module:
    model = Chain()
    blocks: Any = model.blocks
    nn.utils.weight_norm(blocks[1].up)
    blocks.append(nn.utils.weight_norm(nn.Linear(DIM, DIM)))
    return model


class Tied(nn.Module):
    """One weight under two names in a unit, and a whole module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))])
        self.blocks[0][2].weight = self.blocks[0][0].weight
        self.first = nn.Linear(DIM, DIM)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.blocks[0](self.first(x)))


class Strided(nn.Module):
    """Parameters that are not contiguous, huge next to tiny, empty, of no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, DIM).t())
        self.strided = nn.Parameter(torch.randn(5, 2 * DIM)[:, ::2])
        self.empty = nn.Parameter(torch.zeros(0))
        self.channels = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.transposed @ self.strided + self.empty.sum()
        return y + self.channels(y[None, None]).mean((0, 1))


class Buffers(nn.Module):
    """Statistics that each rank keeps by itself, and units that have no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM), nn.ReLU(), nn.BatchNorm1d(DIM), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ListUnits(Chain):
    """Two modules that form one unit, neither around the other; another one apart."""

    def units(self) -> list[Any]:
        blocks: Any = self.blocks
        return [[blocks[0], blocks[2]], blocks[1]]


class HeadAndNorm(Net):
    """A list unit at the end of the forward, as users do with the last norm and the head."""

    def units(self) -> list[Any]:
        blocks: Any = self.blocks
        return [*blocks[:2], [blocks[2], self.head]]


def _square(model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    model(x).square().sum().backward()
    return [x.grad]


# -- outputs and inputs in containers -------------------------------------------------------------------------------


@dataclass
class Plain:
    first: Tensor
    second: Any = None


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("first", "second")
    first: Tensor
    second: Any


class Named(NamedTuple):
    first: Tensor
    second: Any = None


class Holder:
    """An ordinary object."""

    def __init__(self, first: Tensor, second: Any = None) -> None:
        self.first = first
        self.second = second


class _Wrapping(nn.Module):
    """A linear layer whose result is wrapped."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(torch.tanh(self.linear(x)))


class Wrapped(nn.Module):
    """Blocks that hand their result on in some container."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Wrapping(wrap) for _ in range(3))
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks[:-1]:
            x = self.unwrap(block(x))
        return self.blocks[-1](x)


def _square_of(unwrap: Callable[[Any], Tensor], model: nn.Module, rank: int) -> Sequence[Tensor]:
    x = floats(rank)
    unwrap(model(x)).square().sum().backward()
    return [x.grad]


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda t: (None, t, 3), lambda v: v[1]),
    "nested lists": (lambda t: [[{"a": (t,)}], "text"], lambda v: v[0][0]["a"][0]),
    "ordered dict": (lambda t: OrderedDict(a=t.detach(), b=t), lambda v: v["b"]),
    "dataclass": (lambda t: Plain(t.detach(), [t]), lambda v: v.second[0]),
    "slotted dataclass": (lambda t: Slotted(t.detach(), t), lambda v: v.second),
    "named tuple": (lambda t: Named(t.detach(), t), lambda v: v.second),
    "object": (lambda t: Holder(t.detach(), {"x": t}), lambda v: v.second["x"]),
    "function": (lambda t: lambda: t, lambda v: v()),
    "views": (lambda t: t.split(3, dim=1), lambda v: torch.cat(v, 1)),
}


class LeafOutputs(nn.Module):
    """A block that hands out its own weight and its input, beside its result."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM))

        def forward(self, x: Tensor) -> Any:
            return x @ self.weight, self.weight, x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Unit(), self.Unit()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y, weight, same = block(x)
            x = y + same * 0.5 + (weight * 1e-3).sum()
        return x


class PassedOn(nn.Module):
    """Root and block hand out the leaf that they were given."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.linear(x), y

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Unit()])
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x, y = self.blocks[0](x, x if y is None else y)
        return self.linear(x), y


def _prompt_over_three_steps(model: nn.Module, rank: int) -> Sequence[Tensor]:
    prompt = floats(rank)  # one leaf that goes through all iterations, as a learnt prompt does
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # leaves the values alone, but is a step
    for _ in range(3):
        out, same = model(prompt)
        (out.square().sum() + same.sum()).backward()
        optimizer.step()
    assert len(prompt._backward_hooks or ()) <= 2, "hooks pile up on a tensor that outlives the iteration"
    return [prompt.grad]


def weight_handed_out_over_three_steps(model: nn.Module, rank: int) -> Sequence[Tensor]:
    """A unit's weight is used outside of it, in several iterations."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = floats(rank)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
    return [x.grad]


def _keywords(model: nn.Module, rank: int) -> Sequence[Tensor]:
    x, y = floats(rank), floats(rank, 1)
    out, same = model(x=x, y=y)
    (out.sum() + same.square().sum()).backward()
    return [x.grad, y.grad]


@dataclass(frozen=True)
class Kind:
    """A case: how to build the model, and what to do with it."""

    build: Callable[[], nn.Module]
    run: Run = _square


KINDS: dict[str, Kind] = {
    "LSTM and GRU": Kind(Recurrent),
    "LSTM in both directions": Kind(partial(Recurrent, bidirectional=True)),
    "LSTM with projections": Kind(partial(Recurrent, proj_size=3)),
    "attention": Kind(Attention),
    "parameter lists and dicts": Kind(Lists),
    "parametrizations": Kind(_parametrized),
    "weight norm of old": Kind(_weight_norm_of_old),
    "tied weights and modules": Kind(Tied),
    "strides and empty ones": Kind(Strided),
    "buffers, units without parameters": Kind(Buffers),
    "lists of modules": Kind(ListUnits),
    "last block and head in one unit": Kind(HeadAndNorm, step),
    "an output that is an input, over steps": Kind(PassedOn, _prompt_over_three_steps),
    "inputs by keyword": Kind(PassedOn, _keywords),
}
KINDS |= {
    f"output in a {name}": Kind(partial(Wrapped, wrap, unwrap), partial(_square_of, unwrap))
    for name, (wrap, unwrap) in WRAPS.items()
}

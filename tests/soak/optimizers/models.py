"""The models that random programs of optimizers train: tiny, with every kind of parameter that a step may meet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp

WIDTH = 4
KINDS = ("mlp", "tied", "norm", "experts", "scaled", "adapter")


@dataclass(frozen=True)
class Part:
    """One part of a model: its kind, whether it is a unit or the root's, and the dtype of its parameters."""

    kind: str
    unit: bool = True
    dtype: str = "float64"


class Body(nn.Module):
    """What a part computes: [batch, WIDTH] to the same, smooth in all its parameters."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.kind = part.kind
        if part.kind == "mlp":
            self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)  # rows that ranks do not divide
        elif part.kind == "tied":
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        elif part.kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif part.kind == "experts":
            self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH)
        elif part.kind == "scaled":
            self.scale, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0, WIDTH))
        else:
            self.base, self.a = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2, bias=False)
            self.b = nn.Linear(2, WIDTH, bias=False)
            self.base.requires_grad_(False)
        self.to(getattr(torch, part.dtype))
        self.tie()

    def tie(self) -> None:
        """Makes the tied weights one parameter."""
        if self.kind == "tied":
            self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self._compute(x.to(next(self.parameters()).dtype)).to(x.dtype)

    def _compute(self, x: Tensor) -> Tensor:
        if self.kind == "norm":
            return torch.tanh(self.norm(x))
        if self.kind == "experts":
            return torch.tanh(torch.einsum("bi,eio->beo", x, self.experts)).mean(1)
        if self.kind == "scaled":
            return torch.tanh(x * self.scale) + self.nothing.sum()
        if self.kind == "adapter":
            return torch.tanh(self.base(x) + self.b(self.a(x)))
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Parts in a row and a head; a forward may leave parts out."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Body(part) for part in parts)
        self.head = nn.Linear(WIDTH, 2).double()

    def forward(self, x: Tensor, skipped: Collection[int]) -> Tensor:
        for at, part in enumerate(self.parts):
            x = x if at in skipped else part(x)
        out: Tensor = self.head(x)
        return out

    def tie(self) -> None:
        """Makes tied weights one parameter again."""
        for body in self.parts:
            body.tie()  # type: ignore[operator]


def shard(model: Net, parts: Sequence[Part], mesh: DeviceMesh, options: Collection[str]) -> Any:
    """Shards a model; the option "replicated" keeps vectors whole."""
    kept = [param for param in model.parameters() if param.ndim < 2] if "replicated" in options else []
    for part, body in zip(parts, model.parts, strict=True):
        if part.unit:
            hsdp.fully_shard(body, mesh=mesh, replicate_params=kept)
    return hsdp.fully_shard(model, mesh=mesh, replicate_params=kept)

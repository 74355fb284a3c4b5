"""The models that random programs of persistence train: tiny, with every kind of tensor that a state may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

WIDTH = 4
KINDS = ("linear", "tied", "few", "buffers", "frozen", "bf16", "experts", "extra")


class Body(nn.Module):
    """One part: [batch, WIDTH] to the same, smooth in all its parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)  # rows that ranks do not divide
        elif kind == "tied":
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            self.down.weight = self.up.weight
        elif kind == "few":
            self.row, self.scale = nn.Parameter(torch.empty(1, WIDTH)), nn.Parameter(torch.empty(()))
            self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        elif kind == "buffers":
            self.norm = nn.LayerNorm(WIDTH)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("passing", torch.ones(3), persistent=False)
        elif kind in ("frozen", "bf16"):
            self.base, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
            self.base.requires_grad_(False)
        elif kind == "experts":
            self.experts = nn.Parameter(torch.empty(3, WIDTH, WIDTH))
        else:
            self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
            self.seen: dict[str, Any] = {"count": 0, "sums": [torch.zeros(2, dtype=torch.float64)]}
        self.double()
        if kind == "bf16":
            self.base.to(torch.bfloat16)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws every parameter, and puts every buffer to where it starts."""
        for param in self.parameters(recurse=False):
            param.normal_(std=0.5)
        if self.kind == "buffers":
            self.calls.zero_()
            self.mean.zero_()
            self.passing.fill_(1.0)

    def get_extra_state(self) -> Any:
        return self.seen if self.kind == "extra" else {}

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "extra":
            self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        return x + self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        if self.kind == "few":
            return torch.tanh(x * self.row * self.scale) + self.nothing.sum()
        if self.kind == "buffers":
            if self.training:
                self.calls += 1
                self.mean.lerp_(self.norm.weight.detach(), 0.2)
                self.passing.mul_(0.9)
            return torch.tanh(self.norm(x) - self.mean) * self.passing.mean()
        if self.kind in ("frozen", "bf16"):
            hidden = self.base(x.to(self.base.weight.dtype)).double() if self.kind == "bf16" else self.base(x)
            return self.down(torch.tanh(hidden))  # type: ignore[no-any-return]
        if self.kind == "experts":
            return torch.tanh(torch.einsum("bi,eio->beo", x, self.experts)).mean(1)
        if self.kind == "extra" and self.training:
            self.seen["count"] += 1
            self.seen["sums"][0] = self.seen["sums"][0] + 1.5
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Parts in a row and a head."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Body(kind) for kind in kinds)
        self.head = nn.Linear(WIDTH, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)  # type: ignore[no-any-return]

    def tie(self) -> None:
        """Makes tied weights one parameter, which `to_empty` and moves between devices undo."""
        for part in self.parts:
            if part.kind == "tied":
                part.down.weight = part.up.weight  # type: ignore[union-attr]


def placement(param: nn.Parameter) -> Shard | None:
    """Experts are cut along what they compute; there may be fewer of them than ranks."""
    return Shard(1) if param.ndim == 3 else None


def fresh(kinds: Sequence[str], seed: int) -> Net:
    """A model on the CPU."""
    torch.manual_seed(seed)
    model = Net(kinds)
    for module in model.modules():
        if isinstance(module, (Body, nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
    return model

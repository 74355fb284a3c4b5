"""The models that random programs of optimizers train: tiny, with every kind of parameter that a step may meet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hsdp

WIDTH = 4
KINDS = ("mlp", "tied", "norm", "experts", "scaled", "adapter")
CUT = ("mlp", "tied", "experts", "adapter")
"""Kinds that ranks of tensor parallelism can share."""


@dataclass(frozen=True)
class Part:
    """One part of a model: its kind, whether it is a unit or the root's, and the dtype of its parameters.

    Attributes:
        cut: ranks of tensor parallelism, where there are any, share its layers.
    """

    kind: str
    unit: bool = True
    dtype: str = "float64"
    cut: bool = False


class Body(nn.Module):
    """What a part computes: [batch, WIDTH] to the same, smooth in all its parameters."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.kind = part.kind
        self.tp: DeviceMesh | None = None
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

    def cut(self, tp: DeviceMesh) -> None:
        """Shares the layers out over ranks of tensor parallelism: columns, then rows; experts, of which each has some."""
        self.tp, trained = tp, {name: param.requires_grad for name, param in self.named_parameters()}
        halves = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        columns = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("up", "down", "base")}
        if self.kind == "mlp":
            parallelize_module(self, tp, halves)
        elif self.kind == "tied":
            parallelize_module(self, tp, {name: columns[name] for name in ("up", "down")})
            self.tie()
        elif self.kind == "experts":
            self.experts = nn.Parameter(distribute_tensor(self.experts.detach(), tp, [Shard(0)]))
        elif self.kind == "adapter":
            parallelize_module(self, tp, {"base": columns["base"], "a": halves["up"], "b": halves["down"]})
        for name, param in self.named_parameters():
            param.requires_grad_(trained[name])

    def forward(self, x: Tensor) -> Tensor:
        return x + self._compute(x.to(next(self.parameters()).dtype)).to(x.dtype)

    def _compute(self, x: Tensor) -> Tensor:
        if self.kind == "norm":
            return torch.tanh(self.norm(x))
        if self.kind == "experts":
            return self._of_experts(x) / 3
        if self.kind == "scaled":
            return torch.tanh(x * self.scale) + self.nothing.sum()
        if self.kind == "adapter":
            return torch.tanh(self.base(x) + self.b(self.a(x)))
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]

    def _of_experts(self, x: Tensor) -> Tensor:
        if self.tp is None or not isinstance(self.experts, DTensor):
            return torch.tanh(torch.einsum("bi,eio->beo", x, self.experts)).sum(1)
        x = DTensor.from_local(x, self.tp, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        here = torch.tanh(torch.einsum("bi,eio->beo", x, self.experts.to_local())).sum(1)
        return DTensor.from_local(here, self.tp, [Partial()], run_check=False).full_tensor()


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
    """Shards a model.

    Args:
        mesh: over its axis "tp", if it has one, parts are cut that are to be; the others are those of data parallelism.
        options: "replicated" keeps vectors whole; with "one mesh" all parameters live on the mesh with tensor parallelism,
            not only those of parts that are cut.
    """
    how: dict[str, Any] = {"mesh": mesh}
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        for part, body in zip(parts, model.parts, strict=True):
            if part.cut:
                body.cut(mesh["tp"])  # type: ignore[operator]
        if "one mesh" in options:
            replicate = "replicate" if "replicate" in names else None
            how["dp_mesh_dims"] = hsdp.DataParallelMeshDims(shard="shard", replicate=replicate)
        else:
            how["mesh"] = mesh[names[:-1]]
    kept = [param for param in model.parameters() if param.ndim < 2] if "replicated" in options else []
    for part, body in zip(parts, model.parts, strict=True):
        if part.unit:
            hsdp.fully_shard(body, replicate_params=kept, **how)
    return hsdp.fully_shard(model, replicate_params=kept, **how)

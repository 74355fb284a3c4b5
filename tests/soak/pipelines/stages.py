"""What the stages of random pipelines compute, how their layers are called, and how they are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import hsdp
from tests.soak.optimizers.models import Body
from tests.soak.pipelines.programs import Plan


class Planned(Exception):  # noqa: N818
    """What a forward raises that is told to."""


class _Attach(torch.autograd.Function):
    """Hands `x` on; in backward, `aux` has a gradient of 0.1: an auxiliary loss of a stage that sees no loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, aux: Tensor) -> Tensor:
        ctx.save_for_backward(aux)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (aux,) = ctx.saved_tensors
        return grads[0], torch.full_like(aux, 0.1)


class Stage(nn.Module):
    """Layers, called as the plan of the stage says.

    Attributes:
        raises_in: how many more calls end well before one raises; None: all do.
        aux: of the last call, what the loss is to add.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Body(part) for part, _ in plan.layers)
        self.calls = [call for _, call in plan.layers]
        self.raises_in: int | None = None
        self.tells = plan.tells
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        raises, self.raises_in = self.raises_in == 0, None if self.raises_in is None else self.raises_in - 1
        for at, (layer, call) in enumerate(zip(self.layers, self.calls, strict=True)):
            if call in ("checkpointed", "reentrant"):
                x = checkpoint(layer, x, use_reentrant=call == "reentrant")
            elif call != "unused" and not (call == "gated" and x.detach()[0, 0] > 0):  # other rows, other ranks: otherwise
                x = layer(x)
            if call == "twice":
                x = layer(x)
            elif call == "aux":
                x = _Attach.apply(x, x.pow(2).mean())
            if raises and at == len(self.calls) // 2:
                raise Planned
        self.aux = x.pow(2).mean() * 0.1 if self.tells else self.aux
        return x


def shard(stage: Stage, plan: Plan, mesh: DeviceMesh) -> Any:
    """Shards a stage as its plan says."""
    dtypes = {"reduce_dtype": torch.float32} if plan.precision == "reduce" else {}
    if plan.precision in ("float32", "float64"):
        sums = getattr(torch, plan.precision)
        dtypes = {"param_dtype": torch.float32, "reduce_dtype": sums, "output_dtype": torch.float64}
    how: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.reshard,
        "mp_policy": hsdp.MixedPrecisionPolicy(**dtypes),
        "comm_policy": hsdp.CommPolicy(**dict(plan.policy)),
        "offload_policy": hsdp.CPUOffloadPolicy() if plan.offload else None,
        "replicate_params": [param for param in stage.parameters() if param.ndim < 2] if plan.replicated else [],
    }
    for layer, (part, _) in zip(stage.layers, plan.layers, strict=True):
        if part.unit:
            hsdp.fully_shard(layer, **how)
    return hsdp.fully_shard(stage, **how)

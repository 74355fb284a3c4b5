"""Weights that are gathered in 8 bits, on one page: a tensor subclass says what of a shard is sent.

    python -m hsdp.examples.int8_gather
    torchrun --nproc-per-node 4 -m hsdp.examples.int8_gather --replicate 2

Each row of a weight travels as int8 and one scale, a quarter of fp32's bytes, and the layer computes with the rounded row.
Shards and optimizer keep every digit, and the gradient of the rounded weight serves as that of the weight itself (a
straight-through estimator, Bengio et al. 2013). The subclass is written for the protocol of PyTorch's FSDP2, and runs under
that as it is.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from hsdp import clip_grad_norm_, shard_units
from hsdp.examples.launch import choose_device, process_group, rank, say_step, world_size
from hsdp.examples.llama import Llama, LlamaConfig
from hsdp.examples.options import positive

CONFIG = LlamaConfig(vocab=64, width=64, layers=2, heads=4, hidden=128, max_len=16)
GLOBAL_BATCH = 16

aten = torch.ops.aten
STAYS_A_WEIGHT = {
    *(aten.detach.default, aten.clone.default, aten._to_copy.default, aten.empty_like.default, aten.new_zeros.default),
    *(aten.view.default, aten.as_strided.default, aten.slice.Tensor, aten.split.Tensor, aten.copy_.default),
}


class Int8Weight(Tensor):
    """A matrix whose rows are gathered as int8. Everything else is done with the plain matrix, ``rows``, inside of it."""

    rows: Tensor

    @staticmethod
    def __new__(cls, rows: Tensor) -> Int8Weight:
        """Wraps ``rows``, floating-point ``[out, in]``, and shares its memory."""
        return Tensor._make_wrapper_subclass(cls, rows.shape, strides=rows.stride(), dtype=rows.dtype, device=rows.device)

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The names of the tensors inside, and what else there is to know."""
        return ["rows"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Int8Weight:
        """The same around other rows."""
        return cls(inner["rows"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs every operation on the rows; what is cut from a weight, or copied, is a weight too."""
        result = func(*tree_map_only(cls, lambda w: w.rows, args), **tree_map_only(cls, lambda w: w.rows, kwargs or {}))
        if func._schema.is_mutable:
            return None if result is None else args[0]
        return tree_map_only(Tensor, cls, result) if func in STAYS_A_WEIGHT else result

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, Tensor], None]:
        """What is sent of a shard: ``int8 [rows, in]`` and ``[rows, 1]`` scales."""
        scales = self.rows.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(127)
        return (self.rows.div(scales).round_().to(torch.int8), scales), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight of what was gathered, at first; later it is written into ``out``, which may have fewer rows."""
        codes, scales = gathered
        if out is None:
            whole = (codes * scales).to(param_dtype)
            return whole, (whole,)
        # `.data`: autograd, which keeps `out` from forward to backward, must not take this for a change of it.
        torch.mul(codes[: len(out)], scales[: len(out)], out=out.data)
        return None


def quantise(model: nn.Module) -> None:
    """Makes the weights of linear layers ``Int8Weight``."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Int8Weight(layer.weight.detach()))


def build(mesh: DeviceMesh) -> Llama:
    """A Llama whose blocks gather their matrices in 8 bits; each block is a unit."""
    torch.manual_seed(0)
    model = Llama(CONFIG).to(mesh.device_type)
    quantise(model.blocks)
    shard_units(model, "blocks.*", mesh=mesh)
    return model


def train(model: Llama, steps: int, mesh: DeviceMesh) -> list[float]:
    """Learns to count by seven; returns the losses of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = batch(step, mesh)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        say_step(step, steps, f"loss {losses[-1]:.3f}")
    return losses


def batch(step: int, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a step's batch: ``int64 [rows, max_len + 1]``; the whole batch is the same on every mesh."""
    starts = torch.randint(CONFIG.vocab, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + 7 * torch.arange(CONFIG.max_len + 1)) % CONFIG.vocab
    rows = GLOBAL_BATCH // mesh.size()
    return tokens[mesh.get_rank() * rows :][:rows].to(mesh.device_type)


def main(argv: list[str] | None = None) -> int:
    """Runs the job on this rank."""
    parser = argparse.ArgumentParser(description="weights gathered in 8 bits on a hybrid-sharded mesh")
    parser.add_argument("--steps", type=positive, default=100, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--replicate", type=positive, default=1, help="replicas of the model; the rest shards (%(default)s)"
    )
    options = parser.parse_args(argv)
    if GLOBAL_BATCH % world_size() or world_size() % options.replicate:
        parser.error(f"{world_size()} processes do not divide a batch of {GLOBAL_BATCH}, or --replicate not them")
    device = choose_device("auto")
    with process_group(device):
        shape = (options.replicate, world_size() // options.replicate)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        model = build(mesh)
        losses = train(model, options.steps, mesh)
        if rank() == 0:
            numel = sum(layer.weight.numel() for layer in model.blocks.modules() if isinstance(layer, nn.Linear))
            print(f"{numel:,} weights gathered in 8 bits learn to count: {losses[0]:.3f} -> {losses[-1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

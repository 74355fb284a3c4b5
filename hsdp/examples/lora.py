"""LoRA fine-tuning on one page: the base model is frozen and sharded, small adapters (Hu et al. 2021) learn.

    python -m hsdp.examples.lora
    torchrun --nproc-per-node 4 -m hsdp.examples.lora --replicate 2 --save adapters.pt

The language is counting: each token is the one before plus a constant. The base model learns to count by one, which
stands for loading a pretrained one; the adapters then teach it to count by seven. Frozen parameters have no gradients, so
nothing is reduced for them, and the optimizer holds no state for them; gradients flow through them all the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hsdp import clip_grad_norm_, full_params, shard_units
from hsdp.examples.launch import JobError, choose_device, on_rank_zero, process_group, rank, say_step, world_size
from hsdp.examples.llama import Llama, LlamaConfig
from hsdp.examples.options import positive
from hsdp.examples.report import prepare_folder

CONFIG = LlamaConfig(vocab=64, width=64, layers=2, heads=4, hidden=128, max_len=16)
GLOBAL_BATCH = 16


class Adapted(nn.Module):
    """A linear layer plus a trained product of two thin matrices: `base(x) + grow(shrink(x))`, at first `base(x)`."""

    def __init__(self, base: nn.Linear, width: int) -> None:
        super().__init__()
        self.base = base
        self.shrink = nn.Linear(base.in_features, width, bias=False)
        self.grow = nn.Linear(width, base.out_features, bias=False)
        nn.init.zeros_(self.grow.weight)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in] -> [..., out]`."""
        return self.base(x) + self.grow(self.shrink(x))  # type: ignore[no-any-return]


def build(mesh: DeviceMesh, adapter_width: int) -> Llama:
    """A Llama with adapters beside all linear layers of its blocks; each block is a unit."""
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for parent in list(model.blocks.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Adapted(layer, adapter_width))
    model.to(mesh.device_type)
    shard_units(model, "blocks.*", mesh=mesh)
    return model


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by name."""
    return {name: param for name, param in model.named_parameters() if ".grow." in name or ".shrink." in name}


def learn(model: Llama, params: Iterable[nn.Parameter], count_by: int, steps: int, mesh: DeviceMesh) -> list[float]:
    """Trains `params` and freezes the others; returns the losses of this rank."""
    model.requires_grad_(False)  # may change at any time, not only before sharding
    params = list(params)
    for param in params:
        param.requires_grad_(True)
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = batch(step, count_by, mesh)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        say_step(step, steps, f"loss {losses[-1]:.3f}")
    return losses


def batch(step: int, count_by: int, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a step's batch: `int64 [rows, max_len + 1]`; the whole batch is the same on every mesh."""
    starts = torch.randint(CONFIG.vocab, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + count_by * torch.arange(CONFIG.max_len + 1)) % CONFIG.vocab
    rows = GLOBAL_BATCH // mesh.size()
    return tokens[mesh.get_rank() * rows :][:rows].to(mesh.device_type)


def save(model: Llama, path: Path) -> None:
    """Writes the adapters, whole, from the mesh's first rank; every rank calls it."""
    with full_params(model, rank0_only=True):
        if dist.get_rank() == 0:
            torch.save({name: param.detach().cpu() for name, param in adapters(model).items()}, path)


def prepare(path: Path) -> None:
    """Makes the folder of the file that will be saved, before anything is trained.

    Raises:
        JobError: it cannot be made or written to, or `path` is a folder itself.
    """
    prepare_folder(path.absolute().parent)
    if path.is_dir():
        raise JobError(f"--save {path} is a folder; name a file in it")


def main(argv: list[str] | None = None) -> int:
    """Runs the job on this rank."""
    parser = argparse.ArgumentParser(description="LoRA fine-tuning on a hybrid-sharded mesh")
    parser.add_argument("--steps", type=positive, default=100, help="of each of the two phases (%(default)s)")
    parser.add_argument("--adapter-width", type=positive, default=4, help="rank of the adapters (%(default)s)")
    parser.add_argument(
        "--replicate", type=positive, default=1, help="replicas of the model; the rest shards (%(default)s)"
    )
    parser.add_argument("--save", type=Path, help="file for the adapters (none)")
    options = parser.parse_args(argv)
    if GLOBAL_BATCH % world_size() or world_size() % options.replicate:
        parser.error(f"{world_size()} processes do not divide a batch of {GLOBAL_BATCH}, or --replicate not them")
    device = choose_device("auto")
    with process_group(device):
        if options.save:
            try:
                on_rank_zero(lambda: prepare(options.save))
            except JobError as mistake:
                parser.error(str(mistake))
        shape = (options.replicate, world_size() // options.replicate)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        model = build(mesh, options.adapter_width)
        small = adapters(model)
        base = [param for name, param in model.named_parameters() if name not in small]
        for what, params, count_by in (("base", base, 1), ("adapters", list(small.values()), 7)):
            losses = learn(model, params, count_by, options.steps, mesh)
            numel = sum(param.numel() for param in params)
            if rank() == 0:
                print(f"{what}: {numel:,} parameters learn to count by {count_by}: {losses[0]:.3f} -> {losses[-1]:.3f}")
        if options.save:
            save(model, options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())

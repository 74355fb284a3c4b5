"""A GAN on one page: two sharded models in one loop, each other's input, never in each other's way.

    python -m hsdp.examples.gan
    torchrun --nproc-per-node 4 -m hsdp.examples.gan --replicate 2

A generator learns to draw points from eight small clouds on a circle. While its forward waits for its backward, the
discriminator runs forward and backward on the detached samples and its optimizer steps: each model has an iteration of its
own. In the generator's turn the discriminator is frozen, so gradients flow through it and nothing of it is reduced.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hsdp import shard_units
from hsdp.examples.launch import choose_device, process_group, rank, say_step, world_size
from hsdp.examples.options import positive

NUM_MODES = 8
NOISE = 8
WIDTH = 64
GLOBAL_BATCH = 256


def mlp(num_in: int, num_out: int) -> nn.Sequential:
    """Three linear layers."""
    layers = (nn.Linear(num_in, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_out))
    return nn.Sequential(*layers)


def build(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Generator, `[n, NOISE] -> [n, 2]`, and discriminator, `[n, 2] -> [n, 1]`; each linear layer is a unit."""
    torch.manual_seed(0)
    models = mlp(NOISE, 2), mlp(2, 1)
    for model in models:
        model.to(mesh.device_type, dtype)
        shard_units(model, nn.Linear, mesh=mesh)
    return models


def real_points(num: int, generator: torch.Generator) -> Tensor:
    """Points from the clouds: `[num, 2]`."""
    angles = torch.randint(NUM_MODES, (num,), generator=generator) * (2 * math.pi / NUM_MODES)
    return torch.stack((angles.cos(), angles.sin()), 1) + 0.05 * torch.randn(num, 2, generator=generator)


def batch(step: int, mesh: DeviceMesh, dtype: torch.dtype) -> list[Tensor]:
    """This rank's rows of real points, the generator's noise and two blurs; the whole batch is the same on every mesh."""
    random = torch.Generator().manual_seed(step)
    whole = [real_points(GLOBAL_BATCH, random)]
    whole += [torch.randn(GLOBAL_BATCH, width, generator=random) for width in (NOISE, 2, 2)]
    rows = GLOBAL_BATCH // mesh.size()
    return [tensor[mesh.get_rank() * rows :][:rows].to(mesh.device_type, dtype) for tensor in whole]


def train(models: tuple[nn.Module, nn.Module], steps: int, mesh: DeviceMesh) -> list[tuple[float, float]]:
    """Trains both; returns this rank's losses of discriminator and generator."""
    generator, discriminator = models
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=3e-3, betas=(0.5, 0.9))
    dtype = next(generator.parameters()).dtype
    losses = []
    for step in range(steps):
        real, noise, blur, other_blur = batch(step, mesh, dtype)
        width = 0.5 * (1 - step / steps)  # at first the clouds are blurred into one, or the generator misses most
        real = real + width * blur
        fake = generator(noise) + width * other_blur
        loss_d = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        loss_d.backward()
        optimizer_d.step()
        optimizer_d.zero_grad()

        discriminator.requires_grad_(False)
        loss_g = F.softplus(-discriminator(fake)).mean()
        loss_g.backward()
        discriminator.requires_grad_(True)
        optimizer_g.step()
        optimizer_g.zero_grad()
        losses.append((loss_d.item(), loss_g.item()))
        say_step(step, steps, f"discriminator {losses[-1][0]:.3f}  generator {losses[-1][1]:.3f}")
    return losses


@torch.no_grad()
def quality(generator: nn.Module, mesh: DeviceMesh) -> tuple[float, int]:
    """The share of samples that lie in a cloud, and how many clouds have some; every rank calls it."""
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))
    points = generator(noise.to(mesh.device_type)).cpu()
    angles = torch.arange(NUM_MODES) * (2 * math.pi / NUM_MODES)
    distance, mode = torch.cdist(points, torch.stack((angles.cos(), angles.sin()), 1)).min(1)
    inside = distance < 0.2
    return inside.float().mean().item(), len(mode[inside].unique())


def main(argv: list[str] | None = None) -> int:
    """Runs the job on this rank."""
    parser = argparse.ArgumentParser(description="A GAN on a hybrid-sharded mesh")
    parser.add_argument("--steps", type=positive, default=1000, help="turns of both models (%(default)s)")
    parser.add_argument(
        "--replicate", type=positive, default=1, help="replicas of the models; the rest shards (%(default)s)"
    )
    options = parser.parse_args(argv)
    if GLOBAL_BATCH % world_size() or world_size() % options.replicate:
        parser.error(f"{world_size()} processes do not divide a batch of {GLOBAL_BATCH}, or --replicate not them")
    device = choose_device("auto")
    with process_group(device):
        shape = (options.replicate, world_size() // options.replicate)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        models = build(mesh)
        losses = train(models, options.steps, mesh)
        share, modes = quality(models[0], mesh)
        if rank() == 0:
            means = [sum(column) / len(column) for column in zip(*losses[-100:], strict=True)]
            print(f"losses: discriminator {means[0]:.3f}, generator {means[1]:.3f}")
            print(f"{share:.0%} of the samples lie in a cloud; {modes} of {NUM_MODES} clouds have some")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""FSDP2 around tensor and sequence parallelism on a 2-D mesh.

torchrun --nproc-per-node 4 tests/api/fsdp2_scripts/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

DIM, LENGTH, STEPS = 8, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


def main(dtype: torch.dtype) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(2)
    model = Model().to(dtype)
    tp = mesh["tp"]
    plan = {
        "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "last": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(use_local_output=True),
            "gate": ColwiseParallel(input_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tp, plan)
        parallelize_module(
            block, tp, PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True)
        )
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    losses = []
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(STEPS):
        x = torch.randn(3, LENGTH, DIM, generator=generator, dtype=torch.float64)
        loss = (model(x.to(dtype)) - x.flip(-1).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        losses.append(total.item() / 2)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main(torch.float32))
    dist.destroy_process_group()

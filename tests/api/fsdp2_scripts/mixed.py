"""FSDP2 with mixed precision, gradient accumulation, activation checkpointing, and a checkpoint that the run goes on from.

torchrun --nproc-per-node 4 tests/api/fsdp2_scripts/mixed.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

DIM, STEPS, MICRO_BATCHES = 16, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(DIM, 1)

    def forward(self, x):
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)
        return self.last(x)


def build(dtype: torch.dtype):
    torch.manual_seed(1)
    model = Model().to(torch.float64 if dtype is torch.float64 else torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    reduce = torch.float64 if dtype is torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, output_dtype=reduce)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps, generator, dtype) -> list[float]:
    losses = []
    for step in range(steps):
        sync_only_shards = step % 2 == 1
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            if sync_only_shards:
                model.set_requires_all_reduce(last)
            else:
                model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
            target = x.square().sum(1, keepdim=True)
            loss = (model(x.to(dtype)) - target).square().mean() / MICRO_BATCHES
            loss.backward()
            losses.append(loss.detach().double())
        optimizer.step()
        optimizer.zero_grad()
    stacked = torch.stack(losses)
    dist.all_reduce(stacked)
    return (stacked / dist.get_world_size()).tolist()


def main(dtype: torch.dtype) -> list[float]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    model, optimizer = build(dtype)
    losses = train(model, optimizer, STEPS, generator, dtype)
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=where[0])
    model, optimizer = build(dtype)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=where[0])
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return losses + train(model, optimizer, STEPS, generator, dtype)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main(torch.bfloat16))
    dist.destroy_process_group()

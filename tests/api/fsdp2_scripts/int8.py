"""FSDP2 with weights that are gathered in 8 bits, a tensor subclass, on a 2 x 2 mesh; AdamW, and a checkpoint of DCP.

torchrun --nproc-per-node 4 tests/api/fsdp2_scripts/int8.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hsdp.examples.int8_gather import Int8Weight, quantise

DIM, STEPS, MICRO_BATCHES = 16, 4, 2


def build(dtype: torch.dtype):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 4)).to(dtype)
    quantise(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in model[:-1:2]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, generator, dtype) -> list[float]:
    losses = []
    for _ in range(STEPS):
        for micro in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            x = torch.randn(4, 8, generator=generator, dtype=torch.float64).to(dtype)
            loss = (model(x) - x[:, :4]).square().mean() / MICRO_BATCHES
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
    losses = train(model, optimizer, generator, dtype)
    assert all(isinstance(layer.weight.to_local(), Int8Weight) for layer in model[::2])
    paths = [tempfile.mkdtemp()]
    dist.broadcast_object_list(paths)
    torch.serialization.add_safe_globals([Int8Weight])
    dcp.save({"model": model.state_dict()}, checkpoint_id=paths[0])
    fresh, optimizer = build(dtype)
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    state = fresh.state_dict()
    dcp.load({"model": state}, checkpoint_id=paths[0])
    fresh.load_state_dict(state)
    return losses + train(fresh, optimizer, generator, dtype)

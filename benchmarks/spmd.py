"""Parameters with annotations of the package spmd_types, sharded by FSDP2 of torch 2.14 and by hsdp: which gradients come?

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.spmd

Needs torch 2.14 and spmd_types. A linear layer without bias, on 2 data-parallel x 2 tensor-parallel ranks, gets a row of
ones times the rank's number plus one, and its output is summed. Each line: what the weight is annotated as on axis "tp",
and whether spmd_types checks the forward; the first value of its gradient on ranks 0 to 3, and the gradient's placements.

    R    whole on both ranks, which compute different things: the gradient is the sum over "tp", the mean over "dp": 5 5 5 5
    I    whole on both, which compute the same (here they do not): the mean over "dp": 2 3 2 3
    S(0) each rank has half of the rows: the mean over "dp" of its half: 2 3 2 3
"""

from __future__ import annotations

import importlib
import os
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import hsdp

KINDS = ("R", "I", "S(0)")


def _layer(spmd: Any, mesh: DeviceMesh, kind: str) -> nn.Module:
    """The whole layer, or this rank's half of its rows, annotated."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    if kind == "S(0)":
        half = layer.weight.detach().chunk(2)[mesh.get_local_rank("tp")]
        layer.weight = nn.Parameter(half.clone())
    dp, tp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("dp", "tp"))
    spmd.assert_type(layer.weight, {dp: spmd.R, tp: spmd.S(0) if kind == "S(0)" else getattr(spmd, kind)})
    return layer


def _gradient(spmd: Any, mesh: DeviceMesh, library: Any, kind: str, checks: bool) -> str:
    """Of all ranks, the first value of the gradient, or why there is none."""
    layer = _layer(spmd, mesh, kind)
    typecheck = importlib.import_module("spmd_types.checker").typecheck
    try:
        with spmd.set_current_mesh(mesh):
            library(layer, mesh=mesh, dp_mesh_dims=hsdp.DataParallelMeshDims(shard="dp"))
            x = torch.full((1, 4), dist.get_rank() + 1.0)
            with typecheck() if checks else nullcontext():
                if checks:
                    spmd.assert_type(x, {"dp": spmd.V, "tp": {"R": spmd.V, "I": spmd.I}.get(kind, spmd.R)})
                loss = layer(x).sum()
            loss.backward()
    except Exception as error:  # on all ranks alike
        return f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
    gradient: Any = layer.weight.grad
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, float(gradient.to_local().flatten()[0]))
    return f"{' '.join(f'{value:g}' for value in values)}   {gradient.placements}"


def main() -> None:
    """Prints a line for each annotation and library."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    spmd = importlib.import_module("spmd_types")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for checks in (False, True):
        for kind in KINDS:
            for name, library in (("FSDP2", _of_torch), ("hsdp", hsdp.fully_shard)):
                results = _gradient(spmd, mesh, library, kind, checks)
                if dist.get_rank() == 0:
                    print(f"{kind:<5} {'checked' if checks else '':<8} {name:<6} {results}", flush=True)
                dist.barrier()
    os._exit(0)


def _of_torch(layer: nn.Module, mesh: DeviceMesh, dp_mesh_dims: hsdp.DataParallelMeshDims) -> None:
    dims = importlib.import_module("torch.distributed.fsdp").DataParallelMeshDims(shard=dp_mesh_dims.shard)
    torch_fully_shard(layer, mesh=mesh, dp_mesh_dims=dims)


if __name__ == "__main__":
    main()

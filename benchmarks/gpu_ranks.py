"""`python -m benchmarks.gpu_ranks`: ranks that share one GPU and communicate by NCCL, hsdp beside FSDP2.

Needs NCCL 2.30 or newer. Without `nvidia-cuda-mps-control -d`, started before, ranks take turns on the GPU and their
collectives wait for turns. All ranks compute on one GPU, so a step takes longer than with a GPU for each: what the table
compares is the two libraries, whose losses have to be equal as far as bf16 allows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import gpu
from benchmarks.harness import progress, publish

MESHES: dict[str, tuple[int, ...]] = {"2": (2,), "4": (4,), "2x2": (2, 2)}
SIZES = gpu.Sizes(layers=10, rounds=3, steps=2)


def measure(library: str, sizes: gpu.Sizes, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """One library on this rank: milliseconds of a step, round by round, and losses before and behind them."""
    _, step = gpu.prepare(library, sizes, mesh, device)
    losses = [step().item() for _ in range(sizes.warmup)]
    times = []
    for _ in range(sizes.rounds):
        dist.barrier()
        times.append(gpu.time_of(step, sizes.steps, device)[0])
    return {"library": library, "ms": times, "losses": [*losses, step().item()]}


def _main(rank: int, kind: str, library: str, shape: tuple[int, ...], sizes: gpu.Sizes, result: str) -> None:
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0")
    device = gpu.device_of(kind)
    world = torch.Size(shape).numel()
    store = dist.FileStore(f"{result}.store", world)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    measured = measure(library, sizes, mesh, device)
    if rank == 0:
        Path(result).write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def run(kind: str, names: Sequence[str], sizes: gpu.Sizes, folder: Path) -> list[dict[str, Any]]:
    """Every mesh with both libraries, in processes of their own."""
    rows = []
    for name in names:
        for library in ("hsdp", "fsdp2"):
            progress(f"{library} on {name} ...")
            result, shape = folder / f"{library}{name}", MESHES[name]
            mp.spawn(_main, (kind, library, shape, sizes, str(result)), nprocs=torch.Size(shape).numel())
            rows.append({"mesh": name, **json.loads(result.read_text())})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What was found, as text."""
    lines = [f"{'mesh':>5}  {'library':8}{'ms per step (min median max)':>30}   losses"]
    for row in rows:
        spread = f"{min(row['ms']):.1f} {statistics.median(row['ms']):.1f} {max(row['ms']):.1f}"
        lines.append(f"{row['mesh']:>5}  {row['library']:8}{spread:>30}   {' '.join(f'{x:.6f}' for x in row['losses'])}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_ranks", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal with tiny sizes")
    parser.add_argument(
        "--meshes", nargs="+", choices=list(MESHES), default=list(MESHES), help="of ranks that shard, or 2 x 2"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs a rehearsal")
    sizes = SIZES if args.device == "cuda" else gpu.TINY
    with tempfile.TemporaryDirectory(prefix="hsdp-bench-") as folder:
        rows = run(args.device, args.meshes, sizes, Path(folder))
    settings = {**vars(args), "sizes": vars(sizes)}
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu, a rehearsal"
    publish("gpu_ranks", table(rows), settings, args.json, context={"device": device}, rows=rows)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.step`: a training step of hsdp beside FSDP2, on gloo ranks, 1-D and 2-D meshes.

A step is forward, backward, optimizer step and zero_grad of a small transformer, on the same weights and batches.

    --library tree        `CommPolicy(reduction="tree")` beside hsdp's default
    --sockets             hsdp's ranks communicate through gloo's sockets, as FSDP2's do, not through memory
    --clip                the step clips gradients, too: `hsdp.clip_grad_norm_`, torch's beside it for FSDP2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from benchmarks.harness import Contender, Plan, Step, add_arguments, compare, positive, progress, report, shard
from tests.support.models import Case, Transformer, language

MESHES = {"2": (2,), "4": (4,), "2x2": (2, 2), "4x1": (4, 1), "1x4": (1, 4)}


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batches."""

    vocab: int = 512
    dim: int = 128
    heads: int = 4
    hidden: int = 384
    layers: int = 4
    rows: int = 2
    length: int = 64


def build(library: str, policy: dict[str, Any], sizes: Sizes, mesh: DeviceMesh, clip: bool = False) -> Step:
    """Shard the model by `library` and return its training step on this rank."""
    case = make_case(sizes)
    model = case.model()
    assert isinstance(model, Transformer)
    shard(library, (*model.blocks, model), mesh, comm_policy=hsdp.CommPolicy(**policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = case.batch(0, mesh.get_rank())
    clip_grad_norm_: Any = hsdp.clip_grad_norm_ if library == "hsdp" else torch.nn.utils.clip_grad_norm_

    def step() -> None:
        case.loss(model, batch).backward()
        if clip:
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_case(sizes: Sizes) -> Case:
    """The transformer with its batches, in float32."""
    case = language("step", **vars(sizes))
    return Case(case.name, case.build, case.draw, case.loss, torch.float32)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    args = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the processes that are about to start
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    num_params = sum(p.numel() for p in make_case(sizes).model().parameters())
    progress(f"{num_params:,} parameters, {num_params * 4 / 2**20:.1f} MiB in float32")
    policy: dict[str, Any] = {"fusion": args.fusion} if args.fusion else {}
    if args.sockets:
        policy["shared_memory"] = False

    def contender(name: str, library: str, policy: dict[str, Any]) -> Contender:
        return Contender(name, partial(build, library, policy, sizes, clip=args.clip))

    if args.library == "tree":
        a, b = contender("tree", "hsdp", policy | {"reduction": "tree"}), contender("any", "hsdp", policy)
    else:
        a = contender(args.library, args.library, policy)
        b = contender("fsdp2" if args.library != "fsdp2" else "fsdp2 again", "fsdp2", {})
    rows = []
    for mesh in args.mesh:
        progress(f"mesh {mesh} ...")
        rows.append(compare(f"mesh {mesh}", MESHES[mesh], a, b, Plan(args.rounds, args.steps, args.warmup)))
    report("step", rows, {**vars(args), "num_params": num_params}, args.json)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=["2", "4", "2x2"], help="R x S or S")
    parser.add_argument("--library", choices=["hsdp", "fsdp2", "tree"], default="hsdp", help="fsdp2: against itself")
    parser.add_argument("--clip", action="store_true", help="clip gradients in every step")
    parser.add_argument("--fusion", choices=["auto", "packed", "direct"], help="CommPolicy(fusion=...)")
    parser.add_argument("--sockets", action="store_true", help="CommPolicy(shared_memory=False)")
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=positive, default=default, help="(default %(default)s)")
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} is not divisible by --heads {args.heads}")
    if (args.fusion or args.sockets) and args.library == "fsdp2":
        parser.error("--fusion and --sockets are policies of hsdp; leave out --library fsdp2")
    return args


if __name__ == "__main__":
    main()

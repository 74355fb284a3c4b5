"""`python -m hsdp plan`: plans of well-known models on meshes that need not exist."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

import torch

from hsdp.params.placement import least_padding
from hsdp.planning.data import Assumptions
from hsdp.planning.plans import Comparison, Plan, meshes_of
from hsdp.planning.presets import PRESETS, preset
from hsdp.planning.traffic import Link
from hsdp.policies import CommPolicy, MixedPrecisionPolicy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 1 if nothing fits."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        plans = _plans(args)
    except ValueError as error:
        parser.error(str(error))
    told: Plan | Comparison = plans[0] if len(plans) == 1 else Comparison(tuple(plans))
    shown = {"table": told.__str__, "json": told.to_json, "csv": told.to_csv}[args.format]()
    sys.stdout.write(shown.rstrip() + "\n")
    return 0 if any(plan.fits for plan in plans) else 1


def _plans(args: argparse.Namespace) -> list[Plan]:
    facts = preset(
        args.preset,
        dtype=_DTYPES[args.storage],
        mp_policy=MixedPrecisionPolicy(_DTYPES[args.param], _DTYPES[args.reduce]),
        comm_policy=CommPolicy(prefetch=args.prefetch, accumulate=args.accumulate),
        reshard_after_forward=args.reshard,
        shard_placement_fn=least_padding if args.placement == "least-padding" else None,
    )
    told = Assumptions(
        tokens_per_rank=args.tokens_per_rank,
        micro_batches=args.micro_batches,
        optimizer_states=args.optimizer_states,
        over_replicas=args.over_replicas,
        activations=int(args.activations * 2**30),
        link=Link(
            args.fast * 1e9,
            args.slow * 1e9,
            args.ranks_per_node,
            args.latency * 1e-6,
            args.fast_step * 1e-6,
            args.slow_step * 1e-6,
        ),
        flops=args.flops * 1e12,
        memory=None if args.memory is None else int(args.memory * 2**30),
        recompute=args.recompute,
    )
    meshes = list(args.mesh)
    if args.shard is not None or args.replicate is not None:
        meshes.append((args.replicate or 1, args.shard or 1))
    if args.world is not None:
        meshes += meshes_of(args.world)
    if not meshes:
        raise ValueError("no mesh: pass --replicate 8 --shard 64, --mesh 8x64 16x32, or --world 512 for all of that size")
    return [Plan.of(args.preset, facts, replicas, shards, told) for replicas, shards in dict.fromkeys(meshes)]


def _parser() -> argparse.ArgumentParser:
    defaults, link = Assumptions(1), Link()
    parser = argparse.ArgumentParser(
        prog="python -m hsdp plan",
        description="What a model communicates, holds and waits for, per unit and in all, on one mesh or several.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", required=True, choices=PRESETS, help="the model")
    mesh = parser.add_argument_group("mesh")
    mesh.add_argument("--replicate", type=_count, metavar="R", help="replicas")
    mesh.add_argument("--shard", type=_count, metavar="S", help="shard ranks")
    mesh.add_argument("--mesh", type=_mesh, nargs="+", default=[], metavar="RxS", help="several, compared")
    mesh.add_argument("--world", type=_count, metavar="N", help="every mesh of N ranks, compared")
    step = parser.add_argument_group("step")
    step.add_argument("--tokens-per-rank", type=_count, default=8192, metavar="N", help="of a micro-batch")
    step.add_argument("--micro-batches", type=_count, default=1, metavar="N", help="per step")
    sums = ["reduce_scatter", "local"]
    step.add_argument("--accumulate", choices=sums, default=sums[0], help="in all micro-batches but the last")
    step.add_argument("--recompute", action="store_true", help="activation checkpointing: backward runs forward again")
    step.add_argument("--activations", type=float, default=0.0, metavar="GIB", help="alive when a forward ends")
    step.add_argument("--optimizer-states", type=int, default=2, metavar="N", help="tensors per parameter")
    step.add_argument("--over-replicas", action="store_true", help="replicas share the optimizer's step, and its states")
    policy = parser.add_argument_group("policy")
    policy.add_argument("--storage", choices=_DTYPES, default="fp32", help="dtype of the sharded parameters")
    policy.add_argument("--param", choices=_DTYPES, default="bf16", help="dtype of compute and all-gather")
    policy.add_argument("--reduce", choices=_DTYPES, default="fp32", help="dtype of gradients on their way")
    policy.add_argument("--reshard", type=_reshard, metavar="yes|no|K", help="after forward; K: stay sharded over K ranks")
    placements = ["least-padding", "dim0"]
    policy.add_argument("--placement", choices=placements, default=placements[0], help="which dims are sharded")
    policy.add_argument("--prefetch", type=int, default=1, metavar="N", help="units gathered ahead")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--fast", type=float, default=link.fast / 1e9, metavar="GB/s", help="of a rank inside a node")
    machine.add_argument("--slow", type=float, default=link.slow / 1e9, metavar="GB/s", help="of a rank between nodes")
    machine.add_argument("--ranks-per-node", type=_count, default=link.ranks_per_node, metavar="N", help="with fast links")
    for name, of in (("latency", "a call"), ("fast_step", "a hop inside a node"), ("slow_step", "one between nodes")):
        flag, default = "--" + name.replace("_", "-"), round(getattr(link, name) * 1e6, 3)
        machine.add_argument(flag, type=float, default=default, metavar="US", help=f"latency of {of}, microseconds")
    machine.add_argument("--flops", type=float, default=defaults.flops / 1e12, metavar="TFLOP/s", help="achieved by a rank")
    machine.add_argument("--memory", type=float, metavar="GIB", help="of a rank's device")
    parser.add_argument("--format", choices=["table", "json", "csv"], default="table", help="of the output")
    return parser


def _count(text: str) -> int:
    value = int(text.replace(",", "").replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, not {text}")
    return value


def _mesh(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected RxS, e.g. 8x64, not {text!r}")
    return _count(found[1]), _count(found[2])


def _reshard(text: str) -> bool | int:
    return {"yes": True, "no": False}[text] if text in ("yes", "no") else _count(text)

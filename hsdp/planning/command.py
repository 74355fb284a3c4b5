"""`python -m hsdp plan`: plans of well-known models on meshes that need not exist."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from hsdp.params.placement import least_padding
from hsdp.planning.data import Assumptions
from hsdp.planning.machines import MACHINES
from hsdp.planning.optimizers import KINDS
from hsdp.planning.plans import Comparison, Plan, meshes_of
from hsdp.planning.presets import PRESETS, preset
from hsdp.planning.traffic import Link
from hsdp.policies import CommPolicy, MixedPrecisionPolicy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 1 if nothing fits."""
    parser = _parser()
    args = parser.parse_args(argv)
    plans = _plans(args, parser)
    result: Plan | Comparison = plans[0] if len(plans) == 1 else Comparison(tuple(plans))
    shown = {"table": result.__str__, "json": result.to_json, "csv": result.to_csv}[args.format]()
    sys.stdout.write(shown.rstrip() + "\n")
    return 0 if any(plan.fits for plan in plans) else 1


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def _plans(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Plan]:
    meshes = list(args.mesh)
    if args.shard is not None or args.replicate is not None:
        meshes.append((args.replicate or 1, args.shard or 1))
    parts = args.reshard if type(args.reshard) is int else 1
    for _, shards in meshes:
        if shards % parts:
            parser.error(f"--reshard {parts} does not divide {shards} shard ranks")
    if args.world is not None:
        if args.world % parts:
            parser.error(f"--reshard {parts} divides the shard ranks of no mesh of {args.world} ranks")
        meshes += [mesh for mesh in meshes_of(args.world) if mesh[1] % parts == 0]
    if not meshes:
        parser.error("no mesh: pass --replicate 8 --shard 64, --mesh 8x64 16x32, or --world 512 for all of that size")
    facts = preset(
        args.preset,
        dtype=_DTYPES[args.storage],
        mp_policy=MixedPrecisionPolicy(_DTYPES[args.param], _DTYPES[args.reduce]),
        comm_policy=CommPolicy(prefetch=args.prefetch, accumulate=args.accumulate),
        reshard_after_forward=args.reshard,
        shard_placement_fn=least_padding if args.placement == "least-padding" else None,
    )
    machine = MACHINES[args.machine]
    link = machine.link
    on_host = args.machine == "cpu"
    assumed = Assumptions(
        tokens_per_rank=args.tokens_per_rank,
        micro_batches=args.micro_batches,
        optimizer=args.optimizer,
        optimizer_states=args.optimizer_states,
        over_replicas=args.over_replicas,
        activations=None if args.activations is None else int(args.activations * 2**30),
        seq_len=args.seq_len,
        machine=machine.title,
        link=Link(
            _in_units(args.fast, 1e9, link.fast),
            _in_units(args.slow, 1e9, link.slow),
            args.ranks_per_node,
            _in_units(args.latency, 1e-6, link.latency),
            _in_units(args.fast_step, 1e-6, link.fast_step),
            _in_units(args.slow_step, 1e-6, link.slow_step),
        ),
        flops=_in_units(args.flops, 1e12, machine.flops),
        bandwidth=_in_units(args.bandwidth, 1e9, machine.bandwidth),
        memory=None if args.memory is None else math.ceil(args.memory * 2**30),
        recompute={"no": False, "full": True}.get(args.recompute, args.recompute),
        backend="gloo" if on_host else "nccl",
        streams=not on_host,
    )
    return [Plan.of(args.preset, facts, replicas, shards, assumed) for replicas, shards in dict.fromkeys(meshes)]


def _in_units(value: float | None, unit: float, otherwise: float) -> float:
    return otherwise if value is None else value * unit


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Says defaults that are values; an option whose default is none says in words what happens without it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hsdp plan",
        description="What a model communicates, holds and waits for, per unit and in all, on one mesh or several.",
        formatter_class=_Defaults,
    )
    parser.add_argument("--preset", required=True, choices=PRESETS, help="the model")
    mesh = parser.add_argument_group("mesh")
    mesh.add_argument("--replicate", type=_count, metavar="R", help="replicas")
    mesh.add_argument("--shard", type=_count, metavar="S", help="shard ranks")
    mesh.add_argument("--mesh", type=_mesh, nargs="+", default=[], metavar="RxS", help="several, compared")
    mesh.add_argument("--world", type=_count, metavar="N", help="every mesh of N ranks (that --reshard fits), compared")
    step = parser.add_argument_group("step")
    step.add_argument("--tokens-per-rank", type=_count, default=8192, metavar="N", help="of a micro-batch")
    step.add_argument("--micro-batches", type=_count, default=1, metavar="N", help="per step")
    sums = ["reduce_scatter", "local"]
    step.add_argument("--accumulate", choices=sums, default=sums[0], help="in all micro-batches but the last")
    step.add_argument("--seq-len", type=_count, metavar="N", help="tokens of a sequence (default: at most 8192)")
    step.add_argument(
        "--recompute",
        choices=["no", "selective", "full"],
        nargs="?",
        const="full",
        default="no",
        help="activation checkpointing of blocks",
    )
    step.add_argument(
        "--activations",
        type=_number(0),
        metavar="GIB",
        help="alive when a forward ends (default: estimated from the model)",
    )
    step.add_argument("--optimizer", choices=KINDS, default=KINDS[0], help="muon: for the matrices of blocks")
    step.add_argument("--optimizer-states", type=_whole, default=2, metavar="N", help="tensors per parameter")
    step.add_argument("--over-replicas", action="store_true", help="replicas share the optimizer's step, and its states")
    policy = parser.add_argument_group("policy")
    policy.add_argument("--storage", choices=_DTYPES, default="fp32", help="dtype of the sharded parameters")
    policy.add_argument("--param", choices=_DTYPES, default="bf16", help="dtype of compute and all-gather")
    policy.add_argument("--reduce", choices=_DTYPES, default="fp32", help="dtype of gradients on their way")
    policy.add_argument(
        "--reshard", type=_reshard, metavar="yes|no|K", help="after forward; K: stay sharded over K ranks (default: yes)"
    )
    placements = ["least-padding", "dim0"]
    policy.add_argument("--placement", choices=placements, default=placements[0], help="which dims are sharded")
    policy.add_argument("--prefetch", type=_whole, default=1, metavar="N", help="units gathered ahead")
    machine = parser.add_argument_group("machine (rates are those achieved, and by default those of --machine)")
    machine.add_argument("--machine", choices=MACHINES, default="h100", help="what a rank runs on")
    rate, time = _number(0, above=True), _number(0)
    machine.add_argument("--fast", type=rate, metavar="GB/s", help="of a rank inside a node")
    machine.add_argument("--slow", type=rate, metavar="GB/s", help="of a rank between nodes")
    machine.add_argument("--ranks-per-node", type=_count, default=8, metavar="N", help="with fast links")
    machine.add_argument("--latency", type=time, metavar="US", help="latency of a call, microseconds")
    machine.add_argument("--fast-step", type=time, metavar="US", help="of a hop inside a node")
    machine.add_argument("--slow-step", type=time, metavar="US", help="of a hop between nodes")
    machine.add_argument("--flops", type=rate, metavar="TFLOP/s", help="of a rank")
    machine.add_argument("--bandwidth", type=rate, metavar="GB/s", help="between a rank and its memory")
    machine.add_argument("--memory", type=rate, metavar="GIB", help="of a rank's device (default: not compared)")
    parser.add_argument("--format", choices=["table", "json", "csv"], default="table", help="of the output")
    return parser


def _parsed(text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, not {text!r}") from None


def _count(text: str) -> int:
    value = int(_parsed(text, int))
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, not {text}")
    return value


def _whole(text: str) -> int:
    value = int(_parsed(text, int))
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, not {text}")
    return value


def _number(least: float, above: bool = False) -> Callable[[str], float]:
    """A finite number of at least, or above, a bound."""

    def parse(text: str) -> float:
        value = _parsed(text, float)
        if not (value > least if above else value >= least) or math.isinf(value):
            raise argparse.ArgumentTypeError(
                f"expected a number {'above' if above else 'of at least'} {least:g}, not {text}"
            )
        return value

    return parse


def _mesh(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected RxS, e.g. 8x64, not {text!r}")
    return _count(found[1]), _count(found[2])


def _reshard(text: str) -> bool | int:
    return {"yes": True, "no": False}[text] if text in ("yes", "no") else _count(text)

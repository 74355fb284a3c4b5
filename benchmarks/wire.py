"""`python -m benchmarks.wire`: bytes on the wire of published models under default arguments, over the fewest possible.

A unit whose parameters take P bytes needs P (S - 1) / S received by each of S shard ranks on average, in a gather and in a
reduce-scatter alike: every byte but those that a rank holds. Everything beyond is padding, alignment and used-flags. Per
model and number of ranks:

    mean        what a rank receives (and sends) on average in two gathers and one reduction of all units, over that
    most sent   what the rank that sends most does, over the same: rings carry NCCL's collectives; gloo's broadcasts go
                down a binary tree
    most got    what the rank that receives most does: one that holds nothing receives all, S / (S - 1) of the average
    padded      the mean of `CommPolicy(fusion="packed")`, which pads each parameter to equal parts, as FSDP2 does

Two tables: `planned` asks the planner, `fully_shard`'s own, and runs nothing. `counted` steps one block of each model on a
fake process group, its columns cut to a 512th and the thresholds with them, and adds up the calls of collectives.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

import hsdp
from benchmarks.harness import progress, publish
from hsdp.comm import backends
from hsdp.planning import PRESETS
from hsdp.planning.facts import UnitFacts
from hsdp.planning.layouts import UnitPlan, plan_unit
from hsdp.planning.presets import Block, Shapes, preset
from tests.support.counting import CollectiveCounter
from tests.support.rig import fake_world

MODELS = ("llama3-8b", "llama3-70b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b")
RANKS = (8, 12, 64)
GATHERS = 2
"""In forward and in backward."""

MIXED = hsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
SCALE = 512


@dataclass(frozen=True)
class Ratios:
    """Bytes over the fewest possible."""

    model: str
    shards: int
    gather: float
    scatter: float
    mean: float
    most_sent: float
    most_got: float
    padded: float


# -- planned -----------------------------------------------------------------------------------------------------------


def planned(name: str, shards: int, backend: str) -> Ratios:
    """Of a step of a whole model."""
    units = [plan_unit(unit, 1, shards, backend, device=False) for unit in facts(name)]
    padded = [plan_unit(unit, 1, shards, backend, device=False) for unit in facts(name, hsdp.CommPolicy(fusion="packed"))]
    gathers, scatters = (
        _mean([one for unit in units for one in sends(unit, backend)], kind) for kind in ("gather", "scatter")
    )
    every = [one for unit in units for one in sends(unit, backend)]
    most_sent, most_got = (
        max(map(sum, zip(*each, strict=True))) for each in ([one.by_rank for one in every], [one.got for one in every])
    )
    gathers, scatters = (_mean(every, kind) for kind in ("gather", "scatter"))
    fewest_gather, fewest_scatter = fewest(units)
    padding = [one for unit in padded for one in sends(unit, backend)]
    whole = GATHERS * fewest_gather + fewest_scatter
    return Ratios(
        name,
        shards,
        gathers / GATHERS / fewest_gather,
        scatters / fewest_scatter,
        (gathers + scatters) / whole,
        most_sent / whole,
        most_got / whole,
        (_mean(padding, "gather") + _mean(padding, "scatter")) / whole,
    )


def facts(name: str, comm_policy: hsdp.CommPolicy | None = None) -> list[UnitFacts]:
    """The units of a model, placed as `fully_shard` does without a `shard_placement_fn`."""
    return preset(name, mp_policy=MIXED, comm_policy=comm_policy, shard_placement_fn=None)


def fewest(units: Sequence[UnitPlan]) -> tuple[float, float]:
    """Bytes that a rank receives on average, at least: in a gather of all units, and in a reduction."""
    groups = [group for unit in units for group in unit.dtype_groups]
    part = (units[0].shards - 1) / units[0].shards
    numels = [(group.kind, sum(param.numel for param in group.params)) for group in groups]
    gather = sum(numel * kind.compute.itemsize for kind, numel in numels)
    return gather * part, sum(numel * kind.reduce.itemsize for kind, numel in numels) * part


@dataclass(frozen=True)
class Sends:
    """What each rank sends, and gets, in all transfers of a kind ("gather", "scatter") of a dtype group in a step."""

    kind: str
    by_rank: list[float]
    got: list[float]

    def add(self, nbytes: float, copies: Sequence[int], skipped: int) -> None:
        """A tensor that each rank sends so often and, but for one, receives."""
        for rank, times in enumerate(copies):
            self.by_rank[rank] += times * nbytes
            self.got[rank] += (rank != skipped) * nbytes


def sends(unit: UnitPlan, backend: str) -> Iterator[Sends]:
    """Of a unit's step."""
    for group in unit.dtype_groups:
        even, width = sum(group.gather_inputs) * (unit.shards - 1), group.kind.compute.itemsize
        found = Sends("gather", [float(GATHERS * even)] * unit.shards, [float(GATHERS * even)] * unit.shards)
        for piece in group.layout.pieces:
            for root, numel in enumerate(piece.sizes(unit.shards) if piece.uneven else []):
                found.add(GATHERS * numel * width, broadcast_sends(root, unit.shards, backend), skipped=root)
        yield found
        scattered = sum(group.scatter_inputs) * (unit.shards - 1) / unit.shards
        found = Sends("scatter", [scattered] * unit.shards, [scattered] * unit.shards)
        for piece in group.trained.pieces if group.trained is not None else ():
            for root, numel in enumerate(piece.sizes(unit.shards) if piece.uneven else []):
                # Around a ring, from the rank behind the one that holds it.
                copies = [int(rank != root) for rank in range(unit.shards)]
                found.add(numel * group.kind.reduce.itemsize, copies, skipped=(root + 1) % unit.shards)
        yield found


def broadcast_sends(root: int, shards: int, backend: str) -> list[int]:
    """How often each rank sends what it broadcasts: once around NCCL's ring, or to its children in gloo's binary tree."""
    if backend != "gloo":
        return [int(rank != (root - 1) % shards) for rank in range(shards)]
    sends = [0] * shards
    for child in range(1, shards):
        parent = child - (1 << (child.bit_length() - 1))
        sends[(parent + root) % shards] += 1
    return sends


def _mean(found: Sequence[Sends], kind: str) -> float:
    return sum(sum(one.by_rank) / len(one.by_rank) for one in found if one.kind == kind)


# -- counted -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Parameters of these shapes, each used once."""

    def __init__(self, shapes: Shapes, experts: Shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        if experts:
            self.experts = Layer(experts, {})

    def forward(self, x: Tensor) -> Tensor:
        for param in self.parameters(recurse=False):
            x = x + param.sum()
        return self.experts(x) if hasattr(self, "experts") else x


def narrowed(shapes: Shapes) -> Shapes:
    """Shapes with as many rows, of columns the last of which are fewer."""
    return {name: _narrow(shape) for name, shape in shapes.items()}


def _narrow(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        return shape
    numel = max(8, math.prod(shape[1:]) // SCALE // 8 * 8)
    return (shape[0], numel)


def counted(name: str, shards: int) -> tuple[float, float]:
    """Bytes that a step of one block sends, over the fewest possible: by its calls, and by the plan for it."""
    block: Block = PRESETS[name]().blocks[-1]
    gather, reduce = (size // SCALE for size in backends.direct_bytes("fake"))
    small = hsdp.CommPolicy(direct_gather_bytes=gather, direct_reduce_bytes=reduce)
    with fake_world(shards) as env, patch.object(backends, "UNEVEN_BYTES", backends.UNEVEN_BYTES // SCALE):
        model = nn.Sequential(Layer(narrowed(block.shapes), narrowed(block.experts)))
        modules = [model[0].experts] if block.experts else []
        for module in (*modules, model[0], model):
            hsdp.fully_shard(
                module, mesh=env.mesh((shards,)), mp_policy=MIXED, comm_policy=small, reshard_after_forward=True
            )
        plan = hsdp.plan(model, tokens_per_rank=1)
        for _ in range(2):  # by then the order of units is known
            model(torch.zeros(1)).sum().backward()
        with CollectiveCounter() as counter:
            model(torch.zeros(1)).sum().backward()
        least_gather, least_scatter = fewest(plan.units)
    whole = GATHERS * least_gather + least_scatter
    return counter.total().wire_bytes / whole, sum(one.sent for one in plan.collectives) / whole


# -- report ------------------------------------------------------------------------------------------------------------


def planned_table(rows: Sequence[Ratios], backend: str) -> str:
    """As text."""
    lines = [
        f"planned, whole models, bf16 reduced in fp32, {backend}: bytes over the fewest possible",
        f"{'':14} ranks  gathers  reductions    mean  most sent  most got  padded",
    ]
    for row in rows:
        means = f"{row.gather:8.4f} {row.scatter:11.4f} {row.mean:7.4f}"
        lines.append(f"{row.model:14} {row.shards:5} {means} {row.most_sent:10.3f} {row.most_got:9.3f} {row.padded:7.3f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Plan, count and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=sorted(PRESETS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="shard ranks (default %(default)s)")
    parser.add_argument("--backend", nargs="+", choices=["nccl", "gloo"], default=["nccl", "gloo"])
    parser.add_argument("--json", metavar="FILE", help="write everything here")
    args = parser.parse_args(argv)
    tables, found = [], {}
    for backend in args.backend:
        rows = [planned(name, ranks, backend) for name in args.models for ranks in args.ranks]
        tables.append(planned_table(rows, backend))
        found[backend] = [asdict(row) for row in rows]
    lines = [
        "counted, one block each, calls on a fake process group: mean over the fewest possible",
        f"{'':14} ranks  calls   plan",
    ]
    for name in args.models:
        for ranks in args.ranks:
            progress(f"{name} on {ranks} ...")
            calls, plan = counted(name, ranks)
            lines.append(f"{name:14} {ranks:5} {calls:6.4f} {plan:6.4f}")
    publish("wire", "\n".join([*tables, *lines]), vars(args), args.json, planned=found)


if __name__ == "__main__":
    main()

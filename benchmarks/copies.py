"""`python -m benchmarks.copies`: bytes copied, allocated and communicated per unit and step, hsdp beside FSDP2.

Two tables:

    measured   units of large weights on a fake process group; operators that move bytes without computing are counted
               (`tests.support.counting`), less those of the plain model; allocations come from torch's profiler
    planned    blocks of published models on 8, 12 and 64 ranks: bytes that the plan of `hsdp.buffers.layout` sends, over
               the formulas of docs/formulas.md; nothing is run, as no machine here holds them

That tensors are the same memory is asserted in tests/buffers/test_copies.py: outputs of gathers are the whole parameters,
inputs of reduce-scatters the gradients that autograd made, their outputs what `.grad` holds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import hsdp
from benchmarks.harness import PRECISIONS, dtypes_of, progress, publish, shard
from benchmarks.shapes import BLOCKS, EXPERTS, Shapes
from hsdp.buffers.layout import NEVER, Layout, ParamSpec, lay_out
from hsdp.comm.backends import direct_bytes
from hsdp.unit.dtype_group import GroupKey, thresholds_for
from tests.support.counting import CollectiveCounter, CopyCounter
from tests.support.rig import fake_world

WORLD = 8
MESHES = {"8": (8,), "2x4": (2, 4)}
LIBRARIES = ("fsdp2", "hsdp auto", "hsdp direct", "hsdp packed")
UNITS, WEIGHTS, ROWS, COLUMNS = 3, 4, 1024, 512
UNIT = WEIGHTS * ROWS * COLUMNS
"""Elements of a unit: U."""


class Layer(nn.Module):
    """Large weights, of which each is used once, and that cost nothing to compute with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(WEIGHTS))
        self.register_buffer("probe", torch.full((1, COLUMNS), 1 / COLUMNS, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.weights:
            x = x + F.linear(self.probe, layer.weight).mean()
        return x


def build(library: str, precision: str, mesh: DeviceMesh, units: int = UNITS) -> nn.Module:
    """The model, sharded as "fsdp2" or "hsdp <fusion>" says; "plain": not sharded."""
    dtype = dtypes_of(precision).get("param_dtype", torch.float32)
    model = nn.Sequential(*(Layer(dtype) for _ in range(units)))
    name, _, fusion = library.partition(" ")
    # By default the last unit stays whole: here all are alike.
    options = {"comm_policy": hsdp.CommPolicy(fusion=fusion or "auto"), "reshard_after_forward": True}  # type: ignore[arg-type]
    shard(name, (*model, model), mesh, precision, **options)
    return model.to(dtype) if library == "plain" else model


@dataclass(frozen=True)
class Counts:
    """Of one unit and step, in bytes."""

    gather_copied: float
    gather_cast: float
    reduce_copied: float
    reduce_cast: float
    allocated: float
    calls: dict[str, float]
    wire: dict[str, float]


def measure(library: str, precision: str, mesh: DeviceMesh) -> Counts:
    """Counts of the third step, less the plain model's."""
    plain = _passes(build("plain", precision, mesh))
    mine = _passes(build(library, precision, mesh))
    # A step gathers each unit twice, in forward and in backward.
    forward, backward = (
        [(a - b) / UNITS for a, b in zip(mine[half], plain[half], strict=True)] for half in ("forward", "backward")
    )
    collectives = mine["collectives"]
    assert isinstance(collectives, CollectiveCounter), "what _passes puts there"
    kinds = collectives.counts()
    return Counts(
        gather_copied=forward[0],
        gather_cast=forward[1],
        reduce_copied=backward[0] - forward[0],
        reduce_cast=backward[1] - forward[1],
        allocated=forward[2] + backward[2],
        calls={kind: count / UNITS for kind, count in kinds.items()},
        wire={kind: collectives.total(kind).wire_bytes / UNITS for kind in kinds},
    )


def _passes(model: nn.Module) -> dict[str, Sequence[float] | CollectiveCounter]:
    """Bytes copied, cast and allocated in forward and in backward, and the step's collectives."""
    x = torch.zeros(1)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    with CollectiveCounter() as collectives:
        with CopyCounter() as forward:
            loss = model(x).sum()
        with CopyCounter() as backward:
            loss.backward()
    model.zero_grad()
    losses = []
    allocated = [allocated_by(lambda: losses.append(model(x).sum())), allocated_by(lambda: losses[0].backward())]
    told = [
        (counter.written(casts=False), counter.written(casts=True), nbytes)
        for counter, nbytes in zip((forward, backward), allocated, strict=True)
    ]
    return {"forward": told[0], "backward": told[1], "collectives": collectives}


def allocated_by(run: Callable[[], object]) -> int:
    """Bytes that the CPU allocator handed out, storages that were resized included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    total = 0
    todo = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            total += max(0, event.extra_fields.alloc_size)
    return total


# -- planned -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """Bytes sent over the formula's, for one block on S shard ranks and R replicas."""

    block: str
    shards: int
    gather: float
    scatter: float
    all_reduce: float
    direct: float
    """Part of the block's elements that are gathered without a copy."""
    fsdp2: float
    """FSDP2's gather and reduce-scatter: it pads each parameter to equal rows."""


def planned(block: str, shapes: Shapes, shards: int, precision: str, backend: tuple[int, int]) -> Planned:
    """What the layout's plan sends, over what the formulas say.

    Args:
        block: its name.
        shapes: its parameters.
        shards: shard ranks S.
        precision: "fp32" or "bf16/fp32".
        backend: the backend's measured limits of direct gathers and reduce-scatters, bytes per rank.
    """
    layout = plan_of(shapes, shards, precision, backend, experts=block in EXPERTS)
    whole = sum(math.prod(shape) for shape in shapes.values())
    flags = len(shapes)
    return Planned(
        block,
        shards,
        gather=shards * gathered_elements(layout) / whole,
        scatter=shards * scattered_elements(layout, flags) / whole,
        all_reduce=shards * (layout.numel + flags) / whole,
        direct=sum(piece.spec.numel for piece in layout.pieces if piece.direct_gather) / whole,
        fsdp2=sum(-(-shape[0] // shards) * shards * math.prod(shape[1:]) for shape in shapes.values()) / whole,
    )


def plan_of(shapes: Shapes, shards: int, precision: str, backend: tuple[int, int], *, experts: bool = False) -> Layout:
    """The layout that a unit of these parameters gets under the default policy; `experts`: placed by `least_padding`."""
    kind = GroupKey.of(torch.float32, hsdp.MixedPrecisionPolicy(**dtypes_of(precision)))
    specs = [_least_padding(shape, shards) if experts else ParamSpec(shape, 0) for shape in shapes.values()]
    return lay_out(specs, shards, thresholds_for(hsdp.CommPolicy(), kind, *backend, NEVER))


def _least_padding(shape: tuple[int, ...], shards: int) -> ParamSpec:
    placement = hsdp.least_padding(torch.empty(shape, device="meta"), shards)
    return ParamSpec(shape, 0, merged=2) if isinstance(placement, tuple) else ParamSpec(shape, placement.dim)


def gathered_elements(layout: Layout) -> int:
    """Elements that a rank gives to a gather: direct pieces without the gaps between them, and the packed range."""
    direct = sum(piece.numel for piece in layout.pieces if piece.direct_gather)
    return direct + layout.numel - layout.gather_packed_start


def scattered_elements(layout: Layout, flags: int) -> int:
    """Elements that a rank keeps of a reduce-scatter, used-flags included."""
    direct = sum(piece.numel for piece in layout.pieces if piece.direct_reduce)
    return direct + layout.numel - layout.reduce_packed_start + flags


# -- report ------------------------------------------------------------------------------------------------------


def measured_rows(args: argparse.Namespace) -> Iterator[tuple[str, str, str, Counts]]:
    """One per mesh, precision and library."""
    with fake_world(WORLD) as env:
        for mesh in args.mesh:
            for precision in args.precision:
                for library in LIBRARIES:
                    progress(f"{mesh} {precision} {library} ...")
                    yield mesh, precision, library, measure(library, precision, env.mesh(MESHES[mesh]))


def measured_table(rows: Sequence[tuple[str, str, str, Counts]]) -> str:
    """As text."""
    lines = [
        f"measured, per unit of {WEIGHTS} weights and step, in units U (bytes of the whole unit in the compute dtype)",
        f"{'':30} {'gather':^15} {'reduction':^15}",
        f"{'':30} {'copied':>7} {'cast':>7} {'copied':>7} {'cast':>7}  allocated  sent / formula AG, RS, AR   calls",
    ]
    for mesh, precision, library, counts in rows:
        width = 4 if precision == "fp32" else 2
        cells = [counts.gather_copied, counts.gather_cast, counts.reduce_copied, counts.reduce_cast]
        told = " ".join(f"{cell / (UNIT * width):7.4f}" for cell in cells)
        ratios = ", ".join(f"{ratio:.4f}" for ratio in over_formula(counts, MESHES[mesh], width).values())
        calls = ", ".join(f"{count:g} {kind}" for kind, count in counts.calls.items())
        allocated = counts.allocated / (UNIT * width)
        lines.append(f"{mesh:>4}  {precision:9}  {library:12} {told}  {allocated:9.3f}  {ratios:25}   {calls}")
    return "\n".join(lines)


def over_formula(counts: Counts, shape: tuple[int, ...], width: int) -> dict[str, float]:
    """Bytes sent over docs/formulas.md's formulas, by kind of collective; `width`: bytes of a gathered element."""
    shards, replicas = shape[-1], WORLD // shape[-1]
    part = (shards - 1) / shards
    formula = {
        "all_gather": 2 * UNIT * width * part,
        "reduce_scatter": UNIT * 4 * part,
        "all_reduce": 2 * UNIT / shards * 4 * (replicas - 1) / replicas,
    }
    return {kind: counts.wire[kind] / nbytes for kind, nbytes in formula.items() if nbytes}


def planned_rows(args: argparse.Namespace) -> list[Planned]:
    """One per block and number of ranks."""
    backend = direct_bytes(args.backend)
    every = BLOCKS | EXPERTS
    return [planned(name, every[name], ranks, args.precision[-1], backend) for name in every for ranks in args.ranks]


def planned_table(rows: Sequence[Planned], precision: str, backend: str) -> str:
    """As text."""
    lines = [
        f"planned, {precision}, limits of {backend}: bytes sent / formula",
        f"{'':22} ranks  gather  reduce-scatter  all-reduce  direct   fsdp2",
    ]
    for row in rows:
        cells = f"{row.gather:7.4f} {row.scatter:15.4f} {row.all_reduce:11.4f} {row.direct:7.1%} {row.fsdp2:7.4f}"
        lines.append(f"{row.block:22} {row.shards:5} {cells}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, plan and report."""
    args = parse(argv)
    measured = list(measured_rows(args))
    rows = planned_rows(args)
    report = f"{measured_table(measured)}\n{planned_table(rows, args.precision[-1], args.backend)}"
    found = [
        {"mesh": mesh, "precision": precision, "library": library, **asdict(counts)}
        for mesh, precision, library, counts in measured
    ]
    publish("copies", report, vars(args), args.json, measured=found, planned=[asdict(row) for row in rows])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copies", description=__doc__)
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=list(MESHES), help="S or R x S")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 12, 64], help="of the plans (default %(default)s)")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl", help="of the plans (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write everything counted here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

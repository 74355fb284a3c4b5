"""`python -m benchmarks.device_schedule`: steps on devices in virtual time, beside FSDP2's and the critical path.

The engine and FSDP2 run on tiny tensors; what they put on a device's streams takes the times that `hsdp.plan` has for it,
of a well-known model on a machine of the planner's (`tests/support/link_time.py`). What is compared is the order in which
work is issued, and what waits for what:

    critical path   no schedule can beat it that gathers and reduces in the order of use, with 2.5 blocks gathered at a time
    hsdp, FSDP2     their steps over that, with reduce-scatters on the communicator of all-gathers ("one") or on one of
                    their own ("two", `set_separate_reduce_scatter_group`)

The host takes no time and neither do copies, which favours FSDP2: it copies what it gathers and reduces.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import positive, progress, publish
from hsdp.planning import MACHINES, Assumptions, Plan, preset
from tests.support.link_time import bound, record, run, sizes_of

MESHES = ((1, 8), (1, 64), (16, 8), (8, 64))
TOKENS = (1024, 2048, 4096, 8192)
MODELS = ("llama3-8b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b")
ROOM = 2.5
"""Blocks, experts included, that the critical path has room for: what `prefetch=1` lets be gathered."""


@dataclass(frozen=True)
class Row:
    """Steps of one plan: the critical path in seconds, and over it those of each library with one communicator and two."""

    model: str
    machine: str
    mesh: tuple[int, int]
    tokens: int
    critical: float
    hsdp: tuple[float, float]
    fsdp2: tuple[float, float]

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        ratios = "  ".join(f"{ratio:6.3f}" for ratio in (*self.hsdp, *self.fsdp2))
        return f"{self.model:14} {self.machine:5} {mesh:>5} {self.tokens:6} {1e3 * self.critical:9.1f}  {ratios}"


def planned(model: str, machine: str, mesh: tuple[int, int], tokens: int) -> Plan:
    """A well-known model on a mesh of machines."""
    rates = MACHINES[machine]
    assumed = Assumptions(tokens, machine=rates.title, link=rates.link, flops=rates.flops, bandwidth=rates.bandwidth)
    return Plan.of(model, preset(model), *mesh, assumed)


def room_of(plan: Plan) -> float:
    """Bytes of `ROOM` of the largest block: a unit and those around it, but for the root."""
    sizes, blocks = sizes_of(plan), [0]
    for index, unit in enumerate(plan.units[1:], 1):
        assert unit.facts.parent is not None, "only the root has none"
        blocks.append(sizes[index] + blocks[unit.facts.parent])
    return ROOM * max(blocks)


def measure(model: str, machine: str, mesh: tuple[int, int], tokens: int, micro_batches: int = 1) -> Row:
    """One row."""
    plan = planned(model, machine, mesh, tokens)

    def step(library: str, two: bool) -> float:
        works = record(library, plan, two_communicators=two, micro_batches=micro_batches)
        return run(works)

    critical = bound(record("hsdp", plan, micro_batches=micro_batches), sizes_of(plan), room_of(plan))
    ours, theirs = ((step(name, False) / critical, step(name, True) / critical) for name in ("hsdp", "fsdp2"))
    return Row(model, machine, mesh, tokens, critical, ours, theirs)


def table(rows: Sequence[Row]) -> str:
    """A line for each, and the worst of each column."""
    lines = [
        f"{'':34}{'critical':>9}  {'hsdp':^14}  {'FSDP2':^14}",
        f"{'model':14} {'GPU':5} {'mesh':>5} {'tokens':>6} {'path, ms':>10} {'one':>7} {'two':>7} {'one':>7} {'two':>7}",
        *map(str, rows),
        "",
    ]
    behind = max(row.hsdp[0] / row.fsdp2[0] for row in rows)
    ahead = min(row.hsdp[0] / row.fsdp2[0] for row in rows)
    lines += [
        f"hsdp's steps are at most {max(row.hsdp[0] for row in rows):.3f} of the critical path, FSDP2's "
        f"{max(row.fsdp2[0] for row in rows):.3f}",
        f"hsdp / FSDP2 as they come, {len(rows)} rows: {ahead:.3f} to {behind:.3f}",
        f"hsdp, two communicators / one: {min(row.hsdp[1] / row.hsdp[0] for row in rows):.3f} to "
        f"{max(row.hsdp[1] / row.hsdp[0] for row in rows):.3f}; FSDP2: "
        f"{min(row.fsdp2[1] / row.fsdp2[0] for row in rows):.3f} to {max(row.fsdp2[1] / row.fsdp2[0] for row in rows):.3f}",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_schedule", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="presets (default %(default)s)")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=["h100", "a100"])
    parser.add_argument("--tokens", nargs="+", type=positive, default=list(TOKENS), help="per rank")
    parser.add_argument("--micro-batches", type=positive, default=1, help="of a step; replicas are summed in the last one")
    parser.add_argument("--json", metavar="FILE", help="write all rows here")
    args = parser.parse_args(argv)
    rows = []
    for machine in args.machines:
        for model in args.models:
            for mesh in MESHES:
                progress(f"{model}, {machine}, {mesh} ...")
                rows += [measure(model, machine, mesh, tokens, args.micro_batches) for tokens in args.tokens]
    publish("device_schedule", table(rows), vars(args), args.json, rows=[vars(row) for row in rows])


if __name__ == "__main__":
    main()

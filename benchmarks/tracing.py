"""`python -m benchmarks.tracing`: what `hsdp.trace` costs on the host, when it is off and when it is on.

The models of `benchmarks.host` take turns: one that was never traced, one that was traced before and is not now, and one
that is being traced. Each round gives two ratios of CPU time, off / never and on / never. Tensors are tiny and the process
group is fake: on real layers the same microseconds are a smaller share.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from benchmarks.harness import Spread, Step, positive, progress, publish
from benchmarks.host import Meter, Setup, cpu_time, fake_meshes, prepare_with_model
from benchmarks.valgrind import count_in_child

CONTENDERS = ("first", "never", "off", "on")
"""What takes turns. The first model of a process differs by some percent from one that is its equal: it is not counted."""

Spent = dict[str, list[float]]


def measure(setup: Setup, mesh: DeviceMesh, args: argparse.Namespace, meter: Meter) -> Spent:
    """CPU seconds (or instructions) of a step of each contender, round by round."""
    steps: dict[str, tuple[Step, nn.Module]] = {
        name: prepare_with_model("hsdp", setup, args.units, mesh) for name in CONTENDERS
    }
    for name, (step, model) in steps.items():
        with nullcontext() if name == "never" else hsdp.trace(model):
            for _ in range(3):
                step()
        step()
    spent: Spent = {name: [] for name in CONTENDERS}
    for _ in range(args.rounds):
        for name, (step, model) in steps.items():
            gc.collect()
            with hsdp.trace(model) if name == "on" else nullcontext():
                spent[name].append(meter(step, args.steps))
    return spent


def measure_all(setups: list[Setup], args: argparse.Namespace, meter: Meter) -> list[Spent]:
    """All setups."""
    with fake_meshes() as meshes:
        return [measure(setup, meshes[setup.mesh], args, meter) for setup in setups]


def ratio(spent: Spent, name: str) -> Spread:
    """A contender over one that was never traced, round by round."""
    return Spread.of([a / b for a, b in zip(spent[name], spent["never"], strict=True)])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--units", type=positive, default=8, help="(default %(default)s)")
    parser.add_argument("--params", type=positive, default=9, help="per unit (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=20, help="turns (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=15, help="steps a turn (default %(default)s)")
    parser.add_argument("--instructions", action="store_true", help="count instructions under valgrind")
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    args = parser.parse_args(argv)
    setups = [Setup("2x4", args.params, "fp32", "auto", what) for what in ("pass", "step foreach")]
    if args.instructions:
        progress("counting instructions under valgrind takes minutes ...")
        rows = count_in_child(measure_all, setups, argparse.Namespace(**vars(args) | {"rounds": 1}))
    else:
        rows = measure_all(setups, args, cpu_time)
    pairs = list(zip(setups, rows, strict=True))
    unit = "instructions" if args.instructions else "CPU time"
    lines = [
        f"{unit} of a step, over that of a model that was never traced",
        f"{'':45}  off: min median    max  on: min median    max",
        *(f"{setup!s:45}  {ratio(spent, 'off')}     {ratio(spent, 'on')}" for setup, spent in pairs),
    ]
    measured = [{"setup": asdict(setup), "spent": spent} for setup, spent in pairs]
    publish("tracing", "\n".join(lines), vars(args), args.json, rows=measured)


if __name__ == "__main__":
    from benchmarks import tracing  # under its own name, where a child process finds what is sent to it

    tracing.main()

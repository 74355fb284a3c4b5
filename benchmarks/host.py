"""`python -m benchmarks.host`: host time that sharding adds to a step, hsdp beside FSDP2 and the plain model.

Tensors are tiny and collectives do nothing (still_group.py), so what is left is Python and dispatch. The three models
take turns, plain / hsdp / FSDP2, plain / hsdp / FSDP2, ..., and each round gives one ratio of CPU time:

    (hsdp - plain) / (FSDP2 - plain)

A `pass` is forward, backward and gradients set to None; a `step` adds clipping and AdamW, the same for all contenders,
but in `step local` and `step flat`: there hsdp's is given to `hsdp.optim.local`, as the optimizer of FSDP2 cannot be.
`direct` rows force the path that large weights take (tiny ones would all be packed, for which `auto` stands).
`--instructions` counts instructions under valgrind instead: slower, but the same at every run and on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from benchmarks.harness import PRECISIONS, Spread, Step, positive, progress, publish, shard
from benchmarks.still_group import still_world
from benchmarks.valgrind import count_in_child
from hsdp.policies import Fusion

WORLD = 8
MESHES = {"8": (8,), "2x4": (2, 4)}
CONTENDERS = ("plain", "hsdp", "fsdp2")
DIM = 16


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    mesh: str
    params: int
    precision: str
    fusion: Fusion
    what: str
    """"pass", or "step" and AdamW's implementation; in "step local" and "step flat" hsdp's is foreach, by `optim.local`."""

    def __str__(self) -> str:
        return f"{self.what:12} {self.mesh:>4} {self.params:3} params  {self.precision:9} {self.fusion}"


class Block(nn.Module):
    """`num_params` weights of as many modules, one product each: the cheapest user of that many parameters."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(num_params))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def prepare(library: str, setup: Setup, units: int, mesh: DeviceMesh) -> Step:
    """The pass or step of a model of `units` units."""
    return prepare_with_model(library, setup, units, mesh)[0]


def prepare_with_model(library: str, setup: Setup, units: int, mesh: DeviceMesh) -> tuple[Step, nn.Module]:
    """A model of `units` units, and its pass or step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(setup.params) for _ in range(units)))
    shard(library, (*model, model), mesh, setup.precision, comm_policy=hsdp.CommPolicy(fusion=setup.fusion))
    x = torch.randn(2, DIM)
    if library == "plain" and setup.precision != "fp32":
        # The plain model computes in the same dtype, without the casts that mixed precision adds.
        model, x = model.bfloat16(), x.bfloat16()
    params = list(model.parameters())

    def one_pass() -> None:
        model(x).sum().backward()
        for param in params:
            param.grad = None

    if setup.what == "pass":
        return one_pass, model
    kind = setup.what.split()[1]
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=kind == "fused", foreach=kind != "fused")
    if library == "hsdp" and kind in ("local", "flat"):
        optimizer = hsdp.optim.local(optimizer, flat=kind == "flat")
    clip: Callable[..., object] = hsdp.clip_grad_norm_ if library == "hsdp" else nn.utils.clip_grad_norm_

    def whole_step() -> None:
        model(x).sum().backward()
        clip(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return whole_step, model


@dataclass(frozen=True)
class Row:
    """One setup: per contender the CPU seconds (or instructions) of a step, round by round."""

    setup: Setup
    units: int
    spent: dict[str, list[float]]

    def added(self, library: str) -> list[float]:
        """What a library adds to the plain model, per unit and step, round by round."""
        pairs = zip(self.spent[library], self.spent["plain"], strict=True)
        return [(mine - plain) / self.units for mine, plain in pairs]

    def least(self, library: str) -> float:
        """The same of the least of all rounds: what other work on the machine adds is least there too."""
        return (min(self.spent[library]) - min(self.spent["plain"])) / self.units

    def ratio(self) -> Spread:
        """What hsdp adds over what FSDP2 adds."""
        return Spread.of([a / b for a, b in zip(self.added("hsdp"), self.added("fsdp2"), strict=True)])


Meter = Callable[[Step, int], float]
"""(run, times) -> what one run takes."""


def cpu_time(run: Step, times: int) -> float:
    """CPU seconds of one run."""
    start = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - start) / times


@contextmanager
def fake_meshes() -> Iterator[dict[str, DeviceMesh]]:
    """The meshes, over ranks that are not there."""
    torch.set_num_threads(1)
    with still_world(WORLD) as env:
        yield {name: env.mesh(shape) for name, shape in MESHES.items()}


def measure(setup: Setup, mesh: DeviceMesh, units: int, rounds: int, steps: int, meter: Meter) -> Row:
    """The three contenders in turns."""
    runs = {name: prepare(name, setup, units, mesh) for name in CONTENDERS}
    for run in runs.values():
        for _ in range(3):
            run()
    spent: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, run in runs.items():
            gc.collect()  # nobody pays for another's garbage, everybody for their own
            run()  # to look at every object there is empties the caches: that is nobody's cost
            spent[name].append(meter(run, steps))
    return Row(setup, units, spent)


def measure_all(setups: Sequence[Setup], args: argparse.Namespace, meter: Meter) -> list[Row]:
    """One row per setup."""
    rows = []
    with fake_meshes() as meshes:
        for setup in setups:
            progress(f"{setup} ...")
            rows.append(measure(setup, meshes[setup.mesh], args.units, args.rounds, args.steps, meter))
    return rows


def table(rows: Sequence[Row], unit: str, scale: float) -> str:
    """The ratios as text."""
    lines = [
        f"added per unit and step, {unit} (median); ratio hsdp / fsdp2, both less the plain model: of rounds, of the least",
        f"{'':45}    hsdp   fsdp2  ratio: min median    max   least",
    ]
    for row in rows:
        ours, theirs = (statistics.median(row.added(name)) * scale for name in CONTENDERS[1:])
        least = row.least("hsdp") / row.least("fsdp2")
        lines.append(f"{row.setup!s:45} {ours:7.0f} {theirs:7.0f}      {row.ratio()}    {least:4.2f}")
    return "\n".join(lines)


def setups(args: argparse.Namespace) -> list[Setup]:
    """All combinations asked for."""
    return [
        Setup(mesh, params, precision, fusion, what)
        for what in args.what
        for fusion in args.fusion
        for mesh in args.mesh
        for params in args.params
        for precision in args.precision
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    args = parse(argv)
    if args.instructions:
        progress("counting instructions under valgrind takes minutes ...")
        rows = count_in_child(measure_all, setups(args), argparse.Namespace(**vars(args) | {"rounds": 1}))
    else:
        rows = measure_all(setups(args), args, cpu_time)
    report = table(rows, *(("1000 instructions", 1e-3) if args.instructions else ("us of CPU time", 1e6)))
    publish("host", report, vars(args), args.json, rows=[asdict(row) for row in rows])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    whats = ["pass", "step foreach", "step fused", "step local", "step flat"]
    parser.add_argument("--what", nargs="+", choices=whats, default=whats)
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=list(MESHES), help="S or R x S")
    parser.add_argument("--params", nargs="+", type=positive, default=[9, 30], help="parameters per unit")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--fusion", nargs="+", choices=["auto", "packed", "direct"], default=["auto", "direct"])
    parser.add_argument("--units", type=positive, default=8, help="(default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=21, help="A B C turns (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=5, help="steps a turn (default %(default)s)")
    parser.add_argument("--instructions", action="store_true", help="count instructions under valgrind")
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    from benchmarks import host  # under its own name, where a child process finds what is sent to it

    host.main()

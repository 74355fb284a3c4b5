"""`python -m benchmarks.host`: host time that sharding adds to a step, hsdp beside FSDP2 and the plain model.

Tensors are tiny and the process group is fake, so what is left is Python and dispatch. The three models take turns,
plain / hsdp / FSDP2, plain / hsdp / FSDP2, ..., and each round gives one ratio of CPU time:

    (hsdp - plain) / (FSDP2 - plain)

A `pass` is forward, backward and gradients set to None; a `step` adds clipping and AdamW. `direct` rows force the path
that large weights take (tiny ones would all be packed, for which `auto` stands). `--instructions` counts instructions
under valgrind instead: slower, but the same at every run and on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from benchmarks.harness import Spread, Step, header, positive, progress
from hsdp.clip import clip_grad_norm_
from tests.rig import fake_world

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
    fusion: str
    what: str
    """"pass", or "step foreach" / "step fused" after AdamW's implementation."""

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
    """A model of `units` units, and its pass or step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(setup.params) for _ in range(units)))
    _shard(library, setup, model, mesh)
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
        return one_pass
    kind = setup.what.split()[1]
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=kind == "fused", foreach=kind == "foreach")
    clip: Callable[..., object] = clip_grad_norm_ if library == "hsdp" else nn.utils.clip_grad_norm_

    def whole_step() -> None:
        model(x).sum().backward()
        clip(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return whole_step


def _shard(library: str, setup: Setup, model: nn.Sequential, mesh: DeviceMesh) -> None:
    mixed = setup.precision != "fp32"
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    for module in (*model, model):
        if library == "hsdp":
            comm = hsdp.CommPolicy(fusion=setup.fusion)  # type: ignore[arg-type]
            hsdp.fully_shard(module, mesh=mesh, mp_policy=hsdp.MixedPrecisionPolicy(**dtypes), comm_policy=comm)
        elif library == "fsdp2":
            fsdp.fully_shard(module, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**dtypes))


@dataclass(frozen=True)
class Row:
    """One setup: per contender the CPU seconds (or instructions) of a step, round by round."""

    setup: Setup
    units: int
    spent: dict[str, list[float]]

    @property
    def ratio(self) -> Spread:
        """What hsdp adds over what FSDP2 adds."""
        plain, ours, theirs = (self.spent[name] for name in CONTENDERS)
        return Spread.of([(a - p) / (b - p) for p, a, b in zip(plain, ours, theirs, strict=True)])

    def added(self, library: str) -> float:
        """Median of what a library adds, per unit and step."""
        pairs = zip(self.spent[library], self.spent["plain"], strict=True)
        return statistics.median(mine - plain for mine, plain in pairs) / self.units


@contextmanager
def fake_meshes() -> Iterator[dict[str, DeviceMesh]]:
    """The meshes, over fake ranks."""
    torch.set_num_threads(1)
    with fake_world(WORLD) as env:
        yield {name: env.mesh(shape) for name, shape in MESHES.items()}


def measure(setup: Setup, mesh: DeviceMesh, units: int, rounds: int, steps: int) -> Row:
    """CPU time of the three contenders in turns."""
    runs = {name: prepare(name, setup, units, mesh) for name in CONTENDERS}
    for run in runs.values():
        for _ in range(3):
            run()
    spent: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, run in runs.items():
            gc.collect()  # nobody pays for another's garbage, everybody for their own
            start = time.process_time()
            for _ in range(steps):
                run()
            spent[name].append((time.process_time() - start) / steps)
    return Row(setup, units, spent)


def count(setup: Setup, units: int, steps: int) -> Row:
    """Instructions of the three contenders, each in a process of its own under valgrind."""
    from torch.utils.benchmark import Timer

    spent = {}
    for name in CONTENDERS:
        progress(f"  {name} under valgrind ...")
        start = (
            "from benchmarks.host import Setup, fake_meshes, prepare\n"
            "held = fake_meshes()\n"
            f"setup = {setup!r}\n"
            f"run = prepare({name!r}, setup, {units}, held.__enter__()[setup.mesh])\n"
            "for _ in range(3): run()"
        )
        stats = Timer("run()", start).collect_callgrind(number=steps, collect_baseline=False)
        assert not isinstance(stats, tuple), "one repeat"
        spent[name] = [stats.counts() / steps]
    return Row(setup, units, spent)


def table(rows: Sequence[Row], unit: str, scale: float) -> str:
    """The ratios as text."""
    lines = [
        f"added per unit and step, {unit}; ratio hsdp / fsdp2, both less the plain model (round by round)",
        f"{'':48}    hsdp   fsdp2     min median    max",
    ]
    for row in rows:
        lines.append(
            f"{row.setup!s:48} {row.added('hsdp') * scale:7.0f} {row.added('fsdp2') * scale:7.0f}  {row.ratio}"
        )
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
    rows = []
    if args.instructions:
        rows = [count(setup, args.units, args.steps) for setup in setups(args)]
    else:
        with fake_meshes() as meshes:
            for setup in setups(args):
                progress(f"{setup} ...")
                rows.append(measure(setup, meshes[setup.mesh], args.units, args.rounds, args.steps))
    told = header()
    print("benchmarks.host: " + ", ".join(f"{key} {value}" for key, value in told.items()))
    print(table(rows, *(("1000 instructions", 1e-3) if args.instructions else ("us of CPU time", 1e6))))
    if args.json:
        whole = {"benchmark": "host", **told, "settings": vars(args), "rows": [asdict(row) for row in rows]}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    whats = ["pass", "step foreach", "step fused"]
    parser.add_argument("--what", nargs="+", choices=whats, default=whats)
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=list(MESHES), help="S or R x S")
    parser.add_argument("--params", nargs="+", type=positive, default=[9, 30], help="parameters per unit")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16/fp32"], default=["fp32", "bf16/fp32"])
    parser.add_argument("--fusion", nargs="+", choices=["auto", "packed", "direct"], default=["auto", "direct"])
    parser.add_argument("--units", type=positive, default=8, help="(default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=7, help="A B C turns (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=15, help="steps a turn (default %(default)s)")
    parser.add_argument("--instructions", action="store_true", help="count instructions under valgrind")
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

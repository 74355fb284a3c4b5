"""The A B A B runner: contenders take turns in one set of processes, and what counts is the ratio of each round.

    rank 0..N-1:  build A, build B, warm both up
                  round 1: A A A A  B B B B     round 2: A A A A  B B B B     ...
                  `steps` calls at a time, a barrier before and after

A and B of a round run within a moment of each other, so that what else the machine does hits both. The time of a
round is that of its slowest rank. Absolute times are context only.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsdp
from hsdp.examples.launch import leave
from tests.support.facts import header, in_words

Step = Callable[[], object]
AXES = {1: ("shard",), 2: ("replicate", "shard")}


@dataclass(frozen=True)
class Apart:
    """A step, and what runs behind each without being measured: what a training step would overlap with its end."""

    step: Step
    behind: Step

    def __call__(self) -> None:
        """Both."""
        self.step()
        self.behind()


@dataclass(frozen=True)
class Contender:
    """A name, and a function of a module (or a partial of one) that makes a step on this rank's mesh."""

    name: str
    build: Callable[[DeviceMesh], Step]


@dataclass(frozen=True)
class Plan:
    """How often to run what."""

    rounds: int = 7
    steps: int = 5
    warmup: int = 3


@dataclass(frozen=True)
class Rounds:
    """Times of one contender, in seconds per step and round: wall time, and CPU time summed over ranks."""

    name: str
    wall: list[float]
    cpu: list[float]


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of some values."""
        return cls(min(values), statistics.median(values), max(values))

    def __str__(self) -> str:
        return f"{self.min:6.2f} {self.median:6.2f} {self.max:6.2f}"


@dataclass(frozen=True)
class Row:
    """One configuration: A against B."""

    config: str
    a: Rounds
    b: Rounds

    @property
    def wall_ratio(self) -> Spread:
        """Wall time of A over that of B, round by round."""
        return Spread.of([a / b for a, b in zip(self.a.wall, self.b.wall, strict=True)])

    @property
    def cpu_ratio(self) -> Spread:
        """CPU time of A over that of B, round by round."""
        return Spread.of([a / b for a, b in zip(self.a.cpu, self.b.cpu, strict=True)])


def compare(config: str, mesh_shape: Sequence[int], a: Contender, b: Contender, plan: Plan) -> Row:
    """Run two contenders in turns on a mesh of fresh gloo processes, one thread each."""
    world = torch.Size(mesh_shape).numel()
    directory = tempfile.mkdtemp(prefix="hsdp-bench-")
    try:
        mp.spawn(_rank_main, (world, tuple(mesh_shape), (a, b), plan, directory), nprocs=world)
        times_a, times_b = json.loads(Path(directory, "times.json").read_text())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Row(config, Rounds(a.name, *times_a), Rounds(b.name, *times_b))


def _rank_main(
    rank: int, world: int, shape: tuple[int, ...], contenders: Sequence[Contender], plan: Plan, directory: str
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])
    steps = [contender.build(mesh) for contender in contenders]
    for step in steps:
        for _ in range(plan.warmup):
            step()
    rounds = [[_time(step, plan.steps) for step in steps] for _ in range(plan.rounds)]
    # [rounds, contenders, (wall, cpu)] -> per contender: wall times, CPU times
    local = torch.tensor(rounds, dtype=torch.float64)
    slowest, summed = local[..., 0].clone(), local[..., 1].clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(summed)
    if rank == 0:
        times = [[slowest[:, i].tolist(), summed[:, i].tolist()] for i in range(len(contenders))]
        Path(directory, "times.json").write_text(json.dumps(times))
    leave(0)  # gloo's threads may abort an interpreter that is going away


def _time(step: Step, num_steps: int) -> tuple[float, float]:
    gc.collect()  # neither pays for the other's garbage
    if isinstance(step, Apart):
        times = [_time_of(step.step, 1, step.behind) for _ in range(num_steps)]
        return statistics.mean(wall for wall, _ in times), statistics.mean(cpu for _, cpu in times)
    return _time_of(step, num_steps)


def _time_of(step: Step, num_steps: int, behind: Step | None = None) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    cpu, own = time.process_time() - cpu, time.perf_counter() - wall
    if behind is not None:  # ranks do not wait for each other before it: their slowest is found afterwards
        behind()
    dist.barrier()
    return (own if behind is not None else time.perf_counter() - wall) / num_steps, cpu / num_steps


def table(rows: Sequence[Row]) -> str:
    """The ratios as text."""
    a, b = rows[0].a.name, rows[0].b.name
    width = max(len(row.config) for row in rows)
    spread = "   min median    max"
    lines = [
        f"{a} / {b} (below 1: {a} is better)",
        f"{'':{width}}  {'wall time':^20}  {'CPU time':^20}  context: median ms per step",
        f"{'':{width}}  {spread}  {spread}  {a}, {b}",
    ]
    for row in rows:
        context = ", ".join(f"{1e3 * statistics.median(one.wall):.1f}" for one in (row.a, row.b))
        lines.append(f"{row.config:{width}}  {row.wall_ratio}  {row.cpu_ratio}  {context}")
    return "\n".join(lines)


def publish(
    name: str,
    text: str,
    settings: Mapping[str, Any],
    json_path: str | None,
    *,
    context: Mapping[str, str] | None = None,
    **found: Any,
) -> None:
    """Print what a benchmark found, below a line that says when and with what it ran.

    Args:
        name: of the benchmark.
        text: its table.
        settings: what it was asked for.
        json_path: file for everything measured, if any.
        context: more for the line.
        found: everything measured, for the file.
    """
    facts = header() | dict(context or {})
    print(f"benchmarks.{name}: {in_words(facts)}\n{text}", flush=True)
    if json_path:
        whole = {"benchmark": name, **facts, "settings": settings, **found}
        Path(json_path).write_text(json.dumps(whole, indent=1) + "\n")


def report(name: str, rows: Sequence[Row], settings: dict[str, Any], json_path: str | None) -> None:
    """Publish the ratios of some rows."""
    measured = [{**asdict(row), "wall_ratio": asdict(row.wall_ratio), "cpu_ratio": asdict(row.cpu_ratio)} for row in rows]
    publish(name, table(rows), settings, json_path, rows=measured)


# -- what is compared ---------------------------------------------------------------------------------------------


PRECISIONS = ("fp32", "bf16/fp32")
"""Storage in fp32 and compute, then reduction, in these."""


def dtypes_of(precision: str) -> dict[str, torch.dtype]:
    """A precision as arguments of either library's `MixedPrecisionPolicy`; "bf16" is for reductions too."""
    if precision == "fp32":
        return {}
    return {"param_dtype": torch.bfloat16} | ({"reduce_dtype": torch.float32} if precision == "bf16/fp32" else {})


def shard(library: str, modules: Iterable[nn.Module], mesh: DeviceMesh, precision: str = "fp32", **options: Any) -> None:
    """Makes a unit of each module by "hsdp" or "fsdp2"; "plain" leaves them alone. `options` are for hsdp."""
    for module in modules:
        if library == "hsdp":
            hsdp.fully_shard(module, mesh=mesh, mp_policy=hsdp.MixedPrecisionPolicy(**dtypes_of(precision)), **options)
        elif library == "fsdp2":
            fsdp.fully_shard(module, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**dtypes_of(precision)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags every benchmark has."""
    plan = Plan()
    parser.add_argument("--rounds", type=positive, default=plan.rounds, help="A B pairs (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=plan.steps, help="steps a turn (default %(default)s)")
    parser.add_argument("--warmup", type=positive, default=plan.warmup, help="steps before (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all measured times here")


def positive(text: str) -> int:
    """An argument that is an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def progress(text: str) -> None:
    """A line for whoever waits, on stderr."""
    print(text, file=sys.stderr, flush=True)

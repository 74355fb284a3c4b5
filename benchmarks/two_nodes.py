"""`python -m benchmarks.two_nodes`: a training step on two emulated nodes, hsdp beside FSDP2 and the best schedule.

Four ranks: shards inside a node, replicas across (`benchmarks.netns`), at three rates of the link between. The layers
either sleep for their compute time, so that compute and communication do not fight for few cores, or really compute.
All contenders take turns in one set of processes; a row is the ratio to FSDP2, which has its prefetch lists set and, with
accumulation, defers its all-reduce where hsdp does. `best` is `tests.support.best_step` fed with collectives that were
timed one at a time on the same link; no library reaches it exactly. Needs root.

With layers that sleep, a host has nothing to do, as beside a device: there gloo's threads hide what they copy, and copies
in shared memory, which the host makes when it waits, are not hidden. `--sockets` is the transport to look at then.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsdp
from benchmarks.harness import Spread, Step, positive, progress, publish, shard
from benchmarks.netns import two_nodes
from hsdp.comm.work import CommWork
from tests.support.best_step import Durations, best_step

WORLD = 4
RATES = {"unlimited": None, "1gbit": "1gbit", "500mbit": "500mbit"}
DIM, WEIGHTS = 612, 4
"""A unit: four square weights, 1.5 million parameters, 6 MB; ten units have 15 million."""


@dataclass(frozen=True)
class Job:
    """What the ranks do."""

    directory: str
    layers: str
    units: int
    forward: float
    rows: int
    rounds: int
    steps: int
    micro_batches: int
    contenders: tuple[str, ...]
    sockets: bool = False


class Sleep(torch.autograd.Function):
    """Sleeps for its compute time; twice as long in backward, where it makes gradients of the weights' sizes."""

    @staticmethod
    def forward(ctx: Any, seconds: float, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(*weights)
        time.sleep(seconds)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return None, grad, *(torch.full_like(weight, 1e-3) for weight in ctx.saved_tensors)


class SleepingLayer(nn.Module):
    """Weights, and as long as computing with them would take."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(DIM, DIM)) for _ in range(WEIGHTS))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.seconds, x, *self.weights)


class RealLayer(nn.Module):
    """The same weights, multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(WEIGHTS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class InTurn(hsdp.AllReduce):
    """The all-reduce stage without overlap: the host waits for each."""

    def start(self, *args: Any) -> CommWork:
        comm_work = super().start(*args)
        comm_work.wait()
        return comm_work


def build(job: Job, library: str, policy: hsdp.CommPolicy, mesh: DeviceMesh) -> nn.Module:
    """The sharded model; "plain": not sharded."""
    torch.manual_seed(0)
    layers = [RealLayer() if job.layers == "real" else SleepingLayer(job.forward) for _ in range(job.units)]
    model = nn.Sequential(*layers)
    shard(library, (*layers, model), mesh, comm_policy=replace(policy, shared_memory=not job.sockets))
    if library == "fsdp2":
        for at, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 2])
            layer.set_modules_to_backward_prefetch(layers[max(0, at - 1) : at][::-1])
    return model


UNIT_SHARD_BYTES = WEIGHTS * DIM * DIM * 4 // 2
"""Bytes of a unit's reduction buffer, with two shard ranks."""
BUCKETS = hsdp.CommPolicy(all_reduce_bucket_bytes=3 * UNIT_SHARD_BYTES)
CONTENDERS: dict[str, tuple[str, hsdp.CommPolicy, bool, bool]] = {
    # name: library, policy, several micro-batches, all-reduce deferred to the last one
    "fsdp2": ("fsdp2", hsdp.CommPolicy(), False, False),
    "overlap": ("hsdp", hsdp.CommPolicy(), False, False),
    "overlap, buckets": ("hsdp", BUCKETS, False, False),
    "fsdp2 / 4": ("fsdp2", hsdp.CommPolicy(), True, False),
    "overlap / 4": ("hsdp", hsdp.CommPolicy(), True, False),
    "fsdp2 deferred / 4": ("fsdp2", hsdp.CommPolicy(), True, True),
    "deferred alone / 4": ("hsdp", hsdp.CommPolicy(prefetch=0), True, True),
    "both / 4": ("hsdp", hsdp.CommPolicy(), True, True),
    "both, buckets / 4": ("hsdp", BUCKETS, True, True),
    "adamw": ("hsdp", hsdp.CommPolicy(), False, False),
    "adamw over replicas": ("hsdp", hsdp.CommPolicy(), False, False),
}
BASELINES = (
    {"overlap / 4": "fsdp2 / 4"}
    | dict.fromkeys(("deferred alone / 4", "both / 4", "both, buckets / 4"), "fsdp2 deferred / 4")
    | dict.fromkeys(("adamw", "adamw over replicas"), "adamw")
)
"""What a contender is compared with, if not "fsdp2"."""


def make_step(job: Job, name: str, mesh: DeviceMesh) -> tuple[Step, Step]:
    """A training step of a contender, without optimizer, unless its name has one; and what waits for all that it began."""
    library, policy, several, deferred = CONTENDERS[name]
    model: Any = build(job, library, policy, mesh)
    if name.startswith("deferred alone"):
        model.set_replica_reduce(InTurn())
    optimizer: Any = None
    if name.startswith("adamw"):
        adamw = torch.optim.AdamW(model.parameters(), foreach=True)
        optimizer = hsdp.optim.local(adamw, over_replicas=name.endswith("over replicas"))
    x = torch.randn(job.rows, DIM).requires_grad_()
    count = job.micro_batches if several else 1

    def micro_batch() -> None:
        model(x).mean().backward()

    def step() -> None:
        for micro in range(count):
            last = micro == count - 1
            if deferred and library == "hsdp":
                with model.accumulate(last=last):
                    micro_batch()
            else:
                if deferred:
                    model.set_requires_all_reduce(last)
                micro_batch()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    def end() -> None:
        for param in model.parameters():
            param.to_local()

    return step, end


def rank_main(rank: int, job: Job) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{job.directory}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    steps = {name: make_step(job, name, mesh) for name in job.contenders}
    times: dict[str, list[float]] = {name: [] for name in job.contenders}
    durations = []
    for step, _ in steps.values():
        for _ in range(2):
            step()
    for _ in range(job.rounds):
        durations.append(asdict(measure_parts(job, mesh)))
        for name, (step, end) in steps.items():
            gc.collect()
            times[name].append(_slowest(step, job.steps, end))
    if rank == 0:
        Path(job.directory, "times.json").write_text(json.dumps({"times": times, "durations": durations}))
    dist.barrier()
    dist.destroy_process_group()


def _slowest(run: Callable[[], object], times: int, end: Callable[[], object] | None = None) -> float:
    """Wall time of a run on the slowest rank; `end` comes behind the last one, and is measured with them."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        run()
    if end is not None:
        end()
    took = torch.tensor((time.perf_counter() - start) / times, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure_parts(job: Job, mesh: DeviceMesh) -> Durations:
    """One unit's parts, one at a time: its compute, and collectives as hsdp starts them, in both groups at once."""
    layers = build(replace(job, units=1), "plain", hsdp.CommPolicy(), mesh)
    x = torch.randn(job.rows, DIM).requires_grad_()
    repeats = 3
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.append(layers(x).mean())

    def backward() -> None:
        outputs.pop().backward()

    took_forward = _slowest(forward, repeats)
    took_backward = _slowest(backward, repeats)
    linear: nn.Module = nn.Linear(WEIGHTS * DIM, DIM, bias=False)
    policy = hsdp.CommPolicy(shared_memory=not job.sockets)
    unit: Any = hsdp.fully_shard(linear, mesh=mesh, comm_policy=policy)._units()[0]  # type: ignore[attr-defined]
    whole, part = torch.zeros(WEIGHTS * DIM * DIM), torch.zeros(WEIGHTS * DIM * DIM // 2)
    shard, replicate = unit.shard_comm, unit.replicate_comm
    return Durations(
        forward=took_forward,
        backward=took_backward,
        gather=_slowest(lambda: shard.all_gather(unit, 1, [whole], [part], None).wait(), repeats),
        scatter=_slowest(lambda: shard.reduce_scatter(unit, 2, [part], [whole], [], None).wait(), repeats),
        all_reduce=_slowest(lambda: replicate.all_reduce(unit, 3, [part]).wait(), repeats),
    )


@dataclass(frozen=True)
class Result:
    """One rate: times of each contender in seconds per step, round by round, and of the parts."""

    rate: str
    layers: str
    times: dict[str, list[float]]
    durations: list[Durations]

    def ratio(self, name: str) -> tuple[Spread, float]:
        """To its baseline: round by round, and smallest to smallest, which a busy machine disturbs least."""
        times, base = self.times[name], self.times[BASELINES.get(name, "fsdp2")]
        return Spread.of([a / b for a, b in zip(times, base, strict=True)]), min(times) / min(base)

    def over_best(self, job: Job, name: str) -> tuple[Spread, float]:
        """To the best schedule, likewise."""
        times = self.times[name]
        pairs = zip(times, self.durations, strict=True)
        quiet = Durations(**{key: min(getattr(one, key) for one in self.durations) for key in PARTS})
        return (
            Spread.of([took / best_of(job, name, parts) for took, parts in pairs]),
            min(times) / best_of(job, name, quiet),
        )


PARTS = [part.name for part in fields(Durations)]


def best_of(job: Job, name: str, parts: Durations) -> float:
    """The best schedule of a contender's step."""
    _, _, several, deferred = CONTENDERS[name]
    return best_step(parts, job.units, job.micro_batches if several else 1, deferred)


def table(results: Sequence[Result], job: Job) -> str:
    """The ratios as text."""
    spread = "min median    max  minima"
    lines = [
        f"{'':22}  {'ratio to fsdp2':^28}  {'ratio to best schedule':^28}  context: ms",
        f"{'':22}  {spread:>28}  {spread:>28}  smallest",
    ]
    for result in results:
        smallest = {key: min(getattr(one, key) for one in result.durations) for key in PARTS}
        told = ", ".join(f"{key} {1e3 * value:.1f}" for key, value in smallest.items())
        lines.append(f"{result.layers} layers, {result.rate}; one unit's parts alone take at least, ms: {told}")
        for name, times in result.times.items():
            ratio, best = result.ratio(name), result.over_best(job, name)
            cell = f"{'':28}" if name.startswith("fsdp2") else f"{ratio[0]}  {ratio[1]:6.2f}"
            lines.append(f"  {name:20}  {cell}  {best[0]}  {best[1]:6.2f}  {1e3 * min(times):.0f}")
    return "\n".join(lines)


def job_of(args: argparse.Namespace) -> Job:
    """What a command line asks for, but for the layers and where times are written."""
    times = args.units, args.forward, args.rows, args.rounds, args.steps, args.micro_batches
    return Job("", "sleeping", *times, tuple(args.only), args.sockets)


def measured(args: argparse.Namespace, module: str, timeout: float) -> Iterator[tuple[str, str, Any]]:
    """Runs the ranks of a benchmark, `python -m module --job JOB --rank RANK`, for each kind of layers and rate in turn.

    Yields the layers, the rate, and what rank 0 wrote to times.json in the job's directory.
    """
    with two_nodes() as nodes:
        for layers in args.layers:
            for rate in args.rate:
                progress(f"{layers} layers, {rate} ...")
                nodes.limit(RATES[rate])
                with tempfile.TemporaryDirectory(prefix="hsdp-bench-") as directory:
                    told = asdict(replace(job_of(args), directory=directory, layers=layers))
                    command = [sys.executable, "-W", "ignore", "-m", module, "--job", json.dumps(told)]
                    ranks = [(rank // 2, [*command, "--rank", str(rank)]) for rank in range(WORLD)]
                    nodes.run(ranks, Path(directory), timeout=timeout)
                    yield layers, rate, json.loads(Path(directory, "times.json").read_text())


def heading(args: argparse.Namespace) -> str:
    """The line above a table."""
    num_params = args.units * WEIGHTS * DIM * DIM
    return f"{num_params:,} parameters in {args.units} units, {args.micro_batches} micro-batches where '/ 4' is said"


def arguments(
    argv: Sequence[str] | None, module: str, doc: str | None, baselines: dict[str, str], rates: list[str], steps: int
) -> argparse.Namespace:
    """The command line of a benchmark: `baselines` tells its contenders, and which each is compared with."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.add_argument("--rate", nargs="+", choices=RATES, default=rates)
    parser.add_argument("--layers", nargs="+", choices=["sleeping", "real"], default=["sleeping", "real"])
    parser.add_argument("--only", nargs="+", choices=baselines, default=list(baselines), help="contenders")
    parser.add_argument("--sockets", action="store_true", help="ranks of a node do not share memory, as FSDP2's do not")
    parser.add_argument("--units", type=positive, default=10, help="(default %(default)s)")
    parser.add_argument("--forward", type=float, default=0.018, help="seconds a unit sleeps (default %(default)s)")
    parser.add_argument("--rows", type=positive, default=64, help="of a batch of real layers (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=steps, help="steps a turn (default %(default)s)")
    parser.add_argument("--micro-batches", type=positive, default=4, help="(default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all measured times here")
    args = parser.parse_args(argv)
    missing = {baselines[name] for name in args.only} - set(args.only)
    if missing:
        parser.error(f"--only also needs what they are compared with: {', '.join(sorted(missing))}")
    return args


def run(main: Callable[[], None], rank_main: Callable[[int, Job], None]) -> None:
    """A benchmark's process: that of a rank, which `measured` started, or the one that was called."""
    if "--job" not in sys.argv:
        main()
        return
    content = json.loads(sys.argv[sys.argv.index("--job") + 1])
    rank_main(int(sys.argv[-1]), Job(**content | {"contenders": tuple(content["contenders"])}))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    baselines = {name: BASELINES.get(name, "fsdp2") for name in CONTENDERS}
    args = arguments(argv, "benchmarks.two_nodes", __doc__, baselines, list(RATES), steps=1)
    results = [
        Result(rate, layers, found["times"], [Durations(**one) for one in found["durations"]])
        for layers, rate, found in measured(args, "benchmarks.two_nodes", timeout=1800)
    ]
    rows = [asdict(one) for one in results]
    report = f"{heading(args)}\n{table(results, job_of(args))}"
    publish("two_nodes", report, vars(args), args.json, rows=rows)


if __name__ == "__main__":
    run(main, rank_main)

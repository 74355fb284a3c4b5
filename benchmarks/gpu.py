"""`python -m benchmarks.gpu`: hsdp on one GPU, without a cluster. `--device cpu` runs the same code, tiny, as a rehearsal.

    verbs      every path of collectives.py on a real NCCL group of one rank, its results checked
    steps      Llama blocks in bf16 as one rank of idle worlds of 8 and 64 sees them, hsdp / FSDP2 / plain in turns: what
               sharding adds to a step besides communication, the host's share of it, the peak of memory, and how often the
               host waits for the device; with `--compiled` also with blocks that torch.compile has compiled
    overlap    the same with collectives that take set times on their streams (the GPU spins): how much of that is hidden,
               told by `hsdp.trace` and by the time of a step beside one without delays

Each part runs in a process of its own; the table comes last.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsdp
from benchmarks.harness import positive, progress, publish, shard
from benchmarks.idle_world import idle_world
from hsdp.comm.collectives import Comm
from hsdp.comm.observer import CommContext
from hsdp.comm.streams import Streams
from hsdp.comm.work import CommWork
from hsdp.examples.llama import Block, LlamaConfig

LIBRARIES = ("plain", "hsdp", "hsdp flat", "fsdp2")


@dataclass(frozen=True)
class Sizes:
    """Of the model, its batch and what is measured. The defaults of a GPU: 1.0e9 parameters in 20 blocks."""

    width: int = 2048
    hidden: int = 5504
    layers: int = 20
    heads: int = 16
    rows: int = 2
    length: int = 2048
    warmup: int = 3
    rounds: int = 5
    steps: int = 3


TINY = Sizes(width=32, hidden=64, layers=2, heads=2, rows=1, length=8, warmup=1, rounds=1, steps=1)


class Blocks(nn.Module):
    """A stack of Llama's blocks: what a large model spends its time in, without embedding and head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        config = LlamaConfig(
            width=sizes.width, layers=sizes.layers, heads=sizes.heads, hidden=sizes.hidden, max_len=sizes.length
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(sizes.layers))
        angles = torch.outer(torch.arange(sizes.length).float(), torch.ones(sizes.width // sizes.heads // 2))
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.rotations)
        return x


# -- verbs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Owner:
    """What a collective is for."""

    name: str = "benchmark"


def check_verbs(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Runs every verb of a `Comm` on a group of one rank; returns what was checked.

    Raises:
        AssertionError: a verb gave something else than its input, which is what one rank gets.
    """
    streams = Streams(device)
    comm = Comm(group, 0, 1, device, CommContext(streams))
    checked: list[str] = []
    keys = iter(range(1, 1000))

    def fresh(*dtypes: torch.dtype) -> list[Tensor]:
        return [torch.randn(1024 * (i + 1), device=device).to(dtype) for i, dtype in enumerate(dtypes)]

    def check(what: str, start: Callable[[], CommWork], outputs: list[Tensor], expected: list[Tensor]) -> None:
        comm_work = start()
        comm_work.wait()
        streams.synchronize()
        assert comm_work.done(), f"{what}: not done after it was waited for"
        for output, value in zip(outputs, expected, strict=True):
            assert torch.equal(output, value), f"{what} changed a tensor of {value.numel()} {value.dtype}"
        checked.append(what)

    f32, bf16 = torch.float32, torch.bfloat16
    for what, dtypes in {"one": [f32], "several": [f32, f32, f32], "two dtypes": [bf16, f32, bf16]}.items():
        given = fresh(*dtypes)
        got = [torch.zeros_like(one) for one in given]
        doubled = [torch.zeros_like(one) for one in given]

        def double(got: list[Tensor] = got, doubled: list[Tensor] = doubled) -> None:
            torch._foreach_copy_(doubled, got)
            torch._foreach_mul_(doubled, 2.0)

        def gather(given: list[Tensor] = given, got: list[Tensor] = got, then: Any = double) -> CommWork:
            outs, ins = ([one.view(torch.uint8) for one in tensors] for tensors in (got, given))
            with streams.on("gather"):
                return comm.all_gather(Owner(), next(keys), outs, ins, then)

        check(f"all-gather of {what}", gather, [*got, *doubled], [*given, *(2 * one for one in given)])
        kept, got_back = fresh(*dtypes), [torch.zeros_like(one) for one in given]
        before = [one.clone() for one in kept]

        def scatter(given: list[Tensor] = given, got: list[Tensor] = got_back, whole: list[Tensor] = kept) -> CommWork:
            with streams.on("scatter"):
                return comm.reduce_scatter(Owner(), next(keys), got, given, whole, None)

        check(f"reduce-scatter of {what}", scatter, [*got_back, *kept], [*given, *before])

        def reduce(tensors: list[Tensor] = kept) -> CommWork:
            with streams.after("replicate", streams.mark()):
                return comm.all_reduce(Owner(), next(keys), tensors)

        check(f"all-reduce of {what}", reduce, kept, before)
    value = torch.ones(4, device=device)
    check("local", lambda: comm.local("scale", Owner(), lambda: value.mul_(3.0)), [value], [torch.full_like(value, 3.0)])
    assert comm.exchange("benchmark", {"rank": 0}, Owner()) == [{"rank": 0}]
    comm.broadcast("benchmark", value, Owner())
    return checked


def _verbs_main(_: int, kind: str, result: str) -> None:
    device = device_of(kind)
    store = dist.FileStore(f"{result}.store", 1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    checked = check_verbs(dist.group.WORLD, device)
    dist.destroy_process_group()
    Path(result).write_text(json.dumps(checked))


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A library in a world, its blocks compiled or not.

    Attributes:
        ms, host_ms: milliseconds of a step, round by round: until the device is done, and until the host has enqueued it.
        peak_mib, reserved_mib: the peak of allocated memory, and what the allocator holds for it, in MiB.
        syncs: how often the host waits for the device in a step, as far as PyTorch sees it.
    """

    library: str
    world: int
    compiled: bool
    ms: list[float]
    host_ms: list[float]
    peak_mib: float
    reserved_mib: float
    syncs: int


def prepare(
    library: str, sizes: Sizes, mesh: DeviceMesh, device: torch.device, compiled: bool = False
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A sharded model in bf16 with fp32 shards (plain: all bf16), and its step with AdamW, which returns the loss.

    "hsdp flat" is hsdp whose AdamW steps one flat tensor of shards.
    """
    torch.manual_seed(0)
    with device:
        model = Blocks(sizes)
    for block in model.blocks if compiled else ():
        block.compile()
    shard(library.removesuffix(" flat"), (*model.blocks, model), mesh, "bf16/fp32")
    if library == "plain":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # no temporaries
    if library == "hsdp flat":
        optimizer = hsdp.optim.local(optimizer, flat=True)
    x = torch.randn(sizes.rows, sizes.length, sizes.width, device=device, dtype=torch.bfloat16)

    def step() -> Tensor:
        loss: Tensor = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def measure_steps(library: str, world: int, sizes: Sizes, device: torch.device, compiled: bool = False) -> Measured:
    """One library as rank 0 of an idle world."""
    with idle_world(world):
        mesh = _mesh(world, device)
        _, step = prepare(library, sizes, mesh, device, compiled)
        for _ in range(sizes.warmup):
            step()
        syncs = _syncs(step, device)
        _reset_peak(device)
        times = [time_of(step, sizes.steps, device) for _ in range(sizes.rounds)]
        ms, host_ms = ([one[k] for one in times] for k in (0, 1))
        return Measured(library, world, compiled, ms, host_ms, *_peaks_mib(device), syncs)


def _steps_main(_: int, kind: str, library: str, world: int, sizes: Sizes, compiled: bool, result: str) -> None:
    measured = measure_steps(library, world, sizes, device_of(kind), compiled)
    Path(result).write_text(json.dumps(vars(measured)))


# -- overlap ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """hsdp with collectives that take time: a step without delays and with, what they sum to, and what a trace says.

    `hidden` is the share of the delays that does not show in the step; `traced` the trace's share of collectives' time
    under compute.
    """

    plain_ms: float
    delayed_ms: float
    delays_ms: float
    hidden: float
    traced: float
    summary: str


class SlowComm(Comm):
    """A Comm whose collectives take time: on a GPU the stream that they run on spins first."""

    pauses: ClassVar[dict[str, float]] = {}
    """Seconds, by kind of collective."""

    def _ready(self, key: int, kind: str, owner: Any, custom: object = None) -> int:
        key = super()._ready(key, kind, owner, custom)  # first: from there on a trace counts the collective's time
        _spin(self.pauses[kind], self.device)
        return key


def slow_down(model: Any, pauses: dict[str, float]) -> None:
    """Makes the collectives of a sharded model take time, for good."""
    SlowComm.pauses = pauses
    for unit in model._units():
        for comm in (unit.shard_comm, unit.replicate_comm):
            comm.__class__ = SlowComm


_cycles_per_second: list[float] = []


def _spin(seconds: float, device: torch.device) -> None:
    if device.type != "cuda":
        time.sleep(seconds)
        return
    if not _cycles_per_second:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        begin.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        end.synchronize()
        _cycles_per_second.append(100_000_000 / (begin.elapsed_time(end) / 1e3))
    torch.cuda._sleep(int(seconds * _cycles_per_second[0]))


def measure_overlap(sizes: Sizes, device: torch.device) -> Overlap:
    """An idle world of 2 x 4 whose collectives each take a third of a block's backward or so."""
    with idle_world(8):
        mesh = init_device_mesh(device.type, (2, 4), mesh_dim_names=("replicate", "shard"))
        model, step = prepare("hsdp", sizes, mesh, device)
        for _ in range(sizes.warmup):
            step()
        plain = statistics.median(time_of(step, sizes.steps, device)[0] for _ in range(sizes.rounds))
        # Forward takes about a third of a step of a block, and two gathers and two reductions lie beside three thirds.
        pause = plain / 1e3 / sizes.layers / 6
        _spin(pause, device)
        pauses = {"all-gather": pause, "reduce-scatter": pause, "all-reduce": 2 * pause}
        slow_down(model, pauses)
        slow = statistics.median(time_of(step, sizes.steps, device)[0] for _ in range(sizes.rounds))
        with hsdp.trace(model) as t:
            for _ in range(sizes.steps):
                step()
        summary = t.summary()
        started = {kind: one.started / sizes.steps for kind, one in summary.collectives.items()}
        delays = 1e3 * sum(started[kind] * took for kind, took in pauses.items())
        hidden = 1.0 - (slow - plain) / delays
        return Overlap(plain, slow, delays, hidden, summary.overlap, str(summary))


def _overlap_main(_: int, kind: str, sizes: Sizes, result: str) -> None:
    Path(result).write_text(json.dumps(vars(measure_overlap(sizes, device_of(kind)))))


# -- the machine ------------------------------------------------------------------------------------------------------


def device_of(kind: str) -> torch.device:
    """The device of this process, made its own."""
    if kind == "cuda":
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    torch.set_num_threads(1)
    return torch.device(kind)


def _mesh(world: int, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))


def time_of(step: Callable[[], object], num_steps: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step: until the device is done, and until the host has enqueued it."""
    gc.collect()
    streams = Streams(device)
    streams.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    enqueued = time.perf_counter()
    streams.synchronize()
    return tuple(1e3 * (end - start) / num_steps for end in (time.perf_counter(), enqueued))  # type: ignore[return-value]


def _syncs(step: Callable[[], object], device: torch.device) -> int:
    """How often the host waits for the device in a step, as far as PyTorch tells."""
    if device.type != "cuda":
        step()
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in caught if "synchronizing" in str(one.message)]
    for one in waits[:3]:
        progress(f"the host waits at {one.filename}:{one.lineno}")
    return len(waits)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peaks_mib(device: torch.device) -> tuple[float, float]:
    """Allocated at the peak, and reserved."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated(device) / 2**20, torch.cuda.max_memory_reserved(device) / 2**20


# -- the whole --------------------------------------------------------------------------------------------------------


def run(kind: str, worlds: Sequence[int], sizes: Sizes, folder: Path, compiled: bool = False) -> dict[str, Any]:
    """All parts, each in a process of its own, so that none finds another's memory; `compiled`: in the first world too."""
    found: dict[str, Any] = {"steps": []}
    progress("verbs ...")
    found["verbs"] = _in_process(_verbs_main, folder / "verbs", kind)
    for world, with_compiler in [(world, False) for world in worlds] + [(world, True) for world in worlds[:1] if compiled]:
        for library in LIBRARIES:
            progress(f"{library} in a world of {world}{', compiled' * with_compiler} ...")
            name = f"{library}{world}{with_compiler}"
            found["steps"].append(_in_process(_steps_main, folder / name, kind, library, world, sizes, with_compiler))
    progress("overlap ...")
    found["overlap"] = _in_process(_overlap_main, folder / "overlap", kind, sizes)
    return found


def _in_process(main: Callable[..., None], result: Path, *args: Any) -> Any:
    mp.spawn(main, (*args, str(result)), nprocs=1)
    return json.loads(result.read_text())


def table(found: dict[str, Any]) -> str:
    """What was found, as text."""
    overlap = found["overlap"]
    lines = [
        f"{len(found['verbs'])} paths of collectives.py checked on a group of one rank",
        f"{'world':>6}  {'library':20}{'ms per step (min median max)':>29}{'host ms':>9}{'peak MiB':>10}{'reserved':>10}"
        f"{'waits':>7}",
    ]
    for row in found["steps"]:
        spread = f"{min(row['ms']):.1f} {statistics.median(row['ms']):.1f} {max(row['ms']):.1f}"
        lines.append(
            f"{row['world']:6}  {row['library'] + ' compiled' * row['compiled']:20}{spread:>29}"
            f"{statistics.median(row['host_ms']):9.1f}{row['peak_mib']:10.0f}{row['reserved_mib']:10.0f}{row['syncs']:7}"
        )
    lines.append(
        f"overlap, 2 x 4: {overlap['plain_ms']:.1f} ms a step, {overlap['delayed_ms']:.1f} ms with "
        f"{overlap['delays_ms']:.1f} ms of delays in its collectives: {overlap['hidden']:.0%} hidden; traced: "
        f"{overlap['traced']:.0%} under compute"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal with tiny sizes")
    parser.add_argument("--worlds", nargs="+", type=positive, default=[8, 64], help="sizes of the idle worlds")
    parser.add_argument("--compiled", action="store_true", help="in the first world also with compiled blocks")
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs a rehearsal")
    started = time.perf_counter()
    sizes = Sizes() if args.device == "cuda" else TINY
    with tempfile.TemporaryDirectory(prefix="hsdp-bench-") as folder:
        found = run(args.device, args.worlds, sizes, Path(folder), args.compiled)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu, a rehearsal"
    told = [found["overlap"]["summary"], f"{time.perf_counter() - started:.0f} s in all; {sizes}", table(found)]
    settings = {**vars(args), "sizes": vars(sizes)}
    publish("gpu", "\n".join(told), settings, args.json, context={"device": device}, **found)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.memory`: transient communication memory of a step, for models of 4, 16 and 64 layers.

Layers are large weights that compute next to nothing, so what a step allocates and frees again is what communication
needs: whole parameters, gradients on their way, buffers of collectives.

    transient = peak of (bytes alive - bytes alive before the pass - gradients landed so far)       / U

U is one unit gathered: its elements in the compute dtype. It must be the same for any number of layers. Beside it
stands the formula of docs/formulas.md; FSDP2 runs the same model. The process group is fake (4 ranks): its collectives
never say that they are done until somebody waits, which is how a slow link looks, so queues fill up to their bounds. With
`--gloo` four processes run, and hsdp holds what its reduce-scatter of all-to-all and sum receives besides. With `--device
emul` they run on the emulated accelerator (tests/support/device), and bytes are those of its allocator.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from benchmarks.harness import PRECISIONS, dtypes_of, positive, progress, publish, shard
from hsdp.params.tensor_parallel import block_of
from tests.support import device as emulator
from tests.support.counting import LiveBytes
from tests.support.rig import Pool, RankEnv, fake_world

WORLD = 4
MESHES = {"4": (4,), "2x2": (2, 2)}
WEIGHTS, ROWS, COLUMNS = 4, 512, 256
UNIT = WEIGHTS * ROWS * COLUMNS + COLUMNS
"""Elements of a unit: U."""


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    mesh: str
    precision: str
    library: str
    prefetch: int = 1

    @property
    def replicas(self) -> int:
        """Replicas R."""
        return WORLD // self.shards

    @property
    def shards(self) -> int:
        """Shard ranks S."""
        return MESHES[self.mesh][-1]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of an element of a whole parameter: b_p."""
        return 4 if self.precision == "fp32" else 2

    def __str__(self) -> str:
        prefetch = "" if self.library == "fsdp2" else f" prefetch {self.prefetch}"
        return f"{self.mesh:>4}  {self.precision:9}  {self.library}{prefetch}"


class Layer(nn.Module):
    """`WEIGHTS` weights and a small one, all used, of which autograd saves nothing but the weights: no activations."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(WEIGHTS))
        self.gain = nn.Parameter(torch.ones(COLUMNS))
        self.register_buffer("probe", torch.full((1, COLUMNS), 1 / COLUMNS, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.weights:
            x = x + F.linear(self.probe, layer.weight).mean()
        return x + self.gain.mean()


@dataclass(frozen=True)
class Peaks:
    """Transient bytes at the peak of each half of a step, in units of U, for one number of layers."""

    layers: int
    forward: float
    backward: float

    @property
    def pair(self) -> tuple[float, float]:
        """Forward, backward."""
        return self.forward, self.backward


class TransientBytes(LiveBytes):
    """Counts live bytes less those of gradients that have landed."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._params = params
        self._landed_before = _grad_bytes(params)

    @property
    def live(self) -> int:
        return super().live - (_grad_bytes(self._params) - self._landed_before)


class AllocatedBytes(TransientBytes):
    """The same by the counters of the device's allocator, whose peak is read and begun anew around every operator.

    What an operator itself allocates and frees counts too. Memory is freed in the order of the host's calls, as CUDA's is.
    """

    def __init__(self, params: Sequence[nn.Parameter], device: str) -> None:
        super().__init__(params)
        self._module = torch.get_device_module(device)
        self._landed = self._landed_before
        self._before = 0

    def __enter__(self) -> AllocatedBytes:
        gc.collect()
        self._before = self._module.memory_allocated()
        self._module.reset_peak_memory_stats()
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *exc: object) -> None:
        self._measure()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    @property
    def live(self) -> int:
        return self._above(self._module.memory_allocated())

    def _above(self, allocated: int) -> int:
        return allocated - self._before - (self._landed - self._landed_before)

    def _measure(self) -> None:
        # Since the last operator no more can have landed than has now: what landed meanwhile was transient until then.
        self.peak = max(self.peak, self._above(self._module.max_memory_allocated()))
        self._landed = _grad_bytes(self._params)
        self._module.reset_peak_memory_stats()


def _grad_bytes(params: Sequence[nn.Parameter]) -> int:
    storages = {}
    for param in params:
        if param.grad is not None:
            storage = block_of(param.grad).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def build(setup: Setup, layers: int, mesh: DeviceMesh, device: str = "cpu") -> nn.Module:
    """The sharded model."""
    dtype = dtypes_of(setup.precision).get("param_dtype", torch.float32)
    model = nn.Sequential(*(Layer(dtype) for _ in range(layers))).to(device)
    policy = hsdp.CommPolicy(prefetch=setup.prefetch)
    shard(setup.library, (*model, model), mesh, setup.precision, comm_policy=policy)
    return model


def measure(setup: Setup, layers: int, mesh: DeviceMesh, device: str = "cpu") -> Peaks:
    """Peaks of the third step: the first ones allocate for good and record the order."""
    gc.collect()
    model = build(setup, layers, mesh, device)
    params = list(model.parameters())
    counter = TransientBytes if device == "cpu" else partial(AllocatedBytes, device=device)
    x = torch.ones(1, 1, device=device)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    with counter(params) as forward:
        loss = model(x).sum()
    # What forward leaves whole (FSDP2 keeps the last unit) is communication's too: it counts on in backward.
    kept = forward.live
    with counter(params) as backward:
        loss.backward()
    unit = UNIT * setup.gathered_bytes
    return Peaks(layers, forward.peak / unit, (kept + backward.peak) / unit)


def formula(setup: Setup, device: str = "cpu") -> tuple[float, float]:
    """docs/formulas.md's bounds in units of U, for forward and backward of hsdp with its default policy but for prefetch.

    gathered + gradients being made + reductions that hold whole gradients + shards of reductions under way
    """
    policy = hsdp.CommPolicy(prefetch=setup.prefetch)
    gathered = 1 + policy.prefetch
    made = 1
    wide = 4 / setup.gathered_bytes  # b_g / b_p
    holding = policy.max_inflight_reduce_scatters
    queued = policy.max_inflight_all_reduces if setup.replicas > 1 or device != "cpu" else 0
    return gathered, gathered + made + wide * (holding + (holding + queued) / setup.shards)


def setups(args: argparse.Namespace) -> Iterator[Setup]:
    """All combinations asked for."""
    for mesh in args.mesh:
        for precision in args.precision:
            for prefetch in args.prefetch:
                yield Setup(mesh, precision, "hsdp", prefetch)
            yield Setup(mesh, precision, "fsdp2")


def run(env: RankEnv, todo: Sequence[Setup], layers: Sequence[int]) -> list[list[Peaks]]:
    """Everything, on this rank."""
    torch.set_num_threads(1)
    found = []
    for setup in todo:
        if env.rank == 0:
            progress(f"{setup} ...")
        found.append([measure(setup, count, env.mesh(MESHES[setup.mesh]), env.device) for count in layers])
    return found


def _largest(peaks: Sequence[Peaks]) -> Peaks:
    """Of all ranks."""
    return Peaks(peaks[0].layers, max(one.forward for one in peaks), max(one.backward for one in peaks))


def table(todo: Sequence[Setup], found: Sequence[Sequence[Peaks]], device: str = "cpu") -> str:
    """Forward and backward for each number of layers."""
    heads = "  ".join(f"{f'L={peaks.layers}':^13}" for peaks in found[0])
    lines = [
        f"transient bytes in units U ({UNIT * 4 / 2**20:.1f} MiB in fp32), forward / backward",
        f"{'':32}  {heads}  {'formula':^13}",
    ]
    for setup, row in zip(todo, found, strict=True):
        cells = "  ".join(_cell(peaks.pair) for peaks in row)
        limit = _cell(formula(setup, device)) if setup.library == "hsdp" else ""
        lines.append(f"{setup!s:32}  {cells}  {limit}")
    return "\n".join(lines)


def _cell(pair: tuple[float, float]) -> str:
    return f"{pair[0]:5.2f} / {pair[1]:5.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    args = parse(argv)
    todo = list(setups(args))
    if args.gloo or args.device != "cpu":
        if args.device != "cpu":
            emulator.build()
        with Pool(WORLD, device=args.device) as pool:
            ranks = pool.run(run, todo, args.layers, timeout=600)
        # The largest peak of all ranks: they differ by what has arrived when.
        found = [[_largest(peaks) for peaks in zip(*rows, strict=True)] for rows in zip(*ranks, strict=True)]
    else:
        with fake_world(WORLD) as env:
            found = run(env, todo, args.layers)
    backend = "emulccl, by the device's allocator" if args.device != "cpu" else "gloo" if args.gloo else "fake"
    told = f"backend {backend}, {table(todo, found, args.device)}"
    rows = [{**asdict(setup), "peaks": [asdict(p) for p in row]} for setup, row in zip(todo, found, strict=True)]
    publish("memory", told, vars(args), args.json, rows=rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=list(MESHES), help="S or R x S")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--layers", nargs="+", type=positive, default=[4, 16, 64], help="(default %(default)s)")
    parser.add_argument("--prefetch", nargs="+", type=int, default=[1, 0], help="windows (default %(default)s)")
    parser.add_argument("--gloo", action="store_true", help="four real processes")
    parser.add_argument("--device", choices=["cpu", emulator.NAME], default="cpu", help="emul: four real processes too")
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    from benchmarks import memory  # under its own name, where other processes find what is sent to them

    memory.main()

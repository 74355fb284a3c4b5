"""`python -m benchmarks.memory`: transient communication memory of a step, for models of 4, 16 and 64 layers.

Layers are large weights that compute next to nothing, so what a step allocates and frees again is what communication
needs: whole parameters, gradients on their way, buffers of collectives.

    transient = peak of (bytes alive - bytes alive before the pass - memory that becomes gradients, from its birth on) / U

U is one unit gathered: its elements in the compute dtype. It must be the same for any number of layers. Beside it
stands the formula of docs/formulas.md; FSDP2 runs the same model. FSDP2 puts the output of a reduction into `.grad` when
it enqueues the reduction, hsdp when it has ended: that memory is the gradient's in both, and counts as such in both. The
last column holds this against the peak of all bytes, gradients included, which no choice of what is transient changes.
With `--standing`, gradients are there when the backward begins, and outputs are added to them: then all of it counts.

The process group is fake: its collectives never say that they are done until somebody waits, which is how a slow link
looks, so queues fill up to their bounds. With `--gloo` four processes run, and hsdp holds what its reduce-scatter of
all-to-all and sum receives besides. With `--device emul` they run on the emulated accelerator (tests/support/device), and
bytes are those of its allocator.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from benchmarks import harness
from benchmarks.harness import dtypes_of, positive, progress, publish, shard
from hsdp.params.local import local_of
from tests.support import device as emulator
from tests.support.counting import LiveBytes
from tests.support.rig import Pool, RankEnv, fake_world

MESHES = {"4": (4,), "2x2": (2, 2), "2x8": (2, 8), "2x64": (2, 64)}
PRECISIONS = (*harness.PRECISIONS, "bf16")
WEIGHTS, ROWS, COLUMNS = 4, 512, 256
UNIT = WEIGHTS * ROWS * COLUMNS + COLUMNS
"""Elements of a unit: U."""


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        mesh, precision: as they are called above.
        library: "hsdp" or "fsdp2".
        prefetch, fusion: of hsdp's policy.
        standing: gradients are there when the backward begins.
    """

    mesh: str
    precision: str
    library: str
    prefetch: int = 1
    fusion: str = "direct"
    standing: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mesh."""
        return MESHES[self.mesh]

    @property
    def world(self) -> int:
        """Ranks."""
        return math.prod(self.shape)

    @property
    def replicas(self) -> int:
        """Replicas R."""
        return self.world // self.shards

    @property
    def shards(self) -> int:
        """Shard ranks S."""
        return self.shape[-1]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of an element of a whole parameter: b_p."""
        return 4 if self.precision == "fp32" else 2

    @property
    def reduced_bytes(self) -> int:
        """Bytes of an element that is reduced: b_g."""
        return 2 if self.precision == "bf16" else 4

    def __str__(self) -> str:
        policy = "" if self.library == "fsdp2" else f" {self.fusion}, prefetch {self.prefetch}"
        return f"{self.mesh:>4}  {self.precision:9}  {self.library}{policy}{', standing' if self.standing else ''}"


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
    """Bytes at the peak, in units of U, for one number of layers.

    Attributes:
        layers: their number.
        forward, backward: transient ones, of each half of a step.
        step: all, gradients included, but for the shards.
    """

    layers: int
    forward: float
    backward: float
    step: float

    @property
    def pair(self) -> tuple[float, float]:
        """Forward, backward."""
        return self.forward, self.backward


class TransientBytes(LiveBytes):
    """Live bytes at every operator, and when each storage was made: afterwards one knows which became gradients."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._params = params
        self._history: list[int] = []
        self._born: dict[int, int] = {}

    def transient(self) -> int:
        """The peak without the memory that has become gradients, from when that was allocated."""
        made = sorted((self._born[key], size) for key, size in _gradients(self._params).items() if key in self._born)
        peak = grads = taken = 0
        for at, live in enumerate(self._history):
            while taken < len(made) and made[taken][0] <= at:
                grads += made[taken][1]
                taken += 1
            peak = max(peak, live - grads)
        return peak

    def _note(self, tensor: Tensor, old: bool) -> None:
        known = len(self._known)
        super()._note(tensor, old)
        if len(self._known) > known and not old:
            self._born[tensor.untyped_storage()._cdata] = len(self._history)

    def _measure(self) -> None:
        live = self._measured()
        self.peak = max(self.peak, live)
        self._history.append(live)

    def _measured(self) -> int:
        return self.live


class AllocatedBytes(TransientBytes):
    """The same by the counters of the device's allocator, whose peak is read and begun anew around every operator.

    What an operator itself allocates and frees counts too. Memory is freed in the order of the host's calls, as CUDA's is.
    """

    def __init__(self, params: Sequence[nn.Parameter], device: str) -> None:
        super().__init__(params)
        self._module = torch.get_device_module(device)
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
        return int(self._module.memory_allocated()) - self._before

    def _measured(self) -> int:
        peak = int(self._module.max_memory_allocated()) - self._before
        self._module.reset_peak_memory_stats()
        return peak


def _gradients(params: Sequence[nn.Parameter]) -> dict[int, int]:
    """The memory of gradients: bytes by storage."""
    storages = [local_of(param.grad).untyped_storage() for param in params if param.grad is not None]
    return {storage._cdata: storage.nbytes() for storage in storages}


def build(setup: Setup, layers: int, mesh: DeviceMesh, device: str = "cpu") -> nn.Module:
    """The sharded model."""
    dtype = dtypes_of(setup.precision).get("param_dtype", torch.float32)
    model = nn.Sequential(*(Layer(dtype) for _ in range(layers))).to(device)
    shard(setup.library, (*model, model), mesh, setup.precision, comm_policy=policy_of(setup))
    return model


def policy_of(setup: Setup) -> hsdp.CommPolicy:
    """hsdp's policy, the default but for what is set up."""
    return hsdp.CommPolicy(prefetch=setup.prefetch, fusion=setup.fusion)  # type: ignore[arg-type]


def measure(setup: Setup, layers: int, mesh: DeviceMesh, device: str = "cpu") -> Peaks:
    """Peaks of the third step: the first ones allocate for good and record the order."""
    gc.collect()
    model = build(setup, layers, mesh, device)
    params = list(model.parameters())

    def counter() -> TransientBytes:
        return TransientBytes(params) if device == "cpu" else AllocatedBytes(params, device)

    x = torch.ones(1, 1, device=device)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    if setup.standing:
        model(x).sum().backward()
    with counter() as forward:
        loss = model(x).sum()
    # What forward leaves whole (FSDP2 keeps the last unit) is communication's too: it counts on in backward.
    kept = forward.live
    with counter() as backward:
        loss.backward()
    unit = UNIT * setup.gathered_bytes
    peaks = forward.peak, kept + backward.transient(), max(forward.peak, kept + backward.peak)
    return Peaks(layers, *(peak / unit for peak in peaks))


def formula(setup: Setup, device: str = "cpu") -> tuple[float, float]:
    """docs/formulas.md's bounds in units of U, for forward and backward of hsdp with its default policy but for `setup`.

    gathered (staging of packed ones included) + gradients being made + reductions that hold whole gradients
    + results of reductions that are not the gradients' own memory
    """
    policy = policy_of(setup)
    gathered = 1 + policy.prefetch
    unpacked = max(gathered, 2) if setup.fusion == "packed" else gathered
    made = 1
    wide = setup.reduced_bytes / setup.gathered_bytes  # b_g / b_p
    holding = policy.max_inflight_reduce_scatters
    queued = policy.max_inflight_all_reduces if setup.replicas > 1 or device != "cpu" else 0
    own = setup.reduced_bytes == 4 and not setup.standing
    results = 0 if own else wide * (holding + queued) / setup.shards
    return unpacked, gathered + made + wide * holding + results


def setups(args: argparse.Namespace) -> Iterator[Setup]:
    """All combinations asked for."""
    for mesh in args.mesh:
        for precision in args.precision:
            for fusion in args.fusion:
                for prefetch in args.prefetch:
                    yield Setup(mesh, precision, "hsdp", prefetch, fusion, args.standing)
            yield Setup(mesh, precision, "fsdp2", standing=args.standing)


def run(env: RankEnv, todo: Sequence[Setup], layers: Sequence[int]) -> list[list[Peaks]]:
    """Everything, on this rank."""
    torch.set_num_threads(1)
    found = []
    for setup in todo:
        if env.rank == 0:
            progress(f"{setup} ...")
        found.append([measure(setup, count, env.mesh(setup.shape), env.device) for count in layers])
    return found


def run_alone(todo: Sequence[Setup], layers: Sequence[int]) -> list[list[Peaks]]:
    """Everything, as one rank of worlds that are not there."""
    found = []
    for world, same in groupby(todo, lambda setup: setup.world):
        with fake_world(world) as env:
            found += run(env, list(same), layers)
    return found


def _largest(peaks: Sequence[Peaks]) -> Peaks:
    """Of all ranks."""
    most = [max(getattr(one, name) for one in peaks) for name in ("forward", "backward", "step")]
    return Peaks(peaks[0].layers, *most)


def table(todo: Sequence[Setup], found: Sequence[Sequence[Peaks]], device: str = "cpu") -> str:
    """Forward and backward for each number of layers."""
    heads = "  ".join(f"{f'L={peaks.layers}':^13}" for peaks in found[0])
    lines = [
        f"transient bytes in units U ({UNIT * 4 / 2**20:.1f} MiB in fp32), forward / backward",
        f"{'':45}  {heads}  {'formula':^13}  peak, L={found[0][-1].layers}",
    ]
    for setup, row in zip(todo, found, strict=True):
        cells = "  ".join(_cell(peaks.pair) for peaks in row)
        limit = _cell(formula(setup, device)) if setup.library == "hsdp" else ""
        lines.append(f"{setup!s:45}  {cells}  {limit:13}  {row[-1].step:6.2f}")
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
        with Pool(todo[0].world, device=args.device) as pool:
            ranks = pool.run(run, todo, args.layers, timeout=600)
        # The largest peak of all ranks: they differ by what has arrived when.
        found = [[_largest(peaks) for peaks in zip(*rows, strict=True)] for rows in zip(*ranks, strict=True)]
    else:
        found = run_alone(todo, args.layers)
    backend = "emulccl, by the device's allocator" if args.device != "cpu" else "gloo" if args.gloo else "fake"
    report = f"backend {backend}, {table(todo, found, args.device)}"
    rows = [{**asdict(setup), "peaks": [asdict(p) for p in row]} for setup, row in zip(todo, found, strict=True)]
    publish("memory", report, vars(args), args.json, rows=rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--mesh", nargs="+", choices=MESHES, help="S or R x S (default: all, of four ranks with processes)")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--layers", nargs="+", type=positive, default=[4, 16, 64], help="(default %(default)s)")
    parser.add_argument("--fusion", nargs="+", choices=["direct", "packed"], default=["direct", "packed"])
    parser.add_argument("--prefetch", nargs="+", type=int, default=[1, 0], help="windows (default %(default)s)")
    parser.add_argument("--standing", action="store_true", help="gradients are there already")
    parser.add_argument("--gloo", action="store_true", help="four real processes")
    parser.add_argument("--device", choices=["cpu", emulator.NAME], default="cpu", help="emul: four real processes too")
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    args = parser.parse_args(argv)
    processes = args.gloo or args.device != "cpu"
    args.mesh = args.mesh or [mesh for mesh, shape in MESHES.items() if not processes or math.prod(shape) == 4]
    if processes and any(math.prod(MESHES[mesh]) != 4 for mesh in args.mesh):
        parser.error("--gloo and --device run four processes: choose --mesh 4 or 2x2")
    return args


if __name__ == "__main__":
    from benchmarks import memory  # under its own name, where other processes find what is sent to them

    memory.main()

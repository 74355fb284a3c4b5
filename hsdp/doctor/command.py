"""`python -m hsdp doctor`: what is installed, whether a step is right on these devices, how fast they are, what to set.

python -m hsdp doctor
torchrun --nnodes 2 --nproc-per-node 8 ... -m hsdp doctor --tune
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from hsdp import debug
from hsdp.api.fully_shard import fully_shard
from hsdp.comm.backends import direct_bytes
from hsdp.doctor.measure import LinkRates, Rates, measure
from hsdp.doctor.thresholds import Paths, measure_paths, policy, shard_ranks, table
from hsdp.format import bytes_of, seconds_of, several
from hsdp.weights.full_params import full_params

TRAINING_SHARE = 0.6
"""Of the flops of a large product, what training achieves: 400 of about 660 Tflop/s on an H100."""

TOLERANCE = 1e-10
"""How far parameters may be from those of one device, relative to the largest; steps are in float64."""

_SLOW_ANEW = 2.0
"""From here on `Rates.anew` is worth a hint."""

MEETING = timedelta(minutes=3)
"""For how long ranks wait for each other: whoever examines a cluster would not wait for torch's 30 minutes."""

_OPTIONAL = {"numpy": "checkpoint", "safetensors": "safetensors"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on this rank; returns the exit status: 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m hsdp doctor", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there is one each")
    parser.add_argument(
        "--tune", action="store_true", help="also measure which CommPolicy suits these links: a minute or so"
    )
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device in this process")
    try:
        device, warning = _device(args.device)
        _meet(device)
    except (ValueError, RuntimeError) as error:
        parser.error(
            f"the ranks do not meet: {str(error).splitlines()[0]}; start it with torchrun, or alone without RANK, and see "
            "that every rank reaches MASTER_ADDR and MASTER_PORT"
        )
    try:
        lines, healthy = examine(device, [warning] if warning else [], args.tune)
        if dist.get_rank() == 0:
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0 if healthy else 1


def _meet(device: torch.device) -> None:
    """Makes the default process group: of the ranks that the environment tells of, or of this process alone.

    Raises:
        ValueError, RuntimeError: the environment is incomplete, or not all ranks come within `MEETING`.
    """
    alone = "RANK" not in os.environ
    store = HashStore() if alone else None
    backend = "nccl" if device.type == "cuda" else "gloo"
    rank, world_size = (0, 1) if alone else (-1, -1)
    dist.init_process_group(backend, store=store, timeout=MEETING, rank=rank, world_size=world_size)


def examine(device: torch.device, warnings: Sequence[str] = (), tune: bool = False) -> tuple[list[str], bool]:
    """What there is to say of this job, and whether all is well. Every rank of the default process group calls it.

    Args:
        device: this rank's.
        warnings: hints that the caller has.
        tune: measure which `CommPolicy` suits the links, too.
    """
    troubles, hints = [], [*warnings, *_hints()]
    versions, mistakes = _versions()
    troubles += mistakes
    difference = step_difference(device)
    right = difference <= TOLERANCE
    rates = measure(device)
    paths = measure_paths(device, shard_ranks(rates)) if tune and dist.get_world_size() > 1 else []
    if not right:
        troubles.append(f"a step gives parameters that differ from those of one device by {difference:.1e} of the largest")
    if rates.anew > _SLOW_ANEW:
        hints.append(
            f"filling 64 MiB takes {rates.anew:.1f} times as long in memory that was just allocated: set "
            "THP_MEM_ALLOC_ENABLE=1, or have malloc keep memory, if units have more than 32 MiB (docs/performance.md)"
        )
    if len(set(rates.nodes)) > 1:
        hints.append(f"nodes have different numbers of ranks {rates.nodes}: links between them were not measured")
    lines = [
        versions,
        f"{several(dist.get_world_size(), 'rank')} on {several(len(rates.nodes), 'node')}, backend {dist.get_backend()} "
        f"({', '.join(_backends())} available), {_device_text(device)}",
        f"correctness: two steps of a small model on {_mesh_text()} ranks "
        f"{'equal' if right else 'DIFFER FROM'} those of one device (by {difference:.1e})",
        "measured, on the slowest rank",
        *(f"  {line}" for line in _measured(rates)),
        *(f"  {line}" for line in (table(paths) if paths else ())),
        "set",
        *(f"  {line}" for line in _settings(rates, device)),
        *(f"  {line}" for line in (_policy(paths) if paths else ())),
        *(f"hint: {hint}" for hint in hints),
        *(f"WRONG: {trouble}" for trouble in troubles),
        "all is well" if not troubles else f"{several(len(troubles), 'thing')} to put right",
    ]
    return lines, not troubles


# -- what is installed ---------------------------------------------------------------------------------------------


def _versions() -> tuple[str, list[str]]:
    """A line of versions, and what is wrong with them."""
    found = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    for name in _OPTIONAL:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    try:
        own, needs = importlib.metadata.version("hsdp"), importlib.metadata.requires("hsdp") or []
    except importlib.metadata.PackageNotFoundError:
        own, needs = "(not installed)", []
    wanted = next((need for need in needs if re.match(r"torch\b", need)), "")
    bounds = dict(re.findall(r"(>=|<)\s*([\d.]+)", wanted))
    outside = (">=" in bounds and _number(torch.__version__) < _number(bounds[">="])) or (
        "<" in bounds and _number(torch.__version__) >= _number(bounds["<"])
    )
    return f"hsdp {own}, " + ", ".join(found), [f"torch {torch.__version__}: hsdp needs {wanted}"] if outside else []


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _backends() -> Iterator[str]:
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    yield from (name for name, here in there.items() if here)


def _device(name: str) -> tuple[torch.device, str | None]:
    """This rank's device, made current, and a word about it if it may not be what was meant."""
    local, ranks = _from_environment("LOCAL_RANK", 0), _from_environment("LOCAL_WORLD_SIZE", 1)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and gpus < ranks):
        few = name == "auto" and gpus > 0
        return torch.device("cpu"), f"{ranks} ranks for {several(gpus, 'GPU')}: the CPU was examined" if few else None
    if local >= gpus:
        raise ValueError(f"LOCAL_RANK={local}, and PyTorch finds {several(gpus, 'GPU')}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local), None


def _from_environment(name: str, otherwise: int) -> int:
    setting = os.environ.get(name, str(otherwise))
    if not setting.isdecimal():
        raise ValueError(f"{name}={setting!r}: expected a number, as torchrun sets it")
    return int(setting)


def _device_text(device: torch.device) -> str:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{facts.name} with {bytes_of(facts.total_memory)} each"
    return f"CPU, {several(torch.get_num_threads(), 'thread')} per rank, {several(os.cpu_count() or 1, 'core')} in all"


def _hints() -> Iterator[str]:
    for name, extra in _OPTIONAL.items():
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} is missing, which pip install 'hsdp[{extra}]' brings"
    if debug.ON:
        yield "HSDP_DEBUG=1 is set: steps are checked, and slower for it"
    if dist.get_world_size() == 1:
        yield "one process has no links; torchrun --nproc-per-node N -m hsdp doctor measures them"


# -- a step --------------------------------------------------------------------------------------------------------


def _mesh_shape() -> tuple[int, int]:
    world = dist.get_world_size()
    return (2, world // 2) if world >= 4 and world % 2 == 0 else (1, world)


def _mesh_text() -> str:
    replicas, shards = _mesh_shape()
    return f"{replicas} x {shards}"


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(24, 36), nn.Tanh(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 5)]
    return nn.Sequential(*layers).to(device, torch.float64)


def step_difference(device: torch.device) -> float:
    """Two steps sharded over all ranks, beside the same on this device alone with the batches of all ranks.

    Returns:
        The largest difference of a parameter on any rank, relative to the largest parameter.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    state = torch.random.get_rng_state()
    model, twin = _model(device), _model(device)
    mesh = init_device_mesh(device.type, _mesh_shape(), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for step in range(2):
        batches = torch.randn(world, 3, 24, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(device)
        for one, batch in ((model, batches[rank]), (twin, batches.flatten(0, 1))):
            one(batch).square().mean().backward()
            with torch.no_grad():
                for param in one.parameters():
                    assert param.grad is not None, "every parameter takes part"
                    param.sub_(0.1 * param.grad)
                    param.grad = None
    with torch.no_grad(), full_params(model):
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        differences = [float((mine - theirs).abs().max()) for mine, theirs in pairs]
    largest = max(float(param.detach().abs().max()) for param in twin.parameters())
    # A maximum, Python's as a backend's, may drop what is not a number.
    off = math.inf if not all(map(math.isfinite, differences)) else max(differences) / largest
    worst = torch.tensor(off, dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    torch.random.set_rng_state(state)
    return float(worst)


# -- what was measured ---------------------------------------------------------------------------------------------


def _measured(rates: Rates) -> Iterator[str]:
    yield f"matrix product: {rates.flops / 1e9:,.4g} Gflop/s; memory: {rates.bandwidth / 1e9:,.3g} GB/s"
    for what, link in (("inside a node", rates.fast), ("between nodes", rates.slow)):
        if link is not None:
            yield (
                f"links {what}, {several(link.size, 'rank')}: {link.rate / 1e9:,.3g} GB/s sent by a rank, "
                f"{seconds_of(link.latency)} a call"
            )


def _settings(rates: Rates, device: torch.device) -> Iterator[str]:
    """Arguments of `hsdp.plan` and of the command."""
    flops = rates.flops * TRAINING_SHARE
    known: list[LinkRates] = [link for link in (rates.fast, rates.slow) if link is not None]
    node = max(rates.nodes)
    # Told in both, as a plan without it is one for NCCL on H100.
    machine, kind = ('machine="cpu", ', " --machine cpu") if device.type == "cpu" else ("", "")
    python, command = "", ""
    if known:
        fast, slow, latency = known[0].rate, known[-1].rate, max(link.latency for link in known)
        python = (
            f", link=hsdp.planning.Link(fast={fast:.3g}, slow={slow:.3g}, ranks_per_node={node}, latency={latency:.2g}, "
            "fast_step=0, slow_step=0)"
        )
        command = (
            f" --fast {fast / 1e9:.3g} --slow {slow / 1e9:.3g} --ranks-per-node {node} --latency {latency * 1e6:.0f} "
            "--fast-step 0 --slow-step 0"
        )
    yield f"hsdp.plan(..., {machine}flops={flops:.3g}, bandwidth={rates.bandwidth:.3g}{python})"
    yield f"python -m hsdp plan ...{kind} --flops {flops / 1e12:.3g} --bandwidth {rates.bandwidth / 1e9:.3g}{command}"
    yield f"(flops: {TRAINING_SHARE:.0%} of the product's, which is what training achieves)"


def _policy(paths: list[Paths]) -> Iterator[str]:
    """Arguments of `fully_shard`."""
    found, backend = policy(paths), dist.get_backend()
    sizes = f"direct_gather_bytes={found.direct_gather_bytes}, direct_reduce_bytes={found.direct_reduce_bytes}"
    gather, reduce = direct_bytes(backend)
    yield f"fully_shard(..., comm_policy=hsdp.CommPolicy({sizes}))"
    yield f"(by default {gather} and {reduce} with {backend})"

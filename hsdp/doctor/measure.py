"""Rates of the machine that runs: what a plan has to be told, measured in seconds between the ranks that are there."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

REPEATS = 3


@dataclass(frozen=True)
class LinkRates:
    """All-reduces in groups of ranks that run at the same time.

    Attributes:
        size: ranks of a group.
        rate: bytes per second that a rank sends, by the ring's formula (nccl-tests' "busbw").
        latency: seconds of a call that sends next to nothing.
    """

    size: int
    rate: float
    latency: float


@dataclass(frozen=True)
class Rates:
    """What was measured, on the slowest rank.

    Attributes:
        nodes: how many ranks each node has; its length is the number of nodes.
        flops: per second, of a large matrix product.
        bandwidth: bytes per second, of a copy inside a rank's memory, read and written ones counted.
        anew: how many times as long it takes to fill a large block of a host's memory that was just allocated as one that
            was there before; 1 on a device, where PyTorch keeps memory.
        fast: between the ranks of a node; None where a node has one.
        slow: between nodes, all ranks of a node at once; None on one node, or where nodes have different numbers of ranks.
    """

    nodes: list[int]
    flops: float
    bandwidth: float
    anew: float
    fast: LinkRates | None
    slow: LinkRates | None


def measure(device: torch.device) -> Rates:
    """Measures; every rank of the default process group calls it, with its own device."""
    rank, hosts = dist.get_rank(), _hosts()
    names = list(dict.fromkeys(hosts))
    members = [[at for at, host in enumerate(hosts) if host == name] for name in names]
    sizes = list(map(len, members))
    across = list(zip(*members, strict=True)) if len(set(sizes)) == 1 and len(names) > 1 else []
    # Every rank makes every group, in one order.
    inside = [dist.new_group(ranks) for ranks in members]
    between = [dist.new_group(list(ranks)) for ranks in across]
    fast = slow = None
    if max(sizes) > 1:
        mine = next(group for group, ranks in zip(inside, members, strict=True) if rank in ranks)
        fast = _link(mine, device)
    if between:
        slow = _link(next(group for group, ranks in zip(between, across, strict=True) if rank in ranks), device)
    return Rates(sizes, _flops(device), _bandwidth(device), _anew(device), fast, slow)


def _hosts() -> list[str]:
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, socket.gethostname())
    return [str(host) for host in found]


def medians(actions: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[float]:
    """How long each takes on the rank that takes longest; all ranks begin together.

    The actions take turns, so that what else the machine does meets all of them.
    """
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds + 1):  # the first one warms up
        for action, seconds in zip(actions, times, strict=True):
            _wait(device)
            dist.barrier()
            start = time.perf_counter()
            action()
            _wait(device)
            seconds.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(seconds[1:]) for seconds in times], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return list(map(float, slowest))


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    return medians([action], REPEATS, device)[0]


def _wait(device: torch.device) -> None:
    """The host waits for all that was enqueued on a device."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _link(group: ProcessGroup, device: torch.device) -> LinkRates:
    size = group.size()
    nbytes = 1 << (24 if device.type == "cpu" else 28)
    large, small = (torch.ones(n // 4, device=device) for n in (nbytes, 64))

    def reduce(operand: Tensor) -> Callable[[], object]:
        return lambda: dist.all_reduce(operand, dist.ReduceOp.MAX, group=group) if size > 1 else None

    latency, seconds = (_seconds(reduce(operand), device) for operand in (small, large))
    return LinkRates(size, 2 * nbytes * (size - 1) / size / max(seconds - latency, 1e-9), latency)


def _flops(device: torch.device) -> float:
    on_cpu = device.type == "cpu"
    n, dtype = (1024, torch.float32) if on_cpu else (8192, torch.bfloat16)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: a @ b, device)


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(1 << (24 if device.type == "cpu" else 28), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _anew(device: torch.device) -> float:
    if device.type != "cpu":
        return 1.0
    block = torch.ones(1 << 24)  # 64 MiB: glibc's malloc keeps blocks of 32 MiB at most
    storage = block.untyped_storage()
    nbytes = storage.nbytes()

    def fill_anew() -> None:
        storage.resize_(0)
        storage.resize_(nbytes)
        block.fill_(1.0)

    kept, anew = medians([lambda: block.fill_(1.0), fill_anew], REPEATS, device)
    return anew / kept

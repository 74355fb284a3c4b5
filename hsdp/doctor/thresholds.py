"""From which size a parameter is worth a transfer of its own, on these links and with this backend.

A *packed* parameter shares a transfer and costs a copy, a *direct* one costs a transfer and no copy (`CommPolicy`). Units
of equal weights are gathered and reduced by hsdp itself, both ways in turn, size by size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hsdp.api.fully_shard import fully_shard
from hsdp.buffers.layout import NEVER
from hsdp.doctor.measure import Rates, medians
from hsdp.policies import CommPolicy

ROUNDS = 7
COLUMNS = 256
WEIGHTS = 8
SIZES = tuple(1 << power for power in range(12, 25, 2))


@dataclass(frozen=True)
class Paths:
    """One size of weights.

    Attributes:
        nbytes: of a rank's piece of each.
        gather: seconds of a unit's on the slowest rank, packed and direct.
        step: those of a forward and backward, with gradients that are reduced packed and directly.
    """

    nbytes: int
    gather: tuple[float, float]
    step: tuple[float, float]


class Weights(nn.Module):
    """A unit of equal weights, whose gradients are as long in coming as it takes to write them.

    Args:
        count: of them.
        rows: of each, of `COLUMNS` columns, fp32.
        device: where.
    """

    def __init__(self, count: int, rows: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(rows, COLUMNS, device=device) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product with each weight."""
        return torch.stack([nn.functional.linear(x, weight).sum() for weight in self.weights]).sum()


def shard_ranks(rates: Rates) -> int:
    """The ranks of a node, where they are several and the same everywhere; else all ranks."""
    alike = len(set(rates.nodes)) == 1 and rates.nodes[0] > 1
    return rates.nodes[0] if alike else sum(rates.nodes)


def measure_paths(device: torch.device, shards: int) -> list[Paths]:
    """Measures in groups of `shards` ranks, all at once; every rank of the default process group calls it."""
    mesh = init_device_mesh(device.type, (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    found = []
    most = 1 << (25 if device.type == "cpu" else 29)
    for nbytes in SIZES:
        count = min(WEIGHTS, most // (nbytes * shards))
        if count < 2:
            break
        rows = nbytes // (4 * COLUMNS) * shards
        # What is reduced directly is gathered directly, too: the layout has both kinds at its beginning.
        packed, gathered, both = (
            fully_shard(
                Weights(count, rows, device),
                mesh=mesh["shard"],
                comm_policy=CommPolicy(direct_gather_bytes=gather, direct_reduce_bytes=reduce),
                reshard_after_forward=False,
            )
            for gather, reduce in ((NEVER, NEVER), (0, NEVER), (0, 0))
        )
        calls = max(1, min(16, (1 << 23) // (count * nbytes * shards)))
        gather = _medians([_gathering(packed, calls), _gathering(gathered, calls)], calls, device)
        step = _medians([_stepping(gathered, calls, device), _stepping(both, calls, device)], calls, device)
        found.append(Paths(nbytes, (gather[0], gather[1]), (step[0], step[1])))
    return found


def _gathering(model: nn.Module, calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            model.unshard()  # type: ignore[operator]
            model.reshard()  # type: ignore[operator]

    return run


def _stepping(model: nn.Module, calls: int, device: torch.device) -> Callable[[], None]:
    x = torch.ones(1, COLUMNS, device=device)

    def run() -> None:
        for _ in range(calls):
            model(x).backward()
            for param in model.parameters():
                param.grad = None

    return run


def _medians(actions: list[Callable[[], None]], calls: int, device: torch.device) -> list[float]:
    """Seconds that each of an action's calls takes on the slowest rank."""
    return [seconds / calls for seconds in medians(actions, ROUNDS, device)]


def threshold(sizes: Iterable[tuple[int, tuple[float, float]]]) -> int:
    """The least size from which on direct ones are never slower than packed ones; above all sizes if there is none.

    Args:
        sizes: ascending, each with its seconds, packed and direct.
    """
    least = None
    largest = 0
    for nbytes, (packed, direct) in sizes:
        largest = nbytes
        least = None if direct > packed else least if least is not None else nbytes
    return 2 * largest if least is None else least


def policy(paths: list[Paths]) -> CommPolicy:
    """The policy that follows from what was measured."""
    return CommPolicy(
        direct_gather_bytes=threshold((one.nbytes, one.gather) for one in paths),
        direct_reduce_bytes=threshold((one.nbytes, one.step) for one in paths),
    )


def table(paths: list[Paths]) -> Iterator[str]:
    """What was measured, line by line."""
    yield f"{'rank has of each':>17}{'gather packed':>15}{'direct':>10}{'step packed':>15}{'direct':>10}   ms per unit"
    for one in paths:
        times = "".join(
            f"{1e3 * seconds:{width}.3f}" for seconds, width in zip((*one.gather, *one.step), (15, 10, 15, 10), strict=True)
        )
        yield f"{one.nbytes >> 10:>13} KiB{times}"

"""A world of many ranks of which one process is there: its collectives write what they must, and nobody sends anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future as create_work


class IdleGroup(dist.ProcessGroup):
    """A group of one process that passes for one rank of many: collectives write what they must, in one kernel each.

    torch's own fake group copies a gathered tensor once per rank: in a world of 64, 64 kernels that no cluster has.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._done = torch.futures.Future[None]()
        self._done.set_result(None)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """What hsdp and torch take it for."""
        return "fake"

    @property
    def group_name(self) -> str:
        """The name that torch gave it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def _work(self) -> Any:
        return create_work(self._done)

    def _allgather_base(self, output: Tensor, mine: Tensor, *_: Any) -> Any:
        return self.allgather_into_tensor_coalesced([output], [mine])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> Any:
        """Fills outputs with copies of this rank's inputs."""
        rows = [output.view(self.size(), -1) for output in outputs]
        torch._foreach_copy_(rows, [mine.view(1, -1).expand_as(row) for mine, row in zip(inputs, rows, strict=True)])
        return self._work()

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, *_: Any) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [whole])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> Any:
        """Fills outputs with this rank's part of the inputs."""
        mine = [one.view(self.size(), -1)[self.rank()] for one in inputs]
        torch._foreach_copy_([output.view(-1) for output in outputs], mine)
        return self._work()

    def allreduce(self, *_: Any) -> Any:
        """Leaves the tensors as they are."""
        return self._work()

    allreduce_coalesced = broadcast = barrier = allreduce

    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced


@contextmanager
def idle_world(size: int) -> Iterator[None]:
    """Makes this process rank 0 of `size` ranks that are not there."""
    if "idle" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "idle", lambda _store, rank, size, _timeout: IdleGroup(rank, size), devices=["cpu", "cuda"]
        )
    dist.init_process_group("idle", store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()

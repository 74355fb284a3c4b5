"""What ranks compare, before something starts that they might not all start: numbers, in the group or gathered."""

from __future__ import annotations

import hashlib
import struct
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hsdp.comm import backends
from hsdp.comm.divergence import DivergenceGuard
from hsdp.comm.groups import backend_name, timeout_of
from hsdp.comm.questions import Answer
from hsdp.comm.work import wait_for
from hsdp.torch_private import backend_of


def digest_of(value: object) -> int:
    """62 bits that stand for plain data."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 2


def guard_of(group: ProcessGroup, rank: int, device: torch.device) -> DivergenceGuard:
    """The divergence guard of a group: one, however many units and models use the group."""
    # Groups written in Python may know no other reduction than the sum, and may sum without being asked to.
    in_group = type(group) is ProcessGroup and backend_name(group, device) in backends.ASK_IN_GROUP
    this = weakref.ref(group)

    def compare(divergence_guard: DivergenceGuard, values: list[int], answer: Answer) -> list[int]:
        alive = this()
        assert alive is not None, "units hold their groups"
        if not in_group:
            return _differing_in_gathered(alive, device, values)
        question = Greatest(alive, device, [*values, *(-value for value in values)])
        wait_for(question.work, backend_name(alive, device), divergence_guard, answer.number, answer.what, "", answer.key)
        greatest = question.values()
        return [i for i in range(len(values)) if greatest[i] != -greatest[i + len(values)]]

    return DivergenceGuard.of(group, rank, timeout_of(group, device), compare, in_group)


class Greatest:
    """The greatest of all ranks' 64-bit integers, place by place: starts at once.

    It goes to the backend itself: modes and traces that watch a model's operators are not to see it.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, values: list[int]) -> None:
        self._memory = bytearray(struct.pack(f"{len(values)}q", *values))
        here = torch.frombuffer(self._memory, dtype=torch.int64)
        self._tensor = here if device.type == "cpu" else here.to(device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self.work: Any = backend_of(group, device).allreduce([self._tensor], options)

    def values(self) -> list[int]:
        """They, once `work` has ended."""
        if self._tensor.device.type != "cpu":
            return list(map(int, self._tensor.tolist()))
        return list(struct.unpack(f"{self._tensor.numel()}q", self._memory))


def _differing_in_gathered(group: ProcessGroup, device: torch.device, values: list[int]) -> list[int]:
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    return [i for i, of_ranks in enumerate(zip(*(one.tolist() for one in gathered), strict=True)) if len(set(of_ranks)) > 1]

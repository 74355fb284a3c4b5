"""No collective on gloo has a name that its two threads may free under each other (`GATHER_ALONE_BYTES`)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import OpType

from hsdp import CommPolicy, fully_shard
from hsdp.comm.work import CommWork
from tests.support.rig import Pool, RankEnv

_INSIDE_OF_A_STRING = 15
"""Letters that a string of C++ has room for without memory on the heap."""

_NAMES = {int(kind): name for name in dir(OpType) if isinstance(kind := getattr(OpType, name), OpType)}


class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 32), nn.Linear(32, 32).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) + self.narrow(x.bfloat16()).float()


def _step(env: RankEnv, shape: tuple[int, ...]) -> set[str]:
    started: list[Any] = []
    init = CommWork.__init__

    def recorded(work: CommWork, comm: Any, kind: str, owner: Any, works: list[Any], *rest: Any) -> None:
        started.extend(works)
        init(work, comm, kind, owner, works, *rest)

    # Each unit gathers several tensors: parameters that go directly, small ones in one, and those of another dtype.
    policy = CommPolicy(shared_memory=False, direct_gather_bytes=1024, direct_reduce_bytes=1024)
    model = nn.Sequential(_TwoDtypes(), _TwoDtypes())
    with mock.patch.object(CommWork, "__init__", recorded):
        for unit in (*model, model):
            fully_shard(unit, mesh=env.mesh(shape), comm_policy=policy)
        model(torch.ones(2, 32)).sum().backward()
    return {_NAMES[int(work._get_op_type())] for work in started if work is not None}


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["2", "2x2"])
def test_names_have_room_in_a_string(pool2: Pool, pool4: Pool, shape: tuple[int, ...]) -> None:
    for names in (pool4 if len(shape) > 1 else pool2).run(_step, shape):
        assert "ALLGATHER" in names and len(names) >= 1 + len(shape)
        assert not [name for name in names if len(name) > _INSIDE_OF_A_STRING]

"""The watch over memory that collectives use finds a buffer that goes too early."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hsdp.buffers.flat_buffer import FlatBuffer
from tests.support.lent_memory import watched
from tests.support.rig import Pool, RankEnv


def _free_too_early(env: RankEnv) -> None:
    group = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    assert group is not None
    with watched():
        buffer = FlatBuffer.empty(env.world_size * 1000, torch.float32, env.device)
        parts = list(buffer.tensor.chunk(env.world_size))
        if env.rank == 0:
            work = group.allgather([parts], [torch.ones(1000)])
            with pytest.raises(AssertionError, match=r"free of 8000 bytes.*(.|\n)*_free_too_early(.|\n)*allgather"):
                buffer.free()  # the other rank waits for this one's next line
            store.set("lent", "asked")
        else:
            store.wait(["lent"])
            work = group.allgather([parts], [torch.ones(1000)])
        work.wait()
        assert buffer.tensor.sum() == buffer.tensor.numel()
        buffer.free()
        assert not buffer.held


def test_memory_may_not_go_while_a_collective_uses_it(pool2: Pool) -> None:
    pool2.run(_free_too_early)

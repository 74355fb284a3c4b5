"""HSDP_SLOW: ranks that wait for others say for which, whether they wait before a collective or in it."""

from __future__ import annotations

import io
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from hsdp.comm import questions, work
from tests.support.deep import Deep, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import shard

LATE = 2


class Told(io.StringIO):
    """What a rank prints; the late rank comes when somebody has printed something."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._store = dist.PrefixStore(f"told {group.group_name}", dist.distributed_c10d._get_default_store().clone())

    def flush(self) -> None:
        self._store.set("told", self.getvalue())

    def wait(self) -> None:
        self._store.wait(["told"], timedelta(seconds=20))


def be_late(env: RankEnv, steps: int) -> tuple[str, str]:
    """One rank is late after so many steps; what this rank prints, and the summary of its trace."""
    step(shard(seeded(Deep), DeviceMesh.from_group(dist.new_group(), "cpu")), env.rank)  # what is slow the first time
    group = dist.new_group()
    told = Told(group)
    model: Any = seeded(Deep)
    with (
        mock.patch.object(questions, "SLOW", 0.5),
        mock.patch.object(questions, "_SLOW_PATIENCE", 1.5),
        mock.patch.object(work, "_TICK", timedelta(seconds=0.25)),
        mock.patch.object(sys, "stderr", told),
    ):
        for k in range(steps + 1):
            if k == steps:
                dist.barrier(group)  # nobody else is late
                if env.rank == LATE:
                    told.wait()
            model = shard(model, DeviceMesh.from_group(group, "cpu")) if k == 0 else model
            with hsdp.trace(model) as traced:
                step(model, env.rank, k)
    return told.getvalue(), str(traced.summary())


@pytest.mark.parametrize("steps", [0, 1, 4], ids=["first question", "asked in the group", "known collective"])
def test_a_late_rank_is_named_once(pool4: Pool, steps: int) -> None:
    outcomes = pool4.run(be_late, steps)
    printed = "".join(text for text, _ in outcomes)
    assert printed.count("HSDP_SLOW=0.5") == 1
    assert printed.startswith("hsdp: 3 rank(s) have waited 0.")
    assert f"for rank(s) [{LATE}] in " in printed
    assert "unit" in printed
    traced = [summary for text, summary in outcomes if text]
    assert steps == 0 or printed.removeprefix("hsdp: ").split(" (HSDP")[0] in traced[0]

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
from hsdp.errors import CollectiveError
from tests.support.deep import Deep, seeded, step
from tests.support.rig import Pool, RankEnv, fake_world
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
    assert printed.count(f"for rank(s) [{LATE}] in ") == 1  # on a busy machine others may be late, too
    assert printed.startswith("hsdp: 3 rank(s) have waited 0.")
    assert "unit" in printed
    traced = [summary for text, summary in outcomes if text]
    assert steps == 0 or printed.removeprefix("hsdp: ").split(" (HSDP")[0] in traced[0]


class _EndsAtTheTick:
    """A work that ends between the moment at which a tick's wait gave up and the look whether it has ended."""

    def __init__(self, error: str | None) -> None:
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        """As gloo's: it gives up after `timeout`, else it raises its error."""
        error = "Operation timed out!" if timeout is not None else self.error
        if error is not None:
            raise RuntimeError(error)

    def is_completed(self) -> bool:
        """By now."""
        return True


def test_a_collective_that_ends_at_a_tick_has_not_failed() -> None:
    with fake_world(2):
        work.wait_for(_EndsAtTheTick(None), "gloo", None, 0, "all-reduce", "a")
        with pytest.raises(CollectiveError, match="Connection closed"):
            work.wait_for(_EndsAtTheTick("Connection closed by peer"), "gloo", None, 0, "all-reduce", "a")

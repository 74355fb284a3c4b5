"""A rank that is gone while a checkpoint is saved or loaded, or says what no other can read: all are told at once."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError, saving
from hsdp.checkpoint.ranks import Ranks
from tests.checkpoint import models as cm
from tests.support.rig import Pool
from tests.support.worker import RankEnv

WORLD = 3
TIMEOUT = 120.0  # seconds, of the groups: nobody may wait as long


@pytest.fixture(scope="module")
def pool3() -> Iterator[Pool]:
    with Pool(WORLD, group_timeout=TIMEOUT) as pool:
        yield pool


def lose(env: RankEnv, directory: str, moment: str, victim: int) -> tuple[str, float]:
    """Saves, or loads what was saved before, while a rank dies; returns what this one was told, and after how long."""
    model = cm.build(env.mesh((1, WORLD)))
    checkpoint.save(directory, model, step=1)
    dist.barrier()

    def die(*_: Any) -> bytes:
        if env.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return b""

    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        if moment == "loading":
            checkpoint.load(directory, model, progress=die)
        elif moment == "planning":
            with mock.patch.object(saving, "pack", die):
                checkpoint.save(directory, model, step=2)
        else:
            checkpoint.save(directory, model, step=2, progress=die, async_=moment == "writing in the background").wait()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        ("planning", 2),
        ("writing", 1),
        ("writing", 0),
        ("writing in the background", 2),
        ("writing in the background", 0),
        ("loading", 1),
        ("loading", 0),
    ],
)
def test_all_that_remain_are_told_which_rank_is_gone(pool3: Pool, tmp_path: Path, moment: str, victim: int) -> None:
    outcomes = pool3.run_raw(lose, str(tmp_path), moment, victim, timeout=100.0)
    assert [one.rank for one in outcomes if one.error == "Died"] == [victim]
    remain = [one for one in outcomes if one.rank != victim]
    assert all(one.ok for one in remain), remain
    doing = "loading" if moment == "loading" else "saving step 2 to"
    for text, _ in (one.value for one in remain):
        assert text.startswith(doing)
        if victim:
            assert f"on rank {victim}: rank 0 of 3 lost contact with it" in text
        else:
            assert "lost contact with rank 0" in text
    assert len({one.value[0] for one in remain}) == (1 if victim else 2), "one text, but where each lost rank 0 by itself"
    assert max(one.value[1] for one in remain) < TIMEOUT / 2
    assert checkpoint.verify(tmp_path).step == 1


def leave_before_the_reply(env: RankEnv) -> list[str]:
    """Rank 1 says its part and is gone before rank 0 answers. Rank 2 has its answer, and must not wait for rank 0.

    Rank 0 hears rank 1 first, and a message has arrived when its sending has ended.
    """
    ranks, post = Ranks(), Ranks._post
    (pid,) = (pid for rank, pid in ranks.each("pids", lambda: (env.rank, os.getpid())) if rank == 1)
    results = []

    def post_and_die(self: Ranks, value: object, rank: int) -> None:
        post(self, value, rank)
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_its_end() -> None:
        if env.rank == 2:
            poll = select.poll()
            poll.register(os.pidfd_open(pid))
            assert poll.poll(60_000), "rank 1 lives"

    if env.rank == 1:
        mock.patch.object(Ranks, "_post", post_and_die).start()
    for what, action in (("first", wait_for_its_end), ("second", lambda: None)):
        try:
            ranks.each(what, action)
            results.append("fine")
        except CheckpointError as error:
            results.append(str(error))
            break
    return results


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux, to see another's child end")
def test_a_rank_that_leaves_before_it_is_answered_is_missed_by_all_at_once(pool3: Pool) -> None:
    outcomes = pool3.run_raw(leave_before_the_reply, timeout=100.0)
    assert [one.error for one in outcomes] == [None, "Died", None], outcomes
    first, second = (one.value for one in outcomes[::2])
    assert first == second
    assert first[0] == "fine"
    assert first[1].startswith("second: on rank 1: rank 0 of 3 lost contact with it")


class Unreadable:
    """Can be written, and not be read, as an object of a class that another process does not have."""

    def __reduce__(self) -> Any:
        return getattr, ("text", "no such name")


class Elsewhere:
    """Can be read on the rank alone that wrote it."""

    def __reduce__(self) -> Any:
        return _only_here, (os.getpid(),)


def _only_here(pid: int) -> int:
    if pid != os.getpid():
        raise LookupError("it is of another process")
    return pid


def say_what_nobody_can_read(env: RankEnv) -> list[str]:
    ranks, told = Ranks(), []  # no module can be pickled
    for source, value in [(0, Unreadable()), (1, Unreadable()), (0, os), (1, os), (1, Elsewhere())]:
        given = value if env.rank == source else None
        for call in (ranks.each, partial(ranks.one, rank=source)):
            with pytest.raises(CheckpointError) as caught:
                call("saying", lambda given=given: given)
            told.append(str(caught.value))
    assert ranks.each("and they go on", lambda: env.rank) == [0, 1]
    return told


def test_what_cannot_go_from_rank_to_rank_is_an_error_on_all(pool2: Pool) -> None:
    """Objects of users travel with a whole state dict; one rank raised, and the others waited for it."""
    first, second = pool2.run(say_what_nobody_can_read)
    assert first == second
    assert all("a value cannot go from rank to rank" in told for told in first[:-2])
    assert all("a value from another rank cannot be read: LookupError: it is of" in told for told in first[-2:])


def load_odd_settings(env: RankEnv) -> str:
    model = cm.build(env.mesh((1, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    if env.rank == 0:
        state["param_groups"][0]["rule"] = Unreadable()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_full_optimizer_state_dict(model, optimizer, state)
    return str(caught.value)


def test_settings_that_other_ranks_cannot_read_are_an_error_on_all(pool2: Pool) -> None:
    first, second = pool2.run(load_odd_settings)
    assert first == second
    assert first.startswith("load_full_optimizer_state_dict: a value cannot go from rank to rank: AttributeError: ")

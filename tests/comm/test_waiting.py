"""How the host waits for a work of gloo: in ticks, of which the last may be over just before the work is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hsdp.comm.observer import CommContext
from hsdp.comm.streams import Streams
from hsdp.comm.work import CommWork, TwoPhases, wait_for
from hsdp.errors import CollectiveError


class LateWork:
    """Ends between the end of a tick and the question whether it has ended."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self._ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._ended:
            self._ended = True
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return self._ended


def _in_a_group() -> AbstractContextManager[object]:
    return mock.patch.multiple(dist, get_rank=lambda: 0, is_initialized=lambda: True)


def test_a_work_that_ends_with_the_tick_has_ended_well() -> None:
    wait_for(LateWork(), "gloo", None, 0, "all-gather", "unit")


def test_a_work_that_fails_with_the_tick_is_told_with_its_own_error() -> None:
    with _in_a_group(), pytest.raises(CollectiveError, match="failed on rank 0: connection closed by peer"):
        wait_for(LateWork("connection closed by peer"), "gloo", None, 0, "all-gather", "unit")


def test_a_work_that_failed_is_told_behind_the_destruction_of_all_groups() -> None:
    """As in a `finally` behind a backward that failed: what is left of it must not raise that there is no group."""
    message = "the all-gather of unit 'unit' failed: connection closed by peer"
    with mock.patch.object(dist, "is_initialized", return_value=False), pytest.raises(CollectiveError, match=message):
        wait_for(LateWork("connection closed by peer"), "gloo", None, 0, "all-gather", "unit")


class _Carrier:
    """A process group on the CPU, as far as waiting goes."""

    size = 2
    backend = "gloo"
    divergence_guard = None

    def __init__(self) -> None:
        self.context = CommContext(Streams(torch.device("cpu")))


class _Owner:
    name = "blocks.3"


class _Ended:
    """A work that has ended, well or not."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return True


def _runs_out_of_memory() -> None:
    raise MemoryError("no room for the sum")


def test_results_that_were_never_made_are_missed_by_each_wait() -> None:
    """The collective has ended, what follows it has not: a second wait, say behind an `except`, must not pass."""
    comm_work = CommWork(_Carrier(), "reduce-scatter", _Owner(), [_Ended()], None, _runs_out_of_memory)
    with pytest.raises(MemoryError, match="no room"):
        comm_work.wait()
    for _ in range(2):
        with pytest.raises(CollectiveError, match=r"reduce-scatter of unit 'blocks\.3' raised in an earlier wait"):
            comm_work.wait()


@pytest.mark.parametrize("fails", ["first", "between", "second"])
def test_a_collective_in_two_phases_that_failed_in_one_is_missed_by_each_wait(fails: str) -> None:
    def second() -> CommWork:
        if fails == "between":
            _runs_out_of_memory()
        return CommWork(_Carrier(), "all-gather", _Owner(), [_Ended("peer" if fails == "second" else "")], None)

    first = CommWork(_Carrier(), "all-reduce", _Owner(), [_Ended("peer" if fails == "first" else "")], None)
    comm_work = TwoPhases(_Carrier(), "all-reduce", _Owner(), [first], second)
    with _in_a_group():
        with pytest.raises(MemoryError if fails == "between" else CollectiveError):
            comm_work.wait()
        for _ in range(2):
            with pytest.raises(CollectiveError, match=r"all-reduce of unit 'blocks\.3' raised in an earlier wait"):
                comm_work.wait()

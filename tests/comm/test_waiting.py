"""How the host waits for a work of gloo: in ticks, of which the last may be over just before the work is."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from hsdp.comm.work import wait_for
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


def test_a_work_that_ends_with_the_tick_has_ended_well() -> None:
    wait_for(LateWork(), "gloo", None, 0, "all-gather", "unit")


def test_a_work_that_fails_with_the_tick_is_told_with_its_own_error() -> None:
    with mock.patch.object(dist, "get_rank", return_value=0), pytest.raises(CollectiveError, match="closed by peer"):
        wait_for(LateWork("connection closed by peer"), "gloo", None, 0, "all-gather", "unit")

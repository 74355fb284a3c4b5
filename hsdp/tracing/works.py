"""Collectives of a traced model: when a collective started, when it was done, and who waited for it for how long."""

from __future__ import annotations

import time
from typing import Any, Protocol

from hsdp.comm.work import CommWork
from hsdp.tracing.events import Moment, Op, WorkRecord
from hsdp.tracing.spans import COLLECTIVES

_WAITS = {kind: f"wait {kind}" for kind in COLLECTIVES}
_BEGIN, _END = Op.BEGIN, Op.END
_now = time.perf_counter


class Log(Protocol):
    """The recorder, as far as its collectives write to it."""

    def now(self) -> Moment:
        """This moment."""
        ...

    def log(self, op: Op, kind: str = ..., what: Any = ...) -> None:
        """Notes an entry."""
        ...


class TracedWork(CommWork):
    """A collective whose end and whose waiting are recorded: collectives of a traced model are given this class."""

    __slots__ = ()

    def watch(self, recorder: Log, record: WorkRecord) -> None:
        """Begins to record, once the collective was started."""
        _under_way[self] = (recorder, record)
        works = [work for work in self._works or () if work is not None]
        record.calls = len(works)
        if self._comm.streams.active:
            record.end = recorder.now()
            return
        # Futures tell when calls are done; asking `is_completed` from time to time would not.
        try:
            for work in works:
                work.get_future().then(record.call_done)
        except (AttributeError, NotImplementedError, RuntimeError):
            pass  # the backend has none: the end of the wait has to do

    def wait(self) -> None:
        """Blocks until the results are there, and records for how long."""
        told = _under_way.pop(self, None)
        if told is None:  # it was waited for before, or the trace has ended
            super().wait()
            return
        recorder, record = told
        recorder.log(_BEGIN, _WAITS[record.kind], record)
        try:
            super().wait()
        finally:
            recorder.log(_END)
            record.waited = _now()


_under_way: dict[TracedWork, tuple[Log, WorkRecord]] = {}
"""Collectives that were not waited for, until their trace ends."""


def forget_works(recorder: Log) -> None:
    """The recorder's trace has ended: collectives that are still under way end without it."""
    for comm_work in [comm_work for comm_work, (its, _) in _under_way.items() if its is recorder]:
        del _under_way[comm_work]

"""Flights of a traced model: when a collective started, when it was done, and who waited for it for how long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hsdp.flight import Flight
from hsdp.streams import Event
from hsdp.tracing.replay import Op
from hsdp.tracing.spans import COLLECTIVES, Lane

if TYPE_CHECKING:
    from hsdp.tracing.recorder import Recorder

Moment = tuple[float, Event]
"""A time: by the host's clock, in seconds, and as an event on the stream that was current."""

_WAITS = {kind: f"wait {kind}" for kind in COLLECTIVES}
_BEGIN, _END = Op.BEGIN, Op.END
_now = time.perf_counter


class FlightRecord:
    """A collective that was started. `frees`: bytes of gradients that are let go once it was waited for."""

    __slots__ = ("_ends", "calls", "end", "frees", "kind", "lane", "nbytes", "sent", "start", "unit", "waited")

    def __init__(self, lane: Lane, kind: str, unit: str, start: Moment, nbytes: int, sent: float) -> None:
        self.lane: Lane = lane
        self.kind = kind
        self.unit = unit
        self.start = start
        self.nbytes = nbytes
        self.sent = sent
        self.end: Moment | None = None
        self.waited: float | None = None
        self.calls = self.frees = 0
        self._ends: list[float] = []

    def call_done(self, _: object) -> None:
        """One of its calls is done: runs on a thread of the backend, where appending is safe and counting is not."""
        self._ends.append(_now())

    @property
    def done(self) -> Moment | None:
        """When it was done, or None if nobody told."""
        if self.end is None and self._ends and len(self._ends) == self.calls:
            return max(self._ends), None
        return self.end


class TracedFlight(Flight):
    """A flight whose end and whose waiting are recorded: flights of a traced model are given this class."""

    __slots__ = ()

    def watch(self, recorder: Recorder, record: FlightRecord) -> None:
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
            recorder.reducing -= record.frees


_under_way: dict[TracedFlight, tuple[Recorder, FlightRecord]] = {}
"""Flights that were not waited for, until their trace ends."""


def forget_flights(recorder: Recorder) -> None:
    """The recorder's trace has ended: flights that are still under way end without it."""
    for flight in [flight for flight, (its, _) in _under_way.items() if its is recorder]:
        del _under_way[flight]

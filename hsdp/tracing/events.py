"""What a trace records while the model runs: entries of the log, marks of the compute track, records of collectives."""

from __future__ import annotations

import enum
import time
from typing import Any

from hsdp.comm.streams import Event
from hsdp.tracing.spans import Track

Moment = tuple[float, Event]
"""A time: by the host's clock, in seconds, and as an event on the stream that was current."""

_now = time.perf_counter


class Op(enum.Enum):
    """What an entry of the log tells."""

    BEGIN = enum.auto()
    END = enum.auto()
    END_KIND = enum.auto()
    BEGIN_PASS = enum.auto()
    FORGET_PASS = enum.auto()
    END_FORWARD = enum.auto()
    ENTER_BACKWARD = enum.auto()
    LEAVE_BACKWARD = enum.auto()
    END_BACKWARD = enum.auto()


Entry = tuple[float, Event, Op, str, Any]
"""Host time, event, op, kind, and what it is about: a unit, a runtime, a collective's record or a name."""


class WorkRecord:
    """A collective that was started."""

    __slots__ = ("_ends", "calls", "end", "kind", "nbytes", "sent", "start", "track", "unit", "waited")

    def __init__(self, track: Track, kind: str, unit: str, start: Moment, nbytes: int, sent: float) -> None:
        self.track: Track = track
        self.kind = kind
        self.unit = unit
        self.start = start
        self.nbytes = nbytes
        self.sent = sent
        self.end: Moment | None = None
        self.waited: float | None = None
        self.calls = 0
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


Mark = tuple[float, Event, str, str, WorkRecord | None]
"""What the compute track does from a moment on: a kind and a unit, or an empty kind for nothing of ours."""

"""What a trace records while the model runs: entries of the log, marks of the compute track, records of collectives."""

from __future__ import annotations

import enum
import time
from typing import Any

from hsdp.comm.observer import Point
from hsdp.comm.streams import Event
from hsdp.tracing.spans import COLLECTIVES, Track
from hsdp.unit.unit import Unit

Moment = tuple[float, Event]
"""A time: by the host's clock, in seconds, and as an event on the stream that was current."""

_now = time.perf_counter
_WAITS = {kind: f"wait {kind}" for kind in COLLECTIVES}


class Op(enum.Enum):
    """What an entry of the log tells, beside the points that are passed."""

    BEGIN = enum.auto()
    END = enum.auto()
    END_KIND = enum.auto()


Entry = tuple[float, Event, Op | Point, str, Any]
"""Host time, event, op or point, kind, and what it is about: a unit, a root, a collective's record or a name."""


class WorkRecord:
    """A collective that was started. `wait`: what the compute track does while it waits for it.

    `units` are those that share it, until the trace ends: only then is it known what they are called there.
    """

    __slots__ = ("_ends", "calls", "end", "kind", "nbytes", "sent", "start", "track", "unit", "units", "wait", "waited")

    def __init__(self, track: Track, kind: str, unit: str, start: Moment, nbytes: int, sent: float) -> None:
        self.track: Track = track
        self.kind = kind
        self.unit = unit
        self.units: list[Unit] = []
        self.start = start
        self.nbytes = nbytes
        self.sent = sent
        self.end: Moment | None = None
        self.waited: float | None = None
        self.calls = 0
        self.wait = _WAITS[kind]
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

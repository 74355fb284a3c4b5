"""Spans: what was under way from when to when, and the arithmetic of intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from hsdp.comm.questions import Late

Track = Literal["host", "compute", "gather", "scatter", "replicate"]
Interval = tuple[float, float]

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
WORKING = frozenset({"forward", "backward", "optimizer", "launch", "copy", "sum", "landing"})
"""Kinds of the compute track other than waits: under these a collective is hidden."""


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        track: the stream. Spans of "compute" never overlap: at any moment it does one thing. On a device "host" has the
            same spans by the host's clock.
        kind: on the compute track "forward", "backward", "optimizer", "launch" (allocating, casting and starting
            collectives), "copy", "sum", "landing", or "wait " and a kind of collective; on the others a collective.
        unit: name of the unit, or of those that share the collective.
        start, end: seconds since the trace began.
        nbytes: bytes of the collective's whole operand: what is gathered, scattered or reduced.
        sent: bytes that this rank sends at least, by the ring's formula.
        calls: calls of the backend.
    """

    track: Track
    kind: str
    unit: str
    start: float
    end: float
    nbytes: int = 0
    sent: float = 0.0
    calls: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Recording:
    """A finished trace.

    Attributes:
        spans: in the order in which they began, track by track.
        iterations: when each forward of a root began, seconds; a step of several micro-batches has as many.
        end: when the trace ended, seconds.
        memory: (seconds, bytes) of gather buffers, unsharded gradients and reduction buffers, whenever they changed.
        units: names of all units, in the model's order.
        device: kind of device.
        late: with HSDP_SLOW, ranks that others waited for, as far as it was this rank that told of them.
    """

    spans: list[Span]
    iterations: list[float]
    end: float
    memory: list[tuple[float, int]]
    units: list[str]
    device: str
    late: tuple[Late, ...] = ()
    _by_track: dict[str, list[Span]] = field(default_factory=dict, repr=False, compare=False)

    def track(self, track: Track) -> list[Span]:
        """The spans of one track."""
        if not self._by_track:
            for span in self.spans:
                self._by_track.setdefault(span.track, []).append(span)
        return self._by_track.get(track, [])

    def between(self, start: float, end: float) -> Recording:
        """What of it lies between two moments, with times from the first on; spans at the edges are cut there."""
        spans = [
            replace(span, start=max(span.start, start) - start, end=min(span.end, end) - start)
            for span in self.spans
            if span.end > start and span.start < end
        ]
        iterations = [at - start for at in self.iterations if start <= at < end]
        memory = [(at - start, nbytes) for at, nbytes in self.memory if start <= at <= end]
        return Recording(spans, iterations, end - start, memory, self.units, self.device, self.late)

    def started(self) -> list[Span]:
        """The spans of all collectives."""
        return [span for span in self.spans if span.kind in COLLECTIVES]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Seconds that disjoint intervals cover."""
    return sum(end - start for start, end in disjoint)


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """The moments that are in both of two lists of disjoint intervals in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found

"""A recording in Chrome's trace event format: one process per rank, a thread per track, a counter of buffers' bytes."""

from __future__ import annotations

import json
from typing import Any

from hsdp.tracing.spans import COLLECTIVES, Recording, Span, Track

TRACKS: tuple[Track, ...] = ("host", "compute", "gather", "scatter", "replicate")


def chrome_trace(recording: Recording, rank: int) -> str:
    """The recording as JSON. Times are microseconds since the trace began; ranks of one job can be put in one file."""
    events: list[dict[str, Any]] = [_meta("process_name", rank, 0, {"name": f"rank {rank}"})]
    thread = 0
    for track in TRACKS:
        for row, spans in enumerate(rows(recording.track(track))):
            thread += 1
            events.append(_meta("thread_name", rank, thread, {"name": track if row == 0 else f"{track} {row + 1}"}))
            events.append(_meta("thread_sort_index", rank, thread, {"sort_index": thread}))
            events += [_complete(span, rank, thread) for span in spans]
    for start in recording.iterations:
        events.append({"ph": "i", "s": "p", "name": "iteration", "pid": rank, "tid": 1, "ts": start * 1e6})
    for at, nbytes in recording.memory:
        counter = {"ph": "C", "name": "communication buffers", "pid": rank, "ts": at * 1e6, "args": {"bytes": nbytes}}
        events.append(counter)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def rows(spans: list[Span]) -> list[list[Span]]:
    """Spans in as few rows as hold them so that those of a row do not overlap, or lie in each other."""
    found: list[list[Span]] = []
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        inside = span.kind not in COLLECTIVES and bool(found)
        at = 0 if inside else next((i for i, end in enumerate(ends) if end <= span.start), len(found))
        if at == len(found):
            found.append([])
            ends.append(0.0)
        found[at].append(span)
        ends[at] = max(ends[at], span.end)
    return found


def _meta(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}


def _complete(span: Span, rank: int, thread: int) -> dict[str, Any]:
    details = {"unit": span.unit}
    if span.nbytes:
        details |= {"bytes": str(span.nbytes), "sent": str(round(span.sent)), "calls": str(span.calls)}
    return {
        "ph": "X",
        "name": f"{span.kind} {span.unit}",
        "cat": span.kind,
        "pid": rank,
        "tid": thread,
        "ts": span.start * 1e6,
        "dur": span.seconds * 1e6,
        "args": details,
    }

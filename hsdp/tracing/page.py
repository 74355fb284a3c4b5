"""A trace as one HTML file that needs nothing else: `python -m hsdp trace FILE` writes it from what `to_chrome` wrote.

The file holds the spans as JSON, and a script that draws them on a canvas, as far as they are in view.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from hsdp.tracing.picture import TITLES, hues
from hsdp.tracing.script import SCRIPT, STYLE

_FIELDS = ("start", "length", "kind", "unit", "bytes", "sent", "calls")


def page_of(files: Sequence[Path]) -> str:
    """The page of one trace, or of those of several ranks of one job under each other.

    Raises:
        ValueError: a file is no trace that `Trace.to_chrome` wrote; names it.
    """
    ranks = [rank for path in files for rank in _ranks(path)]
    spans = [span for rank in ranks for row in rank["rows"] for span in row["spans"]]
    kinds = sorted({span[2] for span in spans})
    units = _in_model_order([span for span in spans if span[2] in ("forward", "backward")], spans)
    for span in spans:
        span[2], span[3] = kinds.index(span[2]), units.index(span[3])
    # An optimizer's name stands where a unit's does, and several units may share a collective.
    computing = {units[span[3]] for span in spans if kinds[span[2]] != "optimizer"}
    found = hues([unit for unit in units if unit in computing and " + " not in unit])
    data = {
        "fields": _FIELDS,
        "kinds": kinds,
        "units": [[unit, found.get(unit.split(" + ")[0])] for unit in units],
        "ranks": ranks,
    }
    title = ", ".join(path.name for path in files)
    # "</script>" in a name would end the script, and "<!--<script>" would keep it open.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n"
        f'<header><h1>{escape(title)}</h1><input id="find" type="search" placeholder="find a unit">'
        '<button id="out">&minus;</button><button id="in">+</button><button id="all">all</button>'
        '<span class="hint">wheel: zoom &middot; drag: move &middot; click: follow a unit</span></header>\n'
        '<output id="view"></output>\n<main><canvas id="canvas"></canvas><aside id="legend"></aside></main>\n'
        '<div id="tip" hidden></div>\n'
        f'<script id="data" type="application/json">{text}</script>\n<script>{SCRIPT}</script>\n</body></html>\n'
    )


def _ranks(path: Path) -> list[dict[str, Any]]:
    """The processes of a file: rows of spans, moments at which forwards began, bytes of buffers. Times in microseconds."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        found: dict[int, dict[str, Any]] = {}
        for (rank, thread), name in names.items():
            one = found.setdefault(rank, {"rank": rank, "rows": [], "starts": [], "memory": []})
            mine = (e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, thread))
            one["rows"].append({"name": _title(name), "spans": [_span(event) for event in mine]})
        for event in events:
            if event["name"] == "iteration":
                found[event["pid"]]["starts"].append(event["ts"])
            elif event["ph"] == "C":
                found[event["pid"]]["memory"].append([round(event["ts"], 1), event["args"]["bytes"]])
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "Trace.to_chrome did not write it"
        raise ValueError(f"{path} is no trace of hsdp: {reason}") from None
    if not any(row["spans"] for one in found.values() for row in one["rows"]):
        raise ValueError(f"{path} is no trace of hsdp: it has no spans")
    return list(found.values())


def _title(row: str) -> str:
    """A row's name as the picture has it: "all-gather 2" for "gather 2"."""
    track, _, number = row.partition(" ")
    return f"{TITLES.get(track, track)} {number}".rstrip()


def _span(event: dict[str, Any]) -> list[Any]:
    details = event["args"]
    times = [round(event["ts"], 2), round(event["dur"], 2)]
    return [*times, event["cat"], details["unit"], *(int(details.get(name, 0)) for name in ("bytes", "sent", "calls"))]


def _in_model_order(computing: list[list[Any]], spans: list[list[Any]]) -> list[str]:
    """Names of units, those that compute in the order in which they begin, then others."""
    forwards = [span for span in computing if span[2] == "forward"] or computing
    ordered = dict.fromkeys(span[3] for span in sorted(forwards, key=lambda span: span[0]))
    return list(ordered | dict.fromkeys(span[3] for span in spans))

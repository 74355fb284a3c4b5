"""Traces to look at: the picture's words and colours, and the page, which a browser draws if one is here."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from hsdp.__main__ import main
from hsdp.tracing.chrome import chrome_trace
from hsdp.tracing.page import page_of
from hsdp.tracing.picture import draw, hues
from hsdp.tracing.script import SCRIPT
from hsdp.tracing.spans import Recording, Span
from hsdp.tracing.summary import summarize

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = next(filter(None, map(shutil.which, ("node", "nodejs"))), None)

STAGE = """
const any = new Proxy(function () {}, {
  get: (_, name) => name === Symbol.toPrimitive ? () => 1 : any, set: () => true, apply: () => any });
const view = {}, found = { data: { textContent: require('fs').readFileSync(0, 'utf-8') }, view, find: { value: '' } };
const document = { getElementById: name => found[name] || any, createElement: () => any };
const window = {}, history = { replaceState() {} }, location = { hash: '' };
"""
"""A page's elements as far as its script needs them to begin, for JavaScript without a browser; data come from stdin."""


def _recording(num_units: int, micro_batches: int = 1, steps: int = 1) -> Recording:
    """Units that compute 1 ms forward and 2 ms backward, gathers beside them, a wait of 1 ms before each backward."""
    units = [f"blocks.{at}" for at in range(num_units)]
    spans: list[Span] = []
    starts: list[float] = []
    now = 0.0

    def add(kind: str, unit: str, seconds: float) -> None:
        nonlocal now
        spans.append(Span("compute", kind, unit, now, now + seconds))
        now += seconds

    for _ in range(steps):
        for _ in range(micro_batches):
            starts.append(now)
            for unit in units:
                spans.append(Span("gather", "all-gather", unit, now, now + 5e-4, 1 << 20, 5e5, 1))
                add("forward", unit, 1e-3)
            for unit in reversed(units):
                add("wait all-gather", unit, 1e-3)
                add("backward", unit, 2e-3)
        add("optimizer", "AdamW", 3e-3)
    return Recording(spans, starts, now, [(0.0, 1 << 20), (now, 0)], units, "cpu")


def test_steps_are_counted_apart_from_their_micro_batches() -> None:
    content = {
        (1, 1): "1 step in",
        (1, 3): "3 steps in",
        (4, 1): "1 step (4 micro-batches) in",
        (2, 3): "3 steps (6 micro-batches) in",
    }
    for (micro_batches, steps), start in content.items():
        summary = summarize(_recording(2, micro_batches, steps))
        assert str(summary).startswith(start), str(summary)
        assert summary.steps == steps and summary.iterations == steps * micro_batches
    alone = _recording(1)
    without = replace(alone, spans=[span for span in alone.spans if span.kind != "optimizer"])
    assert str(summarize(without)).startswith("1 forward in") and "slowest of 1 unit," in str(summarize(without))


def test_the_title_is_about_what_is_drawn() -> None:
    # Two forwards of 2 units, each with 2 ms of waits; all of the trace would be 4 ms.
    svg = draw(_recording(2, 2, 1), 0, 3)
    assert "8.0 ms on rank 3, 1 forward and what follows: 2.0 ms of waits, 100% of the time of" in svg
    with pytest.raises(ValueError, match=r"2 forwards \(a micro-batch each\)"):
        draw(_recording(2, 2, 1), 2, 0)
    with pytest.raises(ValueError, match="no forward"):
        draw(Recording([], [], 1.0, [], ["a"], "cpu"), 0, 0)


@pytest.mark.parametrize("count", [1, 3, 12, 13, 41, 100])
def test_no_two_units_share_a_colour(count: int) -> None:
    found = hues([str(at) for at in range(count)])
    assert len(set(found.values())) == count
    assert all(35 <= hue <= 325 for hue in found.values()), "red is for waits"
    if 1 < count <= 12:
        nearest = min(abs(found[str(at)] - found[str(at + 1)]) for at in range(count - 1))
        assert nearest >= 100 and min(abs(a - b) for a, b in combinations(found.values(), 2)) >= 24


def test_the_legend_of_many_units_is_short() -> None:
    few, many = (html.unescape(draw(_recording(count), 0, 0)) for count in (3, 100))
    legend = re.compile(r'height="12" fill="[^"]+"/>\n<text[^>]*>([^<]+)<')
    assert legend.findall(few) == ["blocks.0", "blocks.1", "blocks.2", "wait", "copy, sum, launch, landing", "optimizer"]
    told = legend.findall(many)
    assert len(told) == 9 and told[0] == "blocks.0" and told[5] == "blocks.99 (100 units in the model's order)"


def _write(path: Path, recording: Recording, rank: int = 0) -> Path:
    path.write_text(chrome_trace(recording, rank))
    return path


def test_a_page_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = _recording(3)
    called = {"blocks.1": "<!--<script>", "blocks.2": "</script>"}
    named = [replace(span, unit=called.get(span.unit, span.unit)) for span in recording.spans]
    files = [_write(tmp_path / "a.json", replace(recording, spans=named)), _write(tmp_path / "b.json", recording, 1)]
    assert main(["trace", *map(str, files)]) == 0
    page = tmp_path / "a.html"
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    assert not re.search(r"https?:|src=|@import|<link|fetch\(", text), "it would ask the network"
    assert text.count("</script>") == 2, "a name ended the script"
    held = re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1]  # type: ignore[index]
    assert "<" not in held, "a name opened a script or a comment"
    data = json.loads(held)
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert [row["name"] for row in data["ranks"][0]["rows"]] == ["compute", "all-gather"]
    assert sum(len(row["spans"]) for row in data["ranks"][1]["rows"]) == len(recording.spans)
    assert dict(data["units"])["</script>"] is not None and dict(data["units"])["AdamW"] is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [{"name": "x"}]}', "\udcff", None]
)
def test_what_is_no_trace_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    assert main(["trace", str(path)]) == 2
    output = capsys.readouterr().err
    assert re.fullmatch(r"python -m hsdp trace: error: .*some\.json is no trace of hsdp: .*\n", output), output
    assert not (tmp_path / "some.html").exists()


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_a_long_trace_is_drawn_too() -> None:
    """A call of JavaScript takes some 100,000 arguments."""
    count = 200_000
    row = {"name": "compute", "spans": [[at, 1, 0, 0, 0, 0, 0] for at in range(count)]}
    rank = {"rank": 0, "rows": [row], "starts": [], "memory": [[at, at] for at in range(count)]}
    fields = ["start", "length", "kind", "unit", "bytes", "sent", "calls"]
    data = json.dumps({"fields": fields, "kinds": ["forward"], "units": [["a", 35]], "ranks": [rank]})
    script = f"{STAGE}{SCRIPT}\nconsole.log(view.textContent);"
    done = subprocess.run([str(NODE), "-e", script], input=data, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "rank 0, 200.000 ms in view: forward 200.000 ms\n", done.stderr[-2000:]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("count", [3, 100])
def test_a_browser_draws_what_is_in_view(tmp_path: Path, count: int) -> None:
    page = tmp_path / "page.html"
    page.write_text(page_of([_write(tmp_path / "page.json", _recording(count))]))
    total = count * 4 + 3

    def seen(view: str) -> str:
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={tmp_path / 'page.png'}"]
        shot = [*command, "--window-size=1400,600", "--virtual-time-budget=2000", "--dump-dom", page.as_uri() + view]
        dom = subprocess.run(shot, capture_output=True, text=True, timeout=60, check=True).stdout
        assert len(re.findall(r'<div title="blocks', dom)) == count
        return html.unescape(re.search(r'<output id="view">(.*?)</output>', dom, re.DOTALL)[1])  # type: ignore[index]

    whole = seen("")
    assert whole.startswith(f"rank 0, {total:.3f} ms in view: backward {2 * count:.3f} ms"), whole
    assert seen(f"#0-{1000 * count}") == f"rank 0, {count:.3f} ms in view: forward {count:.3f} ms", "the forwards alone"
    assert (tmp_path / "page.png").stat().st_size > 5000

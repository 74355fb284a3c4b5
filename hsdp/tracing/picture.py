"""One iteration as a picture: a track per stream, a colour per unit, so that what runs under what is seen at a glance."""

from __future__ import annotations

import colorsys
from html import escape
from itertools import pairwise

from hsdp.format import several
from hsdp.tracing.chrome import rows
from hsdp.tracing.spans import COLLECTIVES, Interval, Recording, Span
from hsdp.tracing.summary import summarize

_WIDTH, _LEFT, _RIGHT, _TOP = 1280, 96, 16, 64
_ROW, _THIN_ROW, _GAP = 40, 22, 10  # heights of rows of the compute track and of the others, and between tracks
_INK, _FAINT, _GRID, _WAIT, _OTHER = "#24292f", "#6a737d", "#e4e7eb", "#d1382c", "#b9c0c7"
TITLES: dict[str, str] = {
    "compute": "compute",
    "gather": "all-gather",
    "scatter": "reduce-scatter",
    "replicate": "all-reduce",
}
"""What the tracks are called."""
_LIGHT = {"forward": 80, "backward": 62}
_CHARACTER = 6.2  # width of one in labels
_MOST_HUES, _STRIDE = 12, 5  # how many hues can be told apart; 5 has no divisor in common with 12


def draw(recording: Recording, iteration: int, rank: int) -> str:
    """The SVG document of one iteration.

    Raises:
        ValueError: there is no such iteration.
    """
    start, end = _window(recording, iteration)
    spans = [span for span in recording.spans if span.end > start and span.start < end]
    # Spans too thin to be seen take room in the file only.
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - start)
    canvas = _Canvas(start, scale, recording.units)
    y = float(_TOP)
    for track, title in TITLES.items():
        of_lane = [span for span in spans if span.track == track]
        if not of_lane and track != "compute":
            continue
        height = _ROW if track == "compute" else _THIN_ROW
        canvas.label(title, y + height / 2 + 4)
        for row in rows(of_lane):
            for span in row:
                canvas.span(span, y, height)
            y += height + 1
        y += _GAP
    canvas.axis(end, y)
    seen = summarize(recording.between(start, end))
    exposed = sum(one.exposed for one in seen.collectives.values())
    head = (
        f"{1e3 * (end - start):.1f} ms on rank {rank}, {several(seen.iterations, 'forward')} and what follows: "
        f"{1e3 * exposed:.1f} ms of waits, {seen.overlap:.0%} of the time of collectives is under compute"
    )
    bottom = canvas.legend(y + 34)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom:.0f}" '
            f'viewBox="0 0 {_WIDTH} {bottom:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="11">',
            f'<rect width="{_WIDTH}" height="{bottom:.0f}" fill="#ffffff"/>',
            f'<text x="{_LEFT}" y="28" font-size="15" font-weight="bold" fill="{_INK}">{escape(head)}</text>',
            *canvas.parts,
            "</svg>\n",
        ]
    )


def _window(recording: Recording, iteration: int) -> Interval:
    """From the beginning of an iteration to the end of its last span."""
    starts = [*recording.iterations, recording.end]
    windows = list(pairwise(starts))
    if not windows:
        raise ValueError("to_svg: no forward of a root began while it was traced, so there is no iteration to draw")
    if iteration == -1:
        backwards = [span.start for span in recording.track("compute") if span.kind == "backward"]
        windows = [one for one in windows if any(one[0] <= at < one[1] for at in backwards)] or windows
    if not -len(windows) <= iteration < len(windows):
        count = several(len(windows), "forward")
        raise ValueError(f"to_svg(iteration={iteration}): the trace has {count} (a micro-batch each); choose one of them")
    start, end = windows[iteration]
    return start, max((span.end for span in recording.spans if start <= span.start < end), default=end)


class _Canvas:
    """SVG elements, and where times and units lie on them."""

    def __init__(self, start: float, scale: float, units: list[str]) -> None:
        self.parts: list[str] = []
        self._start = start
        self._scale = scale
        self._hues = hues(units)
        self._seen: dict[str, str] = {}
        self._units = units

    def _x(self, seconds: float) -> float:
        return _LEFT + max(0.0, seconds - self._start) * self._scale

    def _color(self, span: Span) -> str:
        if span.kind.startswith("wait"):
            return _WAIT
        hue = self._hues.get(span.unit.split(" + ")[0])
        if hue is None or not (span.kind in _LIGHT or span.kind in COLLECTIVES):
            return _INK if span.kind == "optimizer" else _OTHER
        self._seen.setdefault(span.unit, _hex(hue, 62))
        return _hex(hue, _LIGHT.get(span.kind, 62))

    def span(self, span: Span, y: float, height: float) -> None:
        """A rectangle, with its name where there is room; hovering tells the rest."""
        left, right = self._x(span.start), min(self._x(span.end), _WIDTH - _RIGHT)
        width = max(right - left, 0.3)
        size = f", {span.nbytes:,} bytes" if span.nbytes else ""
        title = f"{span.kind} of {span.unit}: {1e3 * span.seconds:.2f} ms{size}"
        self.parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{self._color(span)}">'
            f"<title>{escape(title)}</title></rect>"
        )
        label = _short(span)
        if label and width > _CHARACTER * len(label) + 6:
            color = "#ffffff" if span.kind.startswith("wait") or span.kind == "optimizer" else _INK
            self.parts.append(
                f'<text x="{left + 4:.1f}" y="{y + height / 2 + 4:.1f}" fill="{color}">{escape(label)}</text>'
            )

    def label(self, title: str, y: float) -> None:
        """The name of a track."""
        self.parts.append(f'<text x="{_LEFT - 8}" y="{y:.1f}" text-anchor="end" fill="{_INK}">{title}</text>')

    def axis(self, end: float, y: float) -> None:
        """Milliseconds since the iteration began, behind everything."""
        tick = _nice((end - self._start) * 1e3 / 10)
        lines = []
        for at in range(int((end - self._start) * 1e3 / tick) + 1):
            x = self._x(self._start + at * tick / 1e3)
            lines.append(f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>')
            text = f"{at * tick:g} ms"
            lines.append(f'<text x="{x:.1f}" y="{y + 14:.1f}" text-anchor="middle" fill="{_FAINT}">{text}</text>')
        self.parts[:0] = lines

    def legend(self, y: float) -> float:
        """What colours mean; returns where the picture ends."""
        entries = [*_few(self._seen, self._units), ("wait", _WAIT)]
        entries += [("copy, sum, launch, landing", _OTHER), ("optimizer", _INK)]
        x = float(_LEFT)
        for name, color in entries:
            width = 26 + _CHARACTER * len(name)
            if x + width > _WIDTH - _RIGHT:
                x, y = float(_LEFT), y + 20
            self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" fill="{color}"/>')
            self.parts.append(f'<text x="{x + 17:.1f}" y="{y + 10:.1f}" fill="{_INK}">{escape(name)}</text>')
            x += width + 8
        self.parts.append(
            f'<text x="{_LEFT}" y="{y + 32:.1f}" fill="{_FAINT}">'
            "A unit has one colour in all tracks, lighter in forward. A collective under compute of another colour is "
            "hidden.</text>"
        )
        return y + 44


def hues(units: list[str]) -> dict[str, int]:
    """A hue for each unit, from 35 to 325 degrees: red is for waits.

    A few get hues far apart, their neighbours above all. Of many no two could be told apart that way: then the hue runs
    with the unit's place in the model, so that colours say how deep it lies.
    """
    if len(units) <= _MOST_HUES:
        return {name: 35 + (at * _STRIDE % _MOST_HUES) * 290 // _MOST_HUES for at, name in enumerate(units)}
    return {name: 35 + at * 290 // (len(units) - 1) for at, name in enumerate(units)}


def _few(seen: dict[str, str], units: list[str]) -> list[tuple[str, str]]:
    """Entries of the legend for units: all of a few, and of many some at even distances."""
    shown = {name: color for name, color in seen.items() if name in units}
    ordered = [(name, shown[name]) for name in units if name in shown]
    if len(units) <= _MOST_HUES:
        return ordered
    picked = [ordered[at * (len(ordered) - 1) // 5] for at in range(6)] if len(ordered) > 6 else ordered
    return [*picked[:-1], (f"{picked[-1][0]} ({several(len(ordered), 'unit')} in the model's order)", picked[-1][1])]


def _short(span: Span) -> str:
    """The label of a span: its unit, or what the host does."""
    if span.kind in _LIGHT or span.kind in COLLECTIVES:
        return span.unit
    return "wait" if span.kind.startswith("wait") else span.kind


def _nice(rough: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `rough`."""
    power = 1e-6
    while power * 10 < rough:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _hex(hue: int, light: int) -> str:
    """A colour as every viewer knows it: many that show pictures in pages know no hsl()."""
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue / 360, light / 100, 0.65))
    return f"#{red:02x}{green:02x}{blue:02x}"

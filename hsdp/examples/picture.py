"""A line chart as SVG text, without a plotting library: loss over steps, with levels to compare against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 800, 480
# Room for the axes, and on the right for the names of the lines.
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 124, 68, 56
_CURVE_COLORS = ("#8fb3d9", "#1f5fa8", "#b8862b", "#6b4fa0")
_LEVEL_COLOR = "#b4442f"
_INK, _FAINT_INK, _GRID = "#24292f", "#6a737d", "#e4e7eb"
_LINE_HEIGHT = 16  # between two names on the right


@dataclass(frozen=True)
class Curve:
    """A named line through `(steps[i], losses[i])`."""

    name: str
    steps: Sequence[int]
    losses: Sequence[float]


@dataclass(frozen=True)
class Level:
    """A named horizontal line."""

    name: str
    loss: float


def loss_picture(title: str, *, curves: Sequence[Curve], levels: Sequence[Level]) -> str:
    """The SVG document. Lines are named at their right end, where a legend would make the eye travel.

    Raises:
        ValueError: if no curve has a point, or a value is not finite.
    """
    steps = [step for curve in curves for step in curve.steps]
    losses = [loss for curve in curves for loss in curve.losses] + [level.loss for level in levels]
    if not steps:
        raise ValueError("there is nothing to draw: no curve has a point")
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError("a loss that is not finite cannot be drawn")
    x_axis = _Axis.covering([0, *steps], _LEFT, _WIDTH - _RIGHT, whole_numbers=True)
    y_axis = _Axis.covering(losses, _HEIGHT - _BOTTOM, _TOP)
    names = [_Name(f"{level.name} {level.loss:.2f}", y_axis.place(level.loss), _LEVEL_COLOR) for level in levels]
    names += [
        _Name(f"{curve.name} {curve.losses[-1]:.2f}", y_axis.place(curve.losses[-1]), _curve_color(index))
        for index, curve in enumerate(curves)
        if curve.losses
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 30, title, size=16, weight="bold"),
        *_draw_axes(x_axis, y_axis),
        *(_draw_level(y_axis.place(level.loss)) for level in levels),
        *(_draw_curve(curve, x_axis, y_axis, _curve_color(i)) for i, curve in enumerate(curves) if curve.steps),
        *_draw_names(names),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels: `low` to `start`, `high` to `end`; both are ticks."""

    low: float
    high: float
    tick: float
    start: float
    end: float

    @classmethod
    def covering(cls, values: Sequence[float], start: float, end: float, *, whole_numbers: bool = False) -> _Axis:
        low, high = min(values), max(values)
        if low == high:
            high = low + 1
        tick = _nice_tick((high - low) / 6)
        if whole_numbers:
            tick = max(1.0, tick)
        return cls(math.floor(low / tick) * tick, math.ceil(high / tick) * tick, tick, start, end)

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return [self.low + i * self.tick for i in range(round((self.high - self.low) / self.tick) + 1)]

    def label(self, value: float) -> str:
        decimals = max(0, -math.floor(math.log10(self.tick)))
        return f"{value:,.{decimals}f}"


def _nice_tick(rough: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


@dataclass(frozen=True)
class _Name:
    text: str
    y: float
    color: str


def _draw_axes(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(_line(x_axis.start, y, x_axis.end, y, _GRID))
        parts.append(_text(x_axis.start - 10, y + 4, y_axis.label(value), anchor="end", color=_FAINT_INK))
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(_line(x, y_axis.start, x, y_axis.start + 5, _FAINT_INK))
        parts.append(_text(x, y_axis.start + 21, x_axis.label(value), anchor="middle", color=_FAINT_INK))
    parts.append(_line(x_axis.start, y_axis.start, x_axis.end, y_axis.start, _FAINT_INK))
    middle = (x_axis.start + x_axis.end) / 2
    parts.append(_text(middle, _HEIGHT - 12, "optimizer step", anchor="middle", color=_INK))
    parts.append(_text(_LEFT, _TOP - 10, "nats per byte", color=_INK))
    return parts


def _draw_level(y: float) -> str:
    return _line(_LEFT, y, _WIDTH - _RIGHT, y, _LEVEL_COLOR, extra=' stroke-dasharray="6 4"')


def _draw_curve(curve: Curve, x_axis: _Axis, y_axis: _Axis, color: str) -> str:
    points = [(x_axis.place(step), y_axis.place(loss)) for step, loss in zip(curve.steps, curve.losses, strict=True)]
    if len(points) == 1:  # a line through one point is invisible
        return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{color}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"/>'


def _draw_names(names: Sequence[_Name]) -> list[str]:
    """Each name beside the end of its line; where lines end close together, they are pushed apart."""
    ordered = sorted(names, key=lambda name: name.y)
    heights: list[float] = []
    for name in ordered:
        heights.append(max(name.y, heights[-1] + _LINE_HEIGHT) if heights else name.y)
    lowest = _HEIGHT - _BOTTOM - 4.0
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], lowest)
        lowest = heights[index] - _LINE_HEIGHT
    x = _WIDTH - _RIGHT + 8
    return [_text(x, y + 4, name.text, color=name.color, weight="bold") for name, y in zip(ordered, heights, strict=True)]


def _curve_color(index: int) -> str:
    return _CURVE_COLORS[index % len(_CURVE_COLORS)]


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, extra: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{extra}/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    color: str = _INK,
    size: int = 13,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" '
        f'font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
    )

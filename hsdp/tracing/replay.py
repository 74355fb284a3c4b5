"""What the compute track did: the recorder's log of beginnings and ends, replayed into marks and spans.

    log      forward A entered   begin launch B   end   forward A left
    marks    forward A           launch B         forward A   nothing          "from now on it does this": a flat sequence

A stack says what to go back to. The replay runs when the trace has ended, so that the traced step pays for none of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hsdp.comm.observer import Point
from hsdp.tracing.events import Entry, Mark, Op, WorkRecord
from hsdp.unit.unit import Unit

_Doing = tuple[str, Any]


def replay(log: list[Entry], names: Mapping[Unit, str]) -> list[Mark]:
    """The marks of a log of these units, by these names: others, which may be their parents, did nothing that it tells."""
    stack: list[_Doing] = []
    heights: dict[Any, int] = {}
    marks: list[Mark] = []
    for host, event, op, kind, what in _without_failed_steps(log):
        _apply(stack, heights, op, kind, what, names.keys())
        if op is not Point.FORWARD_BEGINS:
            marks.append((host, event, *_described(stack, names)))
    return marks


def _without_failed_steps(log: list[Entry]) -> list[Entry]:
    """Without the beginnings of optimizers' steps that have no end: they raised, and nobody was told when."""
    begun: list[int] = []
    for at, (_, _, op, kind, _) in enumerate(log):
        if kind == "optimizer" and op is Op.BEGIN:
            begun.append(at)
        elif kind == "optimizer" and begun:
            begun.pop()
    return [entry for at, entry in enumerate(log) if at not in begun] if begun else log


def _described(stack: list[_Doing], names: Mapping[Unit, str]) -> tuple[str, str, WorkRecord | None]:
    kind, what = stack[-1] if stack else ("", "")
    if isinstance(what, str):
        return kind, what, None
    return (kind, names[what], None) if isinstance(what, Unit) else (kind, what.unit, what)


def _apply(
    stack: list[_Doing], heights: dict[Any, int], op: Op | Point, kind: str, what: Any, units: Collection[Unit]
) -> None:
    backward: Unit | None = stack[-1][1] if stack and stack[-1][0] == "backward" else None
    if op is Op.BEGIN:
        stack.append((kind, what))
    elif op is Op.END:
        del stack[-1:]
    elif op is Op.END_KIND:
        if stack and stack[-1][0] == kind:
            stack.pop()
    elif op is Point.FORWARD_ENTERED:
        stack.append(("forward", what))
    elif op is Point.FORWARD_BEGINS:
        if not any(doing == "forward" for doing, _ in stack):
            stack.clear()  # what a backward or a step that failed left behind
        heights[what] = len(stack)
    elif op is Point.DROPPED:
        # Told when it fails, and once more when its root looks for what is left of it.
        del stack[heights.pop(what, len(stack)) :]
    elif op is Point.FORWARD_LEFT:
        # Above it may be what a module left whose exception somebody caught.
        while stack and stack.pop() != ("forward", what):
            pass
    elif op is Point.BACKWARD_ENTERED:
        # The last child's outputs are its parent's too, and both are told of them.
        if backward is None or backward.parent is not what:
            if backward is not None:
                stack.pop()
            stack.append(("backward", what))
    elif op is Point.BACKWARD_LEFT:
        # What follows is its parent's, until the next unit is entered: an embedding's backward is the root's.
        parent = None if backward is None or backward is not what else backward.parent
        if parent is not None:
            stack.pop()
            if parent in units:
                stack.append(("backward", parent))
    else:
        assert op is Point.BACKWARD_ENDS, f"{op} is not replayed"
        if backward is not None:
            stack.pop()

"""What a unit's observer is told, and where: by default a unit has no observer, and each place costs one look at None.

    passes      the root's forwards and backwards begin, end and fail; units are entered and left
    begins      hsdp's own work in between, which `ends`: launching a gather, filling a reduction, landing, waiting
    starting    a collective is about to start; `started`: it has, and so much is on its way
    allocates   the memory of a unit's gathers and reductions may have changed

A place that tells an observer reads `context.observer` of its unit, or of the process group that it uses:

    if (observer := unit.context.observer) is not None:
        observer.passes(Point.FORWARD_ENTERED, unit)

`hsdp.trace` is one. Observers look on: what the engine does never depends on them.
"""

from __future__ import annotations

import enum
from typing import Any, Literal, Protocol

from hsdp.comm.labels import Named
from hsdp.comm.streams import Streams


class Point(enum.Enum):
    """What a root or a unit passes."""

    FORWARD_BEGINS = enum.auto()
    """Of a root: its units are known, none is entered."""
    FORWARD_ENTERED = enum.auto()
    FORWARD_LEFT = enum.auto()
    """Of a unit, one of whose modules has run. One that raised is not left: its root's forward goes on, or is dropped."""
    BACKWARD_ENTERED = enum.auto()
    BACKWARD_LEFT = enum.auto()
    """Of a unit: all of its gradients are there."""
    BACKWARD_ENDS = enum.auto()
    """Of a root: all is reduced that has to be."""
    DROPPED = enum.auto()
    """Of a root: its forward or backward failed."""


Work = Literal["launch", "copy", "landing", "wait"]
"""What begins and ends: a unit launches a gather or a reduction, copies gathered parameters to their places or gradients
into the operands of a reduction ("copy"), or lands one; or a `CommWork` is waited for."""


class Observer(Protocol):
    """Is told what happens. Its methods must not raise, nor change anything that they are given."""

    def passes(self, point: Point, what: Any) -> None:
        """A root (a `Runtime`) or a unit passes a point."""
        ...

    def begins(self, work: Work, what: Any) -> None:
        """Work of a unit, or the waiting for a `CommWork`, begins. Other work may begin and end before."""
        ...

    def ends(self, work: Work, what: Any) -> None:
        """It has ended, perhaps by an exception."""
        ...

    def starting(self) -> None:
        """A collective is about to start: ranks may be asked first whether they agree."""
        ...

    def started(self, comm: Any, owner: Named, comm_work: Any, calls: list[Any]) -> None:
        """A collective has started, the one that was announced last; or there is a `CommWork` without one.

        Args:
            comm: its `Comm`.
            owner: what it is for: a unit, or the bucket of reductions that share it.
            comm_work: its `CommWork`.
            calls: the backend's works; None for each that was over when its call returned.
        """
        ...

    def allocates(self, unit: Any) -> None:
        """The memory of a unit's gathers or reductions may have changed."""
        ...


class CommContext:
    """What the process groups of one unit share.

    Attributes:
        streams: the side streams of the unit's root.
        observer: is told what the unit and its process groups do; None: no observer.
    """

    __slots__ = ("observer", "streams")

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.observer: Observer | None = None

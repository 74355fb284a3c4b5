"""A *flight*: a collective under way.

On a device its work was enqueued on a side stream and `wait` makes the current stream wait for an event. On the CPU the
backend's threads carry it and `wait` blocks the host until it is done, then runs what has to follow it (a local sum, a
scale).
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from hsdp.comm.divergence import Agreement, described
from hsdp.comm.streams import Event, Streams
from hsdp.errors import CollectiveError, DivergenceError


class Named(Protocol):
    """Whatever a flight is for; its name appears in errors."""

    name: str


class Carrier(Protocol):
    """What started a flight: the process group, as far as waiting for it goes."""

    streams: Streams
    backend: str
    agreement: Agreement | None


_TICK = timedelta(seconds=1)
"""How often a rank that waits looks whether another one asks."""

flying: weakref.WeakSet[Flight] = weakref.WeakSet()
"""Flights that were not waited for yet: what a time-out tells of."""


class Flight:
    """A collective under way: its works, the buffers they touch, and what follows them."""

    __slots__ = ("__weakref__", "_comm", "_count", "_event", "_finish", "_keep", "_works", "kind", "name", "start")

    def __init__(
        self,
        comm: Carrier,
        kind: str,
        owner: Named,
        works: list[Any],
        keep: Any,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.kind = kind
        self.name = owner.name
        self._comm = comm
        self._count = comm.agreement.count if comm.agreement is not None else 0
        self._works: list[Any] | None = works
        self._keep = keep
        self._finish = finish
        self._event: Event = None
        self.start = time.monotonic()
        flying.add(self)
        if comm.streams.active:
            # Made with its side stream current: order everything on that stream, the host goes on.
            self._settle()
            self._event = comm.streams.mark()

    def done(self) -> bool:
        """Whether waiting would not block the host (CPU) or the stream (device)."""
        if self._comm.streams.active:
            return self._event is None or bool(self._event.query())
        return self._works is None or all(work is None or work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Blocks until the results are there: the host on the CPU, the current stream on a device.

        Raises:
            CollectiveError: the collective failed or timed out.
            DivergenceError: another rank is about to start another collective in its place.
        """
        if self._comm.streams.active:
            self._comm.streams.join(self._event)
        elif self._works is not None:
            self._settle()
        flying.discard(self)
        # A device's side stream may still read the buffers, but whoever reuses their memory is behind the event now.
        self._keep = self._finish = None

    @property
    def event(self) -> Event:
        """The device event behind the flight's last work; None on the CPU."""
        return self._event

    def _settle(self) -> None:
        assert self._works is not None, "a flight settles once"
        for work in self._works:
            if work is not None:
                wait_for(work, self._comm.backend, self._comm.agreement, self._count, self.kind, self.name)
        self._works = None
        if self._finish is not None:
            self._finish()


def wait_for(work: Any, backend: str, agreement: Agreement | None, count: int, kind: str, name: str) -> None:
    """Waits for a work of op number `count`, and meanwhile answers ranks that ask about it."""
    try:
        if backend != "gloo":
            work.wait()
            return
        if agreement is not None and agreement.broken and not work.is_completed():
            agreement.look(count, kind, name)
        for tick in itertools.count(1):
            try:
                work.wait(_TICK)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                if agreement is None:
                    continue
                agreement.look(count, kind, name)
                if tick * _TICK.total_seconds() >= agreement.timeout:
                    raise RuntimeError(f"it did not end within {agreement.timeout:g} seconds") from None
    except RuntimeError as error:
        if isinstance(error, DivergenceError):
            raise
        raise CollectiveError(
            f"the {described(kind, name)} failed on rank {dist.get_rank()}: {error}. Another rank may have stopped, raised "
            f"or taken another branch: see its log. This rank was waiting for: {_describe_flying()}"
        ) from error


_abandoned: list[Flight] = []


def abandon(flight: Flight) -> None:
    """Keeps the buffers of a flight that nobody waits for any more until its collective has ended."""
    _abandoned[:] = [other for other in _abandoned if not other.done()]
    _abandoned.append(flight)
    flying.discard(flight)


def _describe_flying() -> str:
    now = time.monotonic()
    return "; ".join(
        f"{described(flight.kind, flight.name)} ({_nbytes(flight._keep)} bytes, {now - flight.start:.1f} s old)"
        for flight in sorted(flying, key=lambda flight: flight.start)
    )


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0

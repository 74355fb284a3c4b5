"""A *communication work*: a collective under way.

On a device it was enqueued on a side stream and `wait` makes the current stream wait for an event. On the CPU the
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

from hsdp.comm.custom import WaitedOnly
from hsdp.comm.divergence import DivergenceGuard, described
from hsdp.comm.labels import Named, labelled
from hsdp.comm.observer import CommContext
from hsdp.comm.streams import Event
from hsdp.errors import CollectiveError, DivergenceError
from hsdp.torch_private import is_profiling


class Carrier(Protocol):
    """The starter of a collective: its process group, as far as waits need to know it."""

    size: int
    context: CommContext
    backend: str
    divergence_guard: DivergenceGuard | None


_TICK = timedelta(seconds=1)
"""How often a rank that waits looks whether another one asks."""

_GIVES_UP = 0.9
"""Of the time-out: then a rank gives up a question in the group, before its backend does, which may end the process."""

_outstanding: dict[int, weakref.ref[CommWork]] = {}
"""By identity, collectives that were not waited for yet, and some that were deleted meanwhile."""

_MOST_OUTSTANDING = 1024


def outstanding() -> list[CommWork]:
    """Collectives that were not waited for yet, oldest first: what a time-out tells of."""
    held = list(_outstanding.items())  # at once: models in other threads add to it
    alive = [work for _, ref in held if (work := ref()) is not None]
    for key, ref in held:
        if ref() is None and _outstanding.get(key) is ref:  # not a later work with the same identity
            del _outstanding[key]
    return sorted(alive, key=lambda work: work.start)


class CommWork:
    """A collective under way: its works, the buffers they touch, and what follows them."""

    __slots__ = (
        "__weakref__",
        "_broken",
        "_comm",
        "_count",
        "_event",
        "_finish",
        "_in_use",
        "_keep",
        "_works",
        "kind",
        "name",
        "start",
    )

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
        self._count = comm.divergence_guard.count if comm.divergence_guard is not None else 0
        self._works: list[Any] | None = works
        self._keep = keep
        self._finish = finish
        self._event: Event = None
        self._in_use: _InUse | None = None
        self._broken = False  # `finish` began and did not end
        self.start = time.monotonic()
        _outstanding[id(self)] = weakref.ref(self)
        if len(_outstanding) > _MOST_OUTSTANDING:
            outstanding()
        if _kept:
            _let_go()
        context = comm.context
        if context.streams.active:
            # Made with its side stream current: order everything on that stream, the host goes on.
            self._settle()
            self._event = context.streams.mark()
            self._in_use = _InUse(self._event, (keep, finish))
        if context.observer is not None:
            context.observer.started(comm, owner, self, works)

    def done(self) -> bool:
        """Whether waiting would not block the host (CPU) or the stream (device)."""
        if self._comm.context.streams.active:
            return self._event is None or bool(self._event.query())
        return self._works is None or all(work is None or work.is_completed() for work in self._works)

    @property
    def broken(self) -> bool:
        """Whether it ended, but its `finish` raised: no wait will bring its results."""
        return self._broken

    def wait(self) -> None:
        """Blocks until the results are there: the host on the CPU, the current stream on a device.

        Raises:
            CollectiveError: the collective, or its `finish`, failed or timed out, now or in an earlier wait.
            DivergenceError: another rank is about to start another collective in its place.
        """
        if self._broken:
            # Its works have ended, so that waiting again would find nothing wrong with results that are not there.
            raise CollectiveError(
                f"what follows the {described(self.kind, self.name)} raised in an earlier wait, so its results are not "
                "there; see the first error of this rank, and repeat the step on all ranks"
            )
        context = self._comm.context
        observer = context.observer
        if observer is not None:
            observer.begins("wait", self)
        try:
            if context.streams.active:
                context.streams.join(self._event)
            elif self._works is not None:
                if is_profiling():
                    labelled(f"wait {self.kind}", self.name, self._settle)
                else:
                    self._settle()
        finally:
            if observer is not None:
                observer.ends("wait", self)
        # Not where waiting raised: that collective is the first that a time-out has to tell of.
        _outstanding.pop(id(self), None)
        # A device's side stream may still read the buffers, but their memory's next use is behind the event now.
        self._keep = self._finish = None
        if self._in_use is not None:
            self._in_use.used = None

    def vacate(self) -> None:
        """Copies its results out of the memory of users' collectives, which is about to be written to.

        Raises:
            CollectiveError, DivergenceError: as `wait`.
        """
        if self._comm.context.streams.active:
            self._comm.context.streams.join(self._event)  # but no `wait`: the compute stream is not behind it
        elif self._works is not None:
            self.wait()

    def traffic(self) -> tuple[list[Tensor], list[Tensor]]:
        """The operands that a ring sends once (gathered, scattered) and twice (summed in place), until `wait`."""
        keep = self._keep
        if keep is None:
            return [], []
        if self.kind == "all-reduce":
            return [], keep
        return (keep[0], []) if self.kind == "all-gather" else (keep[1], keep[2] if len(keep) > 2 else [])

    @property
    def event(self) -> Event:
        """The device event behind the collective's last work; None on the CPU."""
        return self._event

    def _settle(self) -> None:
        works, comm = self._works, self._comm
        assert works is not None, "a collective settles once"
        for work in works:
            if work is not None:
                wait_for(work, comm.backend, comm.divergence_guard, self._count, self.kind, self.name)
        self._works = None
        if self._finish is not None:
            self._broken = True
            self._finish()
            self._broken = False


class _InUse:
    """The buffers that a side stream uses until an event.

    If it is deleted while `used` is set, the collective was not waited for: its backward failed, and the model was deleted.
    The buffers are kept until the event: they belong to the compute stream, whose allocator would hand them out while the
    side stream still works on them.
    """

    __slots__ = ("event", "used")

    def __init__(self, event: Event, used: Any) -> None:
        self.event = event
        self.used = used

    def __del__(self) -> None:
        if self.event is not None and self.used is not None:
            _keep_until(self.event.query, self.used)


class TwoPhases(CommWork):
    """A collective of which the second phase starts when all works of the first have landed.

    On the CPU that is in `wait`: a fixed point, which all ranks come to in the same order.
    """

    __slots__ = ("_go_on", "_phase")

    def __init__(
        self, comm: Carrier, kind: str, owner: Named, first: list[CommWork], go_on: Callable[[], CommWork]
    ) -> None:
        super().__init__(comm, kind, owner, [], None)
        # Streams keep the order, the host goes on.
        self._phase = [go_on()] if comm.context.streams.active else first
        self._go_on = None if comm.context.streams.active else go_on

    @property
    def event(self) -> Event:
        """The event of the second phase."""
        return self._phase[-1].event

    def done(self) -> bool:
        """Never before `wait`, on the CPU: a poll would start the second phase, at another point on each rank."""
        return self._go_on is None and all(work.done() for work in self._phase)

    def wait(self) -> None:
        """Waits for both phases."""
        super().wait()
        go_on, self._go_on = self._go_on, None  # nothing follows the first phase if it fails
        self._broken = go_on is not None
        for work in self._phase:
            work.wait()
        if go_on is not None:
            self._phase = [go_on()]
            self._phase[0].wait()
            self._broken = False


def wait_for(
    work: Any, backend: str, divergence_guard: DivergenceGuard | None, count: int, kind: str, name: str, asked: int = 0
) -> None:
    """Waits for a work of op number `count`, and meanwhile answers ranks that ask about it.

    If `asked` is not 0, the work is itself a question about that op: the host waits on every backend.
    """
    try:
        if backend != "gloo" and not asked:
            work.wait()
            return
        if divergence_guard is not None and divergence_guard.broken and not work.is_completed():
            divergence_guard.answer_peers(count, kind, name)
        began = time.monotonic()
        while not _ends(work, backend):
            if divergence_guard is None:
                continue
            waited = time.monotonic() - began
            divergence_guard.answer_peers(count, kind, name, asked, waited)
            if asked and waited + _TICK.total_seconds() > _GIVES_UP * divergence_guard.timeout:
                raise divergence_guard.alone(count, kind, name, asked)
            if waited >= divergence_guard.timeout:
                raise RuntimeError(f"it did not end within {divergence_guard.timeout:g} seconds") from None
    except Exception as error:  # backends raise RuntimeErrors, users' works what they like
        raise _failed(error, kind, name) from error


def _failed(error: Exception, kind: str, name: str) -> RuntimeError:
    if isinstance(error, DivergenceError):
        return error
    cause = f"{error}" if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    # A clean-up behind a failure may have destroyed all groups before the rest is waited for.
    where = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
    return CollectiveError(
        f"the {described(kind, name)} failed{where}: {cause}. Another rank may have stopped, raised "
        f"or taken another branch: see its log. This rank was waiting for: {_describe_outstanding()}"
    )


def _ends(work: Any, backend: str) -> bool:
    """Waits for a work, a tick at most; returns whether it ended."""
    if type(work) is WaitedOnly:
        work.wait()  # a work without ticks: any error that it raises is its own
        return True
    if backend == "gloo":
        try:
            work.wait(_TICK)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it ended since the tick did, perhaps well; if not, this raises its own error
        return True
    # A wait on a device makes the stream wait, not the host.
    deadline, pause = time.monotonic() + _TICK.total_seconds(), 20e-6
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)
    work.wait()
    return True


_kept: dict[int, tuple[Callable[[], bool], Any]] = {}
"""By a number, what collectives use that were given up, and whether they have ended."""
_numbers = itertools.count()


def _keep_until(ended: Callable[[], bool], used: Any) -> None:
    # In place, one by one: an entry may hold the last reference to another such work, whose deletion calls this again.
    _kept[next(_numbers)] = (ended, used)
    _let_go()


def _let_go() -> None:
    for number, (has_ended, _) in list(_kept.items()):
        if has_ended():
            _kept.pop(number, None)


def abandon(comm_work: CommWork) -> None:
    """Keeps the buffers of a collective that was given up until it has ended."""
    _keep_until(comm_work.done, comm_work)
    _outstanding.pop(id(comm_work), None)


def _describe_outstanding() -> str:
    now = time.monotonic()
    return "; ".join(
        f"{described(comm_work.kind, comm_work.name)} ({_nbytes(comm_work._keep)} bytes, {now - comm_work.start:.1f} s old)"
        for comm_work in outstanding()
    )


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def in_turn(first: Callable[[], object] | None, second: Callable[[], object] | None) -> Callable[[], object] | None:
    """A function that calls `first` and then the other, where there are both."""
    if first is None or second is None:
        return first or second

    def both() -> None:
        first()
        second()

    return both

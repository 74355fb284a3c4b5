"""Thousands of ranks in one process and in simulated time: each is a thread that runs hsdp's own guard, one at a time.

    outcomes = fail(1024, Failure("late", ranks=(512,), seconds=60.0), timeout=20.0)

Real: `DivergenceGuard`, `Questions` and `wait_for`, in every rank, as they are. Simulated, by `tests/support/simulated.py`:
the clock that they read; the store, a server that carries out one operation after the other and takes a set time for each;
the process group, whose all-reduce ends when all ranks have joined it, and which waits as gloo's does.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup

from hsdp.comm import compare, divergence, questions, work
from hsdp.comm.compare import guard_of
from hsdp.comm.work import wait_for
from tests.support.rig import fake_world
from tests.support.simulated import AllReduce, Backend, Client, Clock, Server

CPU = torch.device("cpu")

How = Literal["differs", "late", "dead"]
Where = Literal["first question", "asked in the group", "known collective"]
UNITS = ("blocks.0", "blocks.1")
_FAILS_BEFORE: dict[Where, tuple[int, str]] = {
    "first question": (-1, ""),
    "asked in the group": (0, "blocks.1"),
    "known collective": (2, "blocks.1"),
}
"""Pass (-1: setting up) and unit."""


@dataclass(frozen=True)
class Failure:
    """What one rank does otherwise.

    Attributes:
        how: it does something else, comes late, or dies.
        where: what it is about to do then.
        ranks: those that fail, one as a rule.
        seconds: how late they come.
    """

    how: How | Literal["nothing"]
    where: Where = "first question"
    ranks: tuple[int, ...] = (0,)
    seconds: float = 60.0


@dataclass
class Outcome:
    """What came of one rank.

    Attributes:
        rank: its number.
        came: when it came to the point before which the failing rank fails, in simulated seconds.
        ended: when it had made all passes, or raised.
        error, message: what it raised: the type's name and the text, or "".
        calls: its store operations by method, from the point before which the failing rank fails.
    """

    rank: int
    came: float = 0.0
    ended: float = 0.0
    error: str = ""
    message: str = ""
    calls: Counter[str] = field(default_factory=Counter)


class _Job:
    def __init__(self, world: int, failure: Failure, timeout: float, each: float, away: Callable[[], float] | None) -> None:
        self.clock = Clock()
        self._away = away
        self._server = Server(self.clock, each)
        self._world = world
        self._failure = failure
        self._timeout = timeout
        self._own = threading.local()
        self._started: list[AllReduce] = []
        self.outcomes = [Outcome(rank) for rank in range(world)]

    @contextmanager
    def patched(self) -> Iterator[None]:
        """hsdp finds the simulated clock, store and group."""
        with ExitStack() as stack:
            for where, name, value in (
                (questions, "time", self.clock),
                (work, "time", self.clock),
                (divergence, "PrefixStore", lambda prefix, _: self._client(prefix)),
                (divergence, "own_client", lambda: (None, True)),
                (compare, "backend_of", lambda *_: self._own.backend),
                (compare, "backend_name", lambda *_: "gloo"),
                (compare, "timeout_of", lambda *_: self._timeout),
                (dist, "get_process_group_ranks", lambda _: range(self._world)),
                (dist, "get_rank", lambda: self._own.rank),
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            yield

    def _client(self, prefix: str) -> Client:
        return Client(prefix, self._server, self.clock, self._own.calls, self._away)

    def main(self, outcome: Outcome) -> None:
        """What a rank's thread runs."""
        self._own.rank, self._own.calls = outcome.rank, outcome.calls
        self._own.backend = Backend(self.clock, self._world, self._started)
        try:
            self._train(outcome)
        except SystemExit:
            self.outcomes.remove(outcome)
        except Exception as error:
            outcome.error, outcome.message = type(error).__name__, str(error)
        outcome.ended = self.clock.now

    def _train(self, outcome: Outcome) -> None:
        group = ProcessGroup(outcome.rank, self._world)
        fake = FakeProcessGroup._create_internal(outcome.rank, self._world)
        group._register_backend(CPU, ProcessGroup.BackendType.CUSTOM, fake)
        group._set_group_name("simulated")
        guard = guard_of(group, outcome.rank, CPU)
        guard.differing(*self._about_to(-1, "set-up", "", outcome), [1])
        for number in range(4):
            guard.begin_pass(1)
            for unit in UNITS:
                kind, name = self._about_to(number, "all-gather", unit, outcome)
                guard.before_collective(sum(map(ord, kind + name)), kind, name)
                all_reduce = self._own.backend.allreduce([torch.zeros(1)])
                wait_for(all_reduce, "gloo", guard, guard.count, kind, name)

    def _about_to(self, number: int, kind: str, unit: str, outcome: Outcome) -> tuple[str, str]:
        """Kind and unit of what a rank does next, which may be where it fails."""
        failure = self._failure
        if (number, unit) != _FAILS_BEFORE[failure.where]:
            return kind, unit or UNITS[0]
        outcome.calls.clear()
        fails = outcome.rank in failure.ranks
        if fails and failure.how == "dead":
            raise SystemExit
        if fails and failure.how == "late":
            self.clock.sleep(failure.seconds)
        outcome.came = self.clock.now
        return "broadcast" if fails and failure.how == "differs" else kind, unit or UNITS[0]


def fail(
    world: int, failure: Failure, timeout: float, each: float = 40e-6, away: Callable[[], float] | None = None
) -> list[Outcome]:
    """Runs a job of so many ranks, of which one fails; returns what came of those that live.

    Args:
        world: how many ranks.
        failure: what one of them does.
        timeout: of the process group, seconds.
        each: seconds that the server of the store takes for an operation.
        away: for how many seconds a rank's machine is busy with others, before each of its store operations.
    """
    job = _Job(world, failure, timeout, each, away)
    with fake_world(world), job.patched():
        job.clock.run([partial(job.main, outcome) for outcome in job.outcomes])
    return job.outcomes

"""All ranks of a group start the same collectives in the same order, or learn which of them did not.

A collective that ranks disagree about hangs, or kills the process (gloo), or hands out garbage (NCCL). So before a rank
starts one it must know that all ranks will. It does not ask each time:

    known     this op followed when ranks were here before. At each point of the order one op is known, and starts at once.
    unknown   any other op. The ranks ask each other what they are about to do. They differ: every rank raises. They agree:
              the op is known from now on.

"Here" is a place in the pass under way, and where that is not enough the number of the pass since the last optimizer step:
an accumulating loop steps after the same pass each time. What ranks must do alike without communicating (an optimizer's
step, clipping, giving up a backward that failed) is told with the op that comes next: a rank that skipped it has another op
there. Two ranks that differ never both take the known op, so one of them asks. A rank whose backward failed may do nothing
more; it notes that in the store, for ranks that wait for it.

How ranks ask depends on what they know:

    in the group    where nothing is known no rank starts anything without asking. So the question is a collective of the
                    group itself: the greatest and the least of all ranks' digests, 32 bytes, whatever the number of ranks.
    in the store    where an op is known other ranks may be in it. The question is written to the store that the process
                    group was made with; ranks that wait in the known collective find it there and answer: all raise.
                    The first question of a group is of this kind too: it names missing ranks, whatever the backend does
                    about a rank that is missing while it connects. Groups that torch did not make ask here only.

What is known is the same on all ranks, as they learn from questions alone; so they choose the same way to ask, or one of
them is in the store. A pass that is new to all ranks has one question in the store at most, and then asks in the group.

A steady training loop is known after two steps (in the second one units are gathered ahead for the first time): nothing is
sent and no rank waits.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]

from hsdp.comm.questions import Answer, Questions
from hsdp.errors import CollectiveError, DivergenceError
from hsdp.torch_private import own_client

_MOST_STATES = 1 << 14
"""Bound on the known states, which are forgotten then."""

_MOST_PASSES = 1 << 10
"""Bound on the passes that are told apart: a loop that accumulates longer asks once in each further one."""

_MASK = (1 << 62) - 1

STEP, CLIP, FAILED = 1, 2, 3
"""Events for `DivergenceGuard.note_event`."""

Compare = Callable[["DivergenceGuard", list[int], Answer], list[int]]
"""(guard, integers, what comes next) -> the places at which ranks have other integers: a collective of its own."""


class DivergenceGuard:
    """The agreed order of one process group.

    Args:
        group: the group; its ranks hold one `DivergenceGuard` each.
        rank: this rank's number in it.
        timeout: how long to wait for the other ranks' answers, seconds.
        compare: a collective that finds out which integers differ between ranks.
        in_group: it may serve to ask, too.
    """

    _of_group: ClassVar[weakref.WeakKeyDictionary[ProcessGroup, DivergenceGuard]] = weakref.WeakKeyDictionary()

    def __init__(self, group: ProcessGroup, rank: int, timeout: float, compare: Compare, in_group: bool) -> None:
        self.timeout = timeout
        ranks = dist.get_process_group_ranks(group)
        self._rank = ranks[rank]
        store = _Store(f"hsdp/{group.group_name}/")
        self._questions = Questions(store, store.exclusive, self._rank, ranks, timeout)
        self._compare = compare
        self._in_group = in_group
        self._met = False
        self._follows: dict[int, int] = {}
        self._branches: dict[tuple[int, int], int] = {}
        self._state = 0
        self._begins = True
        self._order = 0
        self._passes = 0
        self._events = 0
        self._users = 0
        self._broken = ""  # the message; not the error, which would hold the frames that it passed
        self.count = 0

    @classmethod
    def of(cls, group: ProcessGroup, rank: int, timeout: float, compare: Compare, in_group: bool) -> DivergenceGuard:
        """The guard of a process group: one, however many units and models use the group."""
        found = cls.among(group)
        if found is None:
            found = cls._of_group[group] = cls(group, rank, timeout, compare, in_group)
        return found

    @classmethod
    def among(cls, group: ProcessGroup) -> DivergenceGuard | None:
        """The guard of a process group that units use; None of any other group."""
        return cls._of_group.get(group)

    def next_user(self) -> int:
        """A number for a new `Comm` of the group: equal on all ranks, because `fully_shard` makes units in one order."""
        self._users += 1
        return self._users

    def begin_pass(self, order: int) -> None:
        """A pass begins with the next op: what follows it depends on `order` alone and not on what was before.

        `order` identifies the order in which ranks mean to gather ahead; it is the same on all that agree so far.
        """
        self._begins = True
        self._order = order

    def note_event(self, event: int) -> None:
        """This rank did something that all must do alike, though nothing is communicated: the next op tells of it."""
        self._events = hash((self._events, event))
        self._questions.tidy()

    def note_failure(self) -> None:
        """A pass failed on this rank behind its last op: ranks that wait for a later one need not wait any longer."""
        if not self._broken:
            self._questions.leave_word(self.count)

    def before_collective(self, key: int, kind: str, name: str) -> None:
        """Called before each collective.

        Args:
            key: identifies kind, unit and whatever else must be equal; the same integer on all ranks that agree.
            kind, name: the same for messages; `name` is that of a unit, or "".

        Raises:
            DivergenceError: the ranks are about to start different collectives.
        """
        self.count += 1
        state, begins, events = self._state, self._begins, self._events
        expected = hash((key, self._order if begins else 0, events)) if begins or events else key
        known = self._branches.get((state, self._passes)) if self._branches else None
        known = known or self._follows.get(state)
        if known != expected:
            self._ask(Answer(self._rank, self.count, described(kind, name), expected), known is not None)
            self._learn(known is None, expected)
        self._state = hash((self._order if begins else state, key))
        if events:
            self._passes = self._events = 0
        elif begins:
            self._passes = min(self._passes + 1, _MOST_PASSES)
        self._begins = False

    def meet(self, what: str) -> None:
        """Asks whether all ranks are about to do `what`, which goes over other groups: a checkpoint, say.

        In the store, which needs no collective, and not where ranks have parted: if this one has failed since its last op,
        or somebody has raised the alarm, they may still save what they have.

        Raises:
            DivergenceError: the ranks are about to do different things, or some do not come in time.
        """
        if self._broken:
            return
        with self._breaking(what):
            parted = self._questions.parted(self.count)
        if not parted:
            self.differing(what, "", [], in_store=True)

    def differing(self, kind: str, name: str, values: list[int], in_store: bool = False) -> list[int]:
        """Always asks the other ranks; returns which of `values` are not the same on all. For set-up, not for steps.

        Args:
            kind, name: what the ranks are about to do.
            values: 62 bits each; as many on every rank.
            in_store: ask there, whatever is known.

        Raises:
            DivergenceError: the ranks are about to do different things.
        """
        self.count += 1
        key = hash((zlib.crc32(kind.encode()), len(values), self._events))
        answer = Answer(self._rank, self.count, described(kind, name), key)
        # Until they agree on the op, and so on how many values there are, ranks send as much for any.
        differs = self._ask(
            answer, in_store or self._state in self._follows, hash(tuple(values)) & _MASK if values else None
        )
        self._state, self._events = hash((self._state, key)), 0
        return self._compare(self, values, answer) if differs and len(values) > 1 else [0] * differs

    def _learn(self, is_new: bool, expected: int) -> None:
        # Most of it is of models that are gone, or that take random branches. All ranks have the same, and forget it at the
        # same question; what goes on is known again after two steps.
        if len(self._follows) + len(self._branches) >= _MOST_STATES:
            self._follows, self._branches = {}, {}
        if is_new:
            self._follows[self._state] = expected
        else:
            # The last one: a training loop comes back to it after each evaluation, and stays with it.
            self._branches[self._state, self._passes] = expected

    def _ask(self, answer: Answer, is_known: bool, value: int | None = None) -> bool:
        """Whether `value` is not the same on all ranks; they all are about to do the same. `is_known`: some op is, here."""
        if self._broken:
            raise DivergenceError(self._broken)
        if is_known or not self._met or not self._in_group:
            with self._breaking(answer.what):
                self._questions.ask(answer)
            self._met = True
            if value is None:
                return False
        differing = self._compare(self, [answer.digest, value or 0], answer)
        if 0 in differing:
            with self._breaking(answer.what):
                raise self._questions.alarm(answer)
        return bool(differing)

    def answer_peers(self, count: int, kind: str, name: str, asked: int = 0, waited: float = 0.0) -> None:
        """Called from time to time while waiting for op number `count`: answers a rank that asks what comes there.

        Args:
            count, kind, name: the op, which this rank has started.
            asked: if not 0: the rank has not, but asks about this op.
            waited: for how long, seconds.

        Raises:
            DivergenceError: a rank is about to start something else, or was when this one looked before.
        """
        if self._broken:
            raise DivergenceError(self._broken)
        answer = Answer(self._rank, count, described(kind, name), asked)
        try:
            self._questions.note_wait(answer, waited)
            differs = self._questions.asks(answer)
        except dist.DistError:
            # The store is gone, as when the rank that holds it has ended before others: no rank can ask there any more, and
            # what was started, among ranks that are all here, may end well.
            return
        if differs:
            with self._breaking(answer.what):
                raise self._questions.alarm(answer)

    def alone(self, count: int, kind: str, name: str, asked: int) -> DivergenceError:
        """The error of a rank that asks in the group, as in `answer_peers`, and has waited for too long."""
        error = self._questions.alarm(Answer(self._rank, count, described(kind, name), asked), gives_up=True)
        self._broken = str(error)
        return error

    @contextmanager
    def _breaking(self, what: str) -> Iterator[None]:
        """A disagreement inside about `what` is the error of the group from now on; a store that is gone fails `what`."""
        try:
            yield
        except DivergenceError as error:
            self._broken = str(error)
            raise
        except dist.DistError as error:
            raise CollectiveError(
                f"rank {self._rank} could not ask the others about {what}: the store does not answer "
                f"({str(error).partition(chr(10))[0]}). The process that holds it may have ended: see the logs of "
                "all ranks, and start them again"
            ) from error

    @property
    def broken(self) -> bool:
        """Whether ranks disagreed: what is under way in the group may never end."""
        return bool(self._broken)


class Member(Protocol):
    """An object that communicates in a group."""

    divergence_guard: DivergenceGuard | None
    number: int


def note_event_of(event: int, members: Iterable[Member]) -> None:
    """Notes an event with the guards of these members, and which members of each group it is about, in whatever order."""
    numbers: dict[DivergenceGuard, list[int]] = {}
    for member in members:
        if member.divergence_guard is not None:
            numbers.setdefault(member.divergence_guard, []).append(member.number)
    for divergence_guard, of in numbers.items():
        divergence_guard.note_event(hash((event, *sorted(of))))


_clients: weakref.WeakKeyDictionary[ProcessGroup, dict[int, tuple[Any, bool]]] = weakref.WeakKeyDictionary()
"""By default group and thread."""


class _Store:
    """The default group's store, under a prefix, as the thread that asks has it.

    Waiting locks a client, and another thread's model must be able to ask and to answer meanwhile: each thread has a client
    of its own, which the groups in it share. All ranks are clients of one server, which has a file open for each.

    Attributes:
        exclusive: only hsdp uses its clients.
    """

    def __init__(self, prefix: str) -> None:
        assert dist.group.WORLD is not None, "a guard's group lies in a default group"
        self._prefix = prefix
        self._world = weakref.ref(dist.group.WORLD)
        self._first, self.exclusive = _client(dist.group.WORLD)
        self._here = threading.local()
        self._here.store = PrefixStore(prefix, self._first)

    def __getattr__(self, method: str) -> Any:
        store = getattr(self._here, "store", None)
        if store is None:
            world = self._world()
            # Behind its destruction, the default store may be that of other groups.
            client = self._first if world is None or world is not dist.group.WORLD else _client(world)[0]
            store = self._here.store = PrefixStore(self._prefix, client)
        return getattr(store, method)


def _client(world: ProcessGroup) -> tuple[Any, bool]:
    known, thread = _clients.setdefault(world, {}), threading.get_ident()
    if thread not in known:
        known[thread] = own_client()
    return known[thread]


def described(kind: str, name: str) -> str:
    """What an op is, for people."""
    return f"{kind} of unit {name!r}" if name else kind

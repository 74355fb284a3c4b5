"""All ranks of a group start the same collectives in the same order, or learn which of them did not.

A collective that ranks disagree about hangs, or kills the process (gloo), or hands out garbage (NCCL). So before a rank
starts one it must know that the others will. It does not ask each time:

    known     this op followed when ranks were here before. At each point of the order one op is known, and starts at once.
    unknown   any other op. Each rank writes its op to the store that the process group was made with, and reads the
              others'. They differ: every rank raises. They agree: the op is known from now on.

"Here" is a place in the pass under way, and where that is not enough the number of the pass since the last optimizer step:
an accumulating loop steps after the same pass each time. What ranks must do alike without communicating (an optimizer's
step, clipping) is told with the op that comes next: a rank that skipped it has another op there. Two ranks that differ
never both take the known op, so one of them asks. The other, which waits in the known collective, finds the question in
the store and answers it: both raise.

A steady training loop is known after two steps (in the second one units are gathered ahead for the first time): nothing is
sent and no rank waits.
"""

from __future__ import annotations

import json
import weakref
import zlib
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]

from hsdp.errors import DivergenceError
from hsdp.torch_private import default_store

_MOST_STATES = 1 << 14
"""Bound on what is remembered: a model that takes random branches asks more often instead of growing."""

_MOST_PASSES = 1 << 10
"""Bound on the passes that are told apart: a loop that accumulates longer asks once in each further one."""

STEP, CLIP = 1, 2
"""Events for `DivergenceGuard.note_event`."""


class _Answer(NamedTuple):
    """What a rank wrote to the store: what it is about to do.

    Attributes:
        number: of that op: how many there have been in the group, this one included.
        what: the op, for people.
        op: identifies it; the same integer on all ranks that agree.
        digest: of what comes with it, for `all_equal`.
    """

    number: int
    what: str
    op: int = 0
    digest: str = ""


class DivergenceGuard:
    """The agreed order of one process group.

    Args:
        group: the group; its ranks hold one `DivergenceGuard` each.
        rank, size: this rank's place in it.
        timeout: how long to wait for the other ranks' answers, seconds.
    """

    _of_group: ClassVar[weakref.WeakKeyDictionary[ProcessGroup, DivergenceGuard]] = weakref.WeakKeyDictionary()

    def __init__(self, group: ProcessGroup, rank: int, size: int, timeout: float) -> None:
        store = default_store()
        # A client of its own: waiting locks the client, and another thread's model must be able to answer meanwhile.
        with suppress(AttributeError, RuntimeError, NotImplementedError):
            store = store.clone()
        self._store = PrefixStore(f"hsdp/{group.group_name}/", store)
        self._rank = rank
        self._size = size
        self.timeout = timeout
        self._ranks = dist.get_process_group_ranks(group)
        self._follows: dict[int, int] = {}
        self._branches: dict[tuple[int, int], int] = {}
        self._state = 0
        self._begins = True
        self._plan = 0
        self._passes = 0
        self._events = 0
        self._asked = 0
        self._broken = ""  # what was told then; not the error, which would hold the frames that it passed
        self.count = 0

    @classmethod
    def of(cls, group: ProcessGroup, rank: int, size: int, timeout: float) -> DivergenceGuard:
        """The guard of a process group: one, however many units and models use the group."""
        found = cls.among(group)
        if found is None:
            found = cls._of_group[group] = cls(group, rank, size, timeout)
        return found

    @classmethod
    def among(cls, group: ProcessGroup) -> DivergenceGuard | None:
        """The guard of a process group that units use; None of any other group."""
        return cls._of_group.get(group)

    def begin_pass(self, plan: int) -> None:
        """A pass begins with the next op: what follows it depends on `plan` alone and not on what was before.

        `plan` stands for the order in which ranks mean to gather ahead; it is the same on all that agree so far.
        """
        self._begins = True
        self._plan = plan

    def note_event(self, event: int) -> None:
        """This rank did something that all must do alike, though nothing is communicated: the next op tells of it."""
        self._events = hash((self._events, event))

    def before_collective(self, op: int, kind: str, name: str) -> None:
        """Called before each collective.

        Args:
            op: identifies kind, unit and whatever else must be equal; the same integer on all ranks that agree.
            kind, name: the same for people; `name` is that of a unit, or "".

        Raises:
            DivergenceError: the ranks are about to start different collectives.
        """
        self.count += 1
        state, begins, events = self._state, self._begins, self._events
        told = hash((op, self._plan if begins else 0, events)) if begins or events else op
        known = self._branches.get((state, self._passes)) if self._branches else None
        known = known or self._follows.get(state)
        if known != told:
            self._ask(described(kind, name), told)
            self._learn(known is None, told)
        self._state = hash((self._plan if begins else state, op))
        if events:
            self._passes = self._events = 0
        elif begins:
            self._passes = min(self._passes + 1, _MOST_PASSES)
        self._begins = False

    def all_equal(self, kind: str, name: str, digest: str) -> bool:
        """Always asks the other ranks; returns whether all came with the same `digest`. For set-up, not for steps.

        Raises:
            DivergenceError: the ranks are about to do different things.
        """
        self.count += 1
        op = hash((zlib.crc32(kind.encode()), self._events))
        told = self._ask(described(kind, name), op, digest)
        self._state, self._events = hash((self._state, op)), 0
        return all(answer.digest == digest for answer in told)

    def _learn(self, is_new: bool, told: int) -> None:
        if is_new:
            if len(self._follows) < _MOST_STATES:
                self._follows[self._state] = told
        elif len(self._branches) < _MOST_STATES or (self._state, self._passes) in self._branches:
            # The last one: a training loop comes back to it after each evaluation, and stays with it.
            self._branches[self._state, self._passes] = told

    def _ask(self, what: str, op: int, digest: str = "") -> list[_Answer]:
        """What all ranks are about to do, in rank order, if that is the same."""
        if self._broken:
            raise DivergenceError(self._broken)
        self._asked += 1
        keys = [_key(self._asked, rank) for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(_Answer(self.count, what, op, digest)))
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError as error:
            silent = [rank for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])]
            raise DivergenceError(
                f"rank {self._ranks[self._rank]} is about to start the {what}, and rank(s) {silent} did not come to the "
                f"same point within {self.timeout:.0f} s: they raised, stopped, or took another branch"
            ) from error
        told = [_Answer(*json.loads(value)) for value in self._store.multi_get(keys)]
        if any((answer.number, answer.op) != (self.count, op) for answer in told):
            raise self._divergence(dict(enumerate(told)))
        # Everybody wrote this question, so everybody has read the one before: the store does not grow.
        self._store.delete_key(_key(self._asked - 1, self._rank))
        return told

    def answer_peers(self, count: int, kind: str, name: str) -> None:
        """Called from time to time while waiting for op number `count`: answers a rank that asks what comes there.

        Raises:
            DivergenceError: a rank is about to start something else, or was when this one looked before.
        """
        if self._broken:
            raise DivergenceError(self._broken)
        question = self._asked + 1
        told: dict[int, _Answer] = {}
        for rank in range(self._size):
            key = _key(question, rank)
            if rank != self._rank and self._store.check([key]):
                answer = _Answer(*json.loads(self._store.get(key)))
                if answer.number <= count:
                    told[rank] = answer
        if told:
            told[self._rank] = _Answer(count, described(kind, name))
            self._store.set(_key(question, self._rank), json.dumps(told[self._rank]))
            raise self._divergence(told)

    @property
    def broken(self) -> bool:
        """Whether ranks disagreed: what is under way in the group may never end."""
        return bool(self._broken)

    def _divergence(self, told: dict[int, _Answer]) -> DivergenceError:
        """The error of the group from now on; ranks that are not in `told` have not answered."""
        groups: dict[str, list[int]] = {}
        for rank, global_rank in enumerate(self._ranks):
            doing = "a known collective, as recorded"
            if (answer := told.get(rank)) is not None:
                doing = f"the {answer.what} (its number {answer.number}, variant {answer.op & 0xFFFF:04x})"
            groups.setdefault(doing, []).append(global_rank)
        listed = "; ".join(f"rank(s) {ranks}: {doing}" for doing, ranks in groups.items())
        number = min(answer.number for answer in told.values())
        self._broken = (
            f"the ranks disagree about collective number {number} of their group: {listed}. They took different "
            "branches, changed different parameters, skipped or repeated a step, or sent a subclass's inputs in different "
            "sizes; make every rank run the same modules and steps in the same order"
        )
        return DivergenceError(self._broken)


def _key(question: int, rank: int) -> str:
    """Where in the store a rank of the group writes its answer to a question."""
    return f"{question}/{rank}"


def described(kind: str, name: str) -> str:
    """What an op is, for people."""
    return f"{kind} of unit {name!r}" if name else kind

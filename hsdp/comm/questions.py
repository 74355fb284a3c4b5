"""Questions that the ranks of a group ask each other over the group's store, at a cost that is the same for any group.

    votes   one number, to which every rank adds its vote: what it is about to do. The sum that comes back tells it how
            many have come before it, and whether they are about to do the same.
    gate    a key per question. The last rank opens it, the others wait for it.
    failed  which ranks' backwards failed, and behind which op. A rank that did not fail there raises the alarm.
    alarm   what the gate says behind a difference or a time-out, and who was late. Only then each rank writes down what it
            is about to do; one of them reads all lines and writes the report, which everybody raises.

So a rank that agrees makes two store operations per question, whether there are two ranks or 65,536; the last one of a
question deletes its gate later, in `tidy`. A rank that waits in a known collective looks once per second at gate, votes
and failures.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from hsdp.debug import SLOW
from hsdp.errors import DivergenceError
from hsdp.format import kinds_by_rank, ranks_of

_PATIENCE = 1.5
"""Seconds without a new line after which a report is written: ranks that wait for a collective look once per second."""

_LOOK = 0.05
"""Seconds from one look at the lines to the next one."""

_SLOW_PATIENCE = 0.5
"""Seconds that a report of late ranks waits for others to notice the same."""

_NUMBER_BITS = 10
"""Of an op's number that a vote tells: no rank is half as many ops ahead of another one in their group."""

_MOST_GATES = 64
"""Bound on the gates that a rank leaves in the store where nobody tidies up, as in a loop without steps."""

_OPEN = b"open"

_DIFFER = "sizes, dtypes or trained parameters, in whether gradients are wanted, or in the steps and clipping before"
"""What two ops that have one name may differ in."""

_LIKELY = (
    "Was this called on some ranks only, as under `if rank == 0:` (an evaluation, a save, a log)? Then call it on all of "
    "them. Else they"
)
"""The likeliest cause comes first."""

_FAILED = "failed"

_MOST_WORDS = 1 << 16
"""Bytes of old words about failures from which on a rank that adds one clears them away."""


class Answer(NamedTuple):
    """What a rank is about to do.

    Attributes:
        rank: its global rank.
        number: of that op: how many there have been in the group, this one included.
        what: the op, for people.
        key: identifies it; the same integer on all ranks that agree; 0 for a collective that is known and has started.
        is_late: the rank came when another one had given up waiting for it.
    """

    rank: int
    number: int
    what: str
    key: int = 0
    is_late: bool = False

    @property
    def digest(self) -> int:
        """62 bits that stand for number and key."""
        return hash((self.number, self.key)) & (1 << 62) - 1


class Alarm(NamedTuple):
    """Why ranks stop, as the gate says; both are 0 where they are about to do different things.

    Attributes:
        came: how many ranks had come to the question when one of them gave up waiting at the gate.
        number: of the op that a rank asked about in the group when it gave up.
    """

    came: int = 0
    number: int = 0

    def __str__(self) -> str:
        return f"alarm {self.came} {self.number}"

    @classmethod
    def read(cls, gate: bytes) -> Alarm:
        """The alarm that a gate gives."""
        return cls(*map(int, gate.split()[1:]))

    def line(self, answer: Answer, asked: Answer | None, place: int) -> Answer:
        """What a rank writes down.

        Args:
            answer: what it is about to do.
            asked: what it asked in the group when it last looked for an alarm and found none.
            place: how many ranks had come to the question in the store when it had; 0: it has not.
        """
        if not self.number:
            return answer._replace(is_late=0 < self.came < place)
        # A question in the group ends with the last rank, also for those that wait when others have left: they go on.
        if asked is not None and asked.number == self.number:
            return asked
        return answer._replace(is_late=(answer.number, not answer.key) > (self.number, False))


class Late(NamedTuple):
    """Ranks that others wait for.

    Attributes:
        waiting: how many ranks wait.
        seconds: for how long the one has that tells it.
        absent: global ranks of those they wait for.
        what: the op that they wait at, for people.
    """

    waiting: int
    seconds: float
    absent: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.waiting} rank(s) have waited {self.seconds:.1f} s for rank(s) {ranks_of(self.absent)} in {self.what}"


late_listeners: list[Callable[[Late], None]] = []
"""Called on the rank that tells of ranks which others wait for."""


class Votes(NamedTuple):
    """How a question stands.

    Attributes:
        came: how many ranks have.
        vote: that of all of them; None: they differ, or nobody has come.
    """

    came: int
    vote: int | None


class Tally:
    """Puts the votes of all ranks into one number of 63 bits, their sum: each rank adds its vote less its last one.

        | digest of the op | low bits of the op's number | 1 in every other question, else 0: these count who has come |

    All ranks agreed about the last question, so what those hold that have not come is known. The first rank whose vote is
    another one sees a sum that is no multiple of its own: it knows at once, no two differences cancel before.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._bits = size.bit_length()
        self._mask = (1 << (63 - 2 * self._bits - _NUMBER_BITS)) - 1

    def vote(self, answer: Answer, question: int) -> int:
        """What a rank holds in the number from this question on."""
        number = answer.number & (1 << _NUMBER_BITS) - 1
        return ((answer.digest & self._mask) << _NUMBER_BITS | number) << self._bits | question & 1

    def came(self, total: int, question: int) -> int:
        """How many ranks have come to `question` when the number is `total`."""
        low = total & (1 << self._bits) - 1
        return low if question & 1 else self._size - low

    def read(self, total: int, question: int, last: int) -> Votes:
        """How `question` stands when the number is `total`; `last`: the vote of all ranks in the question before."""
        count = self.came(total, question)
        vote, rest = divmod(total - (self._size - count) * last, count or 1)
        return Votes(count, vote if count and not rest else None)

    def ahead(self, vote: int, number: int) -> int:
        """How many ops behind op `number` the vote's op comes; negative: before it."""
        half = 1 << _NUMBER_BITS - 1
        return ((vote >> self._bits) - number + half) % (2 * half) - half


class Roll:
    """Lines that ranks write into the store, for one of them to read.

    Args:
        store: where.
        name: of its keys.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self._name = name

    def sign(self, line: str) -> int:
        """Adds a line; returns its place: the first is 1."""
        self._store.append(f"{self._name}/lines", f"{line}\n")
        return int(self._store.add(f"{self._name}/count", 1))

    def count(self) -> int:
        """How many lines there are."""
        return int(self._store.add(f"{self._name}/count", 0))

    def wait(self, count: int, patience: float) -> None:
        """Waits until there are so many lines, or no new one has come for `patience` seconds."""
        seen, deadline = 0, time.monotonic() + patience
        while (found := self.count()) < count and time.monotonic() < deadline:
            if found > seen:
                seen, deadline = found, time.monotonic() + patience
            time.sleep(_LOOK)

    def lines(self) -> list[str]:
        """All lines; somebody has signed."""
        return bytes(self._store.get(f"{self._name}/lines")).decode().splitlines()


class Questions:
    """The questions of one group, one after the other.

    Args:
        store: the group's own part of a store.
        exclusive: nobody else uses its client, so its time-out may be set.
        rank: this rank's global rank.
        ranks: all of the group.
        timeout: how long to wait for the others, seconds.
    """

    def __init__(self, store: Any, exclusive: bool, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self._store = store
        self._exclusive = exclusive
        self._rank = rank
        self._ranks = ranks
        self._tally = Tally(len(ranks))
        self._question = 1
        self._place = 0
        self._last = 0
        self._opened: deque[int] = deque()
        self._slow_at = 0
        self._failed: set[int] = set()
        self._asked: Answer | None = None  # what this rank asked in the group when it last looked, before any alarm
        self.timeout = timeout

    def ask(self, answer: Answer) -> None:
        """Waits until every rank is about to do the same.

        Raises:
            DivergenceError: the ranks differ, or some did not come in time.
        """
        self.leave(self.arrive(answer), answer)

    def arrive(self, answer: Answer) -> bool:
        """The first half of `ask`, which does not wait: tells the others; returns whether this rank is the last one.

        Raises:
            DivergenceError: this rank and those before it differ.
        """
        vote = self._tally.vote(answer, self._question)
        votes = self._tally.read(self._store.add("votes", vote - self._last), self._question, self._last)
        self._place = votes.came
        if votes.vote != vote:
            raise self.alarm(answer)
        self._last = vote
        return votes.came == len(self._ranks)

    def leave(self, is_last: bool, answer: Answer) -> None:
        """The second half: opens the gate, or waits until somebody does."""
        if is_last:
            opened = bytes(self._store.compare_set(self._gate(), "", _OPEN.decode()))
            self._opened.append(self._question)
        else:
            opened = self._wait(answer)
        if opened != _OPEN:
            raise self.alarm(answer)
        self._question += 1
        self._place = 0
        if len(self._opened) > _MOST_GATES:
            self.tidy()

    def tidy(self) -> None:
        """Deletes the gates that this rank opened and everybody has passed: those before the last question's."""
        while self._opened and self._opened[0] < self._question - 1:
            self._store.delete_key(self._gate(self._opened.popleft()))

    def _wait(self, answer: Answer) -> bytes:
        """What the gate says, once it is open; a rank that waits for too long raises the alarm."""
        gate, began = self._gate(), time.monotonic()
        while (left := self.timeout - (waited := time.monotonic() - began)) > 0:
            self.note_wait(answer, waited)
            patience = SLOW - waited if waited < SLOW < self.timeout else left
            try:
                if self._exclusive:
                    self._store.set_timeout(timedelta(seconds=patience))
                else:
                    self._store.wait([gate], timedelta(seconds=patience))
                return bytes(self._store.get(gate))
            except RuntimeError:
                if time.monotonic() - began - waited < 0.5 * patience:
                    raise  # the store is gone
        # The last one opens the gate. Where all have come and it is shut, they wait for that one.
        came = min(self._tally.came(self._store.add("votes", 0), self._question), len(self._ranks) - 1)
        return bytes(self._store.compare_set(gate, "", str(Alarm(came=came))))

    def asks(self, answer: Answer) -> bool:
        """For ranks that are in an op: whether one asks about it or an earlier one, or has raised the alarm."""
        if self._store.check([self._gate()]):
            return True  # this rank has not come to the question, so nobody can have opened it in peace
        if any(behind < answer.number and behind not in self._failed for _, behind in self._words()):
            return True  # that rank has another op next, and this one has started it without
        self._asked = answer if answer.key else None
        votes = self._tally.read(self._store.add("votes", 0), self._question, self._last)
        return votes.came > 0 and (votes.vote is None or self._tally.ahead(votes.vote, answer.number) <= 0)

    def leave_word(self, number: int) -> None:
        """A pass failed on this rank behind op `number`. Does not wait, and cannot fail."""
        if number not in self._failed:
            self._failed.add(number)
            with suppress(RuntimeError):  # the store is gone, and whoever would read it learns of that
                if self._store.check([_FAILED]) and len(self._store.get(_FAILED)) > _MOST_WORDS:
                    self._store.set(_FAILED, "")  # of failures that ranks had in common, or all have raised since
                self._store.append(_FAILED, f"{self._rank} {number}\n")

    def parted(self, number: int) -> bool:
        """For a rank whose last op was `number`: whether a pass of its own failed since, or somebody raised the alarm."""
        return number in self._failed or bool(self._store.check([self._gate()]))

    def _words(self) -> list[tuple[int, int]]:
        """Which ranks failed, and behind which ops."""
        if not self._store.check([_FAILED]):
            return []
        words = [word.split() for word in bytes(self._store.get(_FAILED)).decode().splitlines()]
        return [(int(rank), int(behind)) for rank, behind in words]

    def alarm(self, answer: Answer, gives_up: bool = False) -> DivergenceError:
        """What everybody raises where ranks are about to do different things, or some did not come in time.

        The first rank that comes here writes it, of the lines that are there in time.

        Args:
            answer: what this rank is about to do, or does.
            gives_up: it asked in the group, and has waited for too long.
        """
        told = str(Alarm(number=answer.number if gives_up else 0))
        alarm = Alarm.read(bytes(self._store.compare_set(self._gate(), "", told)))
        roll = Roll(self._store, "alarm")
        if (place := roll.sign(json.dumps(alarm.line(answer, self._asked, self._place)))) == 1:
            roll.wait(len(self._ranks), min(_PATIENCE, self.timeout))
        elif report := self._report(roll, place):
            return DivergenceError(report)
        report = self._compose([Answer(*json.loads(line)) for line in roll.lines()], alarm, self._words())
        self._store.set("report", report)
        return DivergenceError(report)

    def _report(self, roll: Roll, place: int) -> str:
        """The report that another rank writes, or "" if that one died: while lines are added, it waits for more."""
        seen, found = 0, place
        while found > seen:
            try:
                self._store.wait(["report"], timedelta(seconds=2 * _PATIENCE))
                return bytes(self._store.get("report")).decode()
            except RuntimeError:
                seen, found = found, roll.count()
        return ""

    def _compose(self, lines: list[Answer], alarm: Alarm, words: Sequence[tuple[int, int]] = ()) -> str:
        """What ranks are told that wrote down these lines; `words`: which ranks failed, and behind which ops."""
        in_time = [line for line in lines if not line.is_late]
        asked = [line for line in in_time if line.key]
        first = min(asked or lines, key=lambda line: line.number)
        started = any(line.number >= first.number for line in in_time if not line.key)
        if alarm == Alarm() or started or len({(line.number, line.key) for line in asked}) > 1:
            return _told_apart(lines, self._ranks, first.number, words)
        here = {line.rank for line in asked}
        late = sorted(line.rank for line in lines if line.is_late)
        # A rank without a line may have come in time and be slow to write it, unless the late ones are as many as must be.
        is_all = len(late) == len(self._ranks) - alarm.came
        absent = late if is_all else [rank for rank in self._ranks if rank not in here] or [lines[-1].rank]
        return (
            f"rank(s) {ranks_of(sorted(here.difference(absent)))} are about to start {first.what}, and rank(s) "
            f"{ranks_of(absent)} did not come to the same point within {self.timeout:.0f} s: they raised, stopped, do not "
            "make this call, or took another branch, or are late"
        )

    def note_wait(self, answer: Answer, waited: float) -> None:
        """This rank has waited for others before `answer` or in it, for so many seconds; HSDP_SLOW says who tells whom."""
        if waited < SLOW or self._slow_at == answer.number:
            return
        self._slow_at = answer.number
        roll = Roll(self._store, f"slow/{answer.number}")
        if roll.sign(str(self._rank)) == 1:  # one of those who wait speaks for all
            time.sleep(_SLOW_PATIENCE)
            here = set(map(int, roll.lines()))
            late = Late(len(here), waited, tuple(rank for rank in self._ranks if rank not in here), answer.what)
            print(f"hsdp: {late} (HSDP_SLOW={SLOW:g})", file=sys.stderr, flush=True)
            for listener in late_listeners:
                listener(late)

    def _gate(self, question: int = 0) -> str:
        return f"{question or self._question}/gate"


def _told_apart(lines: list[Answer], ranks: Sequence[int], number: int, words: Sequence[tuple[int, int]]) -> str:
    """Which ranks are about to do what, at op `number` of their group; `words` as in `Questions._compose`."""
    doing = dict.fromkeys(ranks, "no answer; they are in a collective that is known, or have stopped")
    ways = _ways(lines)
    for line in lines:
        other = f" (number {line.number})" if line.number != number else ""
        doing[line.rank] = f"{line.what}{other}{ways.get((line.what, line.number, line.key), '')}"
    last = max((behind for _, behind in words if behind < number), default=0)
    failed = sorted(rank for rank, behind in words if behind == last)
    alone = 0 < len(failed) < len(ranks)
    cause = f"The backward of rank(s) {ranks_of(failed)} failed behind number {last}. They" if alone else _LIKELY
    differ = f"The ways differ in {_DIFFER}. " if ways else ""
    return (
        f"the ranks disagree about collective number {number} of their group: {kinds_by_rank(doing)}. {differ}{cause} took "
        "different branches, changed different parameters, skipped or repeated a step, or sent a subclass's inputs in "
        "different sizes; make every rank run the same modules and steps in the same order"
    )


def _ways(lines: list[Answer]) -> dict[tuple[str, int, int], str]:
    """What to add to ops that have one name and are not the same, by what, number and key."""
    keys: dict[tuple[str, int], list[int]] = {}
    for line in lines:
        known = keys.setdefault((line.what, line.number), [])
        if line.key not in known:
            known.append(line.key)
    found = {}
    for (what, number), of in keys.items():
        if len(of) > 1:
            asked = sorted(key for key in of if key)
            found[what, number, 0] = ", as in earlier steps"
            found.update({(what, number, key): f", in way {at}" for at, key in enumerate(asked, 1)})
            if len(asked) == 1:
                found[what, number, asked[0]] = ", in another way"
    return found

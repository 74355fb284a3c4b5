"""All ranks of a group start the same collectives in the same order, or are told who did not.

A collective that ranks disagree about hangs, or kills the process (gloo), or hands out garbage (NCCL). So before a rank
starts one it must know that the others will. It does not ask each time:

    known     the ops since the pass began are ones that all ranks once agreed on, and only one op ever followed them.
              Nothing is exchanged. Whoever deviates is the one to notice, for its op is not the known one.
    unknown   the op is new at this point, or several ops have followed here. Each rank writes its op to the store that the
              process group was made with, and reads the others'. They differ: every rank raises.

A steady training loop is known after two steps (in the second one units are gathered ahead for the first time), so nothing
is sent and no rank waits. A rank that waits in a known collective, while another deviated and asks at that very op, finds
the question in the store and answers it: both raise.
"""

from __future__ import annotations

import json
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup

from hsdp.errors import DivergenceError

_SEVERAL = -1
_MOST_STATES = 1 << 14
"""Bound on what is remembered: a model that takes random branches asks more often instead of growing."""


class Agreement:
    """The agreed order of one process group.

    Args:
        group: the group; its ranks hold one `Agreement` each.
        rank, size: this rank's place in it.
        timeout: how long to wait for the other ranks' answers, seconds.
    """

    _of_group: ClassVar[weakref.WeakKeyDictionary[ProcessGroup, Agreement]] = weakref.WeakKeyDictionary()

    def __init__(self, group: ProcessGroup, rank: int, size: int, timeout: float) -> None:
        store = dist.distributed_c10d._get_default_store()
        # A client of its own: waiting locks the client, and another thread's model must be able to answer meanwhile.
        with suppress(AttributeError, RuntimeError, NotImplementedError):
            store = store.clone()  # type: ignore[attr-defined]
        self._store = PrefixStore(f"hsdp/{group.group_name}/", store)
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=timeout)
        self._ranks = dist.get_process_group_ranks(group)
        self._follows: dict[int, int] = {}
        self._state = 0
        self._begins = True
        self._plan = 0
        self._asked = 0
        self.count = 0

    @classmethod
    def of(cls, group: ProcessGroup, rank: int, size: int, timeout: float) -> Agreement:
        """The agreement of a group: one, however many units and models use the group."""
        found = cls._of_group.get(group)
        if found is None:
            found = cls._of_group[group] = cls(group, rank, size, timeout)
        return found

    def begin(self, plan: int) -> None:
        """A pass begins with the next op: what is known of it depends on `plan` alone and not on what was before.

        `plan` stands for the order in which ranks mean to gather ahead; it is the same on all that agree so far.
        """
        self._begins = True
        self._plan = plan

    def check(self, op: int, kind: str, name: str) -> None:
        """Called before each collective.

        Args:
            op: identifies kind, unit and whatever else must be equal; the same integer on all ranks that agree.
            kind, name: the same for people.

        Raises:
            DivergenceError: the ranks are about to start different collectives.
        """
        self.count += 1
        state = self._state
        if self._begins:
            op = hash((op, self._plan))
        known = self._follows.get(state)
        if known != op:
            self._ask(kind, name, op)
            if known is not None:
                self._follows[state] = _SEVERAL
            elif len(self._follows) < _MOST_STATES:
                self._follows[state] = op
        self._state = hash((self._plan if self._begins else state, op))
        self._begins = False

    def _ask(self, kind: str, name: str, op: int) -> None:
        self._asked += 1
        mine = [self.count, f"{kind} of unit {name!r}", op]
        self._store.set(self._key(self._rank), json.dumps(mine))
        keys = [self._key(rank) for rank in range(self._size)]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            silent = [self._ranks[rank] for rank in range(self._size) if not self._store.check([self._key(rank)])]
            raise DivergenceError(
                f"rank {self._ranks[self._rank]} is about to start the {mine[1]}, and rank(s) {silent} did not come to "
                f"the same point within {self._timeout.total_seconds():.0f} s: they raised, stopped, or took another branch"
            ) from error
        told = [json.loads(value) for value in self._store.multi_get(keys)]
        if any((count, other) != (self.count, op) for count, _, other in told):
            raise self._divergence(told)
        # Everybody wrote this question, so everybody has read the one before: the store does not grow.
        self._asked -= 1
        self._store.delete_key(self._key(self._rank))
        self._asked += 1

    def look(self, count: int, kind: str, name: str) -> None:
        """Called from time to time while waiting for op number `count`: answers a rank that asks what comes there.

        Raises:
            DivergenceError: a rank is about to start something else.
        """
        self._asked += 1
        asking = []
        for rank in range(self._size):
            if rank != self._rank and self._store.check([self._key(rank)]):
                value = json.loads(self._store.get(self._key(rank)))
                if value[0] <= count:
                    asking.append((rank, value))
        if not asking:
            self._asked -= 1
            return
        mine = [count, f"{kind} of unit {name!r}", 0]
        self._store.set(self._key(self._rank), json.dumps(mine))
        told: list[Any] = [None] * self._size
        told[self._rank] = mine
        for rank, value in asking:
            told[rank] = value
        raise self._divergence(told)

    def _key(self, rank: int) -> str:
        return f"{self._asked}/{rank}"

    def _divergence(self, told: list[Any]) -> DivergenceError:
        groups: dict[tuple[str, int, int], list[int]] = {}
        for rank, value in enumerate(told):
            key = ("a known collective, as recorded", 0, 0) if value is None else (f"the {value[1]}", value[0], value[2])
            groups.setdefault(key, []).append(self._ranks[rank])
        listed = "; ".join(
            f"rank(s) {ranks}: {what}" + (f" (its number {count}, variant {op & 0xFFFF:04x})" if count else "")
            for (what, count, op), ranks in groups.items()
        )
        return DivergenceError(
            f"the ranks disagree about collective number {self.count} of their group: {listed}. They took different "
            "branches or changed different parameters; make every rank run the same modules in the same order"
        )

"""A simulated cluster: one rank runs hsdp on the fake backend, the others ask and answer over a real store.

    cluster = Cluster(1024)
    with fake_world(1024, rank=512), cluster.guarded() as store:
        ...                                     store.taken() counts the store operations of rank 512

The others do what the rank does: each question that it asks in the store, all ranks of its group ask, before it and
behind it. What it asks in the group the fake backend answers, as if all agreed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.distributed import HashStore, PrefixStore

from hsdp.comm import backends, compare, divergence, work
from hsdp.comm.questions import Answer, Questions
from tests.support.counted_store import CountedStore, counted

TIMEOUT = 60.0


class Cluster:
    """Ranks around the one that runs hsdp.

    Args:
        server: their store; by default one in this process, which asks nothing of a busy machine.

    Attributes:
        in_store: how many questions the rank asked in the store.
        in_group: how many it asked in the group.
    """

    def __init__(self, server: Any = None) -> None:
        self._server = server or HashStore()
        self._others: dict[Questions, list[Questions]] = {}
        self.in_store = 0
        self.in_group = 0

    @contextmanager
    def guarded(self) -> Iterator[CountedStore]:
        """Groups of the fake backend that are made inside have guards, whose store operations are counted."""
        start = compare.Greatest.__init__

        def counting(question: Any, *args: Any) -> None:
            self.in_group += 1
            start(question, *args)

        with ExitStack() as stack:
            for where, name, value in (
                (backends, "UNGUARDED", frozenset()),
                (backends, "ASK_IN_GROUP", frozenset({"fake"})),
                (compare.Greatest, "__init__", counting),
                # Works of the fake backend never say that they have ended.
                (work, "_ends", lambda work, backend: True),
                (divergence, "own_client", lambda: (self._server, True)),
                (Questions, "ask", lambda mine, answer: self._ask_with_others(mine, answer)),
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            yield stack.enter_context(counted())

    def _ask_with_others(self, mine: Any, answer: Answer) -> None:
        self.in_store += 1
        if mine not in self._others:
            store = PrefixStore(mine._store.prefix, self._server)
            others = [rank for rank in mine._ranks if rank != mine._rank]
            self._others[mine] = [Questions(store, True, rank, mine._ranks, TIMEOUT) for rank in others]
        came = []
        for one in sorted([mine, *self._others[mine]], key=lambda one: one._rank):
            here = answer._replace(rank=one._rank)
            came.append((one, one.arrive(here), here))
        for one, is_last, here in reversed(came):  # the last one opens the gate, which the others find open
            one.leave(is_last, here)

"""A store that counts what its users ask of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hsdp.comm import divergence


class CountedStore:
    """Passes every call on to `store` and counts it under the name of the method.

    Attributes:
        prefix: of its keys.
        calls: how many operations there were, by method; stores may share it.
    """

    def __init__(self, prefix: str, store: Any, calls: Counter[str]) -> None:
        self.prefix = prefix
        self._store = store
        self.calls = calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return method(*args)

        # The time-out is a matter of the client alone.
        return method if name == "set_timeout" else call

    def taken(self) -> int:
        """The number of operations since the last look."""
        total = self.calls.total()
        self.calls.clear()
        return total


@contextmanager
def counted() -> Iterator[CountedStore]:
    """Guards that are made inside count their store operations in the one that it gives."""
    calls: Counter[str] = Counter()
    real = divergence.PrefixStore

    def made(prefix: str, store: Any) -> CountedStore:
        return CountedStore(prefix, real(prefix, store), calls)

    with mock.patch.object(divergence, "PrefixStore", made):
        yield CountedStore("", None, calls)

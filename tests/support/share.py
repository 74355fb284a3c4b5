"""How many of their cases long tests run: by default a fifth of random ones and of planted bugs, a few of those that repeat
on gloo what pretended ranks have shown, and of each test on ranks as many as take every value of every parameter once; all
with HSDP_FULL=1."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Hashable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=tuple[Hashable, ...])

FULL = os.environ.get("HSDP_FULL", "0") not in ("", "0")


def share(cases: int) -> int:
    """Of `cases`, how many to run now."""
    return cases if FULL else max(1, cases // 5)


def some(cases: Collection[Any]) -> list[Any]:
    """Of `cases`, evenly, those to run now."""
    return list(cases) if FULL else list(cases)[::5]


def dealt(cases: Collection[Any], part: int, parts: int) -> list[Any]:
    """Of `cases`, those that the test number `part` of `parts` similar ones runs now: each is run by one of them."""
    return list(cases) if FULL else list(cases)[part::parts]


def each_value_once(cases: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Of the combinations `cases`, one value per parameter each, some that have every value: their indices, in order.

    Greedy: the next is the one with most values that none has so far, and of these the one with most new pairs of values.
    """
    values = [set(enumerate(case)) for case in cases]
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing = set[tuple[int, Hashable]]().union(*values)
    met: set[tuple[tuple[int, Hashable], tuple[int, Hashable]]] = set()
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(values[i] & missing), len(pairs[i] - met)))
        missing -= values[best]
        met |= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def values_once(cases: list[Case]) -> list[Case]:
    """Of the combinations `cases`, those to run now; for lists of which one `parametrize` takes all."""
    return cases if FULL else [cases[i] for i in each_value_once(cases)]


def combination(item: pytest.Function) -> tuple[Hashable, ...]:
    """Which value each `parametrize` of a test's case stands for; values are told apart by identity."""
    params = item.callspec.params
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    rows = [name.replace(" ", "").split(",") if isinstance(name, str) else name for name in names]
    return tuple(tuple(id(params[name]) for name in row) for row in rows)


def takes_ranks(item: pytest.Function) -> bool:
    """Whether a test has processes work for it: one that asks for its pool by `request` has its name from a parameter."""
    names = inspect.signature(item.function).parameters
    return any(name == "request" or name.startswith(("pool", "device")) for name in names)


def spread(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(those to run now, the others) of the tests collected."""
    if FULL:
        return items, []
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and takes_ranks(item):
            tests.setdefault((item.nodeid.partition("::")[0], item.originalname), []).append(item)
    others = set()
    for cases in tests.values():
        chosen = set(each_value_once([combination(case) for case in cases]))
        others.update(case for i, case in enumerate(cases) if i not in chosen)
    return [item for item in items if item not in others], [item for item in items if item in others]

"""How bugs are planted, and the register of them: what the modules beside this one share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hsdp.unit.unit import Unit

WRONG_NUMBERS = "differ|not close"
Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Check:
    """A worker function with its arguments; it ends with error `ends` on every rank (None: it returns)."""

    run: Callable[..., Any]
    args: tuple[Any, ...] = ()
    world: int = 2
    ends: str | None = None


@dataclass(frozen=True)
class Mutant:
    """A planted bug. `kill` is a pattern that the failed check's error, as "Type: message", matches on some rank."""

    name: str
    plant: Plant = field(repr=False)
    check: Check
    kill: str = WRONG_NUMBERS


MUTANTS: dict[str, Mutant] = {}


def mutant(check: Check, kill: str = WRONG_NUMBERS, name: str | None = None) -> Callable[[Plant], Plant]:
    """Registers a function that plants a bug, under its own name.

    A bug that several checks must find is registered once for each, all but one with a `name` of their own.
    """

    def register(plant: Plant) -> Plant:
        known_as = name or plant.__name__.replace("_", " ")
        assert known_as not in MUTANTS, f"two mutants are called {known_as!r}"
        MUTANTS[known_as] = Mutant(known_as, plant, check, kill)
        return plant

    return register


def replaced(owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Patches a method by what `change` makes of it."""
    return mock.patch.object(owner, name, change(getattr(owner, name)))


def gives(owner: Any, method: str, value: Any = None) -> Plant:
    """A bug: a method or function does nothing and returns `value`."""
    return lambda: mock.patch.object(owner, method, lambda *args, **kwargs: value)


def remembering(owner: type, name: str) -> Any:
    """Patches a method so that every object it was called on is held, until the mutant is gone."""
    held: list[Any] = []
    return replaced(owner, name, lambda call: lambda one, *args: (held.append(one), call(one, *args))[1])


@contextmanager
def trusting_what_is_whole() -> Iterator[None]:
    """A forward takes what an earlier one left whole, and does not look whether the shards were written since."""
    whole = mock.patch.object(Unit, "holds_unsharded", property(lambda unit: None))
    with whole, mock.patch.object(Unit, "shards_unchanged", return_value=True):
        yield


@contextmanager
def versions_told_by(version: Callable[[Any], tuple[int, int]]) -> Iterator[None]:
    """Units tell the versions of their parameters so, and do not look at the values of those that stay whole."""
    with (
        mock.patch.object(Unit, "version", property(version)),
        mock.patch.object(Unit, "shards_unchanged", return_value=True),
    ):
        yield

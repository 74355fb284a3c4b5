"""How bugs are planted, and the register of them: what `mutants.py` and `loop_mutants.py` share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

WRONG_NUMBERS = "differ|not close"


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
    plant: Callable[[], AbstractContextManager[Any]] = field(repr=False)
    check: Check
    kill: str = WRONG_NUMBERS


MUTANTS: dict[str, Mutant] = {}


def mutant(
    check: Check, kill: str = WRONG_NUMBERS
) -> Callable[[Callable[[], AbstractContextManager[Any]]], Callable[[], AbstractContextManager[Any]]]:
    """Registers a function that plants a bug, under its own name."""

    def register(plant: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
        name = plant.__name__.replace("_", " ")
        MUTANTS[name] = Mutant(name, plant, check, kill)
        return plant

    return register


def replaced(owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Patches a method by what `change` makes of it."""
    return mock.patch.object(owner, name, change(getattr(owner, name)))


def remembering(owner: type, name: str) -> Any:
    """Patches a method so that every object it was called on is held, until the mutant is gone."""
    held: list[Any] = []
    return replaced(owner, name, lambda call: lambda one, *args: (held.append(one), call(one, *args))[1])

"""What an optimizer's state consists of at one moment, to find out that somebody put other objects there."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

CONTAINERS = (list, tuple, dict, deque)
"""An entry may be one of these, with tensors and numbers in it: an optimizer may keep its last gradients in a list."""


def inside(container: Any) -> list[Any]:
    """What is in a container itself, in order."""
    return list(container.values() if isinstance(container, dict) else container)


def refilled(container: Any, items: Iterable[Any]) -> Any:
    """Another container of the same class (and keys), with these items."""
    if isinstance(container, tuple):
        return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)
    made = copy.copy(container)
    for key, item in zip(made if isinstance(made, dict) else range(len(made)), items, strict=True):
        made[key] = item
    return made


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value, changed; of a container another one, with what is in it changed."""
    if isinstance(value, CONTAINERS):
        return refilled(value, [mapped(one, change) for one in inside(value)])
    return change(value)


def _within(values: Iterable[Any]) -> Iterator[Any]:
    """What is in containers, however deep."""
    for value in values:
        if isinstance(value, CONTAINERS):
            yield from _within(inside(value))
        else:
            yield value


class Entries:
    """The values of a state, those in the dicts of parameters and those in containers there. In-place changes of another
    value are none of the state.

    Args:
        state: `Optimizer.state`, or one like it. Under keys that are no parameters it may have values of any kind.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._all = list(state.values())
        self._dicts = [held for key, held in state.items() if isinstance(key, Tensor)]
        self._filled = list(map(bool, self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._containers = [value for value in self._values if isinstance(value, CONTAINERS)]
        self._inner = list(_within(self._containers))

    def begun_since(self, state: Mapping[Any, Any]) -> list[Tensor]:
        """The parameters in the state whose dicts were not there, or empty."""
        known = {id(one) for one, filled in zip(self._dicts, self._filled, strict=True) if filled}
        return [key for key, one in state.items() if isinstance(key, Tensor) and id(one) not in known]

    def are_those_of(self, state: Mapping[Any, Any]) -> bool:
        """Whether the state has the same values, and dicts of parameters the same. Loops in C: it runs twice in a step."""
        dicts, values = self._dicts, self._values
        return (
            len(state) == len(self._all)
            and all(map(is_, state.values(), self._all))
            and sum(map(len, dicts)) == len(values)
            and all(map(is_, chain.from_iterable(map(dict.values, dicts)), values))
            and (not self._containers or self._has_the_same_within())
        )

    def _has_the_same_within(self) -> bool:
        inner = list(_within(self._containers))
        return len(inner) == len(self._inner) and all(map(is_, inner, self._inner))


def of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What an optimizer keeps for all parameters together: `state["count"]`, say."""
    return {key: held for key, held in state.items() if not isinstance(key, Tensor)}

"""What an optimizer's state consists of at one moment, to find out that somebody put other objects there."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_
from typing import Any


class Entries:
    """The dicts of a state and the values in them. In-place changes of a value are none of the state.

    Args:
        state: `Optimizer.state`, or one like it.
    """

    def __init__(self, state: Mapping[Any, dict[str, Any]]) -> None:
        self._dicts = list(state.values())
        self._filled = list(map(bool, self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def begun_since(self, state: Mapping[Any, dict[str, Any]]) -> list[Any]:
        """The keys of the state whose dicts were not there, or empty."""
        known = {id(one) for one, filled in zip(self._dicts, self._filled, strict=True) if filled}
        return [key for key, one in state.items() if id(one) not in known]

    def are_those_of(self, state: Mapping[Any, dict[str, Any]]) -> bool:
        """Whether the state has the same dicts, and they the same values. Loops in C: this runs twice in every step."""
        dicts, values = self._dicts, self._values
        return (
            len(state) == len(dicts)
            and all(map(is_, state.values(), dicts))
            and sum(map(len, dicts)) == len(values)
            and all(map(is_, chain.from_iterable(map(dict.values, dicts)), values))
        )

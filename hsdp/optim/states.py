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
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def are_those_of(self, state: Mapping[Any, dict[str, Any]]) -> bool:
        """Whether the state has the same dicts, and they the same values. Loops in C: this runs twice in every step."""
        dicts, values = self._dicts, self._values
        return (
            len(state) == len(dicts)
            and all(map(is_, state.values(), dicts))
            and sum(map(len, dicts)) == len(values)
            and all(map(is_, chain.from_iterable(map(dict.values, dicts)), values))
        )

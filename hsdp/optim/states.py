"""What an optimizer's state consists of at one moment, to find out that somebody put other objects there."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor


class Entries:
    """The values of a state, and those in the dicts of parameters. In-place changes of a value are none of the state.

    Args:
        state: `Optimizer.state`, or one like it. Under keys that are no parameters it may have values of any kind.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._all = list(state.values())
        self._dicts = [held for key, held in state.items() if isinstance(key, Tensor)]
        self._filled = list(map(bool, self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

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
        )


def of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What an optimizer keeps for all parameters together: `state["count"]`, say."""
    return {key: held for key, held in state.items() if not isinstance(key, Tensor)}

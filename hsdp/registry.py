"""Which unit manages a parameter. Identities, not weak keys: torch does not swap tensors that are weakly referenced."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from hsdp.unit import Unit

_managed: dict[int, weakref.ref[Unit]] = {}


def register(params: Iterable[nn.Parameter], unit: Unit, ids: list[int]) -> None:
    """Notes that `unit` manages these sharded parameters, and none that it did before; `ids` is its list of them."""
    this = weakref.ref(unit)
    for key in ids:
        if _managed.get(key) is this:
            del _managed[key]
    ids[:] = map(id, params)
    for key in ids:
        _managed[key] = this


def unit_of(param: object) -> Unit | None:
    """The unit that manages a sharded parameter."""
    ref = _managed.get(id(param))
    unit = ref() if ref is not None else None
    if unit is None or not any(managed.sharded is param for managed in unit.params):
        return None
    return unit


def forget(ids: list[int]) -> None:
    """Removes parameters whose unit is gone."""
    for key in ids:
        if (ref := _managed.get(key)) is not None and ref() is None:
            del _managed[key]

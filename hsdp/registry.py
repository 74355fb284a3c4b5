"""Which unit manages a parameter, and which units a module reaches.

Identities, not weak keys: torch does not swap tensors that are weakly referenced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from hsdp.unit import Unit

PREFIX = "FSDP"
"""What the class of a sharded module has in front of the original class's name."""

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


def units_below(model: nn.Module, recurse: bool = True, what: str = "") -> list[Unit]:
    """The units of a module and, with `recurse`, of those below it, parents before children.

    Of a module inside a unit that is the unit around it, too: a unit's parameters are gathered, and become stale, together.

    Args:
        model: the module.
        recurse: False: only the module's own unit, or where it has none those that hold its direct parameters.
        what: the function that asks. With a name, it is an error if there are none.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no parameter of it is sharded, and `what` needs one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what or 'units_below'}: expected an nn.Module, not {type(model).__name__}")
    units: dict[Unit, None] = {}
    for module in model.modules() if recurse else [model]:
        state = module.__dict__.get("_hsdp_state")
        if state is not None:
            units.setdefault(state.unit)
        if recurse or state is None:
            for param in module._parameters.values():
                ref = _managed.get(id(param))
                if ref is not None and ref() not in units and (unit := unit_of(param)) is not None:
                    units.setdefault(unit)
    if what and not units:
        raise ValueError(
            f"{what}({type(model).__name__}): no parameter of it is sharded; call fully_shard on it first"
            + ("" if recurse else ", or pass recurse=True if modules below it are sharded")
        )
    return list(units)


def class_name(module: nn.Module) -> str:
    """The name of a module's class, or of the class that it had before `fully_shard`."""
    name = type(module).__name__
    return name.removeprefix(PREFIX) if "_hsdp_state" in module.__dict__ else name


def forget(ids: list[int]) -> None:
    """Removes parameters whose unit is gone."""
    for key in ids:
        if (ref := _managed.get(key)) is not None and ref() is None:
            del _managed[key]

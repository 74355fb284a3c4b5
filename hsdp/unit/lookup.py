"""Which unit a parameter belongs to, and which units the modules of a model reach."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from hsdp.params.local import local_of
from hsdp.params.ownership import owner_of, owners
from hsdp.unit.unit import Unit


def unit_of(param: object) -> Unit | None:
    """The unit that a sharded parameter belongs to."""
    return cast("Unit | None", owner_of(param))


def all_units() -> list[Unit]:
    """Every unit of the process."""
    return cast("list[Unit]", owners())


def name_of(param: Tensor) -> str:
    """A parameter for people: its qualified name if it is in a unit, else its shape."""
    unit = unit_of(param)
    if unit is None:
        return f"a parameter of shape {tuple(param.shape)}"
    fqn = next(managed.fqn for managed in unit.params if managed.sharded is param)
    return f"parameter {fqn!r} of unit {unit.name!r}"


def memory_of(param: Any) -> Tensor:
    """The memory of a sharded parameter's local tensor, as a tensor that does not count among the users of its storage."""
    unit = unit_of(param)
    for group in () if unit is None else unit.dtype_groups:
        for index, managed in enumerate(group.params):
            if managed.sharded is param and param._local_tensor is managed.local:  # type: ignore[attr-defined]
                return group.local(index)
    return local_of(param).detach()  # replaced, and its unit has not looked


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
                if (unit := unit_of(param)) is not None:
                    units.setdefault(unit)
    if what and not units:
        raise ValueError(
            f"{what}({type(model).__name__}): no parameter of it is sharded; call fully_shard on it first"
            + ("" if recurse else ", or pass recurse=True if modules below it are sharded")
        )
    return list(units)

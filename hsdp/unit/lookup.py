"""Which unit a parameter or a module belongs to, which units a model reaches, and their names in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from hsdp.params.local import local_of
from hsdp.params.ownership import owner_of, owners
from hsdp.params.param import ManagedParam
from hsdp.unit.unit import Unit

T = TypeVar("T")

PREFIX = "FSDP"
"""The prefix of a sharded module's class name, before the original class's name."""

STATE = "_hsdp_state"
"""The attribute of a sharded module with what `fully_shard` made for it: `schedule.module_hooks.ModuleHooks`."""


def unit_of(param: object) -> Unit | None:
    """The unit that a sharded parameter belongs to."""
    return cast("Unit | None", owner_of(param))


def unit_of_module(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard` made of a module; None of other modules, also of those inside of a unit."""
    state = module.__dict__.get(STATE)
    return None if state is None else state.unit


def all_units() -> list[Unit]:
    """Every unit of the process."""
    return cast("list[Unit]", owners())


def unsharded_params() -> dict[int, tuple[Unit, ManagedParam]]:
    """The trained parameters of all units by the identities of the unsharded ones, which forwards and `unshard` show."""
    return {id(param.trained): (unit, param) for unit in all_units() for param in unit.params if param.trained is not None}


def name_of(param: Tensor) -> str:
    """A parameter in messages: its qualified name if it is in a unit, else its shape."""
    unit = unit_of(param)
    if unit is None:
        return f"a parameter of shape {tuple(param.shape)}"
    fqn = next(managed.fqn for managed in unit.params if managed.sharded is param)
    return f"parameter {fqn!r} of unit {unit.name!r}"


def place_of(param: Tensor) -> tuple[int | str, ...]:
    """Sorts parameters alike on all ranks, in whatever order these list them (a set of parameters has another on each).

    Those of units come first, by the numbers of their units; the names of others may differ between ranks: they stay in
    the order in which they are.
    """
    unit = unit_of(param)
    if unit is None:
        return (1,)
    slot = next(at for at, managed in enumerate(unit.params) if managed.sharded is param)
    return (0, unit.shard_comm.number, unit.replicate_comm.number, unit.name, slot)


def class_name(module: nn.Module) -> str:
    """The name of a module's class, or of the class that it had before `fully_shard`."""
    name = type(module).__name__
    return name.removeprefix(PREFIX) if STATE in module.__dict__ else name


def memory_of(param: Any) -> Tensor:
    """The memory of a sharded parameter's local tensor, as a tensor that does not count among the users of its storage."""
    unit = unit_of(param)
    for group in () if unit is None else unit.dtype_groups:
        for index, managed in enumerate(group.params):
            if managed.sharded is param and managed.wrapper is None and param._local_tensor is managed.local:  # type: ignore[attr-defined]
                return group.local(index)
    return local_of(param).detach()  # inside of a wrapper; or replaced since its unit last looked


def walk(item: T, visit: Callable[[T], Iterable[T]]) -> None:
    """Visits an item, and after it, in depth-first order, the items that `visit` returned for it: modules below, say.

    A nested function that called itself would do, and be a cycle of references: what it refers to, parameters with their
    memory say, would be there until Python looks for garbage.
    """
    for below in visit(item):
        walk(below, visit)


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
        own = unit_of_module(module)
        if own is not None:
            units.setdefault(own)
        if recurse or own is None:
            for param in module._parameters.values():
                if (unit := unit_of(param)) is not None:
                    units.setdefault(unit)
    if what and not units:
        raise ValueError(
            f"{what}({type(model).__name__}): no parameter of it is sharded; call fully_shard on it first"
            + ("" if recurse else ", or pass recurse=True if modules below it are sharded")
        )
    return list(units)

"""Which unit a sharded parameter belongs to: one table for the process.

Identities, not weak keys: torch does not swap tensors that are weakly referenced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp.errors import StateError
from hsdp.params.param import ManagedParam
from hsdp.params.parts import memory_of, name_by, span
from hsdp.params.pending import landed


class Owner(Protocol):
    """A unit, as far as this table needs to know it."""

    name: str
    params: list[ManagedParam]


class _Managed(dict[int, "weakref.ref[Owner]"]):
    changes = 0
    """How often a unit came to manage other parameters."""


_managed = _Managed()


def changes() -> int:
    """A counter that grows whenever a unit has come to manage other parameters."""
    return _managed.changes


def register(params: Iterable[nn.Parameter], unit: Owner, ids: list[int]) -> None:
    """Notes that `unit` manages these sharded parameters, and none that it did before; `ids` is its list of them."""
    this = weakref.ref(unit)
    for key in ids:
        if _managed.get(key) is this:
            del _managed[key]
    ids[:] = map(id, params)
    for key in ids:
        _managed[key] = this
    _managed.changes += 1


def owner_of(param: object) -> Owner | None:
    """The unit that manages a sharded parameter."""
    ref = _managed.get(id(param))
    unit = ref() if ref is not None else None
    if unit is None or not any(managed.sharded is param for managed in unit.params):
        return None
    return unit


def owners() -> list[Owner]:
    """All units of the process."""
    return list(dict.fromkeys(unit for ref in list(_managed.values()) if (unit := ref()) is not None))


def name_of_view(tensor: DTensor) -> str | None:
    """Names the sharded parameter that a tensor is or is a view of, or whose gradient; None if it is none of a unit's."""
    for owner in owners():
        for param in owner.params:
            for what, one in (("parameter", param.sharded), ("the gradient of parameter", param.sharded.grad)):
                if isinstance(one, DTensor) and _is_view(tensor, one):
                    return f"{what} {param.fqn!r} of unit {owner.name!r}"
    return None


name_by(name_of_view)


def _is_view(tensor: DTensor, other: DTensor) -> bool:
    """Whether a tensor is another one, or a view of it: autograd knows of most, and by its memory one knows `.data`."""
    if tensor is other or tensor._base is other:
        return True
    view, local = landed(tensor._local_tensor), landed(other._local_tensor)
    if not (type(view) is type(local) is Tensor and view.numel()):
        return False
    (start, end), (first, last) = span(view), span(local)
    return memory_of(view) == memory_of(local) and first <= start and end <= last


def refuse_tied(param: ManagedParam, unit_name: str) -> None:
    """Refuses ties of a sharded parameter to another one: each has memory, a gradient and a gather of its own.

    Raises:
        StateError: a module that held `param` holds a parameter instead that has not left its own place. (One that has,
            when two modules exchange theirs, is taken over.)
    """
    for module, name in param.holders():
        found = module._parameters.get(name)
        owner = None if found is param.sharded else owner_of(found)
        other = next((one for one in owner.params if one.sharded is found), None) if owner is not None else None
        if owner is not None and other is not None and not other.moved():
            raise StateError(
                f"parameter {param.fqn!r} of unit {unit_name!r} was tied to {other.fqn!r} of unit {owner.name!r} after "
                "fully_shard; tie parameters before it, and shard the smallest module that holds both names as one unit"
            )


def forget(ids: list[int]) -> None:
    """Removes parameters whose unit is gone."""
    for key in ids:
        if (ref := _managed.get(key)) is not None and ref() is None:
            del _managed[key]

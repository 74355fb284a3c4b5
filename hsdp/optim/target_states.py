"""States of what is stepped in the place of parameters, from theirs and back: plain tensors, DTensors around them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.errors import StateError
from hsdp.optim.states import CONTAINERS, inside, mapped, refilled
from hsdp.optim.targets import Member, Target, is_number
from hsdp.params.dtensors import as_dtensor, with_dtype
from hsdp.params.local import local_of
from hsdp.unit.lookup import name_of


def _like(name: str, value: Any, tensor: Tensor, counts: Collection[str]) -> bool:
    """Whether an entry of the state has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.shape == tensor.shape and not is_number(name, value, counts)


def shown(target: Target, member: Member, name: str, value: Any, counts: Collection[str]) -> Any:
    """An entry of a target's state as a parameter in it has it; a container is another one, of the parameter's parts."""

    def part(one: Any) -> Any:
        return _wrapped(member, target.cut(one, member)) if _like(name, one, target.tensor, counts) else one

    return mapped(value, part)


def _wrapped(member: Member, value: Tensor) -> Tensor:
    param = member.param
    if not isinstance(param, DTensor):
        return value
    return as_dtensor(value, with_dtype(param._spec if member.share is None else member.share.spec, value.dtype))


def gathered_state(target: Target, state: Any) -> dict[str, Any]:
    """A target's state from that of its parameters: their local tensors, side by side.

    In one order on all ranks, that of Adam's: a checkpoint may list a parameter's entries in another order than the next
    one's, and which is first in a target differs by rank.
    """
    entries = [state[member.param] for member in target.members]
    names = sorted(entries[0], key=lambda name: (name != "step", str(name)))
    return {name: _gathered(target, name, [own[name] for own in entries]) for name in names}


def _gathered(target: Target, name: str, values: list[Any]) -> Any:
    """An entry of a target's state, or what is in one at one place of a container, from those of its members."""
    value = values[0]
    if isinstance(value, CONTAINERS):
        return refilled(value, [_gathered(target, name, list(each)) for each in zip(*map(inside, values), strict=True)])
    if not (isinstance(value, DTensor) or _is_of_another(target, value)):
        # Members of a run show one count of steps: each needs its own when they part.
        return value.clone() if isinstance(value, Tensor) else value
    if target.alone:
        return _local_state(target.members[0], name, value)
    held = torch.zeros_like(target.tensor, dtype=value.dtype)
    for member, one in zip(target.members, values, strict=True):
        held[member.start : member.start + member.count].view(member.shape).copy_(_local_state(member, name, one))
    return held


def _is_of_another(target: Target, value: Any) -> bool:
    """Whether a plain tensor is laid out as the whole parameter, or a rank's part of it, but not as what is stepped.

    An unsharded model's optimizer had it. One that fits may be a user's, who resets a moment.
    """
    param = target.members[0].param
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or value.numel() <= 1:
        return False
    return value.shape in (param.shape, local_of(param).shape) and value.shape != target.tensor.shape


def _local_state(member: Member, name: str, value: Any) -> Tensor:
    param, share = member.param, member.share
    if isinstance(value, DTensor) and value.device_mesh == param.device_mesh:
        if share is not None and value.placements == share.spec.placements:
            return value._local_tensor
        if value.placements == param.placements:  # as it was loaded, perhaps from a run that did not share it out
            return value._local_tensor if share is None else share.of(value._local_tensor).clone()
    raise StateError(
        f"optim.local: entry {name!r} of the state of {name_of(param)} is not sharded as the parameter is "
        f"({getattr(value, 'placements', type(value).__name__)}); load it with placements {param.placements}, "
        "as hsdp.checkpoint does"
    )

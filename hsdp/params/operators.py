"""Operators that hsdp does otherwise than DTensor, for tensors on meshes that it shards on.

select, slice, split, ...    parts along the sharded dim are copies, to which writes are lost: see parts.py
fill_ by a tensor            `part[0] = 1.0`, for which DTensor has no rule
item, float, bool            of a sum over ranks that is still to come: this rank's part, which is warned of
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hsdp.params.parts import Origin, Part, memory_of

_aten = torch.ops.aten
_CUTS = (_aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.diagonal.default)
_ASKS = (_aten._local_scalar_dense.default, _aten.is_nonzero.default)

_meshes: dict[int, weakref.ref[DeviceMesh]] = {}
"""By identity, as meshes that are equal may die one by one: those that parameters are sharded on."""


def watch_operators(mesh: DeviceMesh) -> None:
    """Does these operators of DTensors on this mesh as hsdp does them, from now on."""
    key = id(mesh)
    if key not in _meshes:
        _meshes[key] = weakref.ref(mesh, lambda _: _meshes.pop(key, None))
    _register()


@functools.cache
def _register() -> None:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(_CUTS, _cut))
    handlers.update(dict.fromkeys(_ASKS, _ask))
    handlers[_aten.fill_.Tensor] = _fill


def _cut(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _as_torch_does(op, args, kwargs)
    source = args[0]
    if not _is_watched(source):
        return found
    memory = memory_of(source._local_tensor)
    several = not isinstance(found, Tensor)
    for at, part in enumerate(found if several else [found]):
        local = part._local_tensor
        if type(local) is Tensor and memory_of(local) != memory:
            part._local_tensor = Part(local, Origin(source, op, args[1:], kwargs or {}, at if several else None, local))
    return found


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`part[0] = 1.0`, which DTensor has no rule for: each rank fills what it has."""
    tensor, value = args
    if not isinstance(tensor, DTensor) or isinstance(value, DTensor) or any(p.is_partial() for p in tensor.placements):
        return _as_torch_does(op, args, kwargs)
    op(tensor._local_tensor, value)
    return tensor


def _ask(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if _is_watched(tensor) and any(placement.is_partial() for placement in tensor.placements):
        # Not gathered here: who logs on one rank alone would wait for the others.
        warnings.warn(
            "hsdp: item(), float() or bool() of a DTensor that is still to be reduced over ranks (a norm, sum or maximum "
            "of sharded tensors) gives this rank's part of it; call .full_tensor() first, on all ranks",
            stacklevel=2,
        )
    return _as_torch_does(op, args, kwargs)


def _is_watched(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and id(tensor._spec.mesh) in _meshes


def _as_torch_does(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    ours = handlers.pop(op, None)
    try:
        return op(*args, **(kwargs or {}))
    finally:
        if ours is not None:
            handlers[op] = ours

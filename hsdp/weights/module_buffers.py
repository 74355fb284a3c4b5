"""Buffers: which unit's they are, and which of their values must be equal on all ranks of its mesh.

A buffer belongs to the unit whose module holds it; modules of nested units are those units' own. Every rank keeps a buffer
whole, and hsdp does nothing to it but this: `fully_shard` moves it to the unit's device and casts it to `buffer_dtype`, and
`fully_shard`, `init_sharded` and `sync_module_states` make its values equal on all ranks.

Persistent and non-persistent buffers are alike here. A running mean, a random projection and a table of rotary angles all
decide what a forward computes, and ranks that compute different functions train a model that is none of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hsdp.comm.mesh import MeshAxes
from hsdp.format import dotted
from hsdp.unit.lookup import unit_of, unit_of_module, walk
from hsdp.unit.unit import Unit


class Buffer(NamedTuple):
    """A buffer that its unit keeps equal.

    Attributes:
        fqn: its first name.
        tensor: the registered tensor.
        parts: the plain tensors in it whose values count; they share its memory.
    """

    fqn: str
    tensor: Tensor
    parts: list[Tensor]


def modules_with_units(modules: Sequence[nn.Module], unit: Unit | None) -> list[tuple[str, nn.Module, Unit | None]]:
    """Each module below `modules` once: its name, and the unit whose module it is, `unit` where nobody else's."""
    found: dict[int, tuple[str, nn.Module, Unit | None]] = {}

    def visit(item: tuple[str, nn.Module, Unit | None]) -> list[tuple[str, nn.Module, Unit | None]]:
        name, module, around = item
        if id(module) in found:
            return []
        own = unit_of_module(module) or around
        found[id(module)] = name, module, own
        return [(dotted(name, key), child, own) for key, child in module.named_children()]

    for index, module in enumerate(modules):
        walk(("" if len(modules) == 1 else str(index), module, unit), visit)
    return list(found.values())


def widest(units: Sequence[Unit]) -> Unit:
    """The unit on the most ranks, the first of several: what belongs to no unit is to be equal on the ranks of its mesh.

    A model's first unit may be one of experts, on a few of the ranks that have the model.
    """
    return max(units, key=lambda unit: len(unit.axes.ranks))


def own_buffers(modules: Sequence[nn.Module], unit: Unit) -> list[Buffer]:
    """The buffers of the unit that is made of `modules`, each once.

    Left alone are buffers of a module whose parameters are left alone, all of them (`ignored_params`): whoever manages the
    parameters, with values of each rank's own perhaps, manages what lies beside them.
    """
    holders = ((name, module) for name, module, owner in modules_with_units(modules, unit) if owner is unit)
    ids = {id(param.sharded) for param in unit.params}
    return _buffers_in(((name, module) for name, module in holders if not _left_alone(module, ids)), unit.axes)


def buffers_by_unit(model: nn.Module, default: Unit) -> dict[Unit, list[Buffer]]:
    """All buffers of a sharded model by their unit, each once; `default` takes those in no unit's module."""
    holders: dict[Unit, list[tuple[str, nn.Module]]] = {}
    for name, module, owner in modules_with_units([model], default):
        assert owner is not None, "the default is a unit"
        holders.setdefault(owner, []).append((name, module))
    seen: set[int] = set()
    return {unit: _buffers_in(held, unit.axes, seen) for unit, held in holders.items()}


def _buffers_in(holders: Iterable[tuple[str, nn.Module]], axes: MeshAxes, seen: set[int] | None = None) -> list[Buffer]:
    found: list[Buffer] = []
    seen = set() if seen is None else seen
    for prefix, module in holders:
        for name, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found.append(Buffer(dotted(prefix, name), tensor, _parts_of(tensor, axes)))
    return found


def _left_alone(module: nn.Module, ids: set[int]) -> bool:
    params = list(module.parameters()) if module._buffers else []
    return bool(params) and not any(id(param) in ids or unit_of(param) is not None for param in params)


def _parts_of(tensor: Tensor, axes: MeshAxes) -> list[Tensor]:
    """The plain tensors of a buffer whose values must be equal on the ranks of `axes`.

    None of a DTensor that is distributed over these ranks, and none of a sparse or a quantized tensor.
    """
    if isinstance(tensor, DTensor):
        return _parts_of(tensor._local_tensor, axes) if _same_block(tensor, axes) else []
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts_of(getattr(tensor, name), axes)]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return []
    part = tensor.detach()
    for dim, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded: one place in memory for all, which cannot be written `size` times
            part = part.narrow(dim, 0, 1)
    return [part]


def _same_block(tensor: DTensor, axes: MeshAxes) -> bool:
    """Whether the ranks of `axes` hold the same block of a DTensor: no placement tells them apart."""
    mesh, here = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
    if here is None:
        return False
    alike = mesh
    for dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            alike = alike.narrow(dim, here[dim], 1)
    ours = axes.mesh.mesh
    return bool(torch.isin(ours, mesh).sum() == torch.isin(ours, alike).sum())

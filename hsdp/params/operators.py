"""Operators that hsdp does otherwise than DTensor, for tensors on meshes that it shards on.

select, slice, split, ...    parts along the sharded dim are copies, to which writes are lost: see parts.py
fill_ by a tensor            `part[0] = 1.0`, for which DTensor has no rule
fill_ by a number            refused of what is to be added up over ranks: each would fill its addend
copies of plain tensors      `weight[1:4] = rows`, which DTensor refuses; to parts only: loads have checks of their own
writes by index, by a mask   `grad[mask] = 0`, `index_fill_`, ..., which DTensor refuses: each rank does its part of them
reads by them                `weight[rows]`, which DTensor refuses where the indices are plain tensors
gather                       of which DTensor takes other elements where the indices are fewer than the rows
whole values as `out`        `torch.eye(n, m, out=weight)`, for which DTensor makes the part as large as the whole
scatter_, scatter_add_, ...  as these; DTensor takes a rank's indices for the whole's, and makes the part another size
masked_fill_ by a tensor     as these; on two axes DTensor cuts the rank's part once more
sums of norms                of columns, or of several tensors: DTensor adds up the ranks' parts of norms as they are
max, min, norms              of which torch raises on ranks whose part is empty
losses that are means        of parts that differ in size DTensor takes the mean of the ranks' means
foreach operators in place   autograd's version counters do not count them of DTensors, as they do of plain tensors

Those of sums over ranks that are still to come depend on who asks: schedule/step_norms.py.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_iter, tree_map_only

from hsdp.errors import StateError
from hsdp.params.arguments import by_name
from hsdp.params.dtensors import as_dtensor, full_tensor, part_of_whole, spec_of
from hsdp.params.handlers import as_torch_does, handle
from hsdp.params.parts import Origin, Part, after_write, memory_of, named, refuse_stripes

_aten = torch.ops.aten
_CUTS = (_aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.diagonal.default)
_WRITES_BY_INDEX = (
    _aten.index_put_.default,
    _aten.index_fill_.int_Scalar,
    _aten.index_fill_.int_Tensor,
    _aten.index_copy_.default,
    _aten.index_add_.default,
    _aten.scatter_.src,
    _aten.scatter_.value,
    _aten.scatter_add_.default,
    _aten.scatter_reduce_.two,
    _aten.masked_fill_.Tensor,
)
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList, _aten.nansum.default)
_VALUES_AS_OUT = (_aten.eye.out, _aten.eye.m_out)
_LOSSES = tuple(
    getattr(_aten, name + suffix).default
    for name in ("mse_loss", "huber_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
    for suffix in ("", "_backward")
) + (_aten.binary_cross_entropy_with_logits.default,)
_EXTREMES = (_aten.max.default, _aten.amax.default, _aten.min.default, _aten.amin.default, _aten.linalg_vector_norm.default)
_EXTREMES_OF_LISTS = (_aten._foreach_norm.Scalar, _aten._foreach_max.default)
_ALIKE = frozenset(("avg", "max", "min"))
"""How ranks' parts become one that is what they are, if they are alike."""
_NONE, _MEAN = 0, 1
"""What a loss's argument `reduction` says."""
_IN_PLACE_ON_LISTS = tuple(
    getattr(getattr(_aten, name), overload)
    for name in dir(torch)
    if name.startswith(("_foreach_", "_fused_")) and name.endswith("_")
    for overload in getattr(_aten, name).overloads()
    if overload != "out"
)

_meshes: Counter[int] = Counter()
"""The hashes of meshes that parameters are sharded on, and how often each is meant.

Of equal meshes DTensor gives what it computes the one that it saw first, somebody else's perhaps, and a copied tensor has a
copy of its mesh: all of them are meant. Numbers, as meshes would keep process groups alive.
"""


def watch_operators(mesh: DeviceMesh) -> None:
    """Does these operators of DTensors on this mesh, and on those that are equal, as hsdp does them, from now on."""
    _meshes[hash(mesh)] += 1
    _register()


def unwatch_operators(mesh: DeviceMesh) -> None:
    """Takes back one `watch_operators`, of whatever equal mesh."""
    _meshes[hash(mesh)] -= 1


@functools.cache
def _register() -> None:
    handle(_CUTS, _cut)
    handle(_WRITES_BY_INDEX, _write_by_index)
    handle([_aten.index_put.default], _with_index_written)
    handle([_aten.scatter_add.default], _with_scattered_added)
    handle([_aten.index.Tensor], _read_by_index)
    handle([_aten.gather.default], _gather)
    handle([_aten.fill_.Tensor], _fill)
    handle([_aten.fill_.Scalar], _fill_by_number)
    handle([_aten.copy_.default], _copy)
    handle(_VALUES_AS_OUT, _values_as_out)
    handle(_SUMS, _sum)
    handle(_LOSSES, _loss)
    handle(_IN_PLACE_ON_LISTS, _counted)
    handle(_EXTREMES, _extreme)
    handle(_EXTREMES_OF_LISTS, _extremes)


def _cut(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = as_torch_does(op, args, kwargs)
    source = args[0]
    if not is_watched(source):
        return found
    memory = memory_of(source._local_tensor)
    several = not isinstance(found, Tensor)
    for at, part in enumerate(found if several else [found]):
        local = part._local_tensor
        if type(local) is Tensor and memory_of(local) != memory:
            origin = Origin(source, op, args[1:], kwargs or {}, at if several else None, part._spec, local)
            part._local_tensor = Part(local, origin)
    return found


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`part[0] = 1.0`, which DTensor has no rule for: each rank fills what it has."""
    tensor, value = args
    if not isinstance(tensor, DTensor) or isinstance(value, DTensor) or any(p.is_partial() for p in tensor.placements):
        return as_torch_does(op, args, kwargs)
    op(tensor._local_tensor, value)
    return tensor


def _fill_by_number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a sum over ranks each rank would fill its addend, which DTensor lets it do."""
    tensor, value = args
    if is_watched(tensor) and value != 0:
        mesh = tensor._spec.mesh
        for axis, placement in enumerate(tensor._spec.placements):
            if placement.is_partial() and placement.reduce_op not in _ALIKE and mesh.size(axis) > 1:
                raise StateError(
                    f"fill_ of {named(tensor)}, which is still to be added up over {mesh.size(axis)} ranks: it "
                    "would have another value then; use torch.full_like, or redistribute it before"
                )
    return as_torch_does(op, args, kwargs)


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`weight[1:4] = rows`: a plain tensor counts as a whole part, and is the same on all ranks."""
    target, source, *others = args
    is_part = is_watched(target) and (isinstance(target._local_tensor, Part) or target._base is not None)
    if not is_part or isinstance(source, DTensor):
        return as_torch_does(op, args, kwargs)
    refuse_stripes(target)
    spec = target._spec
    op(target._local_tensor, part_of_whole(source.expand(spec.shape), spec), *others, **(kwargs or {}))
    return target


def _write_by_index(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plain tensors count as wholes, and are the same on all ranks."""
    target, *others = args
    if not is_watched(target):
        return as_torch_does(op, args, kwargs)
    refuse_stripes(target)
    rest, by_name = tree_map_only(DTensor, full_tensor, (others, kwargs or {}))
    target._local_tensor.copy_(after_write(target, lambda whole: op(whole, *rest, **by_name)))
    return target


def _with_index_written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of a read by index, too."""
    target, *others = args
    if not is_watched(target) or all(isinstance(one, DTensor) for one in tree_iter(others) if isinstance(one, Tensor)):
        return as_torch_does(op, args, kwargs)
    return _write_copy(_aten.index_put_.default, args, kwargs)


def _with_scattered_added(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _write_copy(_aten.scatter_add_.default, args, kwargs) if is_watched(args[0]) else as_torch_does(op, args, kwargs)


def _write_copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, *others = args
    return _write_by_index(op, (as_dtensor(target._local_tensor.clone(), target._spec), *others), kwargs)


def _read_by_index(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, indices = args
    if not is_watched(source) or all(index is None or isinstance(index, DTensor) for index in indices):
        return as_torch_does(op, args, kwargs)
    return _of_wholes(op, args, kwargs)


def _gather(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices beside rows that are sharded: DTensor takes each rank's for those of its own rows."""
    return _of_wholes(op, args, kwargs) if is_watched(args[0]) else as_torch_does(op, args, kwargs)


def _of_wholes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """What an operator makes of whole tensors, on all ranks."""
    mesh = args[0]._spec.mesh
    args, kwargs = tree_map_only(DTensor, full_tensor, (args, kwargs or {}))
    found = op(*args, **kwargs)
    return as_dtensor(found, spec_of(mesh, (Replicate(),) * mesh.ndim, found.shape, found.dtype))


def _values_as_out(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`nn.init.eye_(weight)`: each rank makes the whole, and keeps its part."""
    target = kwargs["out"]
    if not is_watched(target):
        return as_torch_does(op, args, kwargs)
    whole = op(*args, **{**kwargs, "out": torch.empty(target.shape, dtype=target.dtype, device=target.device)})
    if whole.shape != target.shape:
        raise ValueError(
            f"{op}: `out` is {named(target)}, and the values have the shape {tuple(whole.shape)}; make them of its shape"
        )
    refuse_stripes(target)
    target._local_tensor.copy_(part_of_whole(whole, target._spec))
    return target


def _sum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of norms that are whole: those of order 1 add up as they are."""
    source, *others = args
    if is_watched(source) and any(map(_is_norm, source.placements)):
        source = source.redistribute(placements=[Replicate() if _is_norm(p) else p for p in source.placements])
    return as_torch_does(op, (source, *others), kwargs)


def _is_norm(placement: Placement) -> bool:
    return getattr(placement, "norm_type", 1) != 1


def _loss(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.mse_loss(weight, anchor)`: element by element, and their mean; its backward, of an equal part for each."""
    given = by_name(op, args, kwargs)
    if not is_watched(given["self"]) or given.get("reduction", _MEAN) != _MEAN:
        return as_torch_does(op, args, kwargs)
    given["reduction"] = _NONE
    if "grad_output" not in given:
        return op(**given).mean()
    shape = given["self"].shape
    given["grad_output"] = (given["grad_output"] / shape.numel()).expand(shape)
    return op(**given)


def _extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest or smallest element, or a norm, also where this rank has no element, which torch refuses."""
    if not _has_no_element(args[0]):
        return as_torch_does(op, args, kwargs)
    given = by_name(op, args, kwargs)
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return as_torch_does(op, (_with_an_element(op, args[0], given.get("ord", 0), dims or None), *args[1:]), kwargs)


def _extremes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(map(_has_no_element, args[0])):
        return as_torch_does(op, args, kwargs)
    order = by_name(op, args, kwargs).get("ord", 0)
    return as_torch_does(op, ([_with_an_element(op, one, order, None) for one in args[0]], *args[1:]), kwargs)


def _has_no_element(tensor: Any) -> bool:
    """Whether this rank has nothing of a tensor that is not empty."""
    return is_watched(tensor) and not tensor._local_tensor.numel() and tensor.numel() > 0


def _with_an_element(op: Any, tensor: Any, order: Any, dims: list[int] | None) -> Any:
    """`tensor`; with other elements where this rank's part has none along `dims`, of which the result has none."""
    if not _has_no_element(tensor):
        return tensor
    local, ndim = tensor._local_tensor, tensor.ndim
    gone = range(ndim) if dims is None else [dim % ndim for dim in dims]
    if not all(size or dim in gone for dim, size in enumerate(local.shape)):
        return tensor
    neutral = _neutral(op._schema.name, order, local.dtype)
    return as_dtensor(local.new_full([size or 1 for size in local.shape], neutral), tensor._spec)


def _neutral(name: str, order: Any, dtype: torch.dtype) -> float:
    """An element that changes no maximum, minimum or norm."""
    if "norm" in name:
        return math.inf if order < 0 else 0.0
    largest = "max" in name
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    if dtype is torch.bool:
        return not largest
    limits = torch.iinfo(dtype)
    return limits.min if largest else limits.max


def _counted(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A backward that would use the weights of before is refused by these counters, and they are what `version` asks."""
    found = as_torch_does(op, args, kwargs)
    if any(map(is_watched, args[0])):
        torch.autograd.graph.increment_version(args[0])
    return found


def is_watched(tensor: Any) -> bool:
    """Whether a tensor is on a mesh on which hsdp does operators its own way."""
    return isinstance(tensor, DTensor) and _meshes.get(hash(tensor._spec.mesh), 0) > 0

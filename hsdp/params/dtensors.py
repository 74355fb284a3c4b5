"""DTensors around local tensors as they are: making them copies, checks and communicates nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from hsdp.params.handlers import handle
from hsdp.policies import is_castable

# DTensor's constructor without its Python `__init__`, which does nothing, costs more than the rest and imports dynamo.
_new: Callable[..., Any] = getattr(torch.Tensor, "_dtensor__new__", None) or (
    lambda cls, local, spec, requires_grad: cls(local, spec, requires_grad=requires_grad)
)
_plain: Callable[..., DTensor] = partial(_new, DTensor, requires_grad=False)


def as_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor of which this rank holds `local` and which is distributed as `spec` says; it wants no gradient."""
    return _plain(local, spec)


def as_dtensors(locals_: Sequence[Tensor], specs: Sequence[DTensorSpec]) -> list[DTensor]:
    """`as_dtensor` for several at once."""
    assert len(locals_) == len(specs), "each has its spec"
    return list(map(_plain, locals_, specs))


def spec_of(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """The spec of a tensor whose whole has this shape, contiguous."""
    whole = torch.empty(shape, dtype=dtype, device="meta")
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), dtype))


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """A spec with another dtype."""
    meta = spec.tensor_meta
    assert meta is not None, "the spec of a DTensor tells its shape"
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=dtype))


def cut_as(value: Any, spec: DTensorSpec) -> Tensor | None:
    """This rank's part of a DTensor, cut as `spec` has it; None where a rank does not hold all that it needs for that.

    DTensor replicates what has fewer rows than ranks where it can help it, and the sum of tensors that are cut otherwise: a
    penalty's gradient comes so. Nothing is communicated.
    """
    if not isinstance(value, DTensor) or value._spec.mesh != spec.mesh:
        return None
    if value._spec.placements != spec.placements:
        pairs = zip(value._spec.placements, spec.placements, strict=True)
        if not all(had.is_replicate() or had == wants for had, wants in pairs):
            return None
        with torch.no_grad():
            value = value.redistribute(placements=spec.placements)
    return value._local_tensor  # type: ignore[no-any-return]


def part_of_whole(whole: Tensor, spec: DTensorSpec) -> Tensor:
    """This rank's part of a whole tensor that is distributed as `spec` says: a view."""
    with torch.device("cpu"):  # torch counts with tensors on the default device
        shape, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    for dim, (size, offset) in enumerate(zip(shape, offsets, strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)
    return whole


def replicates_implicitly() -> bool:
    """Whether plain tensors count as replicated DTensors now (`implicit_replication`): then they may be copied into one."""
    return bool(getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False))


def largest(numbers: Tensor, mesh: DeviceMesh) -> Tensor:
    """The largest of each number among the ranks of the mesh, all of which call it."""
    for axis in range(mesh.ndim):  # one by one: DTensor flattens several, and cannot where the mesh's are turned
        placements: list[Placement] = [Replicate()] * mesh.ndim
        placements[axis] = Partial("max")
        numbers = as_dtensor(numbers, spec_of(mesh, tuple(placements), numbers.shape, numbers.dtype)).full_tensor()
    return numbers


@functools.cache
def find_infs_on_all_axes() -> None:
    """Has `GradScaler` learn of overflows in any of the gradients, on all ranks; once per process.

    DTensor makes ranks agree over those axes alone that shard the first gradient of a list. Where that is replicated and
    others are sharded, or experts are on meshes inside that of dense layers, ranks would skip different steps, unnoticed.
    """

    def of_all(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        grads, found, *others = args
        op([grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads], found, *others, **kwargs)
        # The mesh of most ranks comes last, and hands on what ranks have learnt on smaller ones inside it. It has its one
        # reduction on every rank: those that have no gradients on a smaller mesh do not know of it.
        meshes = dict.fromkeys(grad.device_mesh for grad in grads if isinstance(grad, DTensor))
        for mesh in sorted(meshes, key=lambda mesh: mesh.size()):
            found.copy_(largest(found, mesh))

    handle([torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default], of_all)


def full_tensor(tensor: DTensor) -> Tensor:
    """The whole of a DTensor, as its method gives it, in any dtype: those that backends do not know go as bytes."""
    if is_castable(tensor.dtype):
        return tensor.full_tensor()
    spec = spec_of(tensor.device_mesh, tensor.placements, (*tensor.shape, tensor.dtype.itemsize), torch.uint8)
    data = tensor._local_tensor.contiguous().unsqueeze(-1).view(torch.uint8)
    return as_dtensor(data, spec).full_tensor().view(tensor.dtype).squeeze(-1)

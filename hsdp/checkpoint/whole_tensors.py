"""One tensor between the ranks that hold its rows and one that has it whole, whatever fails on one of them.

An error of a rank that others wait for is withheld: scrap memory travels in the place of what could not be made, and
whoever called raises the error, on all ranks, when the exchange is over. Only a rank that has no memory for scrap either
raises at once; the others then learn of it by the time-out of the process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from hsdp.buffers.fingerprints import as_bytes
from hsdp.buffers.layout import chunk_of
from hsdp.checkpoint.ranks import Ranks, carried, for_messages
from hsdp.comm.groups import own_rank
from hsdp.errors import CheckpointError
from hsdp.params.dtensors import full_tensor, part_of_whole
from hsdp.params.local import local_of

T = TypeVar("T")


class Withheld:
    """The first error of this rank in an exchange, until all ranks can hear of it.

    Attributes:
        error: it; None as long as all went well.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Does `action`; None where it raises."""
        try:
            return action()
        except Exception as error:
            self.error = self.error or error
            return None

    def release(self) -> None:
        """Raises the error, if there was one."""
        if self.error is not None:
            raise self.error

    def memory(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Contiguous memory for what travels; where there is none at first, for scrap."""
        make = partial(torch.empty, shape, dtype=dtype, device=device)
        found = self.attempt(make)
        return make() if found is None else found


def largest_mesh(values: Iterable[object]) -> DeviceMesh | None:
    """The mesh that the tensors live on; of several, the largest; None if none of them is a DTensor.

    Beside parameters of tensor parallelism others live on the data-parallel ranks alone, which each rank sees others of.
    """
    meshes = {id(value.device_mesh): value.device_mesh for value in values if isinstance(value, DTensor)}
    return max(meshes.values(), key=DeviceMesh.size, default=None)


def first_rank(mesh: DeviceMesh | None) -> int:
    """The first rank of a mesh, by its global number; 0 without one."""
    return 0 if mesh is None else int(mesh.mesh.flatten()[0])


def whole_tensor(value: Tensor, dst: int | None, cpu: bool, withheld: Withheld) -> Tensor | None:
    """A copy of the whole of `value` on rank `dst` (None: on every rank), in host memory if `cpu`; else None."""
    with torch.no_grad():
        if isinstance(value, DTensor):
            whole = gather_to(value, dst, withheld) if dst is not None else carried(full_tensor, value)
        else:
            whole = value if dst is None or dst == own_rank() else None
        return None if whole is None else withheld.attempt(partial(_copied, whole.detach(), local_of(value), cpu))


def _copied(whole: Tensor, local: Tensor, cpu: bool) -> Tensor:
    """`whole`, in host memory if `cpu`, and in any case not in that of `local`."""
    moved = whole.cpu() if cpu else whole
    shares = moved.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return moved.clone() if shares else moved


def gather_to(tensor: DTensor, dst: int, withheld: Withheld) -> Tensor | None:
    """The whole tensor on global rank `dst`, on the tensor's device; None on other ranks, and where there is no memory.

    Every rank of the mesh calls it. Ranks that do not share a shard group with `dst` return at once.
    """
    axis = _only_shard_axis(tensor)
    if axis is None:
        whole = carried(full_tensor, tensor) if not _is_replicated(tensor) else tensor.to_local()
        return whole if own_rank() == dst else None
    mesh, group = tensor.device_mesh, tensor.device_mesh.get_group(axis)
    members = dist.get_process_group_ranks(group)
    if dst not in members:
        return None
    group, local = for_messages(group), tensor.to_local()
    if own_rank() != dst:
        if local.numel():
            carried(dist.send, as_bytes(_contiguous(local, withheld)), dst, group=group)
        return None
    made = withheld.attempt(lambda: torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device))
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if made is None else made
    for rank, place in zip(members, _rows(tensor, axis, whole, mesh), strict=True):
        part = place
        if rank == dst:
            part = local
        elif place.numel():
            if made is None or not place.is_contiguous():
                part = withheld.memory(place.shape, place.dtype, local.device)
            carried(dist.recv, as_bytes(part), rank, group=group)
        if part is not place and made is not None:
            withheld.attempt(partial(place.copy_, part))
    return made


def deal(target: Tensor, whole: Tensor | None, src: int, ranks: Ranks, withheld: Withheld) -> None:
    """Writes `whole`, which only global rank `src` has, into `target` on every rank.

    `src` may have None, if an error is withheld there: then every rank gets anything.
    """
    if isinstance(target, DTensor) and 1 < target.device_mesh.size() == ranks.size and _has_rows(target):
        _deal_rows(target, whole, src, withheld)
        return
    # Several axes shard it, or each rank has a mesh of its own beside others' (tensor or pipeline parallelism): each
    # takes its part of the whole tensor.
    value = None if whole is None else withheld.attempt(lambda: whole.cpu().contiguous())
    if value is None:
        value = withheld.memory(target.shape, target.dtype, torch.device("cpu"))
    if ranks.talk is not None and value.numel():
        carried(dist.broadcast, as_bytes(value), group=ranks.talk, group_src=ranks.rank_of(src))
    taken = value
    withheld.attempt(
        lambda: local_of(target).copy_(part_of_whole(taken, target._spec) if isinstance(target, DTensor) else taken)
    )


def _deal_rows(target: DTensor, whole: Tensor | None, src: int, withheld: Withheld) -> None:
    mesh, local, axis = target.device_mesh, target.to_local(), _only_shard_axis(target)
    own, at = mesh.get_coordinate(), _coordinate(mesh, src)
    if own is None or at is None:
        raise CheckpointError(f"load_full_state_dict(src_rank={src}): it is not a rank of the mesh {mesh}")
    # First along the shard axis from src, then along each other axis from those who have it to those who have not.
    others = [a for a in range(mesh.ndim) if a != axis]
    value = local if local.is_contiguous() else withheld.memory(local.shape, local.dtype, local.device)
    if all(own[a] == at[a] for a in others):
        if axis is not None:
            _deal_from(target, value, whole, src, axis, withheld)
        elif whole is not None:
            withheld.attempt(partial(value.copy_, whole))
    for done, a in enumerate(others):
        if all(own[b] == at[b] for b in others[done + 1 :]) and mesh.size(a) > 1 and value.numel():
            carried(dist.broadcast, as_bytes(value), group=mesh.get_group(a), group_src=at[a])
    if value is not local:
        withheld.attempt(partial(local.copy_, value))


def _coordinate(mesh: DeviceMesh, rank: int) -> list[int] | None:
    """The place of a global rank on each axis; without tensors, so that it does not fail while others wait."""
    ranks = mesh.mesh.flatten().tolist()
    if rank not in ranks:
        return None
    at, found = ranks.index(rank), []
    for size in reversed(mesh.shape):
        at, place = divmod(at, size)
        found.append(place)
    return found[::-1]


def _deal_from(target: DTensor, value: Tensor, whole: Tensor | None, src: int, axis: int, withheld: Withheld) -> None:
    mesh, group = target.device_mesh, for_messages(target.device_mesh.get_group(axis))
    if own_rank() != src:
        if value.numel():
            carried(dist.recv, as_bytes(value), src, group=group)
        return
    given = torch.empty(target.shape, dtype=target.dtype, device="meta") if whole is None else whole
    for rank, rows in zip(dist.get_process_group_ranks(group), _rows(target, axis, given, mesh), strict=True):
        if rank == src:
            withheld.attempt(partial(value.copy_, rows))
        elif rows.numel():
            moved = None if whole is None else withheld.attempt(partial(rows.to, value.device))
            if moved is None:
                moved = withheld.memory(rows.shape, rows.dtype, value.device)
            carried(dist.send, as_bytes(_contiguous(moved, withheld)), rank, group=group)


def _contiguous(tensor: Tensor, withheld: Withheld) -> Tensor:
    """The tensor as it travels."""
    found = withheld.attempt(tensor.contiguous)
    return withheld.memory(tensor.shape, tensor.dtype, tensor.device) if found is None else found


def _only_shard_axis(tensor: DTensor) -> int | None:
    """The mesh axis that shards it, if there is exactly one and the others replicate."""
    axes = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is Shard]
    rest = [placement for placement in tensor.placements if not isinstance(placement, Replicate)]
    return axes[0] if len(axes) == len(rest) == 1 else None


def _has_rows(tensor: DTensor) -> bool:
    return _only_shard_axis(tensor) is not None or _is_replicated(tensor)


def _is_replicated(tensor: DTensor) -> bool:
    return all(isinstance(placement, Replicate) for placement in tensor.placements)


def _rows(tensor: DTensor, axis: int, whole: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """The part of `whole` that each rank along the shard axis holds, empty ones included."""
    placement = tensor.placements[axis]
    assert isinstance(placement, Shard), "the axis shards"
    dim, count = placement.dim, mesh.size(axis)
    return [whole.narrow(dim, *chunk_of(whole.shape[dim], count, rank)) for rank in range(count)]

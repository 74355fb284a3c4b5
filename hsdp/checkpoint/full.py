"""Whole state dicts: gathered to one rank, or dealt out from one, one tensor at a time.

    gather   ranks of dst's shard group --rows, point to point--> their places in one whole tensor on dst
    deal     src --rows, point to point--> ranks of its shard group --broadcast--> their replicas

So the rank that has the whole tensors holds one of them beside its shard (and what its caller keeps), ranks of its
shard group hold nothing beside theirs, other replicas do not even take part in gathering.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.optim import Optimizer

from hsdp.buffers.fingerprints import as_bytes, fingerprint
from hsdp.checkpoint.claims import agree_on_sizes
from hsdp.checkpoint.contents import Entry, listing, model_entries
from hsdp.checkpoint.handles import when_settled
from hsdp.checkpoint.local_state import alike
from hsdp.checkpoint.made import is_of_weights
from hsdp.checkpoint.models import Handover
from hsdp.checkpoint.optimizers import OptimizerStaging, commit_optimizer, describe_state, optimizer_state
from hsdp.checkpoint.ranks import Ranks, for_messages
from hsdp.checkpoint.reading import handing_over
from hsdp.checkpoint.structure import leaves_of, mapped
from hsdp.comm.groups import own_rank
from hsdp.errors import CheckpointError
from hsdp.params.dtensors import full_tensor, part_of_whole
from hsdp.params.local import local_of
from hsdp.unit.lookup import units_below


def full_state_dict(model: nn.Module, rank0_only: bool = True, cpu: bool = True) -> dict[str, Any]:
    """The model's state dict with whole tensors. Every rank that holds the model calls it.

    Args:
        model: any module, sharded or not.
        rank0_only: only rank 0 (the first rank of the model's mesh) gets it; the others get an empty dict, and allocate
            nothing.
        cpu: whole tensors are moved to host memory one by one; else they stay on the device.

    Returns:
        Whole tensors, copies, by name; tied parameters are one tensor under all their names. Beside its shard, rank 0
        holds at most the dict and, where `cpu` moves it, one whole tensor on the device. To hold no more than one of them
        (and write it, say), go through `iter_full_state_dict`.

    Raises:
        CheckpointError: on all ranks: a parameter is on the meta device, or a hook of the model's raised.
    """
    entries = alike(model.parameters(), lambda: model_entries(model))
    dst = first_rank(entry.value for entry in entries.values()) if rank0_only else None
    state: dict[str, Any] = {}
    for name, first in first_names(model, entries).items():
        state[name] = state[first] if first in state else whole_value(entries[name].value, dst, cpu)
    return state if dst is None or dst == own_rank() else {}


def iter_full_state_dict(model: nn.Module, rank0_only: bool = True, cpu: bool = True) -> Iterator[tuple[str, Any]]:
    """As `full_state_dict`, one item at a time: rank 0 never holds more than one whole tensor beside its shard.

    Every rank must go through all of them. Tied parameters come under each of their names, gathered anew.

    Yields:
        `(name, whole tensor)`; on ranks that do not get it `(name, None)`.

    Raises:
        CheckpointError: as `full_state_dict`.
    """
    entries = alike(model.parameters(), lambda: model_entries(model))
    dst = first_rank(entry.value for entry in entries.values()) if rank0_only else None
    for name, entry in entries.items():
        yield name, whole_value(entry.value, dst, cpu)


def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Any]:
    """The optimizer's state by parameter name, with whole tensors, arranged as torch's `get_optimizer_state_dict` has it.

    Nothing is initialised, and no step is taken. Arguments as for `full_state_dict`; every rank calls it.

    Returns:
        `{"state": {parameter: {"exp_avg": whole tensor, ...}}, "param_groups": [{"params": [parameter, ...], ...}]}`; on
        ranks that do not get it an empty dict.

    Raises:
        CheckpointError: on all ranks: a parameter of the optimizer is not one of the model's, or state is a plain tensor
            that has the shape of a rank's rows.
    """
    state = alike(model.parameters(), lambda: optimizer_state(model, optimizer))
    dst = first_rank(model.parameters()) if rank0_only else None

    held = state["state"]
    for name, entries in held.items():
        held[name] = whole_value(entries, dst, cpu)
    return state if dst is None or dst == own_rank() else {}


@when_settled
def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    src_rank: int = 0,
    *,
    process_group: ProcessGroup | None = None,
) -> None:
    """Loads whole tensors that one rank has into a model, in place. Every rank that holds the model calls it.

    Hooks and methods of the model that change, or look at, what is loaded are run as by `model.load_state_dict`.

    Args:
        model: any module, sharded or not.
        state: on `src_rank`, whole tensors by name; a lazy mapping or a memory-mapped `torch.load(mmap=True)` keeps the
            peak at one tensor. Ignored on other ranks.
        src_rank: the global rank that has it, one of the mesh's.
        process_group: the ranks that hold the model; None: all.

    Raises:
        ValueError: `src_rank` is not one of the ranks.
        CheckpointError: on all ranks, before anything is changed: names, shapes or dtypes differ, or ranks were called with
            another `src_rank` or another model. Only if `state` does not give a tensor a second time, or a hook of the
            model's raises, the error says that the model is partly changed.
    """
    ranks = Ranks(process_group)
    what = "load_full_state_dict"
    begun = ranks.agree(what, lambda: (ranks.rank_of(src_rank), model_entries(model)), {"src_rank": src_rank})
    source, entries = begun
    agree_on_sizes(ranks, what, [entry.value for entry in entries.values()])
    here = ranks.rank == source
    given: Mapping[str, Any] = (state or {}) if here else {}
    firsts = first_names(model, entries)
    ranks.one(what, lambda: _check_state(given, {n: entry.value for n, entry in entries.items()}, firsts), source)
    handover = Handover(model)
    handed: dict[str, Any] = {}
    tensors = _Given(given)
    with torch.no_grad():
        for name, entry in entries.items():
            if not isinstance(entry.value, Tensor):
                handed[entry.raw_name] = ranks.one(what, partial(given.get, name), source)
                continue
            if firsts[name] == name:
                deal(entry.value, tensors.like(entry.value, name) if here else None, src_rank, ranks)
            if handover.is_watched or not handover.writes_to(entry.value):
                handed[entry.raw_name] = entries[firsts[name]].value  # that of a tied name may be a copy that a hook made

    def hand_over() -> None:
        with handing_over("the state"):
            if tensors.error is not None:
                raise tensors.error
            if handed:
                model.load_state_dict(handed, strict=False)

    ranks.each(what, hand_over)
    tell_units(model)


class _Given:
    """Whole tensors that a mapping gives, perhaps from files.

    An error must not leave the other ranks waiting for their rows: zeros take the place of what is missing, and who asked
    raises it when all ranks have theirs.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self.error: Exception | None = None

    def like(self, target: Tensor, name: str) -> Tensor:
        """The tensor of a name, which is to be of the shape and dtype of `target`."""
        try:
            whole: Tensor = self._given[name]
            return whole
        except Exception as error:
            self.error = self.error or error
            return torch.zeros(target.shape, dtype=target.dtype)


@when_settled
def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any] | None,
    src_rank: int = 0,
    *,
    process_group: ProcessGroup | None = None,
) -> None:
    """Loads an optimizer's whole state, which one rank has, as `full_optimizer_state_dict` returned it.

    The optimizer may be fresh or stepped, and takes no step. Arguments as for `load_full_state_dict`.

    Raises:
        ValueError: `src_rank` is not one of the ranks.
        CheckpointError: on all ranks, before anything is changed: the state is of other parameters, or of another kind
            of optimizer; or ranks were called with another `src_rank`. Only if a hook of the optimizer's raises, the error
            says that it is partly changed.
    """
    ranks = Ranks(process_group)
    what = "load_full_optimizer_state_dict"
    begun = ranks.agree(what, lambda: (ranks.rank_of(src_rank), OptimizerStaging(model, optimizer)), {"src_rank": src_rank})
    source, staging = begun
    given: Mapping[str, Any] = (state or {}) if ranks.rank == source else {}
    described, groups, skeletons = ranks.one(what, lambda: describe_state(given), source)
    staged: dict[str, dict[str, Any]] = {}
    ranks.each(what, lambda: staged.update(staging.allocate(described)))
    merged: list[dict[str, Any]] = []
    ranks.each(what, lambda: merged.extend(staging.groups(groups)))
    ranks.each(what, lambda: staging.check(described, merged))
    with torch.no_grad():
        for name, entries in staged.items():
            whole = leaves_of(given["state"][name]) if given else {}
            for entry, value in entries.items():
                if isinstance(value, Tensor):
                    deal(value, whole.get(entry), src_rank, ranks)
    # Nobody tells in which dtype the weights were: state that is narrower than its parameter was made for another one.
    numbers = staging.numbers()
    narrower = {numbers[name] for name, entries in staged.items() if _is_narrower(entries, staging.params[name])}

    def hand_over() -> None:
        with handing_over("the state"):
            commit_optimizer(optimizer, staging.state_dict(staged, merged, skeletons), narrower)

    ranks.each(what, hand_over)


def _is_narrower(entries: Mapping[str, Any], param: Tensor) -> bool:
    tensors = [v for name, v in entries.items() if isinstance(v, Tensor) and is_of_weights(name, v, param)]
    return any(tensor.dtype.itemsize < param.dtype.itemsize for tensor in tensors)


def tell_units(model: nn.Module) -> None:
    """Parameters were written in place: what their units have gathered is stale."""
    for unit in units_below(model):
        unit.weights_changed()


def _check_state(state: Mapping[str, Any], own: Mapping[str, Any], firsts: Mapping[str, str]) -> None:
    problems = []
    if missing := [name for name in own if name not in state]:
        problems.append(f"the model has {listing(missing)}, which the state does not have")
    if unexpected := [name for name in state if name not in own]:
        problems.append(f"the state has {listing(unexpected)}, which the model does not have")
    for name, value in own.items():
        if isinstance(value, Tensor) and name in state and (told := _misfit(state[name], value)) is not None:
            problems.append(f"{name!r} is {told}")
    for name, first in firsts.items() if not problems else ():
        if first != name and fingerprint(state[first]) != fingerprint(state[name]):
            problems.append(f"it has different values for {first!r} and {name!r}, which are one parameter in the model")
    if problems:
        raise CheckpointError("the state does not fit the model: " + "; ".join(problems[:12]))


def _misfit(found: Any, own: Tensor) -> str | None:
    if not isinstance(found, Tensor) or isinstance(found, DTensor):
        return f"a {type(found).__name__}, not a whole tensor"
    if (found.shape, found.dtype) != (own.shape, own.dtype):
        shapes = tuple(found.shape), tuple(own.shape)
        return f"{found.dtype} of shape {shapes[0]} in the state, {own.dtype} of shape {shapes[1]} in the model"
    return None


def first_names(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Of each name, the first one of the same parameter: itself, but where weights are tied."""
    firsts: dict[int, str] = {}
    names = {}
    for name, entry in entries.items():
        module, _, leaf = entry.raw_name.rpartition(".")
        try:
            held = model.get_submodule(module)._parameters.get(leaf)
        except AttributeError:  # a name that a state-dict hook made
            held = None
        names[name] = name if held is None else firsts.setdefault(id(held), name)
    return names


# -- one tensor ----------------------------------------------------------------------------------------------------


def first_rank(values: Iterable[Any]) -> int:
    """The first rank of the mesh that the tensors live on; of several, of the largest.

    Beside parameters of tensor parallelism others live on the data-parallel ranks alone, which each rank sees others of.
    """
    meshes = {id(value.device_mesh): value.device_mesh for value in values if isinstance(value, DTensor)}
    return int(max(meshes.values(), key=DeviceMesh.size).mesh.flatten()[0]) if meshes else 0


def whole_value(value: Any, dst: int | None, cpu: bool) -> Any:
    """A value with nothing sharded in it at any depth, for rank `dst` (None: for every rank); None for the others.

    Raises:
        CheckpointError: on every rank: it has shards in an object, where they are not found.
    """
    if isinstance(value, Tensor):
        return _whole_tensor(value, dst, cpu)
    whole = mapped(value, lambda leaf: _whole_tensor(leaf, dst, cpu) if isinstance(leaf, Tensor) else leaf, "a value")
    return whole if dst is None or dst == own_rank() else None


def _whole_tensor(value: Tensor, dst: int | None, cpu: bool) -> Tensor | None:
    with torch.no_grad():
        if isinstance(value, DTensor):
            whole = gather_to(value, dst) if dst is not None else full_tensor(value)
        else:
            whole = value if dst is None or dst == own_rank() else None
        if whole is None:
            return None
        moved = whole.detach().cpu() if cpu else whole.detach()
        shares = moved.untyped_storage().data_ptr() == local_of(value).untyped_storage().data_ptr()
        return moved.clone() if shares else moved


def gather_to(tensor: DTensor, dst: int) -> Tensor | None:
    """The whole tensor on global rank `dst`, on the tensor's device; None on other ranks.

    Every rank of the mesh calls it. Ranks that do not share a shard group with `dst` return at once.
    """
    axis = _only_shard_axis(tensor)
    if axis is None:
        whole = full_tensor(tensor) if not _is_replicated(tensor) else tensor.to_local()
        return whole if own_rank() == dst else None
    mesh, group = tensor.device_mesh, tensor.device_mesh.get_group(axis)
    members = dist.get_process_group_ranks(group)
    if dst not in members:
        return None
    group, local = for_messages(group), tensor.to_local()
    if own_rank() != dst:
        if local.numel():
            dist.send(as_bytes(local), dst, group=group)
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
    for rank, place in zip(members, _rows(tensor, axis, whole, mesh), strict=True):
        if not place.numel():
            continue
        if rank == dst:
            place.copy_(local)
        elif place.is_contiguous():
            dist.recv(as_bytes(place), rank, group=group)
        else:
            part = torch.empty(place.shape, dtype=place.dtype, device=place.device)
            dist.recv(as_bytes(part), rank, group=group)
            place.copy_(part)
    return whole


def deal(target: Tensor, whole: Tensor | None, src: int, ranks: Ranks) -> None:
    """Writes `whole`, which only global rank `src` has, into `target` on every rank."""
    if isinstance(target, DTensor) and 1 < target.device_mesh.size() == ranks.size and _has_rows(target):
        _deal_rows(target, whole, src)
        return
    # Several axes shard it, or each rank has a mesh of its own beside others' (tensor or pipeline parallelism): each
    # takes its part of the whole tensor.
    local = local_of(target)
    value = torch.empty(target.shape, dtype=target.dtype, device="cpu") if whole is None else whole.cpu().contiguous()
    if ranks.talk is not None and value.numel():
        dist.broadcast(as_bytes(value), group=ranks.talk, group_src=ranks.rank_of(src))
    local.copy_(part_of_whole(value, target._spec) if isinstance(target, DTensor) else value)


def _deal_rows(target: DTensor, whole: Tensor | None, src: int) -> None:
    mesh, local, axis = target.device_mesh, target.to_local(), _only_shard_axis(target)
    own = mesh.get_coordinate()
    found = (mesh.mesh == src).nonzero()
    if own is None or not len(found):
        raise CheckpointError(f"load_full_state_dict(src_rank={src}): it is not a rank of the mesh {mesh}")
    at = found[0].tolist()
    # First along the shard axis from src, then along each other axis from those who have it to those who have not.
    others = [a for a in range(mesh.ndim) if a != axis]
    value = local if local.is_contiguous() else torch.empty_like(local, memory_format=torch.contiguous_format)
    if all(own[a] == at[a] for a in others):
        if axis is None:
            if whole is not None:
                value.copy_(whole)
        else:
            _deal_from(target, value, whole, src, axis)
    for done, a in enumerate(others):
        if all(own[b] == at[b] for b in others[done + 1 :]) and mesh.size(a) > 1 and value.numel():
            dist.broadcast(as_bytes(value), group=mesh.get_group(a), group_src=at[a])
    if value is not local:
        local.copy_(value)


def _deal_from(target: DTensor, value: Tensor, whole: Tensor | None, src: int, axis: int) -> None:
    mesh, group = target.device_mesh, for_messages(target.device_mesh.get_group(axis))
    if whole is None:
        if value.numel():
            dist.recv(as_bytes(value), src, group=group)
        return
    for rank, rows in zip(dist.get_process_group_ranks(group), _rows(target, axis, whole, mesh), strict=True):
        if rank == src:
            value.copy_(rows)
        elif rows.numel():
            dist.send(as_bytes(rows.to(value.device)), rank, group=group)


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
    """The part of `whole` that each rank along the shard axis holds; torch.chunk's rule, empty ones included."""
    placement = tensor.placements[axis]
    assert isinstance(placement, Shard), "the axis shards"
    dim, count = placement.dim, mesh.size(axis)
    size = whole.shape[dim]
    chunk = -(-size // count)
    starts = [min(rank * chunk, size) for rank in range(count)]
    return [whole.narrow(dim, start, min(chunk, size - start)) for start in starts]

"""Names under which ranks hold different things, of which a checkpoint would keep one: found before anything is written.

sharded tensors     of one name on meshes of other ranks (experts that each rank names alike, stages of a pipeline)
plain tensors       of an optimizer's state beside sharded parameters, of which rank 0's are written
parameters          that the optimizer of one rank has and that of another has not: rank 0's list is written

Whole states are gathered on one rank of the largest mesh; whoever is on it must have what that rank has, or copies of it.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hsdp.buffers.fingerprints import fingerprints
from hsdp.checkpoint.local_state import alike
from hsdp.checkpoint.ranks import Ranks, carried
from hsdp.checkpoint.structure import leaves_of
from hsdp.errors import CheckpointError
from hsdp.format import listing, ranks_of
from hsdp.params.local import local_of
from hsdp.params.subclass import parts_of

Mesh = tuple[int, ...]
"""The ranks of a mesh."""


class Claims(NamedTuple):
    """What a rank says of names that other ranks may have, too.

    Attributes:
        meshes: keys of sharded tensors by the mesh that they are on; those on a mesh of all ranks are left out.
        plain: fingerprints of the plain tensors that the optimizer keeps beside sharded parameters, by their names.
        stepped: names of the parameters that the optimizer has.
    """

    meshes: dict[Mesh, list[str]]
    plain: dict[str, Any]
    stepped: list[str]


def claims_of(flat: Mapping[str, Any], optimizer: Mapping[str, Any] | None, size: int) -> Claims:
    """This rank's claims.

    Args:
        flat: everything that it saves, by key.
        optimizer: the part that is the optimizer's, as `optimizer_state` gives it.
        size: how many ranks save.
    """
    meshes: dict[Mesh, list[str]] = {}
    known: dict[int, Mesh] = {}
    for key, value in flat.items():
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            ranks = known.setdefault(id(mesh), tuple(sorted(mesh.mesh.flatten().tolist())))
            if len(ranks) < size and mesh.get_coordinate() is not None:
                meshes.setdefault(ranks, []).append(key)
    if optimizer is None:
        return Claims(meshes, {}, [])
    plain = {
        f"{entry} of {name}": value.detach()
        for name, entries in optimizer["state"].items()
        if isinstance(flat.get(f"model.{name}"), DTensor)
        for entry, value in leaves_of(entries).items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
    }
    prints = fingerprints(list(plain.values()))
    stepped = sorted({name for group in optimizer["param_groups"] for name in group["params"]})
    return Claims(meshes, dict(zip(plain, prints, strict=True)), stepped)


def contested(claims: Sequence[Claims]) -> list[str]:
    """The keys that meshes of different ranks have, given the claims of all ranks, in rank order.

    Ranks that sent the same are one object (`unpack_all`), which is looked at once: there may be thousands of them.

    Raises:
        CheckpointError: optimizers have other parameters, or other plain tensors, on one rank than on another.
    """
    first = claims[0]
    rank_of = {id(one): rank for rank, one in reversed(list(enumerate(claims)))}
    distinct = [(rank, claims[rank]) for rank in sorted(rank_of.values())]
    for rank, other in distinct:
        if other.stepped != first.stepped:
            only = sorted(set(other.stepped) ^ set(first.stepped))
            raise CheckpointError(
                f"the optimizers of ranks 0 and {rank} have different parameters ({listing(only, 4)} on one of them only), "
                "and one list of them is saved, that of rank 0: in a pipeline, let each stage save to a directory of its "
                "own, with process_group= the ranks of the stage"
            )
        for what, fingerprint in other.plain.items():
            if first.plain.get(what, fingerprint) != fingerprint:
                raise CheckpointError(
                    f"the optimizer's state has {what!r} as a plain tensor, with other values on rank {rank} than on rank "
                    "0, whose would be kept; keep state of a rank's own rows as DTensors, torch.zeros_like(param)"
                )
    meshes: defaultdict[str, set[Mesh]] = defaultdict(set)
    for _, one in distinct:
        for ranks, keys in one.meshes.items():
            for key in keys:
                meshes[key].add(ranks)
    return [key for key, found in meshes.items() if len(found) > 1]


def prints_of(flat: Mapping[str, Any], keys: Iterable[str]) -> dict[str, tuple[Mesh, Any, Any]]:
    """This rank's part of each key that it has: the mesh, what the part is of the whole, and fingerprints."""
    found = {}
    for key in keys:
        value = flat.get(key)
        if isinstance(value, DTensor):
            mesh = tuple(value.device_mesh.mesh.flatten().tolist())
            place = tuple(value.shape), str(value.placements), value.device_mesh.get_coordinate()
            found[key] = mesh, place, fingerprints([part.detach() for part in parts_of(local_of(value))])
    return found


def agree_on(answers: Sequence[Mapping[str, tuple[Mesh, Any, Any]]]) -> list[None]:
    """Compares what meshes have under one name, given every rank's `prints_of`; nothing for any rank, if all is well.

    Raises:
        CheckpointError: values differ, or are cut otherwise.
    """
    seen: dict[tuple[str, Any], tuple[Mesh, Any]] = {}
    meshes: dict[str, Mesh] = {}
    for answer in answers:
        for key, (mesh, (shape, placements, at), part_prints) in answer.items():
            other = meshes.setdefault(key, mesh)
            before, prints = seen.setdefault((key, at), (mesh, (shape, placements, part_prints)))
            if len(other) != len(mesh) or prints != (shape, placements, part_prints):
                raise CheckpointError(
                    f"ranks {ranks_of(before)} and {ranks_of(mesh)} hold different tensors under one name, {key!r}, "
                    "and only one of them would be saved: give them names of their own, or save each of these groups of "
                    "ranks to a directory of its own, with process_group="
                )
    return [None] * len(answers)


def agree_on_sizes(ranks: Ranks, what: str, state: Mapping[str, Any]) -> None:
    """Compares the names in a model, and how much will go from rank to rank: bytes, in which nobody sees shapes or dtypes.

    Raises:
        CheckpointError: on every rank: they differ.
    """
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    ranks.agree(what, lambda: None, {"model": f"{len(tensors)} tensors of {size:,} bytes"})
    if len(set(ranks.each(what, lambda: _print_of_names(state)))) > 1:
        raise CheckpointError(f"{what}: {_told_of_names(ranks.each(what, lambda: list(state)))}")


def agree_on_one_model(what: str, state: Mapping[str, Any], whole: DeviceMesh | None) -> None:
    """The ranks of a mesh, one of which gets `state` whole, have the same names and under each the same tensor.

    All of them call it. On smaller meshes, each of which has a tensor of its own under a name, these must be copies.

    Args:
        what: the call, for the error.
        state: this rank's tensors, and whatever else there is, by name.
        whole: the mesh, which no other mesh of a tensor exceeds; None: there is none, and nothing to compare.

    Raises:
        CheckpointError: on all ranks of that mesh: they have other names, or other values under one; or another rank had
            no memory to compare them.
        Exception: what failed on this rank, when the others have heard of it.
    """
    if whole is None or whole.size() == 1 or whole.get_coordinate() is None:
        return
    if not all(_are_equal([_print_of_names(state)], whole)):
        names: list[Any] = [list(state)]
        for group in _groups_of(whole):
            everyones: list[Any] = [None] * group.size()
            carried(dist.all_gather_object, everyones, names, group=group)
            names = [one for some in everyones for one in some]
        raise CheckpointError(f"{what}: {_told_of_names(names)}")
    sharded = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    narrow = {name: value for name, value in sharded.items() if value.device_mesh.size() < whole.size()}
    if not narrow:
        return
    prints = alike(sharded.values(), partial(_prints_of_parts, list(narrow.values())))
    equal = _are_equal(_summed(prints, [value.device_mesh for value in narrow.values()]), whole)
    if differing := [name for name, same in zip(narrow, equal, strict=True) if not same]:
        raise CheckpointError(
            f"{what}: on meshes of their own ranks hold different tensors under one name ({listing(differing, 4)}), of "
            "which one would be kept: copies must be equal, and experts that differ between ranks must be DTensors over "
            "these ranks (distribute_tensor) before fully_shard"
        )


def _print_of_names(state: Iterable[str]) -> int:
    return zlib.crc32(repr(list(state)).encode())


def _told_of_names(names: Sequence[list[str]]) -> str:
    """What to say of ranks' names, which differ."""
    here, there = next((names[0], other) for other in names if other != names[0])
    only = listing(sorted({*here} ^ {*there}), 4) or "the same, in another order,"
    return (
        f"ranks hold models of different names ({only} on some of them only), and what one rank has would be missing or "
        "mixed up: have experts in one DTensor over these ranks (distribute_tensor before fully_shard), and save what a "
        "rank has alone by checkpoint.save, with process_group= if need be"
    )


def _prints_of_parts(tensors: Sequence[DTensor]) -> list[int]:
    """A number for this rank's part of each tensor, and for the place that the part has in it."""
    found = []
    for tensor in tensors:
        held = fingerprints([part.detach() for part in parts_of(local_of(tensor))])
        place = tensor.device_mesh.get_coordinate(), tuple(tensor.shape), str(tensor.placements)
        found.append(zlib.crc32(repr((held, place)).encode()))
    return found


def _summed(prints: Sequence[int], meshes: Sequence[DeviceMesh]) -> list[int]:
    """For each of the numbers the sum of what the ranks of its mesh have: one for all the parts of a tensor."""
    found = list(prints)
    for mesh in dict.fromkeys(meshes):
        indices = [index for index, one in enumerate(meshes) if one == mesh]
        sums = torch.tensor([prints[index] for index in indices], device=mesh.device_type)
        for group in _groups_of(mesh):
            carried(dist.all_reduce, sums, group=group)
        for index, value in zip(indices, sums.tolist(), strict=True):
            found[index] = value
    return found


def _are_equal(numbers: Sequence[int], mesh: DeviceMesh) -> list[bool]:
    """Whether each number is the same on all ranks of a mesh."""
    bounds = torch.tensor([numbers, [-number for number in numbers]], device=mesh.device_type)
    for group in _groups_of(mesh):
        carried(dist.all_reduce, bounds, dist.ReduceOp.MAX, group=group)
    most, least = bounds.tolist()
    return [a == -b for a, b in zip(most, least, strict=True)]


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """A group for each axis of a mesh that has several ranks: through all of them every rank hears of all others."""
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]

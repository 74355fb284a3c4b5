"""Names under which ranks hold different things, of which a checkpoint would keep one: found before anything is written.

sharded tensors     of one name on meshes of other ranks (experts that each rank names alike, stages of a pipeline)
plain tensors       of an optimizer's state beside sharded parameters, of which rank 0's are written
parameters          that the optimizer of one rank has and that of another has not: rank 0's list is written
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.buffers.fingerprints import fingerprints
from hsdp.checkpoint.contents import listing
from hsdp.checkpoint.ranks import Ranks
from hsdp.checkpoint.structure import leaves_of
from hsdp.errors import CheckpointError
from hsdp.format import ranks_of
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
        for what, told in other.plain.items():
            if first.plain.get(what, told) != told:
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
        for key, (mesh, (shape, placements, at), told) in answer.items():
            other = meshes.setdefault(key, mesh)
            before, prints = seen.setdefault((key, at), (mesh, (shape, placements, told)))
            if len(other) != len(mesh) or prints != (shape, placements, told):
                raise CheckpointError(
                    f"ranks {ranks_of(before)} and {ranks_of(mesh)} hold different tensors under one name, {key!r}, "
                    "and only one of them would be saved: give them names of their own, or save each of these groups of "
                    "ranks to a directory of its own, with process_group="
                )
    return [None] * len(answers)


def agree_on_sizes(ranks: Ranks, what: str, values: Iterable[Any]) -> None:
    """Compares how much of a model will go from rank to rank, as bytes, in which nobody sees another shape or dtype.

    Raises:
        CheckpointError: on every rank: they differ.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    ranks.agree(what, lambda: None, {"model": f"{len(tensors)} tensors of {size:,} bytes"})

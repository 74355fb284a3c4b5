"""All ranks of a mesh begin with the same parameters, buffers and values: verified, and made so or refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hsdp.buffers.fingerprints import fingerprints
from hsdp.errors import DivergenceError
from hsdp.format import ranks_of
from hsdp.params.local import local_of, make_of_local, parts_beside
from hsdp.params.subclass import parts_of
from hsdp.unit.unit import Unit
from hsdp.weights.gather import broadcast, broadcast_all
from hsdp.weights.module_buffers import Buffer, own_buffers


def verify(unit: Unit, modules: Sequence[nn.Module]) -> None:
    """All ranks of the mesh shard the same parameters and hold the same buffers, equal in value unless they are trusted.

    What is on the meta device on some of the ranks is not compared: a load that begins on rank 0 is to come.

    Args:
        unit: the unit, not built yet.
        modules: what it is made of.

    Raises:
        DivergenceError: they do not, or the values differ and the unit's `replica_policy` is "check".
    """
    buffers = own_buffers(modules, unit)
    blocks = [_values_of(param.sharded) for param in unit.params]
    values = blocks + [buffer.parts for buffer in buffers]
    names = [param.fqn for param in unit.params] + [buffer.fqn for buffer in buffers]
    trusted = unit.replica_policy == "trust"
    prints = [None if trusted else fingerprints([part for part in parts if not part.is_meta]) for parts in values]
    on_meta = [any(part.is_meta for part in parts) for parts in values]
    where, structure = f"fully_shard({unit.name})", _structure(unit, buffers)
    # Buffers come along with the parameters: one question, however many there are.
    odd = unequal_values(where, "parameter, buffer or policy", structure, prints, names, unit, on_meta)
    count = len(blocks)
    with torch.no_grad():
        for index in odd:  # in one order on all ranks: they were told the same
            if index < count:
                for part in blocks[index]:
                    broadcast("fully_shard", part.detach(), unit, unit.replicate_comm, unit.shard_comm)
    broadcast_all("fully_shard", [part for index in odd if index >= count for part in values[index]], unit)


def _structure(unit: Unit, buffers: Sequence[Buffer]) -> list[tuple[Any, ...]]:
    """What must be the same on all ranks: each parameter and buffer, and what else decides the sizes of transfers."""
    params: list[tuple[Any, ...]] = [
        (
            p.fqn,
            p.spec.shape,
            str(p.dtype),
            p.spec.dim,
            p.spec.merged,
            p.replicated,
            p.sharded.requires_grad,
            len(p.places),
            make_of_local(p.sharded),
        )
        for p in unit.params
    ]
    held = [("buffer", buffer.fqn, *kind_of(buffer)) for buffer in buffers]
    reshard = repr(unit.settings.reshard_after_forward)
    policies = (repr(unit.mp_policy), repr(unit.comm_policy), reshard, unit.replica_policy)
    return [*params, *held, policies]


def _values_of(param: Tensor) -> list[Tensor]:
    return [*parts_of(local_of(param)), *(part for _, part in parts_beside(param))]


def check_makes(what: str, unit: Unit) -> None:
    """All replicas have the same around the data of tensor subclasses, which is no tensor and cannot be sent.

    Counterparts alone are compared: what a shard is may tell of its rows, which are others on the next shard rank.

    Raises:
        DivergenceError: they have not; on every rank of the unit's mesh, with the names.
    """
    names = [param.fqn for param in unit.params if param.wrapper is not None]
    if not names:
        return
    makes = [make_of_local(param.sharded) for param in unit.params if param.wrapper is not None]
    of_rows = unit.shard_comm.exchange(what, unit.replicate_comm.differing(what, makes, unit), unit)
    if odd := sorted({index for some in of_rows for index in some}):
        raise DivergenceError(
            f"{what}: unit {unit.name!r}: {', '.join(repr(names[index]) for index in odd)} differ between replicas in what "
            f"__tensor_flatten__ tells beside the tensors (this rank has {makes[odd[0]]}), and that is no tensor which "
            "could be sent; build the subclass of the same numbers on all ranks, or have it keep them as 0-dim tensors"
        )


def kind_of(buffer: Buffer) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of what is compared of a buffer, and may be sent."""
    return tuple((tuple(part.shape), str(part.dtype)) for part in buffer.parts)


def unequal_values(
    what: str,
    item: str,
    structure: list[tuple[Any, ...]],
    prints: Sequence[object],
    names: Sequence[str],
    unit: Unit,
    absent: Sequence[bool] = (),
) -> list[int]:
    """Which values are not the same on all ranks of the unit's mesh; on every rank the same list.

    Args:
        what, item: for errors; see `check_structures`.
        structure: what must be the same on all ranks.
        prints: fingerprints of the values, and `names` theirs.
        unit: the unit.
        absent: which of the values this rank does not have; those that others have are left out then.

    Raises:
        DivergenceError: the structures differ, or the values do and the unit's `replica_policy` is "check".
    """
    if equal_on_mesh(what, (structure, prints, absent), unit):
        return []
    check_structures(what, item, structure, unit)
    apart = set(_differing_on_mesh(what, absent, unit)) if absent else set()
    prints = [None if index in apart else value for index, value in enumerate(prints)]
    odd = _differing_on_mesh(what, prints, unit)
    if odd and unit.replica_policy == "check":
        raise unequal(what, names, differing(exchange_on_mesh(what, prints, unit)))
    return odd


def _call_of(what: str) -> str:
    """The function that users called: "fully_shard" of "fully_shard(blocks.0)"."""
    return re.split(r"\W", what, maxsplit=1)[0]


def equal_on_mesh(what: str, value: object, unit: Unit) -> bool:
    """Whether all ranks of the unit's mesh have the same `value` (plain data): a question along each axis."""
    call = _call_of(what)
    row = unit.shard_comm.all_equal(call, value, unit)
    return unit.replicate_comm.all_equal(call, (row, value), unit) and row


def _differing_on_mesh(what: str, prints: Sequence[object], unit: Unit) -> list[int]:
    """Which of `prints`, as many on every rank of the unit's mesh, are not the same on all of them."""
    call = _call_of(what)
    in_row = set(unit.shard_comm.differing(call, prints, unit))
    marked = ["odd" if index in in_row else value for index, value in enumerate(prints)]
    return sorted(in_row.union(unit.replicate_comm.differing(call, marked, unit)))


def check_structures(what: str, item: str, structure: list[tuple[Any, ...]], unit: Unit) -> None:
    """Raises DivergenceError if the ranks of the unit's mesh tell of different models; `item` says what they list."""
    if equal_on_mesh(what, structure, unit):
        return
    structures = exchange_on_mesh(what, structure, unit)
    for rank, other_structure in enumerate(structures):
        pairs = itertools.zip_longest(structures[0], other_structure, fillvalue="nothing")
        for index, (first, other) in enumerate(pairs):
            if first != other:
                ranks = [rank for rank, one in enumerate(structures) if one == other_structure]
                raise DivergenceError(
                    f"{what}: the ranks build different models: {item} {index} is {first} on the mesh's first rank and "
                    f"{other} on rank(s) {ranks_of(ranks)} of the mesh; build the same module everywhere, in the same order"
                )


def exchange_on_mesh(what: str, value: object, unit: Unit) -> list[Any]:
    """The value (plain data) of each rank of the unit's mesh, in its order. For errors: it grows with the mesh."""
    call = _call_of(what)
    rows = unit.replicate_comm.exchange(call, unit.shard_comm.exchange(call, value, unit), unit)
    return [one for row in rows for one in row]


def differing(of_ranks: Sequence[Sequence[object]]) -> dict[int, list[int]]:
    """Which items of what the ranks of a mesh tell differ from those of its first rank, and on which ranks."""
    found: dict[int, list[int]] = {}
    for rank, items in enumerate(of_ranks):
        for index, (item, first) in enumerate(zip(items, of_ranks[0], strict=True)):
            if item != first:
                found.setdefault(index, []).append(rank)
    return found


def unequal(what: str, names: Sequence[str], odd: dict[int, list[int]]) -> DivergenceError:
    """The error of values that differ where `replica_policy` is "check"."""
    differences = ", ".join(f"{names[index]!r} on ranks {ranks_of(ranks)}" for index, ranks in list(odd.items())[:5])
    more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
    return DivergenceError(
        f"{what}: values differ from those of the mesh's first rank: {differences}{more} of the mesh, and "
        "replica_policy='check' forbids that; seed all ranks alike and load the same files, or let "
        "replica_policy='broadcast' make them equal"
    )

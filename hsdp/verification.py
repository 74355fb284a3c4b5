"""All ranks of a mesh begin with the same parameters and the same values: verified, and made so or refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hsdp.errors import DivergenceError
from hsdp.fingerprints import fingerprint
from hsdp.inner import block_of
from hsdp.unit import Unit
from hsdp.whole import broadcast


def verify(unit: Unit) -> None:
    """All ranks of the mesh shard the same parameters, and from the same values unless they are trusted.

    Raises:
        DivergenceError: they do not, or the values differ and the unit's `replica_policy` is "check".
    """
    trusted = unit.replica_policy == "trust"
    prints = [None if trusted or p.sharded.is_meta else fingerprint(block_of(p.sharded)) for p in unit.params]
    told = told_by_all((_structure(unit), prints), unit)
    _check_structures([structure for structure, _ in told], unit.name)
    odd = differing([values for _, values in told])
    if odd and unit.replica_policy == "check":
        raise unequal(f"fully_shard({unit.name})", [p.fqn for p in unit.params], odd)
    with torch.no_grad():
        for index in odd:  # in one order on all ranks: they were told the same
            block = block_of(unit.params[index].sharded).detach()
            broadcast(block, unit, unit.replicate_comm, unit.shard_comm)


def _structure(unit: Unit) -> list[tuple[Any, ...]]:
    """What must be the same on all ranks: each parameter, and what else decides the sizes of transfers."""
    params: list[tuple[Any, ...]] = [
        (
            p.fqn,
            p.spec.shape,
            str(p.dtype),
            p.spec.dim,
            p.spec.merged,
            p.replicated,
            p.sharded.requires_grad,
            p.sharded.is_meta,
            len(p.places),
            None if p.wrapper is None else p.wrapper.kind.__name__,
        )
        for p in unit.params
    ]
    reshard = repr(unit.settings.reshard_after_forward)
    policies = (repr(unit.mp_policy), repr(unit.comm_policy), reshard, unit.replica_policy)
    return [*params, policies]


def _check_structures(told: list[list[tuple[Any, ...]]], unit: str) -> None:
    for rank, structure in enumerate(told):
        pairs = itertools.zip_longest(told[0], structure, fillvalue="nothing")
        for index, (first, other) in enumerate(pairs):
            if first != other:
                raise DivergenceError(
                    f"fully_shard({unit}): the ranks build different models: parameter or policy {index} is {first} on the "
                    f"mesh's first rank and {other} on rank {rank} of the mesh; build the same module everywhere, in the "
                    "same order"
                )


def told_by_all(value: object, unit: Unit) -> list[Any]:
    """What each rank of the unit's mesh tells (plain data), in the order of the mesh. For set-up: it is slow."""
    rows = unit.replicate_comm.exchange(unit.shard_comm.exchange(value, unit), unit)
    return [told for row in rows for told in row]


def differing(told: Sequence[Sequence[object]]) -> dict[int, list[int]]:
    """Which items of what the ranks of a mesh tell differ from those of its first rank, and on which ranks."""
    found: dict[int, list[int]] = {}
    for rank, items in enumerate(told):
        for index, (item, first) in enumerate(zip(items, told[0], strict=True)):
            if item != first:
                found.setdefault(index, []).append(rank)
    return found


def unequal(what: str, names: Sequence[str], odd: dict[int, list[int]]) -> DivergenceError:
    """The error of values that differ where `replica_policy` is "check"."""
    told = ", ".join(f"{names[index]!r} on ranks {ranks}" for index, ranks in list(odd.items())[:5])
    more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
    return DivergenceError(
        f"{what}: values differ from those of the mesh's first rank: {told}{more} of the mesh, and replica_policy='check' "
        "forbids that; seed all ranks alike and load the same files, or let replica_policy='broadcast' make them equal"
    )

"""Whether ranks that must hold the same bits still do, in the middle of a run.

Replicas begin equal and apply the same sums, so they stay equal bit for bit, and nothing in a step compares them. A device
that computes wrongly, a write or a load on some ranks only, a learning rate that differs: each makes them drift apart, and
what is trained then is none of them. What one replica holds is the control of what the others do.

    compared           along                                                      by
    sharded            the replicate axis: each rank with its counterparts        sums over the bits, of a few bytes
    whole everywhere   both axes                                                  (buffers/fingerprints.py)
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp.buffers.fingerprints import fingerprints
from hsdp.comm.collectives import Comm
from hsdp.errors import DivergenceError
from hsdp.format import ranks_of
from hsdp.params.local import local_of, make_of_local, parts_beside
from hsdp.params.subclass import parts_of
from hsdp.unit.lookup import units_below
from hsdp.unit.unit import Unit
from hsdp.weights.gather import check_idle
from hsdp.weights.module_buffers import buffers_by_unit, widest
from hsdp.weights.replica_check import exchange_on_mesh

_MOST_TOLD = 8

_WHAT = "check_replicas"


class _Value(NamedTuple):
    """A tensor that other ranks have too: counterparts on other replicas, or, `everywhere`, all ranks of the mesh."""

    name: str
    tensor: Tensor
    everywhere: bool


def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, buffers: bool = False) -> None:
    """Raises if ranks that must hold the same bits do not: parameters, the optimizer's states, and buffers if asked.

    Call it now and then, between steps, or when a loss looks odd: it tells a broken device, and code that changes weights
    on some ranks only, from a model that diverges. It reads all that a rank holds once, and compares sums of a few bytes.

    Args:
        model: a model with sharded parameters; every rank must call it.
        optimizer: its states are compared too, but for those that replicas share out among themselves.
        buffers: compare these too. Running means, which each rank takes of its own data, differ rightly.

    Raises:
        TypeError: `model` is not a module, or `optimizer` no optimizer.
        ValueError: nothing is sharded.
        StateError: in the middle of a forward or backward.
        DivergenceError: values differ; on every rank, with their names and the ranks that hold them. Where most ranks
            agree, the others are named. Or not every rank came here.
    """
    if optimizer is not None and not hasattr(optimizer, "state"):
        raise TypeError(f"check_replicas(optimizer=...): expected an optimizer, not {type(optimizer).__name__}")
    units = units_below(model, True, "check_replicas")
    check_idle(units, "check_replicas")
    meshes: dict[tuple[Any, Any], tuple[Unit, list[_Value]]] = {}
    held = buffers_by_unit(model, widest(units)) if buffers else {}
    names = {id(param): name for name, param in model.named_parameters()}
    for unit in units:
        groups = unit.replicate_comm.group, unit.shard_comm.group
        values = meshes.setdefault(groups, (unit, []))[1]
        values += _params_and_states(unit, names, {} if optimizer is None else optimizer.state)
        values += (_Value(buffer.fqn, part, True) for buffer in held.get(unit, ()) for part in buffer.parts)
    found: list[str] = []
    for unit, values in meshes.values():
        found += _differences(unit.replicate_comm, values, unit)
        found += _differences(unit.shard_comm, [value for value in values if value.everywhere], unit)
    # What some ranks found all have to know, or the others would go on alone. A mesh tells those of the next one.
    for unit, _ in meshes.values():
        found = list(dict.fromkeys(line for lines in exchange_on_mesh(_WHAT, found, unit) for line in lines))
    if found:
        more = f"; and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        raise DivergenceError(
            f"check_replicas: ranks that must hold the same bits do not: {'; '.join(found[:_MOST_TOLD])}{more}. A device "
            "that computes wrongly does this, and so does code that changes weights, learning rates or loaded values on "
            "some ranks only; replace the one or mend the other, and resume from a checkpoint of before, or make "
            "parameters equal again with hsdp.sync_module_states(model)"
        )


def _params_and_states(unit: Unit, names: dict[int, str], states: Any) -> Iterator[_Value]:
    for param in unit.params:
        sharded: Any = param.sharded
        fqn = names.get(id(sharded), param.fqn)
        if sharded.is_meta:
            continue
        for part in parts_of(local_of(sharded)):
            yield _Value(fqn, part.detach(), param.replicated)
        yield from (_Value(f"{name} of {fqn}", part, True) for name, part in parts_beside(sharded))
        if (made := make_of_local(sharded)) is not None:
            yield _Value(f"what is around {fqn}", torch.tensor(zlib.crc32(made.encode())), param.replicated)
        for key, value in (states.get(sharded) or {}).items():
            name = f"{key} of {fqn}"
            if isinstance(value, DTensor):
                # One that is cut over replicas too has no counterpart.
                if value.placements == sharded.placements:
                    yield _Value(name, value._local_tensor.detach(), param.replicated)
            elif isinstance(value, Tensor):
                yield _Value(name, value.detach(), param.replicated)
            elif isinstance(value, (bool, int, float)):
                yield _Value(name, torch.tensor(value, dtype=torch.float64), param.replicated)


def _differences(comm: Comm, values: list[_Value], unit: Unit) -> list[str]:
    """Which of `values`, as many on every rank of `comm`, are not the same on all of them, in words."""
    if comm.group is None or not values:
        return []
    names = [value.name for value in values]
    # With the names: ranks that hold other states (one has not stepped) have other lists.
    prints = [
        (value.name, *print_of) for value, print_of in zip(values, fingerprints([v.tensor for v in values]), strict=True)
    ]
    if comm.all_equal(_WHAT, prints, unit):
        return []
    ranks = dist.get_process_group_ranks(comm.group)
    of_ranks = comm.exchange(_WHAT, prints, unit)
    lines = []
    if any([one[0] for one in theirs] != names for theirs in of_ranks):
        lines.append(
            f"ranks {ranks_of(ranks)} hold different sets of values: {', '.join(map(str, sorted(map(len, of_ranks))))}"
        )
        of_ranks = [{one[0]: one for one in theirs} for theirs in of_ranks]
        names = [name for name in dict.fromkeys(names) if all(name in theirs for theirs in of_ranks)]
        of_ranks = [[theirs[name] for name in names] for theirs in of_ranks]
    for at, name in enumerate(names):
        seen = [theirs[at] for theirs in of_ranks]
        if len(set(seen)) > 1:
            lines.append(f"{name!r} {_who(seen, ranks)}")
    return lines


def _who(seen: list[Any], ranks: list[int]) -> str:
    """Who differs: the ranks that most others contradict, or all of them where no value is that of most."""
    [(value, count), *_] = Counter(seen).most_common()
    if 2 * count <= len(seen):
        return f"between ranks {ranks_of(ranks)}"
    odd = [rank for rank, one in zip(ranks, seen, strict=True) if one != value]
    return f"on rank(s) {ranks_of(odd)}, not as on {count} of ranks {ranks_of(ranks)}"

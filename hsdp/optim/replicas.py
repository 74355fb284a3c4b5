"""An elementwise step shared out among replicas: each steps 1/R of every shard, and gets the rest from the others.

    gradients        reduce-scattered over replicas: each gets its share of the sums (hsdp/unit/sharing.py)
    step             of its share, whose states it has alone
    afterwards       one all-gather over the replicate axis for each unit; those of all units run beside each other, and
                     beside whatever comes until the unit's next forward: unit/pending_shards.py

A state is a DTensor that both axes shard, under the parameter's name, so checkpoints go onto any mesh as always. Which
rows are a replica's share: hsdp/params/replica_rows.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from hsdp import debug
from hsdp.comm.mesh import refuse_unsorted
from hsdp.params.dtensors import cut_as
from hsdp.params.local import local_of
from hsdp.params.replica_rows import Share, share_of
from hsdp.params.subclass import is_composite
from hsdp.params.tensor_parallel import same_sharding
from hsdp.schedule.optimizer_hooks import check_communicated
from hsdp.unit.lookup import memory_of, place_of, unit_of
from hsdp.unit.pending_shards import PendingShards
from hsdp.unit.replica_gather import ReplicaGather
from hsdp.unit.sharing import share_gradients
from hsdp.unit.unit import Unit

STEPPED = 1
"""Stands for the order of a step's collectives, for the ranks' divergence guards; that of a backward is 0."""


def share_of_param(param: Any) -> Share | None:
    """What this replica steps of a parameter; None where the replicas all step it: see `share_of`."""
    unit = unit_of(param)
    if unit is None or not isinstance(param, DTensor):
        return None
    local = local_of(param)
    if is_composite(local):  # what it holds of a row, only the subclass knows
        return None
    return share_of(param._spec, local, unit.axes)


def part_of_grad(grad: Any, spec: DTensorSpec, share: Share | None) -> Tensor | None:
    """What is stepped with on this rank of a gradient: a plain tensor, or None where the rank does not hold all of it.

    Args:
        grad: sharded as the parameter is, as its shares are, or in fewer parts than either.
        spec: the parameter's.
        share: what this replica steps of it; None: all that this rank holds.
    """
    if not isinstance(grad, DTensor):
        return None
    if share is not None and same_sharding(grad._spec, share.spec):
        return local_of(grad)
    local = local_of(grad) if same_sharding(grad._spec, spec) else cut_as(grad, spec)
    return local if local is None or share is None else share.of(local)


def share_gradients_of(params: Iterable[Any], what: str) -> None:
    """Has gradients of these parameters reduce-scattered over replicas from now on. `what` names the optimizer in errors.

    Raises:
        ValueError: along the replicate axis of a unit's mesh, ranks do not ascend.
        StateError: sums are pending for one of them.
    """
    units: dict[Unit, list[Any]] = {}
    for param in params:
        unit = unit_of(param)
        if unit is not None and unit.axes.replicate_size > 1:
            units.setdefault(unit, []).append(param)
    for unit in units:
        refuse_unsorted(unit.axes, unit.axes.replicate_axis, f"{what}(over_replicas=True), unit {unit.name!r}")
        check_communicated(unit, f"{what}(over_replicas=True)")
    for unit, own in units.items():
        share_gradients(unit, own)


class ReplicaGathers:
    """Hands the stepped shares of parameters to the other replicas."""

    def __init__(self, pairs: Sequence[tuple[Any, Share]]) -> None:
        units: dict[Unit, list[tuple[Any, Share]]] = {}
        for param, share in sorted(pairs, key=lambda pair: place_of(pair[0])):
            unit = unit_of(param)
            assert unit is not None, "only units have replicas"
            units.setdefault(unit, []).append((param, share))
        self._gathers: list[tuple[Unit, ReplicaGather, PendingShards]] = []
        self._parts: list[tuple[Tensor, Share]] = []
        for unit, own in units.items():
            slots = {id(managed.sharded): slot for slot, managed in enumerate(unit.params)}
            shared = [(slots[id(param)], memory_of(param), share) for param, share in own]
            gather = ReplicaGather(unit, "stepped", shared)
            params = [unit.params[slot] for slot, _, _ in shared]
            self._gathers.append((unit, gather, PendingShards(gather.finish, params, unit.context.streams)))
            self._parts += [(local, share) for _, local, share in shared]
        guards = (unit.replicate_comm.divergence_guard for unit in units)
        self._guards = list(dict.fromkeys(guard for guard in guards if guard is not None))

    def run(self) -> None:
        """Starts all units' gathers, side by side. They end when somebody reads the parameters, or here if need be."""
        for _, gather, _ in self._gathers:
            gather.fall_due()
        if debug.ON:
            self._spoil()
        # The same gathers come in a step, whatever was before it: behind a new kind of pass ranks need not ask each other.
        for guard in self._guards:
            guard.begin_pass(STEPPED)
        try:
            for _, gather, _ in self._gathers:
                gather.start()
            for unit, gather, pending in self._gathers:
                if pending.held_elsewhere():
                    gather.finish()
                else:
                    unit.await_shards(pending)
        except BaseException:  # no memory for rows, say: replicas have stepped their shares, and are to stay equal
            for unit, _, pending in self._gathers:
                unit.await_shards(pending)
            raise

    def _spoil(self) -> None:
        """Whoever reads a part that has not arrived finds NaN there, and not the values of the step before."""
        for local, share in self._parts:
            local[: share.start].fill_(math.nan)
            local[share.start + share.rows :].fill_(math.nan)

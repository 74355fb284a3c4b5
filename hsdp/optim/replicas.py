"""An optimizer's step shared out among replicas: each steps 1/R of every shard, and gets the rest from the others.

    shard of a parameter     rows 0:8 of this rank, the same on R = 2 replicas
    replica 0 steps          rows 0:4, and has their states alone
    replica 1 steps          rows 4:8
    afterwards               one all-gather over the replicate axis for each unit; those of all units run beside each other

A state is a DTensor that both axes shard, under the parameter's name, so checkpoints go onto any mesh as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from hsdp.comm.collectives import Comm
from hsdp.comm.work import CommWork
from hsdp.params.tensor_parallel import block_of, over_replicas
from hsdp.unit.lookup import unit_of
from hsdp.unit.unit import Unit


@dataclass(frozen=True)
class Share:
    """What this replica steps of a parameter: `rows` rows of its local tensor from `start` on; others have up to `chunk`.

    `spec` is that of a tensor of the parameter's shape of which each rank holds such a share.
    """

    spec: DTensorSpec
    start: int
    rows: int
    chunk: int

    def of(self, local: Tensor) -> Tensor:
        """The share of a tensor that is laid out as the local one is: a view."""
        return local.narrow(0, self.start, self.rows)


def share_of(param: Any) -> Share | None:
    """This rank's share of a parameter; None where the replicas all step it: there are none, or it has too odd a shape.

    It depends on shapes and meshes alone, and is of the same kind on all ranks.
    """
    unit = unit_of(param)
    if unit is None or unit.axes.replicate_size == 1 or not isinstance(param, DTensor):
        return None
    assert unit.axes.replicate_axis is not None, "replicas lie along an axis"
    spec = over_replicas(param._spec, unit.axes.replicate_axis)
    if spec is None:
        return None
    rows, at = block_of(param).shape[0], unit.axes.replicate_rank
    chunk = -(-rows // unit.axes.replicate_size)
    start = min(at * chunk, rows)
    return Share(spec, start, min(chunk, rows - start), chunk)


class Exchange:
    """Hands the stepped shares of parameters to the other replicas."""

    def __init__(self, pairs: Sequence[tuple[Any, Share]]) -> None:
        units: dict[Unit, list[tuple[Any, Share]]] = {}
        for param, share in pairs:
            unit = unit_of(param)
            assert unit is not None, "only units have replicas"
            units.setdefault(unit, []).append((param, share))
        self._gathers = [_Gather(unit, pairs) for unit, pairs in units.items()]

    def run(self) -> None:
        """All units' gathers, side by side; afterwards every replica has all parts."""
        for gather in self._gathers:
            gather.start()
        for gather in self._gathers:
            gather.finish()


class _Gather:
    """One unit's gather: shares that cut a local tensor evenly are gathered in place, the others in one padded row each."""

    def __init__(self, unit: Unit, pairs: list[tuple[Any, Share]]) -> None:
        comm = unit.replicate_comm
        self._comm: Comm = comm
        self._unit = unit
        slots = {id(managed.sharded): slot for slot, managed in enumerate(unit.params)}
        self._op = hash((unit.op + 3, *(slots[id(param)] for param, _ in pairs)))
        self._direct: list[tuple[Tensor, Tensor]] = []
        self._packed: dict[torch.dtype, list[tuple[Tensor, Share]]] = {}
        for param, share in pairs:
            local = block_of(param).detach()
            if not local.numel():
                continue
            if local.device == comm.device and local.shape[0] == share.chunk * comm.size and local.is_contiguous():
                self._direct.append((local.view(-1), share.of(local).view(-1)))
            else:
                self._packed.setdefault(local.dtype, []).append((local, share))
        self._rows: list[Tensor] = []
        self._work: CommWork | None = None

    def start(self) -> None:
        """Starts it, behind what the compute stream has computed."""
        outputs = [whole for whole, _ in self._direct]
        inputs = [own for _, own in self._direct]
        self._rows = []
        for dtype, alike in self._packed.items():
            sizes = [share.chunk * (local.numel() // local.shape[0]) for local, share in alike]
            rows = torch.zeros(self._comm.size, sum(sizes), dtype=dtype, device=self._comm.device)
            own = rows[self._comm.rank]
            for place, (local, share) in zip(own.split(sizes), alike, strict=True):
                value = share.of(local)
                place[: value.numel()].view(value.shape).copy_(value)
            self._rows.append(rows)
            outputs.append(rows.view(-1))
            inputs.append(own)
        if outputs:
            with self._comm.context.streams.on("replicate"):
                # As bytes, so that tensors of several dtypes share a call.
                self._work = self._comm.all_gather(
                    self._unit,
                    self._op,
                    [output.view(torch.uint8) for output in outputs],
                    [one.view(torch.uint8) for one in inputs],
                    None,
                )

    def finish(self) -> None:
        """Waits for it, and puts parts that came in rows where they belong."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for rows, alike in zip(self._rows, self._packed.values(), strict=True):
            at = 0
            for local, share in alike:
                inner = local.numel() // local.shape[0]
                columns = rows[:, at : at + share.chunk * inner].reshape(-1, *local.shape[1:])
                at += share.chunk * inner
                # Padding is behind the last rows of the last replicas that have any.
                local.copy_(columns[: local.shape[0]])
        self._rows = []

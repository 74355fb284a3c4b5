"""One unit's gather over replicas: each has a share of some tensors, and gets the others' shares."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hsdp.comm.streams import note_read
from hsdp.comm.work import CommWork, abandon
from hsdp.params.replica_rows import Share
from hsdp.unit.unit import Unit


class ReplicaGather:
    """One unit's gather: shares that cut a local tensor evenly are gathered in place, the others in one padded row each.

    Args:
        unit: the unit.
        what: the gather's name for the ranks' divergence guard.
        shared: for each tensor the slot of its parameter in the unit, itself (laid out as the parameter's local one is),
            and this rank's share of it, which is there.
    """

    def __init__(self, unit: Unit, what: str, shared: Sequence[tuple[int, Tensor, Share]]) -> None:
        self._work: CommWork | None = None
        self._due = False
        comm = unit.replicate_comm
        self._comm = comm
        self._unit = weakref.ref(unit)  # which has the gather until it is waited for
        self._key = hash((unit.key + 3, zlib.crc32(what.encode()), *(slot for slot, _, _ in shared)))
        self._direct: list[tuple[Tensor, Tensor]] = []  # as bytes, so that tensors of several dtypes share a call
        self._packed: dict[torch.dtype, list[tuple[Tensor, Share]]] = {}
        for _, local, share in shared:
            if not local.numel():
                continue
            if local.device == comm.device and local.shape[0] == share.chunk * comm.size and local.is_contiguous():
                self._direct.append((_bytes_of(local), _bytes_of(share.of(local))))
            else:
                self._packed.setdefault(local.dtype, []).append((local, share))
        self._rows: list[Tensor] = []

    def __del__(self) -> None:
        if self._work is not None:  # the model was deleted behind a step: the backend still writes
            abandon(self._work)

    def fall_due(self) -> None:
        """Shares have new values: until a gather of them has been started, the first wait starts it."""
        self._due = True

    def start(self) -> None:
        """Starts the gather, behind the work of the compute stream. If that raises, it is due."""
        self._due = True
        outputs = [whole for whole, _ in self._direct]
        inputs = [own for _, own in self._direct]
        found: list[Tensor] = []
        for dtype, alike in self._packed.items():
            sizes = [share.chunk * (local.numel() // local.shape[0]) for local, share in alike]
            rows = torch.zeros(self._comm.size, sum(sizes), dtype=dtype, device=self._comm.device)
            own = rows[self._comm.rank]
            for place, (local, share) in zip(own.split(sizes), alike, strict=True):
                value = share.of(local)
                place[: value.numel()].view(value.shape).copy_(value)
            found.append(rows)
            outputs.append(_bytes_of(rows))
            inputs.append(_bytes_of(own))
        if outputs and (unit := self._unit()) is not None:
            with self._comm.context.streams.on("replicate"):
                self._work = self._comm.all_gather(unit, self._key, outputs, inputs, None)
            self._rows = found  # not before: rows that no gather fills hold zeros for the other replicas
        self._due = False

    def finish(self) -> None:
        """Waits for the gather, and copies parts that came in rows to their places.

        Rows stay until all of them are there: where no memory is left for one, or an interrupt from the keyboard comes, the
        next reader puts them there. So it starts a gather that could not be started, or whose results were not put down.
        """
        if self._due:
            self.start()
        if self._work is not None:
            try:
                self._work.wait()
            except BaseException:
                if self._work.broken:
                    self._work, self._rows, self._due = None, [], True
                raise
            self._work = None
        for rows, alike in zip(self._rows, self._packed.values(), strict=False):  # no rows: nothing has come since
            at = 0
            for local, share in alike:
                inner = local.numel() // local.shape[0]
                columns = rows[:, at : at + share.chunk * inner].reshape(-1, *local.shape[1:])
                at += share.chunk * inner
                # Padding is behind the last rows of the last replicas that have any.
                local.copy_(columns[: local.shape[0]])
            note_read(rows)  # by a forward on another stream than the step's, say
        self._rows = []


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)

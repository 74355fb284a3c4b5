"""`ReductionPipeline`: the queue in which every unit's gradients are reduced, one layer's stage beside another's.

    FILLED --reduce-scatter--> SCATTERING --all-reduce--> REDUCING --> LANDED

         unit 3   [ RS ][ AR      ]
         unit 2         [ RS ][ AR      ]          AR(k) runs while RS(k+1) and the backward of further layers run
         unit 1               [ RS ][ AR      ]

On a device the all-reduce of a reduction is enqueued on its own stream behind the event of its reduce-scatter, at once.
On the CPU the host must see the reduce-scatter done first. It waits for it at a fixed point, when a later reduction
needs its place, and not when a poll happens to find it done: then all ranks start the collectives of a group in one
order, among each other and among the user's own. Two bounds hold memory: reductions that still hold whole gradients, and
reductions behind their reduce-scatter.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from contextlib import suppress
from typing import ClassVar

import torch

from hsdp.collectives import Flight
from hsdp.errors import HSDPError
from hsdp.lane import LaneReduction
from hsdp.streams import Streams
from hsdp.unit import Unit


class Stage(enum.Enum):
    """Where a reduction is."""

    FILLED = "filled"
    SCATTERING = "scattering"
    REDUCING = "reducing"
    LANDED = "landed"


class Reduction:
    """One unit's trip through the pipeline, with its own buffers.

    Attributes:
        unit: whose gradients they are.
        parts: its operands, one per lane.
        all_reduce: whether replicas are summed now; if not, the sums become the unit's partial sums.
        stage: where it is.
        scatter: the flight of its reduce-scatter, once started.
        flight: the flight that its landing waits for.
    """

    __slots__ = ("all_reduce", "flight", "name", "parts", "scatter", "stage", "unit")

    def __init__(self, unit: Unit, parts: list[LaneReduction], all_reduce: bool) -> None:
        self.unit = unit
        self.name = unit.name
        self.parts = parts
        self.all_reduce = all_reduce
        self.stage = Stage.FILLED
        self.scatter: Flight
        self.flight: Flight


class ReductionPipeline:
    """The queue of one root; the class knows every live one.

    Args:
        streams: the root's side streams.
        max_scatters: how many reductions may hold whole gradients.
        max_all_reduces: how many reductions may be behind their reduce-scatter.
    """

    live: ClassVar[weakref.WeakSet[ReductionPipeline]] = weakref.WeakSet()

    def __init__(self, streams: Streams, max_scatters: int, max_all_reduces: int) -> None:
        self.streams = streams
        self.max_scatters = max_scatters
        self.max_all_reduces = max_all_reduces
        self._holding: deque[Reduction] = deque()
        self._reducing: deque[Reduction] = deque()
        ReductionPipeline.live.add(self)

    def __len__(self) -> int:
        """Reductions that hold whole gradients or have not landed."""
        return len({id(r) for r in (*self._holding, *self._reducing)})

    def submit(self, reduction: Reduction) -> None:
        """Takes a filled reduction and starts its reduce-scatter, once the bound allows it."""
        assert reduction.stage is Stage.FILLED, f"reduction of {reduction.name!r} was submitted twice"
        while len(self._holding) >= self.max_scatters:
            self._release(self._holding.popleft())
        with self.streams.on("scatter"):
            reduction.scatter = reduction.flight = self._scatter(reduction)
        reduction.stage = Stage.SCATTERING
        self._holding.append(reduction)
        if self.streams.active:
            self._replicate(reduction)
        self.advance()

    def advance(self) -> None:
        """Lands whatever is done, without blocking the host. Starts no collective: what is done depends on timing."""
        while self._reducing and self._reducing[0].flight.done():
            self._land(self._reducing.popleft())

    def drain(self) -> None:
        """Waits for every stage of every reduction; all gradients have landed after it."""
        while self._holding:
            self._release(self._holding.popleft())
        while self._reducing:
            self._land(self._reducing.popleft())

    def abort(self) -> None:
        """Forgets every reduction. Work in flight is waited for; its errors are swallowed, as one was raised already."""
        for reduction in (*self._holding, *self._reducing):
            with suppress(HSDPError):
                reduction.scatter.wait()
                reduction.flight.wait()
        self._holding.clear()
        self._reducing.clear()

    def _scatter(self, reduction: Reduction) -> Flight:
        unit = reduction.unit
        inputs = [tensor for part in reduction.parts for tensor in part.inputs]
        outputs = [tensor for part in reduction.parts for tensor in part.outputs]
        factor = unit.factor()

        def scale() -> None:
            if factor != 1.0:
                with torch.no_grad():
                    torch._foreach_mul_([v for part in reduction.parts for v in part.values()], factor)

        if inputs:
            return unit.shard_comm.reduce_scatter(reduction, outputs, inputs, scale)
        return Flight("scale", reduction, self.streams, [], None, scale)

    def _release(self, reduction: Reduction) -> None:
        """The shards are summed: lets the whole gradients go. On the CPU the next stage can start only now."""
        reduction.scatter.wait()
        for part in reduction.parts:
            part.inputs = part.outputs = []
        if not self.streams.active:
            self._replicate(reduction)

    def _replicate(self, reduction: Reduction) -> None:
        """Sums over replicas behind the reduce-scatter, or keeps the partial sums for a later micro-batch."""
        unit = reduction.unit
        with self.streams.after("replicate", reduction.scatter.event), torch.no_grad():
            if not reduction.all_reduce:
                _defer(reduction)
                return
            _join_partial(reduction)
            if unit.replicate_comm.size > 1:
                while len(self._reducing) >= self.max_all_reduces:
                    self._land(self._reducing.popleft())
                tensors = [tensor for part in reduction.parts for tensor in part.operands]
                reduction.flight = unit.replicate_comm.all_reduce(reduction, tensors)
        reduction.stage = Stage.REDUCING
        self._reducing.append(reduction)

    def _land(self, reduction: Reduction) -> None:
        reduction.flight.wait()
        with torch.no_grad():
            reduction.unit.land(reduction.parts)
        reduction.stage = Stage.LANDED


def _defer(reduction: Reduction) -> None:
    # Partial sums are fp32, or the reduce dtype if that is wider.
    unit = reduction.unit
    sums = [[t.to(torch.promote_types(t.dtype, torch.float32)) for t in part.operands] for part in reduction.parts]
    if unit.partial is None:
        unit.partial = sums
    else:
        for held, new in zip(unit.partial, sums, strict=True):
            torch._foreach_add_(held, new)
    reduction.stage = Stage.LANDED


def _join_partial(reduction: Reduction) -> None:
    partial, reduction.unit.partial = reduction.unit.partial, None
    if partial is None:
        return
    for held, part in zip(partial, reduction.parts, strict=True):
        torch._foreach_add_(held, part.operands)
        torch._foreach_copy_(part.operands, held)

"""Whole sums of micro-batches that were not communicated, and the factors by which micro-batches are weighed.

    micro-batch 1     gradients, as they are
    micro-batch 2     sums * scale of 1 / scale of 2 + gradients
        ... sent in 2     reduce-scattered, and multiplied with scale of 2 / the divide factor at that time

The scale, and the reduce op where it divides, belong to the backward that made a gradient. A divide factor belongs to the
sum that it divides: a loop knows the number of tokens of a step when it has seen its last micro-batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hsdp.unit.settings import UnitSettings


class Stash(dict[int, Tensor]):
    """The sums of one unit, by slot.

    Args:
        settings: the unit's.
        ranks: over how many its gradients are summed.

    Attributes:
        mixes_ops: the reduce op changed between the micro-batches that are in it, on whatever rank.
    """

    def __init__(self, settings: UnitSettings[Any], ranks: int) -> None:
        super().__init__()
        self._settings = settings
        self._ranks = ranks
        self._scale, self._divisor = 1.0, 1
        self.mixes_ops = False

    def weigh(self, begun: bool) -> None:
        """Called before an addition or the reduction: rescales the sums if the scale or the op has changed since.

        A reduction multiplies all sums with its own factor. `begun`: some rank has put a gradient into it.
        """
        scale, divisor = self._settings.gradient_scale, self._settings.op_divisor(self._ranks)
        self.mixes_ops = begun and (self.mixes_ops or divisor != self._divisor)
        ratio = (self._scale / self._divisor) / (scale / divisor)
        if ratio != 1.0:
            for held in self.values():
                held.mul_(ratio)
        self._scale, self._divisor = scale, divisor

    def has_ops_beside(self, op: str) -> bool:
        """Whether not all of its sums are of backwards with this op."""
        return self.mixes_ops or self._settings.op_divisor(self._ranks, op) != self._divisor

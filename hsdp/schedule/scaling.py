"""When the sums of a reduction are multiplied with the unit's gradient factor: each once, at one moment or at two."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch


class Scaling(NamedTuple):
    """Factors by the moment at which they are applied. Their product is the unit's factor.

    Attributes:
        before: of the gradients, before the reduce-scatter.
        after_scatter: of the sums over shard ranks, in the reduce-scatter or behind it.
        after_all_reduce: of the sums over replicas too.
    """

    before: float
    after_scatter: float
    after_all_reduce: float


@functools.lru_cache(maxsize=256)  # each reduction asks for the same
def scaling_of(factor: float, dtype: torch.dtype, all_reduced: bool, in_tree: bool) -> Scaling:
    """When to apply a unit's factor.

    fp16 overflows at 65504, and loses digits below 6e-5: half of a division (in powers of two, as FSDP2 has it) comes
    before the first sum and the rest behind the last, so that neither the terms vanish nor their sums overflow. In a tree
    everything else comes behind the last sum: what is added below must not depend on where replicas begin.

    Args:
        factor: the unit's.
        dtype: that of the sums.
        all_reduced: they are summed over replicas behind the reduce-scatter.
        in_tree: they are added in the order of the tree over data ranks.
    """
    before = 1.0
    if dtype is torch.float16 and abs(factor) < 1.0:
        before = 0.5 ** (math.frexp(1.0 / abs(factor))[1] // 2)
    rest = factor / before
    return Scaling(before, 1.0, rest) if all_reduced and (in_tree or before != 1.0) else Scaling(before, rest, 1.0)

"""Fingerprints of a shard's values, which show writes to it past all version counters (`p.data`)."""

from __future__ import annotations

import torch
from torch import Tensor

_COLUMNS = 509
_COPIED = 1 << 15
"""Bytes of a shard up to which a copy of it is its fingerprint: it takes the host less than sums do."""


def in_columns(shard: Tensor) -> list[Tensor]:
    """The bits of a 1-D tensor as integers in columns, whose sums are a fingerprint of its values.

    Values that change places, or signs, change the sums of columns, while they keep the sum of all: the number of columns
    is a prime that divides no usual size. float64 is cut into 32-bit halves: an int64 sum overflows, and does not see the
    highest bits of two values change. A shard of few bytes stays in one piece, and is
    copied.
    """
    data = shard.view(torch.uint8)
    whole = data.numel() // 8 * 8
    integers = data[:whole].view(torch.int32 if shard.dtype == torch.float64 else torch.int64)
    if whole <= _COPIED:
        found = [integers, data[whole:]]
    else:
        rows = integers.numel() // _COLUMNS * _COLUMNS
        found = [integers[:rows].view(-1, _COLUMNS), integers[rows:].view(1, -1), data[whole:].view(1, -1)]
    return [part for part in found if part.numel()]

"""Complex numbers on their way between ranks: as pairs of reals, whose sums any backend makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hsdp.comm.uneven import Uneven


def as_reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The memory of contiguous tensors, complex ones as reals in 1-D."""
    return [torch.view_as_real(one).view(-1) if one.is_complex() else one for one in tensors]


def uneven_as_reals(tensors: Sequence[Uneven]) -> list[Uneven]:
    """`as_reals` of tensors that ranks hold in parts."""
    found = []
    for one in tensors:
        if one.whole.is_complex():
            whole, own = as_reals([one.whole, one.own])
            one = replace(one, whole=whole, sizes=tuple(2 * size for size in one.sizes), own=own)
        found.append(one)
    return found

"""Fingerprints of tensors: a few bytes by which ranks see whether they hold equal values."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element; a complex128 is two."""


def plain_row(tensor: Tensor) -> Tensor:
    """The elements of a tensor as a dense 1-D tensor, whose bits are its values: a view where it can be one."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bits: equal values give equal sums, and other values hardly ever do."""
    kind = _INTEGERS[tensor.element_size()]
    bits = plain_row(tensor).view(kind)
    plain = weighted = 0
    step = 1 << 20  # in slices, so that the 64-bit copies stay small beside the parameter
    for start in range(0, bits.numel(), step):
        part = bits[start : start + step].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        plain += int(part.sum())
        weighted += int((part * places).sum())
    return plain & (2**64 - 1), weighted & (2**64 - 1)

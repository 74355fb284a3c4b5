"""Fingerprints of tensors: a few bytes by which ranks see whether they hold equal values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element; a complex128 is two."""

_SLICE, _SLICE_OF_DEVICES = 1 << 16, 1 << 20
"""Elements that are added up at a time, whose 64-bit copies stay small beside a parameter: on CPUs what fits a cache, and
leaves no holes of 8 MiB between what stays; on devices, for which each slice is several launches, more."""


def plain_row(tensor: Tensor) -> Tensor:
    """The elements of a tensor as a dense 1-D tensor, whose bits are its values: a view where it can be one."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,))  # one element is contiguous with any stride, which `view` keeps


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, which every backend carries whatever the dtype: a view of it, if it is contiguous."""
    return plain_row(tensor).view(torch.uint8)


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bits: equal values give equal sums, and other values hardly ever do."""
    return fingerprints([tensor])[0]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one dtype and, as far as fingerprints tell, the same values."""
    return one.dtype == other.dtype and fingerprint(one.detach()) == fingerprint(other.detach())


def fingerprints(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The same of several at once: the host waits for each device once."""
    sums = [_sums(tensor) for tensor in tensors]
    found: list[tuple[int, int]] = [(0, 0)] * len(sums)
    for device in {one.device for one in sums}:
        there = [at for at, one in enumerate(sums) if one.device == device]
        for at, (plain, weighted) in zip(there, torch.stack([sums[at] for at in there]).tolist(), strict=True):
            found[at] = plain & (2**64 - 1), weighted & (2**64 - 1)
    return found


def _sums(tensor: Tensor) -> Tensor:
    """Both sums, modulo 2**64, where the tensor is."""
    bits = plain_row(tensor).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    step = _SLICE if bits.is_cpu else _SLICE_OF_DEVICES
    places = torch.arange(1, 1 + min(step, bits.numel()), device=bits.device)
    for at, narrow in enumerate(bits.split(step)):
        part = narrow.long()
        plain = part.sum()
        total += torch.stack([plain, (part * places[: part.numel()]).sum() + at * step * plain])
    return total

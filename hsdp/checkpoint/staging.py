"""Host memory that background saves copy to: one block per model, used again by each save.

    block    | up.weight | pad | up.bias | pad | exp_avg | ...     each copy begins at a multiple of 64 bytes

Taking new memory for each save would cost a page fault for every 4 KiB, and pinned memory, from which devices copy at full
speed, takes longer to get than to fill. One save is under way at a time (`handles.settled`), so the block is free when the
next one begins.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

K = TypeVar("K", bound=Hashable)

_ALIGNMENT = 64


class Staging:
    """One block of host memory, which grows when it must."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copies(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Copies tensors of any device, contiguous, into the block; the copies made before are overwritten."""
        starts, size = {}, 0
        for key, tensor in tensors.items():
            starts[key] = size
            size += math.ceil(_bytes(tensor) / _ALIGNMENT) * _ALIGNMENT
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        self._reserve(size, pinned=bool(devices))
        copied = {}
        for key, tensor in tensors.items():
            place = self._block[starts[key] : starts[key] + _bytes(tensor)]
            copied[key] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)  # what the host reads next has arrived
        return copied

    def _reserve(self, size: int, *, pinned: bool) -> None:
        if self._block.numel() < size or (pinned and not self._block.is_pinned()):
            self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # given back first: never both at a time
            self._block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


_stagings: weakref.WeakKeyDictionary[nn.Module, Staging] = weakref.WeakKeyDictionary()


def staging_of(model: nn.Module) -> Staging:
    """The block of a model, which is given back when the model is."""
    return _stagings.setdefault(model, Staging())

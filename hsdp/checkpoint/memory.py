"""A tensor's memory as bytes, for files and messages: torch offers it by way of numpy only, which it does not require."""

from __future__ import annotations

import ctypes

from torch import Tensor


def buffer_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU as bytes; the tensor must outlive it."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")

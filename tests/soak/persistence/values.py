"""Values at any depth, compared bit for bit or but for rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-10


def equal(one: Any, other: Any) -> bool:
    """Whether values at any depth are equal, tensors bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
    return near(one, other, 0.0)


def near(one: Any, other: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether values at any depth are equal but for rounding."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        one, other = torch.as_tensor(one).detach(), torch.as_tensor(other).detach()
        if one.shape != other.shape or (one.ndim and one.dtype != other.dtype):
            return False
        return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key], tolerance) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(near(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance * max(1.0, abs(one))
    return bool(one == other)

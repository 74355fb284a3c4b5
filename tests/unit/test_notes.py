"""What is kept of a shard's values: whatever changes them is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hsdp.unit.shard_prints import in_columns

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda value: torch.cat([value[:-1], value[-1:] * 1.5]),
    "order": lambda value: value.flip(0),
    "two weights change places": lambda value: torch.cat([value[16:32], value[:16], value[32:]]),
    "halves change places": lambda value: value.roll(len(value) // 2),
    "rows change places": lambda value: value.view(-1, 16).flip(0).reshape(-1),
    "signs": torch.neg,
    "zeros": torch.zeros_like,
}


def _prints(value: Tensor) -> list[Tensor]:
    return [part.sum(0) if part.ndim > 1 else part.clone() for part in in_columns(value)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [64, 1 << 16, (1 << 16) + 16])
def test_fingerprints_tell_values_from_others(elements: int, dtype: torch.dtype, change: str) -> None:
    value = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
    prints = _prints(value)
    assert sum(one.nbytes for one in prints) <= 1 << 15, "few bytes, whatever the size"
    assert all(map(torch.equal, _prints(value.clone()), prints))
    assert not all(map(torch.equal, _prints(CHANGES[change](value)), prints))

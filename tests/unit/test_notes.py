"""What is kept of a shard's values: whatever changes them is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hsdp.unit.dtype_group import in_columns

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda value: torch.cat([value[:-1], value[-1:] * 1.5]),
    "order": lambda value: value.flip(0),
    "two weights change places": lambda value: torch.cat([value[16:32], value[:16], value[32:]]),
    "halves change places": lambda value: value.roll(len(value) // 2),
    "rows change places": lambda value: value.view(-1, 16).flip(0).reshape(-1),
    "signs": torch.neg,
    "zeros": torch.zeros_like,
}


def _sums(value: Tensor) -> list[Tensor]:
    return [columns.sum(0) for columns in in_columns(value)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [64, 1 << 16, (1 << 16) + 16])
def test_sums_of_columns_tell_values_from_others(elements: int, dtype: torch.dtype, change: str) -> None:
    value = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
    sums = _sums(value)
    assert sum(one.nbytes for one in sums) <= 2 * 8 * 509, "few bytes, whatever the size"
    assert all(map(torch.equal, _sums(value.clone()), sums))
    assert not all(map(torch.equal, _sums(CHANGES[change](value)), sums))

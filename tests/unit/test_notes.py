"""Notes of tensors' values: what changes a value, whatever it is, is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hsdp.unit.unsharded import _COPIED_BYTES, is_as_noted, noted

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda value: torch.cat([value[:-1], value[-1:] * 1.5]),
    "order": lambda value: value.flip(0),
    "two elements change places": lambda value: torch.cat([value[1:2], value[:1], value[2:]]),
    "halves change places": lambda value: value.roll(len(value) // 2),
    "signs": torch.neg,
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [64, 1 << 16])
def test_a_note_tells_values_from_others(elements: int, dtype: torch.dtype, change: str) -> None:
    value = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
    integers = torch.int32 if dtype == torch.float64 else torch.int64
    note = noted(value.view(torch.uint8).view(integers))
    assert isinstance(note, Tensor) == (value.nbytes <= _COPIED_BYTES)
    assert is_as_noted(value.clone().view(torch.uint8).view(integers), note)
    assert not is_as_noted(CHANGES[change](value).view(torch.uint8).view(integers), note)

"""Reduced values cut into local gradients: neighbours of one shape are cut together, and each gets its own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from hsdp.unit.grad_layout import GradLayout

SHAPES = st.lists(st.tuples(st.sampled_from([(), (3,), (2, 3), (0, 3), (3, 1)]), st.integers(0, 2)), min_size=1, max_size=9)


@given(SHAPES)
def test_each_gradient_is_its_own_part(pieces: list[tuple[tuple[int, ...], int]]) -> None:
    shapes: list[tuple[int, ...]] = []
    offsets, at = [], 0
    for shape, gap in pieces:
        shapes.append(shape)
        offsets.append(at)
        at += math.prod(shape) + gap
    params: Any = [SimpleNamespace(sharded=None, grad_spec=None) for _ in shapes]
    kind: Any = None
    layout = GradLayout(kind, torch.device("cpu"), None, params, range(len(shapes)), shapes, offsets, at, alone=False)
    values = torch.arange(float(at))
    found = layout.locals([values])
    assert [tuple(one.shape) for one in found] == shapes
    for one, shape, offset in zip(found, shapes, offsets, strict=True):
        assert torch.equal(one, values[offset : offset + math.prod(shape)].view(shape))
        assert one._base is values and (one.storage_offset() == offset or not one.numel())

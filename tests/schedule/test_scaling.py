"""Every sum is multiplied with the unit's factor once, wherever that is applied."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hsdp.schedule.scaling import scaling_of

FACTORS = st.floats(2.0**-30, 2.0**30).flatmap(lambda size: st.sampled_from((size, -size)))
DTYPES = st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64))


@given(FACTORS, DTYPES, st.booleans(), st.booleans())
def test_the_product_is_the_factor(factor: float, dtype: torch.dtype, all_reduced: bool, in_tree: bool) -> None:
    scaling = scaling_of(factor, dtype, all_reduced, in_tree)
    assert math.prod(scaling) == factor, "powers of two round nothing"
    assert sum(one != 1.0 for one in scaling) <= (2 if dtype is torch.float16 else 1)
    if not all_reduced:
        assert scaling.after_all_reduce == 1.0, "nothing comes behind an all-reduce that there is not"
    elif in_tree:
        assert scaling.after_scatter == 1.0, "sums of a tree are scaled at its root"


@given(st.integers(1, 1 << 20))
def test_means_of_fp16_neither_overflow_nor_vanish(ranks: int) -> None:
    before = scaling_of(1.0 / ranks, torch.float16, all_reduced=True, in_tree=False).before
    assert ranks / math.sqrt(4 * ranks) <= ranks * before <= math.sqrt(4 * ranks), "about half of the division"

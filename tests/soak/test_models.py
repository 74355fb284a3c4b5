"""A share of 300 random models, their policies and schedules, against the twin in float64; `soak.models` runs more."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.soak.random_models import ON_FOUR, ON_TWO, Subject, run
from tests.support.rig import Pool
from tests.support.share import share

pytestmark = pytest.mark.beside

BATCH = 10  # subjects per job of the workers
LARGE = [HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large]


@settings(max_examples=share(20), suppress_health_check=LARGE)
@given(st.lists(ON_TWO, min_size=BATCH, max_size=BATCH))
def test_random_models_on_two_ranks(pool2: Pool, subjects: list[Subject]) -> None:
    pool2.run(run, subjects)


@settings(max_examples=share(10), suppress_health_check=LARGE)
@given(st.lists(ON_FOUR, min_size=BATCH, max_size=BATCH))
def test_random_models_on_four_ranks(pool4: Pool, subjects: list[Subject]) -> None:
    pool4.run(run, subjects)

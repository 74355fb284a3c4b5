"""Random schedules of micro-batches against the twin, in float64: sums are never lost, doubled or leaked."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rig import Pool
from tests.schedules import NUM_BLOCKS, Action, run_schedule

LEVELS = st.sampled_from(["full", "scatter", "local"])
BRANCHES = st.lists(st.sampled_from([0, 1, 2]), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS)
"""Which branches a rank takes inside each block."""


@st.composite
def micro_batches(draw: st.DrawFn) -> Action:
    """One micro-batch: ranks use different parameters, but run the same units."""
    uses = draw(st.lists(BRANCHES, min_size=1, max_size=2))
    for at in range(NUM_BLOCKS):
        if draw(st.integers(0, 9)) == 0:
            for choice in uses:
                choice[at] = 3  # the output of this block is dropped, on every rank
    forwards = draw(st.integers(1, 2))
    backwards = draw(st.sampled_from(["together", "reversed", "twice"]))
    return ("micro", draw(LEVELS), uses, forwards, backwards)


ACTIONS = st.one_of(
    micro_batches(),
    micro_batches(),
    micro_batches(),
    st.tuples(st.just("zero"), st.sampled_from(["module", "optimizer"]), st.booleans()),
    st.sampled_from([("flush",), ("eval",), ("step",)]),
)
POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "fusion": st.sampled_from(["packed", "direct"]),
        "prefetch": st.integers(0, 2),
        "max_inflight_reduce_scatters": st.integers(1, 2),
        "max_inflight_all_reduces": st.integers(1, 2),
        "reduce_scatter_bucket_bytes": st.just(1 << 20),
        "all_reduce_bucket_bytes": st.just(1 << 20),
    },
)
SCHEDULES = st.lists(ACTIONS, min_size=1, max_size=6)
RESHARD = st.sampled_from([None, True, False])


@settings(max_examples=200)
@given(st.sampled_from([(2,), (2, 1), (1, 2)]), POLICIES, RESHARD, SCHEDULES)
def test_schedules_on_two_ranks(
    pool2: Pool, shape: tuple[int, ...], policy: dict[str, Any], reshard: bool | None, schedule: list[Action]
) -> None:
    pool2.run(run_schedule, shape, policy, reshard, schedule)


@settings(max_examples=100)
@given(st.sampled_from([(4,), (2, 2)]), POLICIES, RESHARD, SCHEDULES)
def test_schedules_on_four_ranks(
    pool4: Pool, shape: tuple[int, ...], policy: dict[str, Any], reshard: bool | None, schedule: list[Action]
) -> None:
    pool4.run(run_schedule, shape, policy, reshard, schedule)

"""Steps on a device in virtual time, with the planner's link speeds: near the critical path, and not behind FSDP2.

`python -m benchmarks.device_schedule` has the table of all models, meshes and batches (benchmarks/results).
"""

from __future__ import annotations

import functools

import pytest

from benchmarks.device_schedule import Row, measure
from hsdp.schedule.byte_budget import units_in_budget
from tests.support.link_time import COMPUTE, Communicator, Recorder, Work, bound, run

MOST = 1.03
NEAR = 1.007
"""Where gathers are all that a step waits for, FSDP2's may begin before the compute that hsdp's gathers wait for: see
docs/formulas.md."""

PLANS = {
    "dense, on fast links": ("llama3-8b", "h100", (1, 8), 1024),
    "dense, slow replicas": ("llama3-8b", "a100", (16, 8), 2048),
    "experts, on fast links": ("gpt-oss-20b", "h100", (1, 8), 8192),
    "experts, across nodes": ("mixtral-8x7b", "h100", (1, 64), 4096),
}


@functools.cache
def _row(name: str) -> Row:
    return measure(*PLANS[name])  # type: ignore[arg-type]


@pytest.fixture(params=PLANS)
def row(request: pytest.FixtureRequest) -> Row:
    return _row(request.param)


def test_the_step_is_near_the_critical_path(row: Row) -> None:
    assert 0.99 <= row.hsdp[0] <= MOST, row


def test_fsdp2_is_not_faster(row: Row) -> None:
    assert row.hsdp[0] <= NEAR * row.fsdp2[0], row


def test_a_communicator_of_its_own_for_reduce_scatters_does_not_pay(row: Row) -> None:
    assert row.hsdp[1] >= 0.995 * row.hsdp[0], row


def test_experts_do_not_wait_for_what_lies_between_them() -> None:
    row = _row("experts, across nodes")
    assert row.hsdp[0] < 0.8 * row.fsdp2[0], row


def test_small_units_hardly_count() -> None:
    assert [units_in_budget([10] * 5, bound) for bound in (0, 1, 2, 9)] == [0, 1, 2, 5]
    assert units_in_budget([9, 10, 9], 1) == 1, "nearly equal units are counted"
    assert units_in_budget([1, 10, 1, 10], 1) == 3, "an attention, its experts, and the next attention"
    assert units_in_budget([10, 1, 1, 1, 1, 1, 1], 1) == 6
    assert units_in_budget([1] * 20, 2) == 2, "many small ones are equal ones"
    assert units_in_budget([0, 0, 0], 1) == 1 and units_in_budget([], 3) == 0


# -- the clock itself ---------------------------------------------------------------------------------------------------


def test_a_link_is_shared_and_a_communicator_keeps_its_order() -> None:
    def step(same: bool) -> tuple[float, list[tuple[float, float]]]:
        recorder = Recorder()
        first = Communicator(recorder, _Fixed())  # type: ignore[arg-type]
        second = first if same else Communicator(recorder, _Fixed())  # type: ignore[arg-type]
        compute, side = recorder.current_stream(), recorder.Stream()
        recorder.add("forward", (0,), COMPUTE, 3.0)
        with recorder.stream(recorder.Stream()) as _:
            recorder.current_stream().wait_stream(compute)
            first.start("reduce-scatter", (0,))
        with recorder.stream(side):
            second.start("all-gather", (1,))
        took = run(recorder.works)
        return took, [(work.start, work.end) for work in recorder.works[1:]]

    # Each takes 4 alone. One communicator: the second waits for the first's operands, though it has its own.
    assert step(same=True) == (11.0, [(3.0, 7.0), (7.0, 11.0)])
    # Two: from 3 on they share the link; the second has a quarter left, which takes 2 at half speed.
    assert step(same=False) == (8.0, [(3.0, 8.0), (0.0, 5.0)])


class _Fixed:
    def collective(self, kind: str, units: tuple[int, ...]) -> tuple[str, float]:
        return "shard", 4.0


def test_the_bound_is_known_where_it_is_easy() -> None:
    def works(gather: float, compute: float) -> list[Work]:
        found: list[Work] = []
        for unit in (1, 2, 3):
            found += [Work("all-gather", (unit,), "shard", gather), Work("forward", (unit,), COMPUTE, compute)]
        found.append(Work("reduce-scatter", (3,), "shard", 1.0))
        return found

    assert bound(works(1.0, 10.0), [0, 1, 1, 1], 9.0) == 1 + 30 + 1
    assert bound(works(10.0, 1.0), [0, 1, 1, 1], 9.0) == 30 + 1 + 1
    assert bound(works(10.0, 10.0), [0, 1, 1, 1], 2.0) == 10 + 30 + 1
    assert bound(works(10.0, 10.0), [0, 1, 1, 1], 1.0) == 60 + 1, "with room for one, nothing is hidden"

"""What runs while what is in flight: asserted on the trace of collectives with set delays, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

import hsdp
from tests.support.best_step import Durations
from tests.support.counting import CopyCounter
from tests.support.rig import RankEnv, fake_world
from tests.support.virtual import Clock, Mode, Span, micro_batch, steady_trace, use_device, virtual_model

UNITS = 8
EVEN = Durations(forward=10, backward=20, gather=8, scatter=12, all_reduce=18)
SLOW_LINK = Durations(forward=1, backward=2, gather=1, scatter=1, all_reduce=50)
SLOW_SHARDS = Durations(forward=1, backward=2, gather=1, scatter=50, all_reduce=1)


@pytest.fixture
def fake4() -> Iterator[RankEnv]:
    with fake_world(4) as env:
        yield env


@pytest.fixture(params=["host", "device"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    mode: Mode = request.param
    found = Clock(mode)
    use_device(monkeypatch, found)
    return found


def _model(clock: Clock, env: RankEnv, times: Durations, rows: int = 64, **policy: Any) -> Any:
    return virtual_model(clock, env.mesh((2, 2)), times, UNITS, rows, comm_policy=hsdp.CommPolicy(**policy))


def _under(span: Span, others: list[Span]) -> set[str]:
    """The units of those that ran while `span` did."""
    return {other.unit for other in others if span.during(other)}


def test_an_all_reduce_runs_under_the_next_reduce_scatter_and_backwards(clock: Clock, fake4: RankEnv) -> None:
    model = _model(clock, fake4, EVEN)
    steady_trace(clock, lambda: micro_batch(model))
    scatters, reduces = clock.all("reduce-scatter"), clock.all("all-reduce")
    launched = [str(i) for i in reversed(range(UNITS))]
    assert [span.unit for span in scatters] == [span.unit for span in reduces] == launched
    backwards = clock.all("backward")
    for at, reduce in enumerate(reduces[:-2]):
        assert launched[at + 1] in _under(reduce, scatters), f"AR of {reduce.unit} is not under the next RS"
        assert _under(reduce, backwards) <= set(launched[at + 1 :])
        assert _under(reduce, backwards), f"AR of {reduce.unit} is under no backward"
    for at, scatter in enumerate(scatters[:-1]):
        assert launched[at + 1] in _under(scatter, backwards), f"RS of {scatter.unit} is not under the next backward"


def test_gathers_run_under_the_compute_before_them(clock: Clock, fake4: RankEnv) -> None:
    model = _model(clock, fake4, EVEN)
    steady_trace(clock, lambda: micro_batch(model))
    gathers = clock.all("all-gather")
    # All but the last one twice: that stays whole, as its backward comes first.
    assert [span.unit for span in gathers] == [str(i) for i in (*range(UNITS), *reversed(range(UNITS - 1)))]
    forward, backward = gathers[:UNITS], gathers[UNITS:]
    for before, gather in pairwise(forward):
        assert before.unit in _under(gather, clock.all("forward"))
    for before, gather in pairwise(backward):
        assert before.unit in _under(gather, clock.all("backward"))


def test_without_a_window_nothing_is_gathered_ahead(clock: Clock, fake4: RankEnv) -> None:
    model = _model(clock, fake4, EVEN, prefetch=0)
    steady_trace(clock, lambda: micro_batch(model))
    for gather in clock.all("all-gather"):
        assert not _under(gather, clock.all("forward")) | _under(gather, clock.all("backward"))


def _most_at_a_time(spans: list[tuple[float, float]]) -> int:
    return max(sum(start <= moment < end for start, end in spans) for moment, _ in spans)


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_queued_all_reduces_are_bounded(clock: Clock, fake4: RankEnv, bound: int) -> None:
    model = _model(clock, fake4, SLOW_LINK, max_inflight_all_reduces=bound)
    steady_trace(clock, lambda: micro_batch(model))
    scatters, reduces = clock.all("reduce-scatter"), clock.all("all-reduce")
    assert clock.most_in_flight("all-reduce") <= bound
    # From reduce-scatter to landing. A device's reduce-scatter is under way when the bound is looked at: one more.
    queued = [(scatter.end, reduce.end) for scatter, reduce in zip(scatters, reduces, strict=True)]
    assert _most_at_a_time(queued) == bound + (clock.mode == "device")


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_whole_gradients_are_bounded(clock: Clock, fake4: RankEnv, bound: int) -> None:
    mesh, policy = fake4.mesh((2, 2)), hsdp.CommPolicy(max_inflight_reduce_scatters=bound)
    # Whole parameters stay: no gather stands in the way on the shards' link.
    model = virtual_model(clock, mesh, SLOW_SHARDS, UNITS, comm_policy=policy, reshard_after_forward=False)
    steady_trace(clock, lambda: micro_batch(model))
    made = {span.unit: span.end for span in clock.all("backward")}
    # From the end of the backward that made them until they are sent: those in flight, and those just made.
    held = [(made[span.unit], span.end) for span in clock.all("reduce-scatter")]
    assert _most_at_a_time(held) == bound + 1


def test_a_deeper_queue_is_never_slower(clock: Clock, fake4: RankEnv) -> None:
    took = []
    for depth in (1, 2, 4):
        model = _model(clock, fake4, EVEN, max_inflight_all_reduces=depth)
        took.append(steady_trace(clock, lambda model=model: micro_batch(model)))
    assert took == sorted(took, reverse=True)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_buckets_share_calls_and_add_no_copy(clock: Clock, fake4: RankEnv, kind: str) -> None:
    rows = 4096  # 1 MiB of weights per unit, half of it per shard: large enough to go directly
    nbytes = rows * 64 * 4
    copied = {}
    for count in (1, 3):
        room = count * nbytes // (2 if kind == "all_reduce" else 1)
        policy = {f"{kind}_bucket_bytes": room if count > 1 else 0, "max_inflight_reduce_scatters": 4}
        model = _model(clock, fake4, EVEN, rows, **policy)
        steady_trace(clock, lambda model=model: micro_batch(model))
        spans = clock.all(kind.replace("_", "-"))
        assert len(spans) == -(-UNITS // count), "the last bucket is flushed though it is not full"
        assert [span.unit.count("+") + 1 for span in spans] == [count] * (UNITS // count) + [UNITS % count] * (count > 1)
        model.zero_grad()  # or what was there is kept until the backward has ended well
        with CopyCounter() as counter:
            micro_batch(model)
        copied[count] = counter.written(min_bytes=nbytes // 4)
    assert copied == {1: 0, 3: 0}


@pytest.mark.parametrize(("how", "scatters"), [("reduce_scatter", 4), ("local", 1)])
def test_with_accumulation_the_all_reduce_runs_once_per_step(clock: Clock, fake4: RankEnv, how: str, scatters: int) -> None:
    model = _model(clock, fake4, EVEN, accumulate=how)

    def step() -> None:
        for micro in range(4):
            with model.accumulate(last=micro == 3):
                micro_batch(model)
        model.zero_grad()

    steady_trace(clock, step)
    assert len(clock.all("all-reduce")) == UNITS
    assert len(clock.all("reduce-scatter")) == scatters * UNITS
    assert len(clock.all("all-gather")) == 4 * (2 * UNITS - 1)
    last_backward = clock.all("backward")[-UNITS]
    assert all(span.start >= last_backward.start for span in clock.all("all-reduce")), "only in the last micro-batch"


def test_a_shard_axis_of_one_and_a_mesh_without_replicas_have_no_such_stage(clock: Clock, fake4: RankEnv) -> None:
    for shape, kinds in (((4,), {"all-gather", "reduce-scatter"}), ((4, 1), {"all-reduce"})):
        model = virtual_model(clock, fake4.mesh(shape), EVEN, UNITS)
        steady_trace(clock, lambda model=model: micro_batch(model))
        assert {span.kind for span in clock.trace} - {"forward", "backward"} == kinds
        assert all(param.grad is not None for param in model.parameters())

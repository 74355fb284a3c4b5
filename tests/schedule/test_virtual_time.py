"""The schedule of a step in virtual time, beside the best one that its durations allow."""

from __future__ import annotations

import pytest

from tests.support.best_step import Durations, best_step
from tests.support.rig import fake_world
from tests.support.virtual import Clock, Mode, fsdp2_model, micro_batch, steady_trace, use_device, virtual_model

UNITS = 16
CASES = {
    # forward, backward, gather, scatter, all_reduce: times of one unit's parts
    "forward": Durations(20, 10, 2, 2, 3),
    "backward": Durations(5, 20, 4, 3, 8),
    "all-gather": Durations(2, 4, 20, 4, 4),
    "reduce-scatter": Durations(2, 4, 3, 20, 4),
    "all-reduce": Durations(3, 6, 2, 2, 20),
}


def virtual_step(monkeypatch: pytest.MonkeyPatch, mode: Mode, times: Durations, units: int = UNITS) -> float:
    """The duration of a steady step of the engine."""
    clock = Clock(mode)
    use_device(monkeypatch, clock)
    with fake_world(4) as env:
        model = virtual_model(clock, env.mesh((2, 2)), times, units)
        return steady_trace(clock, lambda: micro_batch(model))


@pytest.mark.parametrize("mode", ["device", "host"])
@pytest.mark.parametrize("bound", CASES)
def test_the_schedule_is_the_best_one(monkeypatch: pytest.MonkeyPatch, bound: str, mode: Mode) -> None:
    times = CASES[bound]
    took = virtual_step(monkeypatch, mode, times)
    best = best_step(times, UNITS)
    assert took <= 1.03 * best, f"{took / best:.3f} of the best schedule ({took:g}, {best:g})"


@pytest.mark.parametrize("bound", CASES)
def test_on_a_device_fsdp2_is_not_faster(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    times = CASES[bound]
    with monkeypatch.context() as patches:
        took = virtual_step(patches, "device", times)
    clock = Clock("device")
    with monkeypatch.context() as patches, fake_world(4) as env:
        use_device(patches, clock)
        model = fsdp2_model(patches, clock, env.mesh((2, 2)), times, UNITS)
        theirs = steady_trace(clock, lambda: micro_batch(model))
    assert took <= theirs, f"{took / theirs:.3f} of FSDP2 ({took:g}, {theirs:g})"


def test_the_best_schedule_is_known_where_it_is_easy() -> None:
    assert best_step(Durations(10, 20, 1, 1, 1), 10) == 1 + 300 + 1 + 1
    assert best_step(Durations(1, 2, 3, 3, 30), 10) == 10 * 3 + 1 + 2 + 3 + 300
    assert best_step(Durations(1, 2, 3, 30, 3), 10) == 19 * 3 + 300 + 3
    assert best_step(Durations(10, 20, 1, 1, 1), 10, micro_batches=4, deferred=True) == 1 + 1200 + 1 + 1

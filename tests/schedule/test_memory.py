"""Transient memory does not grow with the number of layers, keeps to its formula, and a steady loop is steady."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn

from benchmarks.memory import WORLD, Peaks, Setup, build, formula, measure
from tests.support.counting import LiveBytes
from tests.support.rig import Pool, RankEnv, fake_world

SETUPS = [Setup(mesh, precision, "hsdp", w) for mesh in ("4", "2x2") for precision in ("fp32", "bf16/fp32") for w in (0, 1)]


@pytest.fixture
def fake4() -> Iterator[RankEnv]:
    with fake_world(WORLD) as env:
        yield env


@cache
def _peaks(setup: Setup, layers: int) -> Peaks:
    with fake_world(WORLD) as env:
        return measure(setup, layers, env.mesh(_shape(setup)))


def _shape(setup: Setup) -> tuple[int, ...]:
    return (setup.shards,) if setup.replicas == 1 else (setup.replicas, setup.shards)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_transient_memory_is_constant_in_the_number_of_layers(setup: Setup) -> None:
    # From more layers than the queue is deep: by then it has filled up.
    assert _peaks(setup, 7).pair == _peaks(setup, 11).pair


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_transient_memory_keeps_to_the_formula(setup: Setup) -> None:
    peaks = _peaks(setup, 7)
    forward, backward = formula(setup)
    slack = 0.02  # used-flags, padding, and the small parameter, which is packed
    assert peaks.forward <= forward + slack, f"forward: {peaks.forward:.3f} U, formula {forward:.3f} U"
    assert peaks.backward <= backward + slack, f"backward: {peaks.backward:.3f} U, formula {backward:.3f} U"


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("setup", SETUPS[1::2], ids=str)
def test_steady_state_from_the_third_step_on(fake4: RankEnv, setup: Setup) -> None:
    model = build(setup, 6, fake4.mesh(_shape(setup)))
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    _step(model, optimizer)
    seen = []
    with LiveBytes() as bytes_:
        for _ in range(4):
            bytes_.reset_peak()
            _step(model, optimizer)
            seen.append((bytes_.live, bytes_.peak, bytes_.peak_sizes))
    assert seen[0][0] == 0
    assert seen == seen[:1] * 4


def _keep_gradients(env: RankEnv, shape: tuple[int, ...], precision: str) -> None:
    model = build(Setup("x".join(map(str, shape)), precision, "hsdp"), 3, env.mesh(shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for _ in range(3):
        model(torch.full((1, 1), 1.0 + env.rank)).sum().backward()
        grads = [param.grad for param in model.parameters()]
        kept.append([(grad, grad.to_local().clone()) for grad in grads if grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    for pairs in kept:
        assert len(pairs) == len(list(model.parameters()))
        for grad, value in pairs:
            torch.testing.assert_close(grad.to_local(), value, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16/fp32"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["4", "2x2"])
def test_a_kept_gradient_stays_what_it_was(pool4: Pool, shape: tuple[int, ...], precision: str) -> None:
    pool4.run(_keep_gradients, shape, precision)

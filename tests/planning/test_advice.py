"""Advice keeps its word: the model planned anew with what a plan advises is better in what was promised."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hsdp
from hsdp.planning import Link, Plan
from tests.support.models import Transformer

with torch.device("meta"):
    MODELS: dict[str, nn.Module] = {
        "transformer": Transformer(vocab=2048, dim=256, heads=4, hidden=1024, layers=3),
        "odd": nn.Sequential(*(nn.Linear(100, 100) for _ in range(3))),
    }

OPTIONS = st.fixed_dictionaries(
    {
        "mesh": st.sampled_from([(1, 1), (1, 7), (2, 4), (4, 2), (8, 1), (2, 16), (1, 64)]),
        "tokens_per_rank": st.sampled_from([1, 64, 1000, 4096]),
        "seq_len": st.sampled_from([None, 64]),
        "micro_batches": st.sampled_from([1, 2]),
        "memory": st.sampled_from([None, 1 << 20, 32 << 20, 100 << 20, 1 << 30]),
        "recompute": st.sampled_from([False, True, "selective"]),
        "optimizer": st.sampled_from(["elementwise", "muon"]),
        "over_replicas": st.booleans(),
        "bandwidth": st.sampled_from([None, 1e9]),
        "activations": st.sampled_from([None, None, 10 << 20]),
        "flops": st.sampled_from([1e12, 4e14]),
        "link": st.sampled_from([Link(), Link(slow=1e8), Link(fast=1e10, slow=1e10, latency=1e-3)]),
    }
)


def _rate(plan: Plan) -> float:
    return plan.tokens_per_second / (plan.replicas * plan.shards)


def _padding(plan: Plan) -> int:
    return sum(unit.total("padding_bytes") for unit in plan.units)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(MODELS)), OPTIONS)
def test_who_follows_advice_gets_what_it_promises(name: str, options: dict[str, Any]) -> None:
    model = MODELS[name]
    plan = hsdp.plan(model, **options)
    for advice in plan.advice:
        told = options | advice.options
        if options["activations"] is not None and "tokens_per_rank" in advice.options:
            told["activations"] = options["activations"] * told["tokens_per_rank"] // options["tokens_per_rank"]
        followed = hsdp.plan(model, **told)
        assert advice.text in plan.bottleneck
        if advice.promise == "fits":
            assert not plan.fits and followed.fits, advice
        elif advice.promise == "speed":
            assert plan.fits and followed.fits, advice
            assert _rate(followed) == pytest.approx(advice.gain * _rate(plan)), advice
            assert advice.gain > 1.03, advice
        else:
            assert _padding(followed) < _padding(plan), advice
        limit = options["memory"] or 1.5 * plan.memory.total
        assert advice.promise == "padding" or followed.memory.total <= limit, advice


def _layers(**options: Any) -> Plan:
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="meta") for _ in range(8)))
    link = Link(fast=1e9, slow=1e8, ranks_per_node=4, latency=0.0, fast_step=0.0, slow_step=0.0)
    return hsdp.plan(layers, flops=1e12, link=link, **({"mesh": (2, 4), "tokens_per_rank": 1000} | options))


def test_no_more_tokens_are_advised_than_fit() -> None:
    ample, tight = _layers(memory=80 << 30), _layers(memory=_layers().memory.total + (10 << 20))
    raised = [one.options["tokens_per_rank"] for one in ample.advice if "tokens_per_rank" in one.options]
    assert raised and raised[0] > 5000
    assert all(one.options.get("tokens_per_rank", 0) < 1300 for one in tight.advice), tight.bottleneck


def test_tokens_are_raised_by_whole_sequences() -> None:
    plan = _layers(memory=80 << 30, tokens_per_rank=1024, seq_len=512)
    (raised,) = [one.options["tokens_per_rank"] for one in plan.advice if "tokens_per_rank" in one.options]
    assert raised % 512 == 0


def test_what_is_recomputed_without_need_is_told() -> None:
    plan = _layers(tokens_per_rank=1_000_000, recompute=True, memory=1 << 50)
    assert "keep all activations" in plan.bottleneck
    assert plan.advice[0].options == {"recompute": False} and plan.advice[0].gain == pytest.approx(8 / 6, rel=0.02)


def test_where_one_change_is_not_enough_two_are_advised() -> None:
    model = MODELS["transformer"]
    plan = hsdp.plan(model, mesh=(1, 1), tokens_per_rank=64, seq_len=64, memory=30 << 20)
    assert not plan.fits and plan.advice
    assert "ranks instead of 1" in plan.bottleneck
    assert all(plan.changed(**one.options).fits for one in plan.advice)


def test_nothing_is_advised_where_nothing_helps() -> None:
    plan = _layers(mesh=(1, 1), tokens_per_rank=1_000_000)
    assert plan.advice == () and "more or faster ranks" in plan.bottleneck
    assert _layers(memory=1).advice == ()


def test_advice_on_thousands_of_ranks_comes_at_once() -> None:
    """It went through the rows of each rank, once for every parameter of every plan that it tries: for 80 s."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024) for _ in range(6)))
    began = time.process_time()
    assert hsdp.plan(model, mesh=(16384, 8), tokens_per_rank=512).bottleneck
    assert time.process_time() - began < 5

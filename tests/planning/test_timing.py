"""The clock of `plan` is that of the engine: run in virtual time, with the same durations, a step takes as long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import hsdp
from hsdp import CommPolicy
from hsdp.planning import Link, Plan
from hsdp.planning.schedule import Event, Verb, simulate_step
from hsdp.planning.timing import clock
from tests.schedule.test_virtual_time import CASES
from tests.support.best_step import Durations
from tests.support.models import Transformer
from tests.support.rig import fake_world
from tests.support.virtual import Clock, Mode, micro_batch, steady_trace, use_device, virtual_model

UNITS = 9
POLICIES = {
    "default": CommPolicy(),
    "no prefetch": CommPolicy(prefetch=0),
    "wide": CommPolicy(prefetch=3, max_inflight_reduce_scatters=2, max_inflight_all_reduces=2),
    "narrow": CommPolicy(max_inflight_all_reduces=1),
}


@dataclass
class Fixed:
    """Durations of `virtual_model`: its layers are units 1 and up, the root has no parameters."""

    times: Durations
    shared: bool = False

    def compute(self, verb: Verb, unit: int) -> float:
        if unit == 0:
            return 0.0
        return self.times.forward if verb is Verb.FORWARD else self.times.backward

    def collective(self, event: Event) -> float:
        costs = {Verb.GATHER: self.times.gather, Verb.SCATTER: self.times.scatter, Verb.ALL_REDUCE: self.times.all_reduce}
        return 0.0 if 0 in event.units else costs.get(event.verb, 0.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["device", "host"])
@pytest.mark.parametrize("bound", CASES)
def test_a_step_takes_as_long_as_in_virtual_time(
    monkeypatch: pytest.MonkeyPatch, bound: str, mode: Mode, policy: str
) -> None:
    times = CASES[bound]
    virtual = Clock(mode)
    use_device(monkeypatch, virtual)
    with fake_world(4) as env:
        model = virtual_model(virtual, env.mesh((2, 2)), times, UNITS, comm_policy=POLICIES[policy])
        took = steady_trace(virtual, lambda: micro_batch(model))
        units = hsdp.plan(model, tokens_per_rank=1).units
    device = mode == "device"
    assert clock(simulate_step(units, 1, device), Fixed(times), device).step == pytest.approx(took)


def _plan(tokens: int, **told: object) -> Plan:
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="meta") for _ in range(8)))
    link = Link(fast=1e9, slow=1e8, ranks_per_node=4, latency=0.0, fast_step=0.0, slow_step=0.0)
    return hsdp.plan(layers, mesh=(2, 4), tokens_per_rank=tokens, flops=1e12, link=link, **told)  # type: ignore[arg-type]


def test_compute_and_busy_times_are_those_of_the_formulas() -> None:
    plan = _plan(1000)
    elements = 8 * 1024 * 1024
    assert plan.time.compute == pytest.approx(6 * elements * 1000 / 1e12)
    assert _plan(1000, recompute=True).time.compute == pytest.approx(8 * elements * 1000 / 1e12)
    flags = 8 * 4
    # Twice each, but the last layer once.
    assert plan.time.busy["all-gather"] == pytest.approx((2 - 1 / 8) * elements * 4 * 3 / 4 / 1e9)
    assert plan.time.busy["reduce-scatter"] == pytest.approx((elements * 4 + 4 * flags) * 3 / 4 / 1e9)
    assert plan.time.busy["all-reduce"] == pytest.approx((elements + flags) / 4 * 4 * 2 / 2 / 1e8, rel=1e-3)
    # AdamW reads parameters, gradients and two states, and writes all but the gradients.
    assert plan.time.optimizer == pytest.approx(7 * elements / 4 * 4 / 2.7e12)
    assert plan.time.step == pytest.approx(plan.time.compute + sum(plan.time.exposed.values()) + plan.time.optimizer)


def test_attention_costs_what_its_scores_do() -> None:
    with torch.device("meta"):
        model = Transformer(vocab=512, dim=256, heads=4, hidden=1024, layers=4)
    products = 6 * sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    for tokens, seq_len in ((4096, None), (4096, 1024), (16384, None)):
        plan = hsdp.plan(model, mesh=(1, 8), tokens_per_rank=tokens, seq_len=seq_len, flops=1.0)
        sequence = seq_len or min(tokens, 8192)
        # Half of the sequence, two products of 2 flops, forward and 2.5 times in backward, 4 layers of width 256.
        attention = sequence / 2 * 4 * 3.5 * 4 * 256
        vectors = 6 * sum(p.numel() for p in model.parameters() if p.ndim == 1)
        assert plan.time.compute == pytest.approx(tokens * (products + vectors + attention))


def test_selective_recomputation_repeats_half_of_the_products() -> None:
    never, half, whole = (_plan(1000, recompute=how).time.compute for how in (False, "selective", True))
    assert half == pytest.approx((never + whole) / 2)


def test_on_gloo_times_are_not_those_of_a_gpu() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64, device="meta") for _ in range(2)))
    on_gloo, on_gpu = (hsdp.plan(layers, mesh=4, tokens_per_rank=8, backend=backend) for backend in ("gloo", "nccl"))
    assert on_gloo.assumptions.machine == "CPU core" and on_gpu.assumptions.machine == "H100"
    assert on_gloo.time.compute > 1000 * on_gpu.time.compute
    assert on_gloo.time.busy["all-gather"] > 10 * on_gpu.time.busy["all-gather"]
    plan = hsdp.plan(layers, mesh=4, tokens_per_rank=8, backend="gloo", flops=1e9, link=Link(fast=5.0))
    assert (plan.assumptions.flops, plan.assumptions.link.fast) == (1e9, 5.0)
    assert hsdp.plan(layers, mesh=4, tokens_per_rank=8, machine="cpu").assumptions.backend == "gloo"
    with pytest.raises(ValueError, match=r"machine='abacus'.*h100"):
        hsdp.plan(layers, mesh=4, tokens_per_rank=8, machine="abacus")


def test_a_plan_that_is_changed_to_another_machine_has_its_rates() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64, device="meta") for _ in range(2)))
    on_h100, on_a100 = (hsdp.plan(layers, mesh=4, tokens_per_rank=8, machine=machine) for machine in ("h100", "a100"))
    assert on_h100.changed(machine="a100") == on_a100
    assert on_h100.changed(machine="a100", flops=1.0).assumptions.flops == 1.0
    on_gloo = hsdp.plan(layers, mesh=4, tokens_per_rank=8, backend="gloo")
    assert on_h100.changed(machine="cpu", backend="gloo") == on_gloo
    with pytest.raises(ValueError, match=r"machine='abacus'.*h100"):
        on_h100.changed(machine="abacus")


def test_tiers_follow_the_mesh() -> None:
    link = Link(ranks_per_node=8)
    assert [link.members("shard", 8, shards) for shards in (2, 8, 16, 12)] == [2, 8, 8, 4]
    assert [link.members("replicate", 4, shards) for shards in (2, 4, 8, 64)] == [4, 2, 1, 1]
    # What is smaller than a node lies in one; what fills several is spread evenly.
    assert [link.in_a_node(world) for world in (1, 7, 8, 12, 14, 64, 13)] == [1, 7, 8, 6, 7, 8, 8]
    assert [link.members("shard", 1, shards) for shards in (3, 5, 7, 12, 14)] == [3, 5, 7, 6, 7]
    assert [link.members("replicate", replicas, 1) for replicas in (3, 7)] == [3, 7]
    layers = nn.Sequential(nn.Linear(64, 64, device="meta"))
    for mesh in ((1, 7), (7, 1), (3, 2)):
        plan = hsdp.plan(layers, mesh=mesh, tokens_per_rank=8)
        assert sum(one.slow for one in plan.collectives) == 0, mesh
    assert link.split(100.0, 8, 8) == (100.0, 0.0)
    assert link.split(100.0, 8, 1) == (0.0, 100.0)
    # 16 ranks on 2 nodes: of the 15 shards that a rank needs, its node needs 8 from the other, and each rank brings one.
    assert link.split(15.0, 16, 8) == (14.0, 1.0)


@pytest.mark.parametrize("ranks", [0, 2.5, True])
def test_nodes_have_whole_ranks(ranks: Any) -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node=.*an integer of at least 1"):
        Link(ranks_per_node=ranks)


@pytest.mark.parametrize("name", ["fast", "slow", "latency", "fast_step", "slow_step"])
@pytest.mark.parametrize("value", [math.nan, -1.0, "1", True])
def test_rates_of_links_are_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Link\({name}=.*, a number (above|of at least) 0"):
        Link(**{name: value})


def test_latency_grows_with_the_ring() -> None:
    link = Link(fast=1.0, slow=1.0, ranks_per_node=8, latency=1000.0, fast_step=10.0, slow_step=1.0)
    assert link.seconds(1, 8, 8, 0, 0) == 1000 + 7 * 10
    assert link.seconds(1, 32, 8, 5, 7) == 1000 + 28 * 10 + 3 * 1 + 7
    assert link.seconds(2, 4, 1, 0, 0) == 1000 + 2 * 3 * 1


def test_the_bottleneck_is_named_with_what_helps() -> None:
    assert "compute is the bottleneck" in _plan(1_000_000).bottleneck
    starved = _plan(1000, memory=80 << 30)
    assert "raise tokens per rank to" in starved.bottleneck
    told = int(starved.bottleneck.split("raise tokens per rank to ")[1].split()[0].strip(",.").replace(",", ""))
    kind = starved.bottleneck.split()[0]
    enough, fewer = starved.time_with(told), starved.time_with(told * 9 // 10)
    assert enough.exposed[kind] <= 0.03 * enough.step
    assert fewer.exposed[kind] > 0.03 * fewer.step


def test_what_does_not_fit_is_told() -> None:
    peak = _plan(1000, activations=0).memory.total
    assert _plan(1000, activations=0, memory=peak).fits
    tight = _plan(1000, activations=0, memory=peak - 1)
    assert not tight.fits
    assert "does not fit" in tight.bottleneck
    assert "use 1 x 8" in tight.bottleneck
    assert "no mesh or batch is enough" in _plan(1000, memory=1).bottleneck


def test_the_optimizer_shared_out_among_replicas() -> None:
    plan, shared = _plan(1000), _plan(1000, over_replicas=True)
    replicas = plan.replicas
    states, fewer = plan.memory.peak["optimizer"], shared.memory.peak["optimizer"]
    assert replicas > 1 and states / replicas <= fewer <= states / replicas + 2 * replicas * len(plan.units)
    extra = [one for one in shared.collectives if (one.kind, one.axis) == ("all-gather", "replicate")]
    assert len(extra) == 1 and not [one for one in plan.collectives if one.axis == "replicate" and one.kind == "all-gather"]
    # Each replica's part of the shards, which are half of the two states, goes to every other replica.
    assert extra[0].sent == pytest.approx(fewer / 2 * (replicas - 1), rel=1e-3)
    # Over the replicas' links the reduce-scatter and this gather send what the all-reduce sends.
    sent = [sum(one.sent for one in each.collectives if one.axis == "replicate") for each in (plan, shared)]
    assert sent[1] == pytest.approx(sent[0], rel=1e-3)
    assert not [one for one in shared.collectives if one.kind == "all-reduce"]
    plan, shared = _plan(1000, activations=0), _plan(1000, activations=0, over_replicas=True)
    gradients = [each.memory.peak["gradients"] for each in (plan, shared)]
    assert gradients[1] <= gradients[0] / replicas + 2 * replicas * len(plan.units)
    tight = _plan(1000, activations=0, memory=plan.memory.total - 1)
    assert shared.memory.total < plan.memory.total and "over_replicas=True" in tight.bottleneck


def test_links_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Link\(slow=0\).*bytes per second"):
        Link(slow=0)
    with pytest.raises(ValueError, match=r"slow_step=-1.*seconds"):
        Link(slow_step=-1)
    with pytest.raises(ValueError, match="ranks_per_node"):
        Link(ranks_per_node=-1)

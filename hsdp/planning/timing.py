"""When a step's computing and its collectives happen: a clock for each, and how long one waits for the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from hsdp.planning.activations import Recompute
from hsdp.planning.layouts import UnitPlan, head_of
from hsdp.planning.schedule import Event, Verb
from hsdp.planning.traffic import Wires

KINDS = ("all-gather", "reduce-scatter", "all-reduce")


class Durations(Protocol):
    """How long things take, in seconds."""

    @property
    def shared(self) -> bool:
        """Whether the collectives of both axes take turns on one link."""
        ...

    def compute(self, verb: Verb, unit: int) -> float:
        """A unit's own part of forward or backward."""
        ...

    def collective(self, event: Event) -> float:
        """What an event starts; 0 if that is no collective."""
        ...


@dataclass(frozen=True)
class TimePlan:
    """A step's time, in seconds.

    Attributes:
        step: the whole: computing, waiting and the optimizer.
        compute: what forwards and backwards take without communication.
        busy: by kind of collective, how long its calls take, whether hidden or not.
        exposed: by kind, how long computing waits for it.
        optimizer: what the optimizer's step takes.
    """

    step: float
    compute: float
    busy: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    optimizer: float = 0.0

    @property
    def exposed_share(self) -> float:
        """Part of the step in which nothing is computed."""
        return sum(self.exposed.values()) / self.step if self.step else 0.0

    def with_optimizer(self, seconds: float) -> TimePlan:
        """The same with an optimizer's step behind it."""
        return replace(self, step=self.step + seconds, optimizer=seconds)


def clock(events: Sequence[Event], durations: Durations, device: bool, arriving: Sequence[float] = ()) -> TimePlan:
    """Runs a step: computing goes on until it has to wait, collectives of a link run one after the other.

    Args:
        events: the step.
        durations: of its parts.
        device: whether streams order the work; else an all-reduce is started by the host, when it has seen the
            reduce-scatter done.
        arriving: of each unit, how long other replicas' parts of its shards travel that the optimizer stepped just before:
            one behind the other from the start, and a unit's gather is behind its own.
    """
    now = compute = 0.0
    free = {"shard": 0.0, "replicate": 0.0}
    ends: dict[tuple[str, int], float] = {}
    busy, exposed = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)

    def start(kind: str, event: Event, ready: float) -> None:
        link = "replicate" if kind == "all-reduce" and not durations.shared else "shard"
        duration = durations.collective(event)
        end = ready
        if duration:
            end = free[link] = max(ready, free[link]) + duration
        busy[kind] += duration
        for unit in event.units:
            ends[kind, unit] = end

    def wait(kind: str, unit: int) -> None:
        nonlocal now
        end = ends.pop((kind, unit), 0.0)
        exposed[kind] += max(0.0, end - now)
        now = max(now, end)

    landed: dict[int, float] = {}
    link = "shard" if durations.shared else "replicate"
    for unit, duration in enumerate(arriving):
        free[link] += duration
        busy["all-gather"] += duration
        landed[unit] = free[link] if duration else 0.0
    for event in events:
        verb, unit = event.verb, event.units[0]
        if verb in (Verb.GATHER, Verb.REGATHER):
            ready = landed.pop(unit, 0.0)
            if not device:  # the host waits before it starts
                exposed["all-gather"] += max(0.0, ready - now)
                now = max(now, ready)
            start("all-gather", event, max(now, ready))
        elif verb is Verb.OPEN:
            wait("all-gather", unit)
        elif verb in (Verb.FORWARD, Verb.BACKWARD):
            duration = durations.compute(verb, unit)
            now += duration
            compute += duration
        elif verb is Verb.SCATTER:
            start("reduce-scatter", event, now)
        elif verb is Verb.RELEASE:
            wait("reduce-scatter", unit)
        elif verb in (Verb.ALL_REDUCE, Verb.SUM_EARLY):
            scattered = max(ends.get(("reduce-scatter", unit), 0.0) for unit in event.units)
            start("all-reduce", event, scattered if device else now)
        elif verb in (Verb.LAND, Verb.DEFER):
            wait("all-reduce", unit)
    return TimePlan(now, compute, busy, exposed)


@dataclass(frozen=True)
class Predicted:
    """Durations by the roofline: flops over flops per second, bytes over bytes per second.

    A weight costs 2 flops per token and element in forward, as much again for the gradient of its input, and as much
    again for its own if it is trainable. Attention is causal: a token meets half of its sequence, at 4 flops per element of
    attention's width and token met. Backward computes scores again, as fused attention does: 2.5 times as much.

    Attributes:
        units: of the step.
        wires: their collectives.
        tokens: of a micro-batch on a rank.
        seq_len: tokens of a sequence.
        flops: per second, as achieved.
        recompute: whether backward runs forward again (activation checkpointing), in all units but the root and the head.
    """

    units: Sequence[UnitPlan]
    wires: Wires
    tokens: int
    seq_len: int
    flops: float
    recompute: Recompute = False

    @property
    def shared(self) -> bool:
        """Both axes need the links between nodes as soon as a shard group spans nodes."""
        wires = self.wires
        shard, replicate = (wires.link.members(axis, wires.replicas, wires.shards) for axis in ("shard", "replicate"))
        return shard < wires.shards and replicate < wires.replicas

    @cached_property
    def head(self) -> UnitPlan | None:
        """The unit of the head alone, which is not recomputed."""
        return head_of(self.units)

    def compute(self, verb: Verb, unit: int) -> float:
        """See `Durations`."""
        facts = self.units[unit].facts
        in_block = facts.parent is not None and self.units[unit] is not self.head
        forward = 2 * sum(param.numel * param.active for param in facts.params)
        attention = 4 * facts.attention * self.seq_len / 2
        if verb is Verb.FORWARD:
            return (forward + attention) * self.tokens / self.flops
        trained = 2 * sum(param.numel * param.active for param in facts.params if param.trainable)
        again = 0.0
        if self.recompute is not False and in_block:
            again = forward / 2 if self.recompute == "selective" else forward + attention
        return (forward + trained + 2.5 * attention + again) * self.tokens / self.flops

    def collective(self, event: Event) -> float:
        """See `Durations`."""
        return sum(one.seconds for one in self.wires.of(event, self.units))

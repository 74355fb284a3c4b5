"""The plan of a step, as data: units, collectives, memory, time. Built from facts alone.

facts --layouts--> units --schedule--> events --traffic--> collectives
                                              --memory---> peak
                                              --timing---> step, exposed waits
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from hsdp.planning.facts import UnitFacts
from hsdp.planning.layouts import UnitPlan, plan_unit
from hsdp.planning.memory import MemoryPlan, replay
from hsdp.planning.schedule import Event, rehearse
from hsdp.planning.timing import Predicted, TimePlan, clock
from hsdp.planning.traffic import Collective, Link, Wires, add_up

PlanT = TypeVar("PlanT", bound="PlanData")


@dataclass(frozen=True)
class Assumptions:
    """What a plan has to be told, because neither the model nor the mesh shows it.

    Attributes:
        tokens_per_rank: tokens of one micro-batch on one rank.
        micro_batches: forwards and backwards per step, each within `accumulate(last=...)`.
        optimizer_states: tensors of optimizer state per parameter, in its dtype (AdamW: 2). Its own temporaries are not
            counted: a fused optimizer has none.
        over_replicas: the optimizer's step is shared out among replicas (`hsdp.optim.local(over_replicas=True)`).
        activations: bytes that autograd holds when a forward ends.
        link: how ranks are connected.
        flops: per second and rank, as achieved; the default is 40 % of an H100's nominal 989e12 in bf16.
        memory: bytes of a rank's device; None: not compared.
        recompute: backward runs forward again (activation checkpointing).
        backend: of the process groups: "nccl", "gloo", ...
        streams: a device's streams order the work, as on CUDA; else the host does, as on gloo.
    """

    tokens_per_rank: int
    micro_batches: int = 1
    optimizer_states: int = 2
    over_replicas: bool = False
    activations: int = 0
    link: Link = field(default_factory=Link)
    flops: float = 400e12
    memory: int | None = None
    recompute: bool = False
    backend: str = "nccl"
    streams: bool = True

    def __post_init__(self) -> None:
        smallest = {"tokens_per_rank": 1, "micro_batches": 1, "optimizer_states": 0, "activations": 0}
        for name, bound in smallest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < bound:
                raise ValueError(f"plan({name}={value!r}): expected an integer of at least {bound}")
        if not isinstance(self.flops, (int, float)) or not self.flops > 0:
            raise ValueError(f"plan(flops={self.flops!r}): expected flops per second, a number above 0")


@dataclass(frozen=True)
class PlanData(ABC):
    """A step of a model on a mesh, in numbers. `Plan`, which users have, says what they are."""

    name: str
    replicas: int
    shards: int
    assumptions: Assumptions
    units: tuple[UnitPlan, ...]
    collectives: tuple[Collective, ...]
    memory: MemoryPlan
    time: TimePlan
    events: tuple[Event, ...] = field(repr=False)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(unit.numel for unit in self.units)

    @property
    def fits(self) -> bool:
        """Whether the peak fits the device's memory, if that is known."""
        return self.assumptions.memory is None or self.memory.total <= self.assumptions.memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all ranks together train on, per second."""
        per_step = self.assumptions.tokens_per_rank * self.assumptions.micro_batches
        return per_step * self.replicas * self.shards / self.time.step if self.time.step else 0.0

    @cached_property
    def by_unit(self) -> tuple[tuple[Collective, ...], ...]:
        """The collectives of each unit; those of a bucket are counted at its first one."""
        found: list[list[Collective]] = [[] for _ in self.units]
        for event in self.events:
            found[event.units[0]] += self._wires.of(event, self.units)
        return tuple(map(add_up, found))

    @property
    @abstractmethod
    def bottleneck(self) -> str:
        """What holds the step up, and what to do about it: one sentence."""

    @property
    def _wires(self) -> Wires:
        return Wires(self.replicas, self.shards, self.assumptions.link, self.assumptions.backend)

    def on(self, replicas: int, shards: int) -> PlanData:
        """The same model on another mesh."""
        return self.of(self.name, [unit.facts for unit in self.units], replicas, shards, self.assumptions)

    def sharing(self) -> PlanData:
        """The same with the optimizer's step shared out among replicas."""
        told = replace(self.assumptions, over_replicas=True)
        return self.of(self.name, [unit.facts for unit in self.units], self.replicas, self.shards, told)

    def time_with(self, tokens_per_rank: int) -> TimePlan:
        """The time of a step with another number of tokens."""
        told = self.assumptions
        durations = Predicted(self.units, self._wires, tokens_per_rank, told.flops, told.recompute)
        return clock(self.events, durations, told.streams)

    @classmethod
    def of(
        cls: type[PlanT],
        name: str,
        facts: Sequence[UnitFacts],
        replicas: int,
        shards: int,
        assumptions: Assumptions,
    ) -> PlanT:
        """Plans a step of a model that is given as facts; needs no module, no process group and no device."""
        told = assumptions
        units = tuple(plan_unit(one, replicas, shards, told.backend, told.streams) for one in facts)
        events = tuple(rehearse(units, told.micro_batches, told.streams))
        wires = Wires(replicas, shards, told.link, told.backend)
        collectives = [one for event in events for one in wires.of(event, units)]
        sharers = replicas if told.over_replicas else 1
        if sharers > 1:
            collectives += [one for unit in units for one in wires.stepped(unit)]
        return cls(
            name,
            replicas,
            shards,
            told,
            units,
            add_up(collectives),
            replay(events, units, told.optimizer_states, told.activations, told.backend, sharers),
            clock(events, Predicted(units, wires, told.tokens_per_rank, told.flops, told.recompute), told.streams),
            events,
        )


@dataclass(frozen=True)
class ComparisonData:
    """Plans of one model on several meshes."""

    plans: tuple[PlanData, ...]

    @property
    def best(self) -> PlanData | None:
        """The one that trains on most tokens per second and rank, of those that fit; None if none does."""
        fitting = [one for one in self.plans if one.fits]
        return max(fitting, key=lambda one: one.tokens_per_second / (one.replicas * one.shards), default=None)

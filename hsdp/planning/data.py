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
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from hsdp.params.param import PlacementFn
from hsdp.planning.activations import Recompute, UnitActivations, estimate, scaled
from hsdp.planning.facts import UnitFacts, placed
from hsdp.planning.layouts import UnitPlan, plan_unit
from hsdp.planning.machines import MACHINES, machine_of
from hsdp.planning.memory import MemoryPlan, replay
from hsdp.planning.optimizers import KINDS, Kind, OptimizerPlan
from hsdp.planning.schedule import Event, simulate_step
from hsdp.planning.timing import Predicted, TimePlan, clock
from hsdp.planning.traffic import Collective, Link, Wires, add_up

PlanT = TypeVar("PlanT", bound="PlanData")


@dataclass(frozen=True)
class Assumptions:
    """What a plan has to be told, because neither the model nor the mesh shows it.

    Attributes:
        tokens_per_rank: tokens of one micro-batch on one rank.
        micro_batches: forwards and backwards per step, each within `accumulate(last=...)`.
        optimizer: "elementwise" (SGD, AdamW, ...), or "muon": `hsdp.optim.Muon` for the matrices of blocks, which have one
            state, and an elementwise one for the rest.
        optimizer_states: tensors of elementwise optimizer state per parameter, in its dtype (AdamW: 2). Its own
            temporaries are not counted: a fused optimizer has none.
        over_replicas: gradients and the optimizer's step are shared out among replicas
            (`hsdp.optim.local(over_replicas=True)`, `hsdp.optim.Muon(over_replicas=True)`).
        activations: bytes that autograd holds when a forward ends; None: estimated from the shapes of weights (see
            `hsdp.planning.activations`).
        seq_len: tokens of one sequence, for attention; more than `tokens_per_rank` where ranks share sequences (context
            parallelism, whose own communication is not planned). None: `tokens_per_rank`, but at most 8,192.
        machine: title of what ranks run on, where the next four are its own; "" if they were told.
        link: how ranks are connected.
        flops: per second and rank, as achieved.
        bandwidth: bytes per second between a rank and its memory, as achieved; the optimizer's step is bound by it.
        memory: bytes of a rank's device; None: not compared.
        recompute: backward runs forward again (activation checkpointing): False, True for all of each block, "selective"
            for every other product.
        backend: of the process groups: "nccl", "gloo", ...
        streams: a device's streams order the work, as on CUDA; else the host does, as on gloo.
    """

    tokens_per_rank: int
    micro_batches: int = 1
    optimizer: Kind = "elementwise"
    optimizer_states: int = 2
    over_replicas: bool = False
    activations: int | None = None
    seq_len: int | None = None
    machine: str = MACHINES["h100"].title
    link: Link = field(default_factory=Link)
    flops: float = MACHINES["h100"].flops
    bandwidth: float = MACHINES["h100"].bandwidth
    memory: int | None = None
    recompute: Recompute = False
    backend: str = "nccl"
    streams: bool = True

    def __post_init__(self) -> None:
        smallest = {"tokens_per_rank": 1, "micro_batches": 1, "optimizer_states": 0}
        optional = {"activations": 0, "seq_len": 1, "memory": 1}
        smallest |= {name: bound for name, bound in optional.items() if getattr(self, name) is not None}
        for name, bound in smallest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < bound:
                raise ValueError(f"plan({name}={value!r}): expected an integer of at least {bound}")
        for name, unit in (("flops", "flops"), ("bandwidth", "bytes")):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"plan({name}={value!r}): expected {unit} per second, a number above 0")
        if not isinstance(self.link, Link):
            raise TypeError(f"plan(link={self.link!r}): expected a hsdp.planning.Link, e.g. Link(fast=450e9, slow=50e9)")
        if self.optimizer not in KINDS:
            raise ValueError(f"plan(optimizer={self.optimizer!r}): expected one of {', '.join(map(repr, KINDS))}")
        if not isinstance(self.over_replicas, bool):
            raise TypeError(f"plan(over_replicas={self.over_replicas!r}): expected True or False")
        if not isinstance(self.recompute, bool) and self.recompute != "selective":
            raise ValueError(f'plan(recompute={self.recompute!r}): expected False, True or "selective"')

    @property
    def sequence(self) -> int:
        """Tokens of one sequence."""
        return self.seq_len or min(self.tokens_per_rank, 8192)


def backend_of(name: Any, otherwise: str = "") -> str:
    """A backend's name, as torch has it; `otherwise` stands for None.

    Raises:
        TypeError, ValueError: it is none that torch knows.
    """
    if name is None and otherwise:
        return otherwise
    if not isinstance(name, str):
        raise TypeError(f"plan(backend={name!r}): expected the name of a backend, e.g. 'nccl' or 'gloo'")
    known = sorted({*dist.Backend.backend_list, "fake"} - {dist.Backend.UNDEFINED})
    if name.lower() not in known:
        raise ValueError(f"plan(backend={name!r}): not known; choose one of {', '.join(known)}, or register it with torch")
    return name.lower()


@dataclass(frozen=True)
class Advice:
    """Something to change.

    Attributes:
        text: what, and what it gains, for people.
        options: arguments of `hsdp.plan` (and of `Plan.changed`) that carry it out.
        promise: what gets better: "fits", "speed" (tokens per second and rank) or "padding".
        gain: for "speed", how many times as many tokens per second and rank; else 1.
    """

    text: str
    options: dict[str, Any] = field(hash=False)
    promise: Literal["fits", "speed", "padding"]
    gain: float = 1.0


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
        return self.assumptions.memory is None or self.memory.most <= self.assumptions.memory

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
        stepping = _optimizer(self.units, self._wires, self.assumptions)
        for index, unit in enumerate(self.units):
            found[index] += stepping.arriving(unit)
        return tuple(map(add_up, found))

    @property
    @abstractmethod
    def bottleneck(self) -> str:
        """What holds the step up, and what to do about it: one sentence."""

    @property
    @abstractmethod
    def advice(self) -> tuple[Advice, ...]:
        """What to change, as arguments."""

    @property
    def _wires(self) -> Wires:
        assumed = self.assumptions
        return Wires(self.replicas, self.shards, assumed.link, assumed.backend, assumed.over_replicas)

    def changed(
        self: PlanT,
        *,
        mesh: tuple[int, int] | None = None,
        reshard_after_forward: bool | int | None = None,
        shard_placement_fn: PlacementFn | None = None,
        **assumptions: Any,
    ) -> PlanT:
        """The plan of the same model with something else: what `plan(...)` with these arguments would be.

        Args:
            mesh: another `(replicas, shards)`.
            reshard_after_forward, shard_placement_fn: of all units, as for `fully_shard`; None: as they are.
            assumptions: other values of `Assumptions`. Given activations grow with the tokens per rank. `machine`,
                as for `plan`, brings its link, flops and bandwidth, and `backend` whether streams order the work.
        """
        assumed = self.assumptions
        if "machine" in assumptions:
            rates = machine_of(assumptions["machine"])
            own = {"link": rates.link, "flops": rates.flops, "bandwidth": rates.bandwidth}
            assumptions = {**own, **assumptions, "machine": rates.title}
        if "backend" in assumptions:
            assumptions["backend"] = backend_of(assumptions["backend"])
            assumptions = {"streams": assumptions["backend"] != "gloo", **assumptions}
        if assumed.activations is not None and "tokens_per_rank" in assumptions:
            grown = assumed.activations * assumptions["tokens_per_rank"] // assumed.tokens_per_rank
            assumptions = {"activations": grown, **assumptions}
        now = replace(assumed, **assumptions)
        same = (mesh, reshard_after_forward, shard_placement_fn) == (None, None, None)
        if same and assumptions.keys() <= _KEEP_UNITS:
            memory = _memory(self.events, self.units, self._wires, now)
            return replace(self, assumptions=now, memory=memory, time=_time(self.events, self.units, self._wires, now))
        facts = [unit.facts for unit in self.units]
        if reshard_after_forward is not None:
            facts = [replace(unit, reshard_after_forward=reshard_after_forward) for unit in facts]
        if shard_placement_fn is not None:
            facts = [placed(unit, shard_placement_fn) for unit in facts]
        replicas, shards = mesh or (self.replicas, self.shards)
        return self.of(self.name, facts, replicas, shards, now)

    def time_with(self, tokens_per_rank: int) -> TimePlan:
        """The time of a step with another number of tokens."""
        assumed = replace(self.assumptions, tokens_per_rank=tokens_per_rank)
        return _time(self.events, self.units, self._wires, assumed)

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
        units = tuple(plan_unit(one, replicas, shards, assumptions.backend, assumptions.streams) for one in facts)
        events = tuple(simulate_step(units, assumptions.micro_batches, assumptions.streams))
        wires = Wires(replicas, shards, assumptions.link, assumptions.backend, assumptions.over_replicas)
        collectives = [one for event in events for one in wires.of(event, units)]
        stepping = _optimizer(units, wires, assumptions)
        collectives += [*(one for unit in units for one in stepping.arriving(unit)), *stepping.exchanged]
        return cls(
            name,
            replicas,
            shards,
            assumptions,
            units,
            add_up(collectives),
            _memory(events, units, wires, assumptions),
            _time(events, units, wires, assumptions),
            events,
        )


_KEEP_UNITS = {"tokens_per_rank", "seq_len", "activations", "recompute", "memory", "flops", "bandwidth", "optimizer_states"}
"""Assumptions that change neither what is communicated nor the order of things."""


def _activations(units: Sequence[UnitPlan], assumed: Assumptions) -> list[UnitActivations]:
    if assumed.activations is not None:
        return scaled(units, assumed.activations)
    return estimate(units, assumed.tokens_per_rank, assumed.recompute)


def _optimizer(units: Sequence[UnitPlan], wires: Wires, assumed: Assumptions) -> OptimizerPlan:
    return OptimizerPlan(assumed.optimizer, units, wires, assumed.optimizer_states, assumed.flops, assumed.bandwidth)


def _memory(events: Sequence[Event], units: Sequence[UnitPlan], wires: Wires, assumed: Assumptions) -> MemoryPlan:
    stepping = _optimizer(units, wires, assumed)
    held = _activations(units, assumed)
    return replay(events, units, stepping.state_bytes, held, assumed.backend, assumed.over_replicas, stepping.step_bytes)


def _time(events: Sequence[Event], units: Sequence[UnitPlan], wires: Wires, assumed: Assumptions) -> TimePlan:
    """Forwards, backwards and the optimizer; what it stepped travels to other replicas beside the next step."""
    predicted = Predicted(units, wires, assumed.tokens_per_rank, assumed.sequence, assumed.flops, assumed.recompute)
    stepping = _optimizer(units, wires, assumed)
    arriving = [sum(one.seconds for one in stepping.arriving(unit)) for unit in units]
    return clock(events, predicted, assumed.streams, arriving).with_optimizer(stepping.seconds)

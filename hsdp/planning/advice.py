"""The bottleneck of a plan in one sentence, with what to do about it: the plan itself is asked what would help."""

from __future__ import annotations

from hsdp.format import bytes_of, seconds_of
from hsdp.planning.data import PlanData

HIDDEN = 0.03
"""A wait below this part of the step is the fill and the drain, which no schedule hides."""

_MOST_TOKENS = 64
"""More than so many times the tokens is no advice."""


_MOST_MEMORY = 1.5
"""Where the device's memory is not known, a mesh that needs so many times the present peak is no advice."""

_PADDED = 0.05
"""Shards of which more than this part is padding are worth a word."""


def advise(plan: PlanData) -> str:
    """What holds the step up, or does not fit, and what would help: a sentence, and one about padding if it matters."""
    return " ".join(filter(None, (_bottleneck(plan), _padding(plan))))


def _padding(plan: PlanData) -> str | None:
    worst = max(plan.units, key=lambda unit: unit.total("padding_bytes"))
    padding, held = (sum(unit.total(name) for unit in plan.units) for name in ("padding_bytes", "shard_bytes"))
    if padding <= _PADDED * held:
        return None
    dtype_groups = [group for group in worst.dtype_groups if not group.alone]
    pairs = [
        (piece, param) for group in dtype_groups for piece, param in zip(group.layout.pieces, group.params, strict=True)
    ]
    _, param = max(pairs, key=lambda pair: pair[0].numel * plan.shards - pair[1].numel)
    return (
        f"{padding / held:.0%} of the shards, and of what is sent, is padding, most of it of {param.name!r} {param.shape} "
        f"in unit {worst.facts.name!r}, whose dim {param.dim} does not go evenly on {plan.shards} ranks: pass "
        "shard_placement_fn=hsdp.least_padding."
    )


def _bottleneck(plan: PlanData) -> str:
    if not plan.fits:
        return _does_not_fit(plan)
    kind, wait = max(plan.time.exposed.items(), key=lambda item: item[1])
    if not plan.time.step or wait <= HIDDEN * plan.time.step:
        return (
            f"compute is the bottleneck: communication adds {plan.time.exposed_share:.1%} to a step of "
            f"{seconds_of(plan.time.step)}, so more or faster ranks are what makes it shorter."
        )
    visits = sum(1 for unit in plan.units if unit.numel) * plan.assumptions.micro_batches
    remedies = [remedy for remedy in (_more_tokens(plan, kind), _other_mesh(plan), _policy(plan, kind)) if remedy]
    advice = ", or ".join(remedies) or "faster links would help, nothing else does"
    return (
        f"{kind} is exposed by {seconds_of(wait / visits)} per unit ({wait / plan.time.step:.0%} of a step of "
        f"{seconds_of(plan.time.step)}): {advice}."
    )


def _does_not_fit(plan: PlanData) -> str:
    memory = plan.assumptions.memory
    assert memory is not None, "without a limit everything fits"
    term, largest = max(plan.memory.peak.items(), key=lambda item: item[1])
    other = max((one for one in _others(plan) if one.fits), key=lambda one: one.tokens_per_second, default=None)
    shares = plan.replicas > 1 and not plan.assumptions.over_replicas and plan.sharing().fits
    if other is not None:
        advice = f"use {other.replicas} x {other.shards} ({bytes_of(other.memory.total)})"
    elif term == "activations":
        advice = "recompute activations, or lower the tokens per rank"
    else:
        advice = "use more ranks, smaller units or smaller dtypes: no mesh of this many ranks is enough"
    if shares:
        sharing = (
            "share the optimizer's states out among replicas with hsdp.optim.local(..., over_replicas=True) "
            f"({bytes_of(plan.sharing().memory.total)})"
        )
        advice = f"{advice}, or {sharing}" if other is not None else sharing
    return (
        f"it does not fit: the peak is {bytes_of(plan.memory.total)} of {bytes_of(memory)}, of which "
        f"{bytes_of(largest)} are {term}; {advice}."
    )


def _more_tokens(plan: PlanData, kind: str) -> str | None:
    """The fewest tokens per rank, to a sixteenth, with which that wait is hidden."""
    tokens = plan.assumptions.tokens_per_rank

    def hides(candidate: int) -> bool:
        time = plan.time_with(candidate)
        return time.exposed[kind] <= HIDDEN * time.step

    high = tokens
    while not hides(high):
        high *= 2
        if high > _MOST_TOKENS * tokens:
            return None
    low = high // 2
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return f"raise tokens per rank to {high:,}"


def _others(plan: PlanData) -> list[PlanData]:
    """The same on the other meshes of as many ranks."""
    world = plan.replicas * plan.shards
    sizes = [shards for shards in range(1, world + 1) if world % shards == 0 and shards != plan.shards]
    return [plan.on(world // shards, shards) for shards in sizes if _can(plan, shards)]


def _can(plan: PlanData, shards: int) -> bool:
    """Whether no unit asks for parts that do not divide so many shards."""
    policies = [unit.facts.reshard_after_forward for unit in plan.units]
    return not any(type(policy) is int and shards % policy for policy in policies)


def _other_mesh(plan: PlanData) -> str | None:
    limit = plan.assumptions.memory or _MOST_MEMORY * plan.memory.total
    fitting = [one for one in _others(plan) if one.memory.total <= limit]
    other = min(fitting, key=lambda one: one.time.step, default=None)
    if other is None or other.time.step > (1 - HIDDEN) * plan.time.step:
        return None
    shorter = 1 - other.time.step / plan.time.step
    return (
        f"use {other.replicas} x {other.shards} (a step {shorter:.0%} shorter, a peak of {bytes_of(other.memory.total)} "
        f"instead of {bytes_of(plan.memory.total)})"
    )


def _policy(plan: PlanData, kind: str) -> str | None:
    """What costs memory, or fewer steps, instead."""
    if kind == "all-reduce":
        return "accumulate more micro-batches per step, which share one all-reduce"
    keeps = all(unit.keeps for unit in plan.units)
    return None if keeps or kind != "all-gather" else "keep parameters whole with reshard_after_forward=False"

"""What holds a plan up, and what to do about it.

Every piece of advice was planned before it is given: what it promises is read from that plan, and what would not help,
or not fit, is not said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hsdp.comm.tree import fits_tree
from hsdp.format import bytes_of, seconds_of
from hsdp.params.placement import least_padding
from hsdp.planning.data import Advice, PlanData

HIDDEN = 0.03
"""A wait below this part of the step is the fill and the drain, which no schedule hides; gains below it are none."""

_MOST = 64
"""More than so many times the tokens, micro-batches or ranks is no advice."""

_MOST_MEMORY = 1.5
"""Where the device's memory is not known, what needs so many times the present peak is no advice."""

_PADDED = 0.05
"""Shards of which more than this part is padding are worth a word."""


@dataclass(frozen=True)
class Diagnosis:
    """What holds a step up or does not fit, in words, and the advice that goes with it."""

    trouble: str
    advice: tuple[Advice, ...]
    otherwise: str

    def __str__(self) -> str:
        text = ", or ".join(one.text for one in self.advice) or self.otherwise
        return f"{self.trouble}: {text}."


def diagnose(plan: PlanData) -> tuple[Diagnosis, ...]:
    """What there is to say of a plan: of its step or its memory, and of padding if that matters."""
    return tuple(filter(None, (_step(plan) if plan.fits else _memory(plan), _padding(plan))))


# -- what does not fit ---------------------------------------------------------------------------------------------


def _memory(plan: PlanData) -> Diagnosis:
    limit = plan.assumptions.memory
    assert limit is not None, "without a limit everything fits"
    term, largest = max(plan.memory.peak.items(), key=lambda item: item[1])
    trouble = (
        f"it does not fit: the peak is {bytes_of(plan.memory.total)} of {bytes_of(limit)}, "
        f"of which {bytes_of(largest)} are {term}"
    )
    if plan.memory.step > plan.memory.total:
        trouble = f"it does not fit: the optimizer's step takes {bytes_of(plan.memory.step)} of {bytes_of(limit)}"
    for options in (_single_remedies(plan), _double_remedies(plan)):
        fitting = [(plan.changed(**one), one) for one in options]
        found = [(_rate(other), other, one) for other, one in fitting if other.fits]
        if found:
            best = sorted(found, key=lambda item: -item[0])[:2]
            advice = tuple(
                Advice(f"{_in_words(plan, one)} (a peak of {bytes_of(other.memory.most)})", one, "fits")
                for _, other, one in best
            )
            return Diagnosis(trouble, advice, "")
    return Diagnosis(trouble, (), "smaller units or smaller dtypes are needed, no mesh or batch is enough")


def _single_remedies(plan: PlanData) -> Iterator[dict[str, Any]]:
    yield from ({"mesh": mesh} for mesh in _other_meshes(plan))
    if plan.replicas > 1 and not plan.assumptions.over_replicas:
        yield {"over_replicas": True}
    yield from _recomputations(plan)
    yield from _fewer_tokens(plan)


def _double_remedies(plan: PlanData) -> Iterator[dict[str, Any]]:
    for first in _recomputations(plan):
        yield from (first | second for second in _fewer_tokens(plan.changed(**first)))
        yield from (first | {"mesh": mesh} for mesh in _other_meshes(plan))
    times = 2
    while times <= _MOST:
        meshes = [(plan.replicas, plan.shards * times), (1, plan.replicas * plan.shards * times)]
        options = [{"mesh": mesh} | first for mesh in meshes for first in ({}, *_recomputations(plan))]
        fitting = [one for one in options if _can(plan, one["mesh"]) and plan.changed(**one).fits]
        if fitting:
            yield from fitting
            return
        times *= 2


def _recomputations(plan: PlanData) -> Iterator[dict[str, Any]]:
    assumed = plan.assumptions
    if assumed.activations is None and assumed.recompute is not True and len(plan.units) > 1:
        yield from ({"recompute": what} for what in ("selective", True) if what != assumed.recompute)


def _fewer_tokens(plan: PlanData) -> Iterator[dict[str, Any]]:
    """Half as many tokens, and so on, until they fit, as long as there are whole sequences."""
    assumed = plan.assumptions
    tokens = assumed.tokens_per_rank // 2
    while tokens >= (assumed.seq_len or 1) and plan.memory.peak["activations"]:
        if plan.changed(tokens_per_rank=tokens).fits:
            yield {"tokens_per_rank": tokens}
            return
        tokens //= 2


# -- what is slow --------------------------------------------------------------------------------------------------


def _step(plan: PlanData) -> Diagnosis:
    time = plan.time
    kind, wait = max(time.exposed.items(), key=lambda item: item[1])
    if not time.step or wait <= HIDDEN * time.step:
        trouble = f"compute is the bottleneck: waits are {time.exposed_share:.1%} of a step of {seconds_of(time.step)}"
        if time.optimizer > time.compute:
            trouble = f"the optimizer is the bottleneck: {seconds_of(time.optimizer)} of a step of {seconds_of(time.step)}"
        return Diagnosis(trouble, _offers(plan, _without_waits(plan)), "more or faster ranks are what makes it shorter")
    visits = sum(1 for unit in plan.units if unit.numel) * plan.assumptions.micro_batches
    # Shared among replicas, gradients are reduce-scattered over them instead.
    shown = "reduce-scatter over replicas" if kind == "all-reduce" and plan.assumptions.over_replicas else kind
    trouble = (
        f"{shown} is exposed by {seconds_of(wait / visits)} per unit ({wait / time.step:.0%} of a step of "
        f"{seconds_of(time.step)})"
    )
    otherwise = "no other mesh, batch or policy that fits does better, faster links do"
    return Diagnosis(trouble, _offers(plan, _with_waits(plan, kind)), otherwise)


def _without_waits(plan: PlanData) -> Iterator[dict[str, Any]]:
    assumed = plan.assumptions
    if assumed.activations is None and assumed.recompute is not False:
        yield from ({"recompute": what} for what in (False, "selective") if what != assumed.recompute)
    if plan.time.optimizer > HIDDEN * plan.time.step:
        yield from ({"mesh": mesh} for mesh in _other_meshes(plan))
    yield from _shares(plan)


def _shares(plan: PlanData) -> Iterator[dict[str, Any]]:
    """Sharing the optimizer's step out among replicas, or no longer."""
    if plan.replicas > 1:
        yield {"over_replicas": not plan.assumptions.over_replicas}


def _with_waits(plan: PlanData, kind: str) -> Iterator[dict[str, Any]]:
    yield from _more_tokens(plan, kind)
    yield from ({"mesh": mesh} for mesh in _other_meshes(plan))
    yield from _shares(plan)
    if kind == "all-reduce":
        yield from _more_micro_batches(plan)
    elif kind == "all-gather" and not all(unit.keeps for unit in plan.units):
        yield {"reshard_after_forward": False}


def _more_tokens(plan: PlanData, kind: str) -> Iterator[dict[str, Any]]:
    """The fewest tokens per rank, to a sixteenth, with which that wait is hidden; else as many as fit."""
    assumed = plan.assumptions
    # Whole sequences, if the batch is made of them.
    grain = assumed.sequence if assumed.seq_len is not None and assumed.tokens_per_rank % assumed.sequence == 0 else 1

    def hides(tokens: int) -> bool:
        time = plan.time_with(tokens)
        return time.exposed[kind] <= HIDDEN * time.step

    high = assumed.tokens_per_rank // grain
    while not hides(high * grain) and high * grain <= _MOST * assumed.tokens_per_rank:
        high *= 2
    low = high // 2
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if hides(middle * grain) else (middle, high)
    tokens = high * grain
    while tokens > assumed.tokens_per_rank:
        if _affordable(plan, plan.changed(tokens_per_rank=tokens)):
            yield {"tokens_per_rank": tokens}
            return
        tokens = tokens // 2 // grain * grain


def _more_micro_batches(plan: PlanData) -> Iterator[dict[str, Any]]:
    """The fewest that hide the all-reduce, by doubling; else the most that are advice."""
    count = most = plan.assumptions.micro_batches
    while count < 16 * most:
        count *= 2
        time = plan.changed(micro_batches=count).time
        if time.exposed["all-reduce"] <= HIDDEN * time.step:
            break
    yield {"micro_batches": count}


def _offers(plan: PlanData, options: Iterator[dict[str, Any]]) -> tuple[Advice, ...]:
    """Of each kind of change the best one, if it fits and gains anything; the best kinds first."""
    best: dict[tuple[str, ...], Advice] = {}
    for one in options:
        other = plan.changed(**one)
        gain = _rate(other) / _rate(plan) if plan.time.step else 1.0
        key = tuple(one)
        if gain <= 1 + HIDDEN or not _affordable(plan, other) or (key in best and best[key].gain >= gain):
            continue
        effect = f"{gain - 1:.0%} more tokens/s, a peak of {bytes_of(other.memory.most)}"
        best[key] = Advice(f"{_in_words(plan, one)} ({effect} instead of {bytes_of(plan.memory.most)})", one, "speed", gain)
    return tuple(sorted(best.values(), key=lambda advice: -advice.gain))


def _affordable(plan: PlanData, other: PlanData) -> bool:
    return other.memory.most <= (plan.assumptions.memory or _MOST_MEMORY * plan.memory.most)


def _rate(plan: PlanData) -> float:
    """Tokens per second and rank."""
    return plan.tokens_per_second / (plan.replicas * plan.shards)


# -- meshes and words ----------------------------------------------------------------------------------------------


def _other_meshes(plan: PlanData) -> list[tuple[int, int]]:
    """The other meshes of as many ranks."""
    world = plan.replicas * plan.shards
    sizes = [shards for shards in range(1, world + 1) if world % shards == 0 and shards != plan.shards]
    return [mesh for shards in sizes if _can(plan, mesh := (world // shards, shards))]


def _can(plan: PlanData, mesh: tuple[int, int]) -> bool:
    """Whether no unit asks for parts that do not divide so many shards, or for an order of sums that they cannot have."""
    if any(unit.in_tree for unit in plan.units) and not fits_tree(*mesh):
        return False
    _, shards = mesh
    policies = [unit.facts.reshard_after_forward for unit in plan.units]
    return not any(type(policy) is int and shards % policy != 0 for policy in policies)


def _in_words(plan: PlanData, options: dict[str, Any]) -> str:
    world = plan.replicas * plan.shards
    said = []
    for name, value in options.items():
        if name == "mesh":
            ranks = value[0] * value[1]
            more = f"{ranks:,} ranks instead of {world:,} as " if ranks != world else ""
            said.append(f"use {more}{value[0]} x {value[1]}")
        elif name == "tokens_per_rank":
            said.append(f"{'raise' if value > plan.assumptions.tokens_per_rank else 'lower'} tokens per rank to {value:,}")
        elif name == "micro_batches":
            said.append(f"accumulate {value} micro-batches per step, whose sums are sent between replicas once")
        elif name == "over_replicas":
            by = "hsdp.optim.Muon" if plan.assumptions.optimizer == "muon" else "hsdp.optim.local"
            shared = f"share the optimizer's step out among replicas with {by}(..., over_replicas=True)"
            said.append(
                shared if value else "let every replica take the whole optimizer's step, without over_replicas=True"
            )
        elif name == "reshard_after_forward":
            said.append("keep parameters whole with reshard_after_forward=False")
        elif name == "recompute":
            how = {False: "keep all activations", True: "recompute the activations of blocks"}
            said.append(how.get(value, "recompute every other product (selective checkpointing)"))
    return " and ".join(said)


# -- padding -------------------------------------------------------------------------------------------------------


def _padding(plan: PlanData) -> Diagnosis | None:
    padding, held = (sum(unit.total(name) for unit in plan.units) for name in ("padding_bytes", "shard_bytes"))
    if padding <= _PADDED * held:
        return None
    worst = max(plan.units, key=lambda unit: unit.total("padding_bytes"))
    dtype_groups = [group for group in worst.dtype_groups if not group.alone]
    pairs = [
        (piece, param) for group in dtype_groups for piece, param in zip(group.layout.pieces, group.params, strict=True)
    ]
    if not pairs:  # one rank holds everything: what is left are the flat buffers' alignments
        return None
    piece, param = max(pairs, key=lambda pair: pair[0].numel * plan.shards - pair[1].numel)
    trouble = (
        f"{padding / held:.0%} of the shards{', and of what is sent,' * (not piece.uneven)} is padding, most of it of "
        f"{param.name!r} {param.shape} "
        f"in unit {worst.facts.name!r}, whose dim {param.dim} does not go evenly on {plan.shards} ranks"
    )
    less = sum(unit.total("padding_bytes") for unit in plan.changed(shard_placement_fn=least_padding).units)
    helps = less < (1 - HIDDEN) * padding
    options = {"shard_placement_fn": least_padding}
    advice = Advice("pass shard_placement_fn=hsdp.least_padding", options, "padding")
    return Diagnosis(trouble, (advice,) if helps else (), "fewer shard ranks pad less")

"""Plans as text, JSON and CSV. Nothing is computed here."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from hsdp.format import bytes_of, count_of, dtype_of, pattern_of, seconds_of, several, together
from hsdp.planning.activations import Recompute
from hsdp.planning.data import PlanData
from hsdp.planning.layouts import GroupPlan, UnitPlan
from hsdp.planning.memory import TERMS
from hsdp.planning.traffic import Collective

_SHORT = {"all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR"}
Row = Sequence[str]


def as_text(plan: PlanData) -> str:
    """The plan as tables."""
    assumed = plan.assumptions
    head = [
        f"{plan.name}: {count_of(plan.numel)} parameters in {several(len(plan.units), 'unit')} on "
        f"{several(plan.replicas, 'replica')} x {several(plan.shards, 'shard')} ({_nodes(plan)})",
        f"{assumed.tokens_per_rank:,} tokens per rank x {several(assumed.micro_batches, 'micro-batch', 'es')}, backend "
        f"{assumed.backend}",
    ]
    tables = [
        "units (sent: bytes per rank and step; fast: inside a node, slow: between nodes; direct: moved without a copy)",
        _table(_UNIT_HEADS, _unit_rows(plan), left=2),
        "collectives of a step",
        _table(
            ("kind", "axis", "ranks", "calls", "transfers", "sent", "fast", "slow", "takes", "exposed"),
            [_collective_row(plan, one) for one in plan.collectives],
            left=2,
        ),
        f"memory of a rank, at the peak ({plan.memory.at})",
        _table(("term", "at the peak", "at most", "what"), _memory_rows(plan), left=1, last=True),
        f"time of a step {seconds_of(plan.time.step)}: compute {seconds_of(plan.time.compute)}, exposed communication "
        f"{seconds_of(sum(plan.time.exposed.values()))} ({plan.time.exposed_share:.1%}), optimizer "
        f"{seconds_of(plan.time.optimizer)}; {_rate(plan.tokens_per_second)} tokens/s in all\n",
        "assumed",
        *(f"  {line}" for line in _assumed([plan])),
        "",
        plan.bottleneck[0].upper() + plan.bottleneck[1:],
    ]
    if any(group.kind.extension for unit in plan.units for group in unit.dtype_groups):
        tables.append("Subclass: the tensors say what of them is gathered; here it is counted in their compute dtype.")
    return "\n".join([*head, "", *tables])


def _nodes(plan: PlanData) -> str:
    world, link = plan.replicas * plan.shards, plan.assumptions.link
    each = link.in_a_node(world)
    return f"{several(-(-world // each), 'node')} of {each}"


def _rate(tokens: float) -> str:
    return count_of(tokens).replace(" ", "")


_RECOMPUTED: dict[Recompute, str] = {
    False: "nothing is recomputed",
    True: "blocks are recomputed",
    "selective": "every other product of blocks is recomputed",
}


def _assumed(plans: Sequence[PlanData]) -> Iterable[str]:
    """What the figures rest on, one thing a line; of plans that differ in their meshes alone."""
    plan = plans[0]
    assumed, link = plan.assumptions, plan.assumptions.link
    yield (
        f"{assumed.machine}: a rank achieves {assumed.flops / 1e12:.4g} Tflop/s and "
        f"{assumed.bandwidth / 1e9:.4g} GB/s of memory, {link.fast / 1e9:.4g} GB/s in a node, {link.slow / 1e9:.4g} GB/s "
        "between nodes (measure yours: python -m hsdp doctor)"
    )
    if assumed.activations is not None:
        yield f"activations: {bytes_of(assumed.activations)}, as told"
    else:
        how = _RECOMPUTED[assumed.recompute]
        yield f"activations: estimated from the shapes of weights, {how}, the loss of logits in fp32"
    width = sum(unit.facts.attention for unit in plan.units)
    yield (
        f"attention: causal over sequences of {assumed.sequence:,} tokens, never stored"
        if width
        else "attention: none was recognised by the names of its layers, so its flops are not counted"
    )
    if any(unit.in_tree for unit in plan.units):
        yield "sums: in one binary order of ranks (reduction='tree'), the time of adding them not counted"
    states = several(assumed.optimizer_states, "state")
    sharers = sorted({one.replicas for one in plans if assumed.over_replicas and one.replicas > 1})
    shares = f", shared out among {' or '.join(map(str, sharers))} replicas" if sharers else ""
    if assumed.optimizer == "muon":
        yield (
            "optimizer: Muon for the matrices of blocks, 1 state in their dtype, 5 iterations in bf16 on owners dealt by "
            f"cost; {states} per other parameter{shares}"
        )
    else:
        yield f"optimizer: {states} per parameter, in its dtype, bound by the memory's bandwidth{shares}"
    yield "not counted: fragmentation of the allocator, CUDA's and NCCL's own memory (1 to 2 GiB), the input pipeline"


_UNIT_HEADS = (
    ("unit", "dtypes", "parameters", "per rank", "padding", "direct AG", "direct RS")
    + ("calls", "AG", "RS", "AR", "fast", "slow")
)  # fmt: skip


def _unit_rows(plan: PlanData) -> Iterable[Row]:
    """Units that differ by a number in their name only share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for unit, sent in zip(plan.units, plan.by_unit, strict=True):
        name = unit.facts.name
        groups.setdefault((pattern_of(name), *_unit_cells(unit, sent)), []).append(name)
    for (_, *cells), names in groups.items():
        yield together(names), *cells


def _unit_cells(unit: UnitPlan, sent: Sequence[Collective]) -> Row:
    kinds = {kind: sum(one.sent for one in sent if one.kind == kind) for kind in _SHORT}
    return (
        " + ".join(_dtypes(group) for group in unit.dtype_groups),
        count_of(unit.numel),
        bytes_of(unit.total("shard_bytes")),
        bytes_of(unit.total("padding_bytes")),
        f"{direct_share(unit, 'gather'):.1%}",
        f"{direct_share(unit, 'reduce'):.1%}",
        str(sum(one.calls for one in sent)),
        *(bytes_of(kinds[kind]) for kind in _SHORT),
        bytes_of(sum(one.fast for one in sent)),
        bytes_of(sum(one.slow for one in sent)),
    )


def _dtypes(group: GroupPlan) -> str:
    kind = group.kind
    dtypes = "/".join(dtype_of(dtype) for dtype in (kind.storage, kind.compute, kind.reduce))
    return f"{dtypes}{' whole' * kind.replicated}{' subclass' * kind.extension}"


def direct_share(unit: UnitPlan, what: str) -> float:
    """Part of a unit's elements that is gathered, or reduced, without a copy ("gather", "reduce")."""
    direct = 0
    for group in unit.dtype_groups:
        if group.alone:
            direct += sum(param.numel for param in group.params if what == "gather" or param.trainable)
        elif what == "gather":
            direct += sum(piece.spec.numel for piece in group.layout.pieces if piece.direct_gather)
        elif group.trained is not None:
            direct += sum(piece.spec.numel for piece in group.trained.pieces if piece.direct_reduce)
    total = sum(param.numel for param in unit.facts.params if what == "gather" or param.trainable)
    return direct / total if total else 0.0


def _collective_row(plan: PlanData, one: Collective) -> Row:
    # Waits are known by what is waited for: the first row of it shows them.
    waits = _waits_of(one)
    first = next(other for other in plan.collectives if _waits_of(other) == waits) is one
    return (
        one.kind,
        one.axis,
        str(one.size),
        str(one.calls),
        str(one.transfers),
        bytes_of(one.sent),
        bytes_of(one.fast),
        bytes_of(one.slow),
        seconds_of(one.seconds),
        # Of all-to-alls the optimizer's time tells.
        seconds_of(plan.time.exposed[waits]) if first and waits in plan.time.exposed else "",
    )


def _waits_of(one: Collective) -> str:
    """Whose waits are those for a collective: shared among replicas, gradients are reduce-scattered for an all-reduce."""
    return "all-reduce" if one.axis == "replicate" and one.kind == "reduce-scatter" else one.kind


def _memory_rows(plan: PlanData) -> Iterable[Row]:
    for term, meaning in TERMS.items():
        if plan.memory.largest[term]:
            yield term, bytes_of(plan.memory.peak[term]), bytes_of(plan.memory.largest[term]), meaning
    limit = plan.assumptions.memory
    note = (
        "" if limit is None else f"{'fits' if plan.fits else 'does not fit'} in {bytes_of(limit)}, as far as it is counted"
    )
    yield "total", bytes_of(plan.memory.total), "", note
    made = "matrices on their way" if plan.assumptions.optimizer == "muon" else "one of a shard's size (none if fused)"
    yield "in optimizer's step", bytes_of(plan.memory.step), "", f"shards, states, gradients and what it makes: {made}"
    if plan.memory.host:
        yield "host", bytes_of(plan.memory.host), "", "offloaded shards, gradients and optimizer state"


def comparison_as_text(plans: Sequence[PlanData], best: PlanData | None) -> str:
    """One line per plan, the best one marked."""
    if not plans:
        return "nothing to compare"
    shown = ("per rank", "activations", "peak", "AG+RS slow", "AR slow", "step", "compute", "exposed", *_SHORT.values())
    rows = [_comparison_row(plan, plan is best) for plan in plans]
    lines = [
        f"{plans[0].name}: {count_of(plans[0].numel)} parameters, {plans[0].assumptions.tokens_per_rank:,} tokens per rank",
        _table(("", "mesh", *shown, "optimizer", "tokens/s"), rows, left=2),
        "assumed",
        *(f"  {line}" for line in _assumed(plans)),
        "",
        "no mesh fits"
        if best is None
        else f"* {best.replicas} x {best.shards} trains on most tokens per second and rank. With it, " + best.bottleneck,
    ]
    return "\n".join(lines)


def _comparison_row(plan: PlanData, best: bool) -> Row:
    slow = {kind: sum(one.slow for one in plan.collectives if one.kind == kind) for kind in _SHORT}
    return (
        "*" if best else "" if plan.fits else "!",
        f"{plan.replicas} x {plan.shards}",
        bytes_of(plan.memory.persistent),
        bytes_of(plan.memory.peak["activations"]),
        bytes_of(plan.memory.most) + ("" if plan.fits else " (does not fit)"),
        bytes_of(slow["all-gather"] + slow["reduce-scatter"]),
        bytes_of(slow["all-reduce"]),
        seconds_of(plan.time.step),
        seconds_of(plan.time.compute),
        f"{plan.time.exposed_share:.1%}",
        *(seconds_of(plan.time.exposed[kind]) for kind in _SHORT),
        seconds_of(plan.time.optimizer),
        _rate(plan.tokens_per_second),
    )


def _table(heads: Row, rows: Iterable[Row], left: int, last: bool = False) -> str:
    """Columns; the first `left` ones, and the last one if told, flush left."""
    cells = [list(heads), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        flush = [at < left or (last and at == len(row) - 1) for at in range(len(row))]
        padded = [cell.ljust(n) if one else cell.rjust(n) for cell, n, one in zip(row, widths, flush, strict=True)]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return "\n".join(lines) + "\n"


_UNIT_BYTES = ("shard_bytes", "padding_bytes", "whole_bytes")

# -- data --------------------------------------------------------------------------------------------------------


def as_dict(plan: PlanData) -> dict[str, Any]:
    """Everything, as plain data; sizes in bytes, times in seconds."""
    return {
        "model": plan.name,
        "mesh": {"replicas": plan.replicas, "shards": plan.shards},
        "assumptions": asdict(plan.assumptions),
        "parameters": plan.numel,
        "units": [_unit_dict(unit, sent) for unit, sent in zip(plan.units, plan.by_unit, strict=True)],
        "collectives": [asdict(one) for one in plan.collectives],
        "memory": {"total": plan.memory.total, **asdict(plan.memory)},
        "time": {"exposed_share": plan.time.exposed_share, **asdict(plan.time)},
        "tokens_per_second": plan.tokens_per_second,
        "fits": plan.fits,
        "bottleneck": plan.bottleneck,
        "advice": [{"text": one.text, "promise": one.promise, "gain": one.gain} for one in plan.advice],
    }


def _unit_dict(unit: UnitPlan, sent: Sequence[Collective]) -> dict[str, Any]:
    return {
        "name": unit.facts.name,
        "parameters": unit.numel,
        **{name: unit.total(name) for name in _UNIT_BYTES},
        "direct_gather": direct_share(unit, "gather"),
        "direct_reduce": direct_share(unit, "reduce"),
        "collectives": [asdict(one) for one in sent],
        "dtype_groups": [
            {
                "storage": dtype_of(group.kind.storage),
                "compute": dtype_of(group.kind.compute),
                "reduce": dtype_of(group.kind.reduce),
                "replicated": group.kind.replicated,
                "extension": group.kind.extension,
                "params": [
                    {
                        "name": param.name,
                        "shape": list(param.shape),
                        "trainable": param.trainable,
                        "direct_gather": piece.direct_gather,
                        "bytes": piece.numel * group.kind.storage.itemsize,
                    }
                    for param, piece in zip(group.params, group.layout.pieces, strict=True)
                ],
            }
            for group in unit.dtype_groups
        ],
    }


def as_json(plan: PlanData) -> str:
    """`as_dict` as JSON."""
    return json.dumps(as_dict(plan), indent=1)


def as_csv(plan: PlanData) -> str:
    """A line per unit; sizes in bytes."""
    heads = ["unit", "dtypes", "parameters", *_UNIT_BYTES, "direct_gather", "direct_reduce"]
    for kind in _SHORT:
        heads += [f"{kind.replace('-', '_')}_{what}" for what in ("calls", "transfers", "sent", "fast", "slow")]
    rows = []
    for unit, sent in zip(plan.units, plan.by_unit, strict=True):
        row: list[Any] = [unit.facts.name, " + ".join(map(_dtypes, unit.dtype_groups)), unit.numel]
        row += [unit.total(name) for name in _UNIT_BYTES]
        row += [round(direct_share(unit, what), 6) for what in ("gather", "reduce")]
        for kind in _SHORT:
            alike = [one for one in sent if one.kind == kind]
            row += [sum(getattr(one, name) for one in alike) for name in ("calls", "transfers", "sent", "fast", "slow")]
        rows.append(row)
    return _csv(heads, rows)


def comparison_as_json(plans: Sequence[PlanData], best: PlanData | None) -> str:
    """The plans as JSON, and the index of the best."""
    content = {"best": None if best is None else plans.index(best), "plans": [as_dict(plan) for plan in plans]}
    return json.dumps(content, indent=1)


def comparison_as_csv(plans: Sequence[PlanData], best: PlanData | None) -> str:
    """A line per plan."""
    heads = ["replicas", "shards", "best", "fits", "persistent_bytes", "peak_bytes", "step_s", "compute_s", "optimizer_s"]
    heads += [*(f"{kind.replace('-', '_')}_exposed_s" for kind in _SHORT), "tokens_per_second"]
    rows = [
        [
            plan.replicas,
            plan.shards,
            int(plan is best),
            int(plan.fits),
            plan.memory.persistent,
            plan.memory.most,
            plan.time.step,
            plan.time.compute,
            plan.time.optimizer,
            *(plan.time.exposed[kind] for kind in _SHORT),
            plan.tokens_per_second,
        ]
        for plan in plans
    ]
    return _csv(heads, rows)


def _csv(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    return out.getvalue()

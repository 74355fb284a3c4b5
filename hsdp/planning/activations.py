"""What autograd keeps between forward and backward, estimated from the shapes of weights.

A product keeps what it reads, and what follows it (an activation function, attention, a sum) keeps what it makes: rows +
columns of its weight, per token, in the compute dtype. Where the root, or a unit of the head alone, ends in logits over the
rows of an embedding, the backward of cross-entropy holds 12 bytes of each.

That is what fused kernels for norms and rotary embeddings leave. Written out in plain operations these keep more: the
example's Llama on the CPU holds 1.4 times as much (`tests/planning/test_activations.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hsdp.planning.facts import ParamFacts
from hsdp.planning.layouts import UnitPlan, head_of, tables_of

Recompute = bool | Literal["selective"]
"""Whether backward runs forward again: not, wholly (only the inputs of blocks are kept), or in part: "selective" keeps the
inputs of blocks, what attention makes, and the results of every other product, as torchtitan's checkpointing of that
name."""

LOSS_BYTES = 12
"""Per logit: log-probabilities, their gradient and that of the logits, all of them in fp32."""


@dataclass(frozen=True)
class UnitActivations:
    """Bytes of a unit's activations.

    Attributes:
        kept: from its forward to its backward.
        again: what its backward recomputes, with the units inside of it, beyond what was kept, and gradients beside that.
    """

    kept: int
    again: int = 0


def estimate(units: Sequence[UnitPlan], tokens: int, recompute: Recompute) -> list[UnitActivations]:
    """The activations of each unit, for one micro-batch.

    Args:
        units: of a model, the root first.
        tokens: of the micro-batch on this rank.
        recompute: of the units directly below the root; embedding, head and loss are never recomputed.
    """
    tables, head = tables_of(units), head_of(units)
    around = [index == 0 or unit is head for index, unit in enumerate(units)]
    whole = [int(tokens * _unit_bytes(unit, tables if out else set())) for unit, out in zip(units, around, strict=True)]
    if recompute is False:
        return [UnitActivations(nbytes) for nbytes in whole]
    blocks = [_block_of(units, index) for index in range(len(units))]
    found = []
    for index, unit in enumerate(units):
        if around[index]:
            found.append(UnitActivations(whole[index]))
            continue
        kept = int(tokens * _kept_bytes(unit, recompute, inputs=blocks[index] == index))
        below = [at for at, block in enumerate(blocks) if block == index]
        again = sum(whole[at] for at in below) + int(tokens * _widest(units[at] for at in below)) - kept if below else 0
        found.append(UnitActivations(min(kept, whole[index]), max(0, again)))
    return found


def scaled(units: Sequence[UnitPlan], activations: int) -> list[UnitActivations]:
    """A total that somebody told, spread over units in proportion to their parameters."""
    numel = sum(unit.numel for unit in units) or 1
    return [UnitActivations(activations * unit.numel // numel) for unit in units]


def _block_of(units: Sequence[UnitPlan], index: int) -> int:
    """The unit directly below the root that a unit is, or lies in."""
    while (parent := units[index].facts.parent) not in (None, 0):
        index = parent
    return index


def _products(unit: UnitPlan) -> list[tuple[ParamFacts, int]]:
    """Its weights that multiply, with the bytes of one of their activations."""
    found = [(param, group.kind.compute.itemsize) for group in unit.dtype_groups for param in group.params]
    order = {param.name: at for at, param in enumerate(unit.facts.params)}
    return sorted((pair for pair in found if sum(pair[0].widths)), key=lambda pair: order[pair[0].name])


def _unit_bytes(unit: UnitPlan, tables: set[int]) -> float:
    """Per token, when nothing is recomputed; `tables`: numbers of rows over which it may make logits."""
    total = 0.0
    for param, itemsize in _products(unit):
        inputs, outputs = param.widths
        total += ((inputs if param.trainable else 0) + outputs) * itemsize  # a frozen weight's gradient needs no input
        if param.shape[0] in tables:
            total += outputs * (LOSS_BYTES - itemsize)
    return total


def _widest(units: Iterable[UnitPlan]) -> float:
    """Per token, the gradients at both ends of the widest product: they are there beside what was recomputed."""
    return max((sum(param.widths) * itemsize for unit in units for param, itemsize in _products(unit)), default=0.0)


def _kept_bytes(unit: UnitPlan, recompute: Recompute, inputs: bool) -> float:
    """Per token, of a unit that is recomputed; `inputs`: those of the block are its own."""
    products = _products(unit)
    if not products:
        return 0.0
    first, itemsize = products[0]
    total = first.widths[0] * itemsize if inputs else 0.0
    if recompute == "selective":
        total += sum(param.widths[1] * size for param, size in products) / 2 + unit.facts.attention * itemsize
    return total

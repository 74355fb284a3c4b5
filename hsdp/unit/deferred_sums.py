"""Sums over the shard group whose all-reduce comes later: how a reduction becomes such sums, and is joined by them.

    micro-batch 1     operands --to the dtype of pending sums, wholly scaled--> deferred sums
    the last one      operands + deferred sums --all-reduce--> --what the operands are still to be multiplied with-->

In fp16 a part of a unit's factor comes behind the last sum (`Scaling`): before that, the terms of a mean over many replicas
would vanish. Deferred sums are in fp32, where they can be scaled at once, so that each has the factor of its own backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hsdp.unit.reduce_plan import GroupReduction


def defer_sums(part: GroupReduction) -> list[Tensor]:
    """The operands of a reduction that is not summed over replicas, as deferred sums. On the compute stream."""
    sums = [tensor.to(part.plan.kind.accumulate) for tensor in part.operands]
    if part.late_factor != 1.0:
        torch._foreach_mul_(_apart(part, sums)[0], part.late_factor)
    return sums


def join_deferred(part: GroupReduction) -> None:
    """Adds deferred sums to the operands, if there are any. On the operands' stream."""
    held = part.joined
    if held is None:
        return
    if part.late_factor != 1.0:
        sums = [tensor.to(part.plan.kind.accumulate) for tensor in part.operands]
        (values, flags), (held_values, held_flags) = _apart(part, sums), _apart(part, held)
        torch._foreach_add_(values, held_values, alpha=1.0 / part.late_factor)
        flags.add_(held_flags)  # not scaled: of factors with other signs they might add up to 0
        torch._foreach_copy_(part.operands, sums)
    elif held[0].dtype == part.operands[0].dtype:
        torch._foreach_add_(part.operands, held)
    else:
        torch._foreach_copy_(part.operands, torch._foreach_add(held, part.operands))


def _apart(part: GroupReduction, tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The values and the used-flags in tensors that are laid out as a reduction's operands are."""
    if len(tensors) > 1:
        return tensors[:-1], tensors[-1]
    numel = part.grad_layout.numel
    return [tensors[0][:numel]], tensors[0][numel:]

"""Bugs planted in sums whose order no mesh changes: other orders, and what is added or scaled at other places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import hsdp.clip
import hsdp.comm.tree
import hsdp.schedule.pipeline
from hsdp.schedule.reduce_queue import ReduceQueue
from tests.comm import test_tree as tree
from tests.mutants.planting import Check, mutant, replaced

ADDED = Check(tree.check_order, ((1, 4), 1.0), world=4)
ACCUMULATED = Check(tree.check_training, ("fp32", tree.TREE, 1, 2), world=4)
OTHER_BITS = r"AssertionError: blocks\.0"


@mutant(ADDED, kill=OTHER_BITS)
def adds_ranks_one_behind_the_other() -> Any:
    def in_turn(rows: Tensor, out: Tensor) -> None:
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        out.copy_(total)

    return mock.patch.object(hsdp.comm.tree, "fold", in_turn)


@mutant(ADDED, kill=OTHER_BITS)
def adds_the_far_ranks_first() -> Any:
    def change(fold: Callable[..., None]) -> Callable[..., None]:
        def turned(rows: Tensor, out: Tensor) -> None:
            far = len(rows) // 2
            total = torch.empty_like(out)
            fold(torch.stack([rows[(at % 2) * far + at // 2] for at in range(2 * far)]), total)
            out.copy_(total)

        return turned

    return replaced(hsdp.comm.tree, "fold", change)


@mutant(ACCUMULATED, kill="differ at entry")
def defers_the_all_reduce() -> Any:
    def change(go_on: Callable[..., None]) -> Callable[..., None]:
        def deferring(queue: Any, bucket: Any) -> None:
            if bucket.items[0].all_reduce:
                go_on(queue, bucket)
            else:
                queue._reducing.append(queue.start_deferral(bucket.items[0], bucket))

        return deferring

    return replaced(ReduceQueue, "_go_on", change)


@mutant(Check(tree.check_norms, world=4), kill="norms of order .* differ")
def clips_by_a_norm_of_shards() -> Any:
    return mock.patch.object(hsdp.clip, "_norm_of_any_mesh", hsdp.clip._norm)

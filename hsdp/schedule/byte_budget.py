"""How many units of different sizes a bound of N units admits at a time.

Bounds stand for memory, and for what the work on one unit can hide. If every unit counted as one, a block's small
attention would use up a place that its large experts need, and a step of a mixture of experts would wait for each of
them. So small units hardly count: the bytes of `bound` + 1/2 of the largest of them may be there. Of equal units those
are `bound`.
"""

from __future__ import annotations

from collections.abc import Iterable


def units_in_budget(sizes: Iterable[int], bound: int) -> int:
    """For how many of these units there is room, from the first on: at least `bound`, if there are as many.

    Args:
        sizes: bytes of each, which are the same on all ranks, as what follows from them has to be.
        bound: how many of the largest of them may be there.
    """
    count = total = largest = 0
    for size in sizes:
        counted = size or 1
        total += counted
        if counted > largest:
            largest = counted
        if 2 * total > (2 * bound + 1) * largest:
            break
        count += 1
    return count

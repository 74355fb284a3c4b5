"""Collectives of a tensor of which ranks hold different parts, none padded: 5 rows on 4 ranks, say, or 1 expert on 4.

    all-gather, in place     rank 0  [ rows 0:2 |    -     |   -   ]  ---> the same on all ranks, from rank 0
                             rank 1  [    -     | rows 2:4 |   -   ]  ---> ... from rank 1
                             rank 2  [    -     |    -     | row 4 ]  ---> ... from rank 2; rank 3 holds nothing
    reduce-scatter           the other way: the sum of each part over all ranks, left on the rank that holds it

On average a rank receives a tensor of P bytes less its own part, P (S - 1) / S, as in a collective of S equal parts. NCCL
makes these of lists of tensors, which torch's interface allows to be of different sizes: a broadcast, or a reduction, for
each part, in one group of calls. Either goes around a ring, in which no rank sends more than P bytes. gloo takes no such
lists, so they are spelled out here. Its reduction goes around a ring, too, its broadcast down a binary tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hsdp.comm import backends


@dataclass(frozen=True, slots=True)
class Uneven:
    """A tensor that ranks hold in parts.

    Attributes:
        whole: all of it, 1-D.
        sizes: elements of each rank's part, in rank order, which is the order of the parts in `whole`; some are 0.
        own: this rank's part; of a gather the place in `whole` where it lies already.
    """

    whole: Tensor
    sizes: tuple[int, ...]
    own: Tensor

    @property
    def parts(self) -> list[Tensor]:
        """Those of all ranks, as views of the whole."""
        return list(self.whole.split(self.sizes))


def start_gathers(group: Any, backend: str, tensors: Sequence[Uneven], options: Any) -> list[Any]:
    """Starts to fill each `whole` from the ranks' parts of it; returns the works."""
    if backend in backends.UNEVEN_LISTS:
        return [group.allgather([one.parts], [one.own], options) for one in tensors]
    works = []
    for one in tensors:
        for rank, part in enumerate(one.parts):
            if part.numel():
                to_all = dist.BroadcastOptions()
                to_all.rootRank = rank
                works.append(group.broadcast([part], to_all))
    return works


def start_reductions(
    group: Any, backend: str, tensors: Sequence[Uneven], options: Any
) -> tuple[list[Any], Callable[[], object] | None]:
    """Starts to leave the sum of each rank's part in its `own`; returns the works, and what has to follow them.

    Each `whole` may be overwritten.
    """
    if backend in backends.UNEVEN_LISTS:
        return [group.reduce_scatter([one.own], [one.parts], options) for one in tensors], None
    works: list[Any] = []
    summed: list[tuple[Tensor, Tensor]] = []
    rank = group.rank()
    for one in tensors:
        parts = one.parts
        for holder, part in enumerate(parts):
            if part.numel():
                to_holder = dist.ReduceOptions()
                to_holder.rootRank = holder
                works.append(group.reduce([part], to_holder))
        if one.own.numel():
            summed.append((one.own, parts[rank]))
    return works, (lambda: _copy(summed)) if summed else None


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])

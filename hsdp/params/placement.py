"""Which dim to shard: `least_padding`, a `shard_placement_fn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from hsdp.params.local import local_of


def least_padding(param: Tensor, shards: int) -> Shard | tuple[Shard, Shard]:
    """Chooses the sharding of a parameter that communicates the fewest bytes: pass it as `shard_placement_fn`.

    `Shard(0)` on S ranks moves ceil(n / S) * S rows for n: 64 instead of 8 for the weights of 8 experts on 64 ranks. Where
    that pads, and S is a multiple of n, the first two dims are cut as one: each rank holds a part of one expert's rows,
    nothing is padded, and gathers still need no copy. Else the dim with the least padding is taken, the first of equals.

    Args:
        param: a parameter of any shape; of a DTensor its largest block counts, so that all ranks choose the same.
        shards: number of shard ranks.

    Returns:
        `Shard(dim)`, or `(Shard(0), Shard(1))` for the first two dims as one.
    """
    plain = not isinstance(param, DTensor)
    shape = local_of(param).shape if plain else _largest_block(param)
    if not shape or shape[0] % shards == 0:
        return Shard(0)
    if plain and mergeable(shape, shards):
        return (Shard(0), Shard(1))
    padded = [-(-rows // shards) * shards / max(1, rows) for rows in shape]
    return Shard(padded.index(min(padded)))


def _largest_block(param: Any) -> tuple[int, ...]:
    """The shape of what the first rank of a DTensor's mesh holds: ranks with less would choose another dim."""
    shape = list(param.shape)
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, (Shard, _StridedShard)):
            shape[placement.dim] = -(-shape[placement.dim] // param.device_mesh.size(axis))
    return tuple(shape)


def mergeable(shape: Sequence[int], shards: int) -> bool:
    """Whether the first two dims, as one, fall into `shards` equal parts, none of which crosses a row of dim 0."""
    return len(shape) > 1 and shape[0] > 0 and shards % shape[0] == 0 and shape[1] % (shards // shape[0]) == 0

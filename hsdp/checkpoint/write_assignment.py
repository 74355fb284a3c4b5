"""Who writes what several ranks hold: a shard's replicas share the writing, and what is no shard is rank 0's.

file of rank    0 (replica 0)    2 (replica 1)    4 (replica 2)      all hold the same shards
16 MiB of state everything       none             none               few files for a small model
3 GiB of state  1 GiB            1 GiB            1 GiB              as fast as all of them together
"""

from __future__ import annotations

import pickle
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

_FILE = 16 << 20
"""Bytes up to which one rank's file grows before the next replica begins one."""


def size_of(item: WriteItem) -> int:
    """The bytes of a tensor; 0 for a value."""
    data = item.tensor_data
    if data is None or data.chunk is None:
        return 0
    return int(data.chunk.sizes.numel()) * int(data.properties.dtype.itemsize)


def packed(description: Any) -> bytes:
    """A plan, or where its items were written, as it travels between ranks: a tenth of its pickle."""
    return zlib.compress(pickle.dumps(description), 1)


def unpacked(description: bytes) -> Any:
    """What `packed` was given; for messages of this run's own ranks only."""
    return pickle.loads(zlib.decompress(description))


def unpack_all(packed: Sequence[bytes]) -> list[Any]:
    """What all ranks sent. Replicas hold the same and send the same bytes, so they get one object: with thousands of
    ranks, rank 0 would otherwise hold as many copies of each description as there are replicas.
    """
    found = {one: unpacked(one) for one in dict.fromkeys(packed)}
    return [found[one] for one in packed]


def pack_parts(plans: Sequence[SavePlan]) -> list[bytes]:
    """What each rank is to write, as it is told: without the names of everything, which only rank 0 needs."""
    return [packed(replace(plan, planner_data=None)) for plan in plans]


def shared_out(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, in which each part of a DTensor is in the plan of one rank that holds it.

    Plain tensors and values stay with every rank that has them. They may differ between ranks, so one rank, the lowest,
    must write all of them; DTensors are equal on their replicas.

    Args:
        plans: what each rank holds.
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type == WriteItemType.SHARD:
                holders[item.index].append(rank)
                sizes[item.index] = size_of(item)
    load, writer = [0] * len(plans), {}
    for index in sorted(sizes, key=lambda one: -sizes[one]):  # the large ones first: the small ones even it out
        rank = min(holders[index], key=lambda one: (max(load[one], _FILE), one))
        load[rank] += sizes[index]
        writer[index] = rank
    return [
        replace(plan, items=[item for item in plan.items if writer.get(item.index, rank) == rank])
        for rank, plan in enumerate(plans)
    ]

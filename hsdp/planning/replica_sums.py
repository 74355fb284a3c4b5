"""What a replica has of a dtype group where replicas share the optimizer's step: rows of its shards, and sums of gradients.

In numbers, by the rules of hsdp/params/replica_rows.py and hsdp/unit/replica_shares.py, as no mesh exists here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hsdp.buffers.layout import Piece
from hsdp.params.tensor_parallel import placements_tell
from hsdp.planning.facts import ParamFacts
from hsdp.unit.replica_shares import transfer_kinds


class Held(NamedTuple):
    """What the first rank holds of a parameter: the shape of its shard, and the rows of its share; None: it has no share.

    `added`: gradients of such shares can be added up, so that they are made; else gradients are all-reduced.
    """

    local: tuple[int, ...]
    rows: int | None
    added: bool

    @property
    def numel(self) -> int:
        """Elements that this replica steps."""
        return math.prod(self.local if self.rows is None else (self.rows, *self.local[1:]))


def held(param: ParamFacts, piece: Piece, replicas: int, shards: int) -> Held:
    """What the first rank holds of a parameter."""
    local, shape = piece.local_shape(0), param.shape
    if param.merged > 1:  # the mesh axis of the rows cuts them one by one
        cuts = [shape[0]]
    else:
        cuts = [shards] if param.dim == 0 else []
    if replicas == 1 or not shape or not placements_tell(shape[0], cuts, replicas):
        return Held(local, None, False)
    added = shape[0] >= replicas * math.prod(cuts) and not param.extension
    return Held(local, -(-local[0] // replicas), added)


@dataclass(frozen=True)
class SharedSums:
    """A reduce-scatter of sums over replicas, in elements.

    Attributes:
        replicas: among which.
        direct: those of the gradients that go as they lie.
        row: a replica's row of those that are packed, and of the used-flags.
        whole: those of what has no shares, and is summed in place.
    """

    replicas: int
    direct: tuple[int, ...]
    row: int
    whole: int

    @property
    def inputs(self) -> list[int]:
        """Elements of the tensors that are reduce-scattered."""
        return [*self.direct, self.replicas * self.row]

    @property
    def left(self) -> int:
        """Elements of what stays on a replica."""
        return sum(self.direct) // self.replicas + self.whole + self.row


def shared_sums(parts: Sequence[Held], replicas: int, itemsize: int, reduce_bytes: int) -> SharedSums | None:
    """The reduce-scatter of the gradients of some parameters; None if none of them has shares.

    Args:
        parts: what the first rank holds of each.
        replicas: among which.
        itemsize: of the reduce dtype.
        reduce_bytes: from which size on gradients go as they lie.
    """
    shared = [part.added for part in parts]
    if not any(shared):
        return None
    shapes = [part.local for part in parts]
    kinds = transfer_kinds(shapes, shared, replicas, itemsize, reduce_bytes)
    row = len(parts) + sum(-(-shapes[i][0] // replicas) * math.prod(shapes[i][1:]) for i in kinds.packed)
    whole = sum(math.prod(shapes[i]) for i in kinds.whole)
    return SharedSums(replicas, tuple(math.prod(shapes[i]) for i in kinds.direct), row, whole)

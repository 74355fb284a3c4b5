"""Which part of a DTensor each rank of its mesh holds, from shape, mesh and placements, without communication.

A part is a box: where it begins in each tensor dim, and its size there.

    (10, 6), Shard(0) over shard=4    rank 0: rows 0:3    1: 3:6    2: 6:9    3: 9:10    all 6 columns
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from hsdp.buffers.layout import chunk_of


@dataclass(frozen=True)
class Box:
    """A part of a tensor: offset and size for each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property  # asked for in every step
    def slices(self) -> tuple[slice, ...]:
        """The part as an index."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def common(self, other: Box) -> Box | None:
        """What two boxes of one tensor have in common; None if it is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = (min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Box) -> Box:
        """The same box, its offsets counted from those of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


@dataclass(frozen=True)
class Holding:
    """What one rank holds.

    Attributes:
        rank: its global rank.
        box: its part of the tensor.
        copy: the rank's coordinates on the axes that replicate: ranks with equal ones have the tensor whole together.
    """

    rank: int
    box: Box
    copy: tuple[int, ...]


def holdings(spec: DTensorSpec) -> list[Holding]:
    """What each rank of a DTensor's mesh holds, in the order of the mesh.

    Raises:
        ValueError: its placements are none that cut into boxes known beforehand.
    """
    mesh, placements = spec.mesh, spec.placements
    kinds = (Replicate, Shard, _StridedShard)
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if any(not isinstance(placement, kinds) for placement in placements) or len(strided) > 1:
        raise ValueError(
            f"a tensor of shape {tuple(spec.shape)} has placements {placements}; Shard or Replicate is expected"
        )
    # A strided axis (hsdp's, outside of a tensor-parallel one) cuts what the others have left.
    order = [axis for axis in range(mesh.ndim) if axis not in strided] + strided
    replicated = [axis for axis, placement in enumerate(placements) if isinstance(placement, Replicate)]
    found = []
    for coordinate in product(*(range(mesh.size(axis)) for axis in range(mesh.ndim))):
        offsets, sizes = [0] * len(spec.shape), list(spec.shape)
        for axis in order:
            placement = placements[axis]
            if isinstance(placement, (Shard, _StridedShard)):
                dim = placement.dim
                start, sizes[dim] = chunk_of(sizes[dim], mesh.size(axis), coordinate[axis])
                offsets[dim] += start
        box = Box(tuple(offsets), tuple(sizes))
        found.append(Holding(int(mesh.mesh[coordinate]), box, tuple(coordinate[axis] for axis in replicated)))
    return found

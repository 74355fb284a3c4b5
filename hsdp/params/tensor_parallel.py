"""Parameters that are DTensors before hsdp sees them: tensor, sequence or expert parallelism inside of data parallelism.

    (4096, 4096), Shard(0) over tp=2              the user's DTensor: this rank's *block* is (2048, 4096)
    (2048, 4096), Shard(0) over shard=8           what hsdp shards is the block: this rank's rows are (256, 4096)
    (_StridedShard(0, split_factor=2), Shard(0))  the sharded parameter: one DTensor over the meshes (shard, tp)

Everything else in hsdp plans, gathers and reduces blocks, which are plain tensors. This file alone knows how a block
becomes the user's DTensor again for the forward, and how a gradient of that DTensor becomes one of the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from hsdp.buffers.layout import chunk_of
from hsdp.comm.mesh import MeshAxes
from hsdp.comm.streams import note_read
from hsdp.params.dtensors import as_dtensor, with_dtype


class Inner:
    """How a parameter was distributed before hsdp: its mesh and placements there.

    Its mesh is beside hsdp's, or it is the bigger mesh in which hsdp's axes were named (then it replicates over those).

    Args:
        spec: the DTensor's own.
        axes: hsdp's.
    """

    visible = True
    """Whether forwards see a DTensor; else they see a plain tensor (annotations.py)."""

    def __init__(self, spec: DTensorSpec, axes: MeshAxes) -> None:
        self.spec = spec
        self.mesh, self.placements, self.shape = spec.mesh, spec.placements, spec.shape
        names = self.mesh.mesh_dim_names or ()
        self._ours = [self.mesh == axes.around and name in axes.names for name in names] or [False] * self.mesh.ndim
        self._rest = [axis for axis, ours in enumerate(self._ours) if not ours]

    def wrap(self, block: Tensor) -> Tensor:
        """The user's DTensor around a block, in the block's dtype; no copy."""
        return as_dtensor(block, with_dtype(self.spec, block.dtype))

    def annotate(self, unsharded: Tensor) -> None:
        """Annotates a new unsharded parameter with its distribution: a DTensor has its spec, and needs nothing."""

    def block_of_grad(self, grad: Any) -> Tensor:
        """The block's gradient: sums over the inner mesh that are still partial are made here, by DTensor."""
        note_read(grad._local_tensor)  # autograd does so for gradients, but not inside of a DTensor
        wanted, parts = self.placements, 1
        if len(self._rest) < self.mesh.ndim:
            wanted, parts = self._term(grad.placements)
        if grad.placements != wanted:
            grad = grad.redistribute(placements=wanted)
        if parts > 1:
            grad = grad / parts
        local = grad._local_tensor
        return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]  # may be on its way

    def _term(self, placements: tuple[Placement, ...]) -> tuple[tuple[Placement, ...], int]:
        """The placements, of a gradient with these, of a rank's term of the sum over hsdp's axes, and N: it is 1/N of that.

        That sum is the reduction's business, whether DTensor knows of it (Partial) or not. Where hsdp's ranks cut what is
        computed (a sequence), they may have rows of the gradient each, which are no terms: each gets all, and N is their
        number.
        """
        wanted, parts = list(self.placements), 1
        for axis, (have, ours) in enumerate(zip(placements, self._ours, strict=True)):
            if ours and isinstance(have, (Shard, _StridedShard)):
                parts *= self.mesh.size(axis)
            elif ours:
                wanted[axis] = have
        return tuple(wanted), parts

    def sharded_spec(self, axes: MeshAxes, dim: int | None, dtype: torch.dtype) -> DTensorSpec:
        """The spec of the parameter once its block is sharded on `dim` over the mesh of `axes` (None: kept whole)."""
        outer: list[Placement] = list(axes.placements(dim))
        splits = math.prod(self._cuts(dim))
        if dim is not None and splits > 1:
            # The inner mesh splits first, though it comes last in the mesh: what a data-parallel rank holds is strided.
            outer = [_StridedShard(dim, split_factor=splits) if isinstance(p, Shard) else p for p in outer]
        mesh = axes.joined(rest) if (rest := self._rest_mesh()) is not None else axes.mesh
        placements = (*outer, *(self.placements[axis] for axis in self._rest))
        return DTensorSpec(mesh, placements, tensor_meta=with_dtype(self.spec, dtype).tensor_meta)

    def _rest_mesh(self) -> DeviceMesh | None:
        """The inner mesh without hsdp's axes."""
        if len(self._rest) == self.mesh.ndim:
            return self.mesh
        names = tuple((self.mesh.mesh_dim_names or ())[axis] for axis in self._rest)
        return self.mesh[names] if names else None

    def _cuts(self, dim: int | None) -> list[int]:
        """Sizes of the axes over which the inner mesh cuts tensor dim `dim`."""
        cut = [isinstance(p, (Shard, _StridedShard)) and p.dim == dim for p in self.placements]
        return [self.mesh.size(axis) for axis, cuts in enumerate(cut) if cuts]

    def check(self, axes: MeshAxes, dim: int | None, where: str) -> None:
        """Raises ValueError if the parameter cannot be sharded over the mesh of `axes` on `dim` as well."""
        odd = next((p for p in self.placements if not _supported(p)), None)
        if odd is not None:
            raise ValueError(
                f"{where} is a DTensor with placement {odd}, which is neither Shard nor Replicate; redistribute() it first"
            )
        ours = [p for p, mine in zip(self.placements, self._ours, strict=True) if mine]
        if any(not isinstance(p, Replicate) for p in ours):
            raise ValueError(
                f"{where} is a DTensor with placements {self.placements} on {self.mesh}, but hsdp shards it over "
                f"{sorted(axes.names)}; it must be Replicate() there"
            )
        try:
            if (rest := self._rest_mesh()) is not None:
                axes.joined(rest)
        except RuntimeError as error:
            raise ValueError(
                f"{where} is a DTensor on {self.mesh}, which cannot be joined with hsdp's {axes.mesh} ({error}); take both "
                "as slices of one mesh, e.g. mesh = init_device_mesh(type, (r, s, t), mesh_dim_names=('replicate', "
                "'shard', 'tp')), mesh['replicate', 'shard'] for fully_shard and mesh['tp'] for parallelize_module, or "
                "pass the parameter in ignored_params"
            ) from None
        if dim is not None and not placements_tell(self.shape[dim], self._cuts(dim), axes.shard_size):
            raise ValueError(
                f"{where}: its inner mesh cuts dim {dim} of size {self.shape[dim]} into {math.prod(self._cuts(dim))} parts "
                f"and {axes.shard_size} shard ranks cut each of those so unevenly that DTensor's placements cannot tell "
                "who holds what, and checkpoints would be wrong; choose another dim with shard_placement_fn, or pad it"
            )


def over_replicas(spec: DTensorSpec, axis: int) -> DTensorSpec | None:
    """The spec of a tensor like one of hsdp's sharded parameters, of which replicas hold parts, too.

    Each rank's rows (dim 0 of what it holds) are cut once more, by torch.chunk's rule.

    Args:
        spec: the parameter's.
        axis: the mesh axis that replicates it.

    Returns:
        The spec; None if placements cannot say which rank holds what.
    """
    mesh, shape = spec.mesh, spec.shape
    cuts = [at for at, p in enumerate(spec.placements) if isinstance(p, (Shard, _StridedShard)) and p.dim == 0]
    if not shape or not isinstance(spec.placements[axis], Replicate) or len(cuts) > 1:
        return None
    placement: Placement = Shard(0)
    if cuts:
        sizes = [mesh.size(at) for at in cuts]
        if not isinstance(spec.placements[cuts[0]], Shard) or not placements_tell(shape[0], sizes, mesh.size(axis)):
            return None
        placement = _StridedShard(0, split_factor=math.prod(sizes))
    placements = (*spec.placements[:axis], placement, *spec.placements[axis + 1 :])
    return DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)


def placements_tell(rows: int, inner: Sequence[int], shards: int) -> bool:
    """Whether DTensor reads off `(_StridedShard, Shard)` what each rank holds: its rows' number and offset.

    hsdp's shard ranks cut each of the inner mesh's blocks by torch.chunk's rule. DTensor reads placements from the left: a
    shard rank has its rows of all blocks, and the inner mesh cuts those by that rule. Mostly it is the same; not so if a
    rank has rows of a smaller last block, but none of a full one. 7 rows, 2 blocks, 3 shard ranks:

        held         0 1 | 2 3 |  -      4 | 5 | 6        rank 2 has nothing of block 0, and row 6 of block 1
        DTensor's    0 1 | 2 3 |  6      4 | 5 | -        rank 2 has one row in all, so it is of block 0

    `full_tensor()` is right all the same, but not the offsets in a checkpoint: saved by torch and loaded again, row 6 of
    FSDP2's parameter is zero (seen with torch 2.11 and 2.13).

    Args:
        rows: size of the tensor dim.
        inner: sizes of the inner mesh's axes that cut it.
        shards: number of shard ranks, which cut every block.
    """
    blocks = math.prod(inner)
    if rows % blocks == 0 or shards == 1:
        return True
    if len(inner) > 1:
        return False  # _StridedShard cuts into all blocks at once, which differs from one axis after the other
    # Full blocks, one smaller one, and empty ones behind it; ranks beyond the rows of a full one have nothing.
    block = -(-rows // blocks)
    full, left = divmod(rows, block)
    for rank in range(min(shards, block)):
        (_, of_full), (_, of_last) = chunk_of(block, shards, rank), chunk_of(left, shards, rank)
        held = full * of_full + of_last
        if of_last > of_full or of_full != -(-held // blocks):
            return False
    return True


def same_sharding(spec: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether two specs distribute one shape over one mesh in the same way."""
    return (spec.mesh, spec.placements, spec.shape) == (other.mesh, other.placements, other.shape)


def _supported(placement: Placement) -> bool:
    return isinstance(placement, (Shard, _StridedShard, Replicate))

"""A replica's share of a parameter: the rows that it steps, and of whose gradient it gets the sums.

shard of a parameter     rows 0:8 of this rank, the same on R = 2 replicas
share of replica 0       rows 0:4
share of replica 1       rows 4:8
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Replicate

from hsdp.buffers.layout import chunk_of
from hsdp.comm.mesh import MeshAxes
from hsdp.params.tensor_parallel import over_replicas


@dataclass(frozen=True)
class Share:
    """What this replica has of a parameter: `rows` rows of its local tensor from `start` on; a replica has up to `chunk`.

    `spec` is that of a tensor of the parameter's shape of which each rank holds such a share.
    """

    spec: DTensorSpec
    start: int
    rows: int
    chunk: int

    def of(self, local: Tensor) -> Tensor:
        """The share of a tensor that is laid out as the local one is: a view."""
        return local.narrow(0, self.start, self.rows)

    @property
    def has_few_rows(self) -> bool:
        """Whether there are fewer rows than ranks that cut them: then DTensor does not add such a tensor to another one."""
        cuts = zip(self.spec.placements, self.spec.mesh.shape, strict=True)
        return self.spec.shape[0] < math.prod(size for cut, size in cuts if getattr(cut, "dim", None) == 0)


def share_of(spec: DTensorSpec, local: Tensor, axes: MeshAxes) -> Share | None:
    """This rank's share of a parameter; None where there is no other replica, or where it has too odd a shape for shares.

    It depends on shapes and meshes alone, and is of the same kind on all ranks.

    Args:
        spec: the parameter's.
        local: what this rank holds of it, as a plain tensor.
        axes: those of its unit.
    """
    if axes.replicate_size == 1 or axes.replicate_axis is None:
        return None
    if not isinstance(spec.placements[axes.replicate_axis], Replicate):
        return None
    cut = over_replicas(spec, axes.replicate_axis)
    if cut is None:
        return None
    rows, replicas = local.shape[0], axes.replicate_size
    return Share(cut, *chunk_of(rows, replicas, axes.replicate_rank), -(-rows // replicas))

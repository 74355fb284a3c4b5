"""The two axes of a unit: which ranks share its shards and which ranks hold replicas of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard


@dataclass(frozen=True)
class MeshAxes:
    """A device mesh read as HSDP: the last axis shards, the one before it, if any, replicates.

    Attributes:
        mesh: the 1-D `(shard,)` or 2-D `(replicate, shard)` mesh that the DTensors live on.
        shard_size, shard_rank: size S of this rank's shard group and its rank in it.
        replicate_size, replicate_rank: size R of this rank's replicate group and its rank in it (1, 0 on a 1-D mesh).
    """

    mesh: DeviceMesh
    shard_size: int
    shard_rank: int
    replicate_size: int
    replicate_rank: int
    _joined: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    def joined(self, inner: DeviceMesh) -> DeviceMesh:
        """The mesh with the axes of `mesh` and then those of `inner`, made once.

        Raises:
            RuntimeError: they overlap, or do not stem from one root mesh.
        """
        if inner not in self._joined:
            self._joined[inner] = DeviceMesh._concatenate([self.mesh, inner])
        return self._joined[inner]

    @property
    def shard_group(self) -> ProcessGroup:
        """The process group over which parameters are sharded."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replicate_group(self) -> ProcessGroup | None:
        """The process group of this rank's replicas; None on a 1-D mesh."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    @property
    def device(self) -> torch.device:
        """The device that shards of this rank live on."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """DTensor placements of a parameter sharded on tensor dim `dim`, or kept whole (`None`)."""
        inner: Placement = Replicate() if dim is None else Shard(dim)
        return (Replicate(), inner) if self.mesh.ndim == 2 else (inner,)

    def __str__(self) -> str:
        if self.mesh.ndim == 1:
            return f"{self.shard_size} shards on {self.mesh.device_type}"
        return f"{self.replicate_size} replicas x {self.shard_size} shards on {self.mesh.device_type}"


def resolve_mesh(mesh: DeviceMesh | None) -> MeshAxes:
    """Checks `mesh` and reads it as axes; `None` stands for one shard axis over every rank of the default group.

    Raises:
        ValueError: the mesh has more than two axes, or its device type is not usable here.
        TypeError: it is not a DeviceMesh.
        RuntimeError: `mesh` is None and the default process group does not exist.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "fully_shard(mesh=None) shards over all ranks of the default process group, which does not exist; "
                "call torch.distributed.init_process_group() first, or pass mesh="
            )
        device_type = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = device_type.type if device_type is not None and _group_serves(device_type.type) else "cpu"
        mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"fully_shard(mesh=...) takes a torch.distributed DeviceMesh or None, not {type(mesh).__name__}; "
            "make one with torch.distributed.device_mesh.init_device_mesh"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard(mesh=...): the mesh has {mesh.ndim} axes {tuple(mesh.shape)}; pass a 1-D mesh (shard,) for "
            "FSDP or a 2-D mesh (replicate, shard) for HSDP, e.g. a slice mesh['replicate', 'shard'] of a bigger one"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard(mesh=...): rank {dist.get_rank()} is not part of the mesh {mesh}; call fully_shard on its "
            "ranks only, or make the mesh over all ranks"
        )
    if mesh.device_type != "cpu" and not _device_is_here(mesh.device_type):
        raise ValueError(
            f"fully_shard(mesh=...): the mesh is for device type {mesh.device_type!r}, which this process does not have; "
            "make the mesh with init_device_mesh('cpu', ...) or run where the device is"
        )
    shard = mesh.ndim - 1
    return MeshAxes(
        mesh=mesh,
        shard_size=mesh.size(shard),
        shard_rank=mesh.get_local_rank(shard),
        replicate_size=mesh.size(0) if mesh.ndim == 2 else 1,
        replicate_rank=mesh.get_local_rank(0) if mesh.ndim == 2 else 0,
    )


def _group_serves(device_type: str) -> bool:
    """Whether the default process group has a backend for `device_type` (gloo alone does not serve "cuda")."""
    backend = dist.get_backend_config()
    return device_type in backend if ":" in backend else backend != "gloo"


def _device_is_here(device_type: str) -> bool:
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:
        return False

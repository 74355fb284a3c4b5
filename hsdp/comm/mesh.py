"""The axes of a unit: which ranks share its shards and which ranks hold replicas of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from hsdp.torch_private import concatenated, flattened, unflattened


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a bigger, named mesh hsdp uses; the others are of other parallelisms (tensor, pipeline, ...).

    Args:
        shard: the axis, or axes, over which parameters are sharded. None: nothing is sharded, as in DDP.
        replicate: the axis, or axes, over which they are replicated. None: there are no replicas.

    Several axes given as a tuple act as one; name them in the order that they have in the mesh.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (("shard", self.shard), ("replicate", self.replicate)):
            listed = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
            if not all(isinstance(axis, str) for axis in listed):
                raise TypeError(
                    f"DataParallelMeshDims({name}={value!r}): expected the name of a mesh axis, or a tuple of them"
                )
        if not self.shard_names and not self.replicate_names:
            raise ValueError("DataParallelMeshDims(): give shard=, replicate= or both the names of mesh axes")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the axes that shard."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the axes that replicate."""
        return _names(self.replicate)


@dataclass(frozen=True)
class MeshAxes:
    """A device mesh read as HSDP: at most one axis that shards and one that replicates.

    Attributes:
        mesh: the mesh of these axes alone, `(shard,)`, `(replicate, shard)` or `(replicate,)`, that the DTensors live on.
        shard_axis, replicate_axis: their numbers in it; None where there is no such axis.
        shard_size, shard_rank: size S of this rank's shard group and its rank in it (1, 0 without the axis).
        replicate_size, replicate_rank: size R of this rank's replicate group and its rank in it (1, 0 without the axis).
        around: the bigger mesh in which these axes were named, if any; parameters may be DTensors on it.
        names: the names of these axes in that mesh.
    """

    mesh: DeviceMesh
    shard_axis: int | None
    replicate_axis: int | None
    around: DeviceMesh | None = None
    names: frozenset[str] = frozenset()
    _joined: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)
    _cut_meshes: dict[int, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def ranks(self) -> frozenset[int]:
        """All ranks of the mesh: one object for equal ones, so that they are compared at once."""
        return _as_set(tuple(self.mesh.mesh.flatten().tolist()))

    @cached_property
    def shard_size(self) -> int:
        """S, the number of shard ranks."""
        return 1 if self.shard_axis is None else self.mesh.size(self.shard_axis)

    @cached_property
    def shard_rank(self) -> int:
        """This rank's number in its shard group."""
        return 0 if self.shard_axis is None else self.mesh.get_local_rank(self.shard_axis)

    @cached_property
    def replicate_size(self) -> int:
        """R, the number of replicas."""
        return 1 if self.replicate_axis is None else self.mesh.size(self.replicate_axis)

    @cached_property
    def replicate_rank(self) -> int:
        """This rank's number in its replicate group."""
        return 0 if self.replicate_axis is None else self.mesh.get_local_rank(self.replicate_axis)

    def joined(self, inner: DeviceMesh) -> DeviceMesh:
        """The mesh with the axes of `mesh` and then those of `inner`, made once.

        Raises:
            RuntimeError: they overlap, or do not stem from one root mesh.
        """
        if inner not in self._joined:
            self._joined[inner] = concatenated([self.mesh, inner])
        return self._joined[inner]

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis alone; it needs a name if the mesh has other axes."""
        assert self.shard_axis is not None, "without a shard axis there is no mesh of it"
        return self.mesh if self.mesh.ndim == 1 else self.mesh[(self.mesh.mesh_dim_names or ())[self.shard_axis]]

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The process group over which parameters are sharded."""
        return None if self.shard_axis is None else self.mesh.get_group(self.shard_axis)

    @property
    def replicate_group(self) -> ProcessGroup | None:
        """The process group of this rank's replicas."""
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on, and that its shards live on if they are not offloaded."""
        return device_of(self.mesh)

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """DTensor placements of a parameter sharded on tensor dim `dim`, or kept whole (`None`)."""
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        if self.shard_axis is not None and dim is not None:
            placements[self.shard_axis] = Shard(dim)
        return tuple(placements)

    def placement_text(self, dim: int | None, merged: int) -> str:
        """The placement of a parameter in messages: "Replicate()", "Shard(1)", or "Shard(0, 1)" of two dims cut as one.

        Args:
            dim: the tensor dim that is sharded; None: the parameter is whole on every rank.
            merged: how many leading dims are cut as one.
        """
        if self.shard_axis is None or dim is None:
            return "Replicate()"
        return f"Shard({dim})" if merged == 1 else f"Shard({', '.join(map(str, range(merged)))})"

    def merged(self, rows: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Mesh and placements of a parameter with `rows` rows in dim 0 whose first two dims are cut as one.

        The shard axis is read as two, of `rows` ranks and of the rest: one picks the row, the other a part of it.
        """
        assert self.shard_axis is not None, "without a shard axis nothing is cut"
        mesh, axis = self._cut_meshes.get(rows), self.shard_axis
        if mesh is None:
            name = "shard" if self.mesh.mesh_dim_names is None else self.mesh.mesh_dim_names[axis]
            names = (f"{name}_row", f"{name}_part")
            mesh = unflattened(self.mesh, axis, (rows, self.shard_size // rows), names)
            self._cut_meshes[rows] = mesh
        placements: list[Placement] = [Replicate()] * mesh.ndim
        placements[axis], placements[axis + 1] = Shard(0), Shard(1)
        return mesh, tuple(placements)

    def __str__(self) -> str:
        if self.replicate_axis is None:
            return f"{self.shard_size} shards on {self.mesh.device_type}"
        return f"{self.replicate_size} replicas x {self.shard_size} shards on {self.mesh.device_type}"


@lru_cache(maxsize=64)
def _as_set(ranks: tuple[int, ...]) -> frozenset[int]:
    return frozenset(ranks)


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of a mesh that this rank computes on."""
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def resolve_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> MeshAxes:
    """Checks `mesh` and reads it as axes; `None` stands for one shard axis over every rank of the default group.

    Axes go by their position, unless their names say the opposite: `("shard", "replicate")` is read by its names.

    Args:
        mesh: `(shard,)`, `(replicate, shard)`, or any mesh with `dims`.
        dims: which of its axes to use.

    Raises:
        ValueError: the mesh has more than two axes and `dims` is None, or its device type is not usable here, or it has no
            axes of the names in `dims`, or the name of one axis contradicts its position and the other's does not tell.
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
        # Without names, as FSDP2's: DTensors on a mesh of other names do not mix with parameters on this one.
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"fully_shard(mesh=...) takes a torch.distributed DeviceMesh or None, not {type(mesh).__name__}; "
            "make one with torch.distributed.device_mesh.init_device_mesh"
        )
    if dims is None and mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard(mesh=...): the mesh has {mesh.ndim} axes {tuple(mesh.shape)}; pass a 1-D mesh (shard,) for "
            "FSDP or a 2-D mesh (replicate, shard) for HSDP, e.g. a slice mesh['replicate', 'shard'] of a bigger one, or "
            "name the axes with dp_mesh_dims="
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
    dims = dims or _dims_by_names(mesh)
    if dims is not None:
        axes = _named_axes(mesh, dims)
    else:
        axes = MeshAxes(mesh, shard_axis=mesh.ndim - 1, replicate_axis=0 if mesh.ndim == 2 else None)
    refuse_unsorted(axes, axes.shard_axis, "fully_shard(mesh=...)")
    return axes


def refuse_unsorted(axes: MeshAxes, axis: int | None, what: str) -> None:
    """Refuses a mesh along whose `axis`, over which rows are cut, ranks do not ascend.

    Process groups order their ranks, and collectives go by that order; checkpoints go by places on the mesh.

    Args:
        axes: of the mesh.
        axis: which of its axes; None: nothing is cut.
        what: begins the error.

    Raises:
        ValueError: they do not ascend.
    """
    ranks = axes.mesh.mesh
    if axis is not None and bool((ranks.diff(dim=axis) < 0).any()):
        role = "shard" if axis == axes.shard_axis else "replicate"
        raise ValueError(
            f"{what}: along the {role} axis of the mesh {ranks.tolist()} ranks do not ascend; process groups order their "
            "ranks, so that checkpoints would take rows of one rank for those of another: sort them"
        )


def _role(name: str) -> str | None:
    """What an axis of this name does, as far as the name tells: "shard", "replicate" or None."""
    shards = "shard" in name or "fsdp" in name
    replicates = "replica" in name or name == "ddp"
    return None if shards == replicates else "shard" if shards else "replicate"


def _dims_by_names(mesh: DeviceMesh) -> DataParallelMeshDims | None:
    """The axes by their names, if these say the opposite of their positions; None if positions are right.

    Raises:
        ValueError: one name contradicts its position, and the other does not tell what its axis is for.
    """
    names = mesh.mesh_dim_names
    if names is None:
        return None
    roles, positions = [_role(name) for name in names], ("replicate", "shard")[-len(names) :]
    if not any(role not in (None, position) for role, position in zip(roles, positions, strict=True)):
        return None
    if roles == ["shard", "replicate"]:
        return DataParallelMeshDims(shard=names[0], replicate=names[1])
    raise ValueError(
        f"fully_shard(mesh=...): its axes {names} would be taken as {positions}, which is not what they are called; say "
        "what they are for with dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...), or name them in that order"
    )


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> MeshAxes:
    there = mesh.mesh_dim_names or ()
    named = (*dims.replicate_names, *dims.shard_names)
    wrong = [name for name in named if name not in there]
    if wrong or len(set(named)) != len(named):
        raise ValueError(
            f"fully_shard(dp_mesh_dims={dims}): {wrong or named} are not different axes of the mesh, whose axes are "
            f"{there}; name axes of mesh=, each once"
        )
    for names in (dims.replicate_names, dims.shard_names):
        if list(names) != sorted(names, key=there.index):
            raise ValueError(
                f"fully_shard(dp_mesh_dims={dims}): {names} are in another order than in the mesh, whose axes are {there}; "
                f"name them as {tuple(sorted(names, key=there.index))}"
            )
    axes = [_one_axis(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    return MeshAxes(
        axes[0] if len(axes) == 1 else concatenated(axes),
        shard_axis=len(axes) - 1 if dims.shard_names else None,
        replicate_axis=0 if dims.replicate_names else None,
        around=mesh,
        names=frozenset(named),
    )


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flattened(mesh[names], "_".join(names))


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _group_serves(device_type: str) -> bool:
    """Whether the default process group has a backend for `device_type` (gloo alone does not serve "cuda")."""
    backend = dist.get_backend_config()
    return device_type in backend if ":" in backend else backend != "gloo"


def _device_is_here(device_type: str) -> bool:
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:
        return False

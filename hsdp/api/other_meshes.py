"""Parameters that `shard_placement_fn` puts on another mesh: they become a unit of their own inside of the module's.

    fully_shard(block, mesh=dp, shard_placement_fn=place)     place(param) -> ShardPlacementResult(Shard(0), mesh_info)
        block                     unit over dp
        `- moe.experts            unit over the experts' mesh, as if fully_shard had been called on it first

FSDP2 keeps one parameter group per mesh behind the block's hooks. Here the experts have hooks themselves, which gather them
when they are called, and setters of the block reach them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hsdp.api.module import has_forward
from hsdp.api.select import Found, placement_of
from hsdp.comm.mesh import DataParallelMeshDims, MeshAxes
from hsdp.params.param import PlacementFn
from hsdp.policies import MixedPrecisionPolicy
from hsdp.unit.lookup import walk


@dataclass(frozen=True)
class Companion:
    """A unit to make before the one around it.

    Attributes:
        modules: the outermost modules with a forward that hold nothing but its parameters.
        ignored: parameters inside that are left alone.
        mesh, dims: where its parameters are sharded, as `fully_shard` takes it.
        choose: chooses the dims, as `shard_placement_fn` of the outer unit does.
    """

    modules: list[nn.Module]
    ignored: list[nn.Parameter]
    mesh: DeviceMesh
    dims: DataParallelMeshDims | None
    choose: PlacementFn

    def shard(self, fully_shard: Callable[..., Any], outer: MixedPrecisionPolicy, **alike: Any) -> nn.Module:
        """Makes the unit by `fully_shard`, whose other arguments are `alike`; returns one of its modules.

        Its dtypes are those of the unit around it, `outer`, at whose module, and nowhere else, inputs and outputs are cast.
        """

        def placement(param: nn.Parameter, shards: int) -> Any:
            found = placement_of(self.choose, param, shards)
            return getattr(found, "placement", found)

        fully_shard(
            self.modules,
            mesh=self.mesh,
            dp_mesh_dims=self.dims,
            shard_placement_fn=placement,
            mp_policy=replace(outer, cast_forward_inputs=False, output_dtype=None),
            ignored_params=self.ignored,
            **alike,
        )
        return self.modules[0]


def companions(
    modules: list[nn.Module], found: list[Found], axes: MeshAxes, choose: PlacementFn | None, unit: str
) -> list[Companion]:
    """The units that `choose` asks for on other meshes than that of `axes`.

    Raises:
        ValueError: a module holds parameters of two meshes, or all of `modules` are on another one, or some axes of a mesh
            without names are meant.
    """
    if choose is None:
        return []
    meshes: dict[int, _Given] = {}
    names: dict[int, str] = {}
    for places, param in found:
        info = getattr(placement_of(choose, param, axes.shard_size), "mesh_info", None)
        if info is None or (info.mesh == axes.mesh and _axes_of(info) == (axes.replicate_axis, axes.shard_axis)):
            continue
        meshes[id(param)], names[id(param)] = _given(info, places[0].fqn), places[0].fqn
    if not meshes:
        return []
    own = {id(param) for _, param in found} - meshes.keys()
    taken: dict[_Given, list[nn.Module]] = {}

    def visit(item: tuple[nn.Module, bool]) -> list[tuple[nn.Module, bool]]:
        module, may_be = item
        held = {id(param) for param in module.parameters()}
        kinds = {meshes[key] for key in held & meshes.keys()}
        if may_be and has_forward(module) and len(kinds) == 1 and not held & own:
            taken.setdefault(kinds.pop(), []).append(module)
            for key in held:
                names.pop(key, None)
            return []
        return [(child, True) for child in module.children()]

    for module in modules:
        walk((module, False), visit)
    if names:
        raise ValueError(
            f"fully_shard({unit}, shard_placement_fn=...): parameter {next(iter(names.values()))!r} is put on another "
            "mesh, and no module inside holds parameters of that mesh alone; give them a module of their own, whose "
            "forward uses them, or pass that mesh as mesh= if all parameters are on it"
        )
    managed = {id(param) for _, param in found}
    made = []
    for given, held in taken.items():
        ignored = [param for module in held for param in module.parameters() if id(param) not in managed]
        made.append(Companion(held, ignored, *given, choose))
    return made


_Given = tuple[DeviceMesh, DataParallelMeshDims | None]
"""A mesh and its axes as `fully_shard` takes them."""


def _axes_of(info: Any) -> tuple[int | None, int | None]:
    """The axes of its mesh over which an info replicates and shards; the others are not hsdp's."""
    return info.replicate_mesh_dim, info.shard_mesh_dim


def _given(info: Any, fqn: str) -> _Given:
    """Mesh and axes of an info: of axes that were named in a bigger mesh, that one and their names.

    Raises:
        ValueError: `fully_shard` would read the mesh otherwise, whose axes have no names.
    """
    dims, around = getattr(info, "dp_mesh_dims", None), getattr(info, "spmd_mesh", None)
    if dims is not None and around is not None:
        return around, DataParallelMeshDims(dims.shard, dims.replicate)
    mesh, (replicate, shard) = info.mesh, _axes_of(info)
    if (replicate, shard) == (None if mesh.ndim == 1 else 0, mesh.ndim - 1):
        return mesh, None
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"fully_shard(shard_placement_fn=...): parameter {fqn!r} is put on a mesh of shape {tuple(mesh.shape)} without "
            f"names, of which only axis {shard} shards and axis {replicate} replicates; give the mesh's axes names"
        )
    return mesh, DataParallelMeshDims(*(None if axis is None else names[axis] for axis in (shard, replicate)))


def without(found: list[Found], apart: list[Companion]) -> list[Found]:
    """The parameters that are left for the unit around the companions."""
    inside = {id(module) for one in apart for top in one.modules for module in top.modules()}
    return [(places, param) for places, param in found if not any(id(place.module()) in inside for place in places)]

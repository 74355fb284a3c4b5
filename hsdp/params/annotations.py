"""Plain parameters of which the package spmd_types says what other ranks hold: tensor parallelism without DTensors.

    {dp: R, tp: R}      whole on every rank, which compute different things: the gradient is the sum over tp as well
    {dp: R, tp: I}      whole on every rank, which compute the same: the gradient is the same there
    {dp: R, tp: S(0)}   each rank of tp has its rows

FSDP2 reads them from torch 2.14 on. Here, too, such a parameter is sharded as a DTensor with those placements is, and is
a plain tensor in forwards, with its annotation. hsdp never imports the package: code that annotates or checks has done so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Replicate

from hsdp.comm.mesh import MeshAxes
from hsdp.params.dtensors import as_dtensor, with_dtype
from hsdp.params.tensor_parallel import Inner

PACKAGE = "spmd_types"


def is_checked() -> bool:
    """Whether spmd_types checks what this thread computes now."""
    package = sys.modules.get(PACKAGE)
    return package is not None and bool(package.is_type_checking())


def unchecked() -> AbstractContextManager[None]:
    """Inside it spmd_types checks nothing: gathers and reductions have types that it does not know."""
    return sys.modules[PACKAGE].no_typecheck()  # type: ignore[no-any-return]


def checked() -> AbstractContextManager[None]:
    """Inside of `unchecked`, around the user's code, which is checked as it was before."""
    return importlib.import_module(f"{PACKAGE}.checker").typecheck()  # type: ignore[no-any-return]


def annotation_of(param: Tensor) -> Mapping[Any, Any]:
    """The type that spmd_types has for a plain parameter on each axis. Empty: none."""
    package = sys.modules.get(PACKAGE)
    return {} if package is None else package.get_local_type(param)


def is_within(axis: Any, axes: MeshAxes) -> bool:
    """Whether all ranks of an axis of spmd_types are ranks of hsdp's mesh."""
    ranks: list[int] = axes.mesh.mesh.flatten().tolist()
    return {rank - min(ranks) for rank in ranks}.issuperset(axis.layout.all_ranks_from_zero())


class Annotated(Inner):
    """How a plain parameter is distributed over the mesh in which hsdp's axes were named, by its annotation.

    Args:
        param: the parameter, which this rank holds as it is.
        axes: hsdp's, of a bigger mesh.
        where: the parameter's name in errors.

    Raises:
        ValueError: its annotation does not tell what it is on each axis of that mesh, or contradicts hsdp's axes.
    """

    visible = False

    def __init__(self, param: nn.Parameter, axes: MeshAxes, where: str) -> None:
        assert axes.around is not None, "an annotation is read on the mesh around hsdp's"
        package = sys.modules[PACKAGE]
        self._assert_type: Callable[..., Any] = package.assert_type
        self._partition: Any = package.get_partition_spec(param)
        annotation = dict(annotation_of(param))
        kinds = {**annotation, **_cuts(self._partition)}
        placements: list[Placement] = []
        sums: list[Placement] = []
        for at, kind in enumerate(_on_axes(kinds, axes, where)):
            if kind is None:
                placements.append(Replicate())
                sums.append(Replicate())
                continue
            try:
                placements.append(package.spmd_type_to_dtensor_placement(kind))
            except ValueError as error:
                name = (axes.around.mesh_dim_names or ())[at]
                raise ValueError(
                    f"{where} is annotated by spmd_types as {kind} on axis {name}, which does not say how ranks cut it "
                    f"({error}); annotate it as S(dim)"
                ) from None
            sums.append(package.spmd_type_to_dtensor_placement(kind.backward_type()))
        local = DTensor.from_local(param.detach(), axes.around, placements, run_check=False)
        super().__init__(local._spec, axes)
        self._sums = DTensorSpec(self.mesh, tuple(sums), tensor_meta=self.spec.tensor_meta)
        self._is_sum = any(self._sums.placements[axis] != self.placements[axis] for axis in self._rest)
        self._shown = {**_left_out(annotation, axes, package), **annotation}

    def wrap(self, block: Tensor) -> Tensor:
        """The block itself: forwards compute with a plain tensor."""
        return block

    def annotate(self, unsharded: Tensor) -> None:
        """Copies the parameter's annotation to an unsharded parameter."""
        self._assert_type(unsharded, self._shown, partition_spec=self._partition)

    def block_of_grad(self, grad: Tensor) -> Tensor:
        """The block's gradient: summed over the axes on which ranks compute different things with one block."""
        if not self._is_sum:
            return grad
        return super().block_of_grad(as_dtensor(grad, with_dtype(self._sums, grad.dtype)))


def _cuts(partition: Any) -> dict[Any, Any]:
    """The axes that cut a tensor, by a PartitionSpec of spmd_types: an entry per dim, an axis, several, or None."""
    cut: dict[Any, Any] = {}
    for dim, entry in enumerate(partition or ()):
        for axis in entry if isinstance(entry, tuple) else () if entry is None else (entry,):
            cut[axis] = sys.modules[PACKAGE].S(dim)
    return cut


def _on_axes(kinds: dict[Any, Any], axes: MeshAxes, where: str) -> list[Any]:
    """What a parameter is on each axis of the mesh around `axes`; None on hsdp's, and on those of one rank."""
    mesh = axes.around
    assert mesh is not None
    axis_of = sys.modules[PACKAGE].MeshAxis.of
    names = mesh.mesh_dim_names or ()
    others = {name: axis_of(mesh.get_group(name)) for name in names if name not in axes.names}
    for axis, kind in kinds.items():
        if axis not in others.values() and not is_within(axis, axes):
            raise ValueError(
                f"{where} is annotated by spmd_types as {kind} on axis {axis}, which is neither one of {names} nor a part "
                f"of hsdp's {sorted(axes.names)}; pass the mesh that has it"
            )
        if axis not in others.values() and getattr(kind, "name", "") != "R":
            raise ValueError(
                f"{where} is annotated by spmd_types as {kind} on axis {axis}, over which hsdp shards and replicates it; "
                "it must be R there, or have no annotation"
            )
    missing = [name for name, axis in others.items() if axis not in kinds and mesh[name].size() > 1]
    if missing:
        raise ValueError(
            f"{where} is annotated by spmd_types, but not on axis {missing[0]!r} of the mesh: annotate it there as R, I or "
            "S(dim), as ranks may compute different things, or the same, or hold parts of it"
        )
    return [kinds.get(others[name]) if name in others else None for name in names]


def _left_out(annotation: dict[Any, Any], axes: MeshAxes, package: Any) -> dict[Any, Any]:
    """R on hsdp's axes of the mesh that spmd_types works on now, as far as the annotation left them out."""
    mesh = package.current_mesh() or ()
    free = [axis for axis in mesh if is_within(axis, axes) and axis.isorthogonal(*annotation)]
    return dict.fromkeys(free, package.R)


def inner_of(param: nn.Parameter, axes: MeshAxes, where: str) -> Inner | None:
    """How a parameter that hsdp shards over `axes` is distributed already, if it is.

    Raises:
        ValueError: it is annotated, and `axes` do not tell on which mesh, or see `Annotated`.
    """
    if isinstance(param, DTensor):
        return Inner(param._spec, axes)
    annotation = annotation_of(param)
    if not annotation:
        return None
    if axes.around is not None:
        return Annotated(param, axes, where)
    for axis, kind in annotation.items():
        name = getattr(kind, "name", kind)
        if name in ("V", "P") or (name == "R" and param.requires_grad and not is_within(axis, axes)):
            raise ValueError(
                f"{where} is annotated by spmd_types as {name} on axis {axis}: each rank has a part of it, or a term of "
                "the sum that is its gradient, and hsdp would take it for the whole; pass the mesh that has this axis, and "
                "name hsdp's axes in it with dp_mesh_dims="
            )
    return None

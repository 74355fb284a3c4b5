"""Which parameters a unit gets, and how each of them is cut."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parameter import is_lazy

from hsdp.api.module import HSDPModule
from hsdp.comm.mesh import MeshAxes
from hsdp.params.annotations import inner_of
from hsdp.params.local import local_of
from hsdp.params.memory import check_apart, check_kept
from hsdp.params.param import ManagedParam, ParamName, PlacementFn, originals
from hsdp.params.placement import mergeable
from hsdp.params.subclass import extends, wrapper_of
from hsdp.policies import is_trainable
from hsdp.unit.extension_group import check_extension
from hsdp.unit.lookup import unit_of, walk

Found = tuple[list[ParamName], nn.Parameter]
"""A parameter with all its names."""


def identities(name: str, params: Iterable[nn.Parameter] | None, function: str = "fully_shard") -> set[int]:
    """The identities of parameters that were passed to a function as the argument `name`.

    Raises:
        TypeError: something else is among them.
    """
    if params is None:
        return set()
    is_list = isinstance(params, Iterable) and not isinstance(params, torch.Tensor)
    listed = list(params) if is_list else []
    wrong = [one for one in listed if not isinstance(one, nn.Parameter)] if is_list else [params]
    if wrong:
        raise TypeError(
            f"{function}({name}=...) takes a list of parameters, not {type(wrong[0]).__name__} ({wrong[0]!r:.60}); pass "
            "the nn.Parameter objects, e.g. [model.get_parameter(name) for name in names]"
        )
    return {id(param) for param in listed}


def collect_params(
    modules: list[nn.Module], ignored: set[int], is_unit: Callable[[nn.Module], bool] | None = None
) -> list[Found]:
    """The parameters below `modules` that no nested unit owns, each with all its names.

    `is_unit` tells which modules below are units of their own; None: those that are sharded.
    """
    found: dict[int, Found] = {}
    seen: set[int] = set()

    def visit(item: tuple[nn.Module, str]) -> list[tuple[nn.Module, str]]:
        module, prefix = item
        if id(module) in seen or (isinstance(module, HSDPModule) if is_unit is None else is_unit(module)):
            return []
        seen.add(id(module))
        for name, param in module._parameters.items():
            if param is not None and id(param) not in ignored:
                place = ParamName(weakref.ref(module), name, prefix + name)
                found.setdefault(id(param), ([], param))[0].append(place)
        return [(child, f"{prefix}{name}.") for name, child in module.named_children()]

    for index, module in enumerate(modules):
        walk((module, "" if len(modules) == 1 else f"{index}."), visit)
    return list(found.values())


def manage(
    found: list[Found],
    modules: list[nn.Module],
    unit: str,
    axes: MeshAxes,
    choose: PlacementFn | None,
    replicated: set[int],
    reshard_after_forward: bool | int | None,
) -> list[ManagedParam]:
    """Makes what was found in `modules` the parameters of the unit that is named `unit`, each cut as `choose` says.

    Raises:
        TypeError, ValueError: one of them cannot be sharded so.
    """
    for places, param in found:
        check_param(param, places[0].module(), places[0].fqn, unit)
    _check_one_device(found, unit)
    check_apart([(places[0], param) for places, param in found], unit)
    check_kept(modules, unit)
    params = []
    for places, param in found:
        where = f"fully_shard({unit}): parameter {places[0].fqn!r}"
        is_replicated = stays_whole(param, replicated)
        dim, merged = (None, 1) if is_replicated else choose_dim(param, places[0].fqn, unit, choose, axes.shard_size)
        inner = inner_of(param, axes, where)
        if inner is not None:
            inner.check(axes, dim, where)
        managed = ManagedParam(places, param, dim, merged, is_replicated, inner)
        if managed.wrapper is not None:
            check_extension(managed, axes, reshard_after_forward, where)
        params.append(managed)
    return params


def check_param(param: nn.Parameter, module: nn.Module | None, fqn: str, unit: str) -> None:
    """Raises ValueError if a parameter cannot be one of the unit that is named `unit`."""
    if is_lazy(param):
        raise ValueError(
            f"fully_shard({unit}): parameter {fqn!r} of a lazy module has no shape yet; run a forward of the module first"
        )
    where = f"fully_shard({unit}): parameter {fqn!r} of shape {tuple(param.shape)}"
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{where} is in a module of torch.jit, which keeps its parameters itself; shard the plain module")
    owner, name = unit_of(param), None
    if owner is not None:
        name = next(managed.fqn for managed in owner.params if managed.sharded is param)
        if any(place.module() is module for managed in owner.params for place in managed.places):
            raise ValueError(
                f"{where} belongs to unit {owner.name!r} already, as {name!r}: that was sharded before this module inside "
                "it; call fully_shard bottom-up: on inner modules first, then on the module that holds them"
            )
    elif param in originals:
        ref, name = originals[param]
        owner = ref()
    if name is not None:
        raise ValueError(
            f"{where} is tied to {name!r} of unit {owner.name if owner is not None else '(freed)'!r}, which owns it; "
            "shard the smallest module that holds both names as one unit, or untie them"
        )
    if isinstance(param, DTensor) and extends(param._local_tensor):
        raise ValueError(
            f"{where} is a DTensor around a {type(param._local_tensor).__name__}, and gather extensions are supported for "
            "parameters that are not DTensors before; shard the plain parameter, or pass it in ignored_params"
        )
    if not isinstance(param, DTensor):
        wrapper_of(param, where)
    if (layout := local_of(param).layout) is not torch.strided:
        raise ValueError(
            f"{where} has the layout {layout}, and rows are sent of dense tensors only; make it dense (to_dense()), or "
            "pass it in ignored_params"
        )
    if param.requires_grad and not is_trainable(param.dtype):
        raise ValueError(
            f"{where} has dtype {param.dtype} and wants gradients, which cannot be reduced; freeze it "
            "(requires_grad_(False)), or pass it in ignored_params"
        )
    wanted = getattr(param, "grad_dtype", None)  # None: any; a torch without it knows no other than the parameter's dtype
    if param.requires_grad and wanted is not None and wanted is not param.dtype:
        raise ValueError(
            f"{where} has grad_dtype {wanted}, and gradients of sharded parameters have their dtype, {param.dtype}; set "
            f"grad_dtype to that. MixedPrecisionPolicy(reduce_dtype={wanted}) has them summed in {wanted}, and a parameter "
            f"of {wanted} computes in {param.dtype} with MixedPrecisionPolicy(param_dtype={param.dtype}). Or pass it in "
            "ignored_params"
        )


def _check_one_device(found: list[Found], unit: str) -> None:
    on_meta = [places[0].fqn for places, param in found if param.is_meta]
    if on_meta and len(on_meta) < len(found):
        real = next(places[0].fqn for places, param in found if not param.is_meta)
        raise ValueError(
            f"fully_shard({unit}): parameter {on_meta[0]!r} is on the meta device and {real!r} is not, so values would be "
            "lost or made up; materialise the module first, or build all of it on meta"
        )


def stays_whole(param: nn.Parameter, replicated: Container[int]) -> bool:
    """Whether every rank keeps a parameter whole and all-reduces its gradient: one of `replicate_params`, or a scalar.

    A reduce-scatter may add up a scalar's gradient in another order for each rank, and their copies would drift apart.
    """
    return id(param) in replicated or param.ndim == 0


def choose_dim(param: nn.Parameter, fqn: str, unit: str, choose: PlacementFn | None, shards: int) -> tuple[int, int]:
    """The dim to shard a parameter on, and how many leading dims to cut as one."""
    placement = None if choose is None else placement_of(choose, param, shards)
    # FSDP2's ShardPlacementResult holds one; other_meshes.py has seen to its mesh.
    placement = getattr(placement, "placement", placement)
    if placement is None:
        return 0, 1
    where = f"fully_shard({unit}, shard_placement_fn=...): for parameter {fqn!r} of shape {tuple(param.shape)}"
    if isinstance(placement, tuple):
        if placement != (Shard(0), Shard(1)) or isinstance(param, DTensor) or not mergeable(param.shape, shards):
            raise ValueError(
                f"{where} it returned {placement}; the only tuple is (Shard(0), Shard(1)), for plain parameters whose "
                f"first two dims, as one, are cut into {shards} equal parts that lie inside of a row of dim 0"
            )
        return 0, 2
    if type(placement) is not Shard:
        raise TypeError(f"{where} it returned {placement!r}; return Shard(dim) or None")
    if not -param.ndim <= placement.dim < param.ndim:
        raise ValueError(f"{where} it returned {placement}, but dims go from {-param.ndim} to {param.ndim - 1}")
    return placement.dim % param.ndim, 1


def asked_once(choose: PlacementFn | None) -> PlacementFn | None:
    """The function with its answers kept: it is the user's, and may count its calls or draw from an iterator."""
    if choose is None:
        return None
    answers: dict[tuple[nn.Parameter, int], Any] = {}

    def kept(param: nn.Parameter, shards: int) -> Any:
        if (param, shards) not in answers:
            answers[param, shards] = placement_of(choose, param, shards)
        return answers[param, shards]

    return kept


def placement_of(choose: PlacementFn, param: nn.Parameter, shards: int) -> Any:
    """Calls the function with the parameter, and with the number of shard ranks if it asks for that.

    It asks by a parameter named `shards`, or by a second one that cannot do without a value. What has a default is the
    function's own: `lambda param, _experts=experts: ...` binds a loop's variable.
    """
    try:
        named = inspect.signature(choose).parameters
    except (TypeError, ValueError):
        return choose(param)
    positional = [one for one in named.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(positional) > 1 and positional[1].default is inspect.Parameter.empty:
        return choose(param, shards)
    asked = named.get("shards")
    by_name = asked is not None and asked.kind in (asked.POSITIONAL_OR_KEYWORD, asked.KEYWORD_ONLY)
    return choose(param, shards=shards) if by_name and asked not in positional[:1] else choose(param)

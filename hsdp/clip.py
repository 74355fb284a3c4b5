"""`clip_grad_norm_`: one norm over gradients on any mixture of meshes, with as few reductions as the meshes allow.

    gradients --foreach norms--> a number per way of sharding --one all-reduce per group--> norm --foreach--> scaled

Everything happens on local tensors: a DTensor operator costs the host tens of microseconds, and gradients are hundreds.

Where a unit has `CommPolicy(reduction="tree")` the norm must not depend on the mesh. Its terms lie on other ranks, in other
tensors, on every mesh, so they are added as integers, whose sum no order changes:

    largest |x|: m < 2^e --all-reduce--> each |x / 2^e|^p as an integer of 56 bits --sums, one all-reduce--> norm
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hsdp.comm.collectives import all_reduce_now
from hsdp.comm.divergence import CLIP, note_event_of
from hsdp.errors import StateError
from hsdp.schedule.optimizer_hooks import check_communicated
from hsdp.schedule.runtime import await_failure
from hsdp.unit.lookup import place_of, unit_of, unit_of_module, unsharded_params
from hsdp.unit.unit import Unit

Groups = tuple[ProcessGroup, ...]
"""The process groups over which gradients are sharded; none for what every rank holds whole."""

Bundles = dict[tuple[torch.dtype, torch.device], list[Tensor]]
"""Local tensors of one dtype and device each, as foreach kernels want them."""

_ALIKE = 1e-5
"""Norms of the same gradients, added up in other orders, differ by less than this part of them."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients in place so that their norm, as one vector over all ranks, is at most `max_norm`.

    Does what `torch.nn.utils.clip_grad_norm_` does with the unsharded gradients on one device, and what that does with
    DTensors at a fraction of the cost. Every rank of the meshes must call it, with the same parameters. Where they
    share a mesh there is one all-reduce of one number; with `CommPolicy(reduction="tree")` in one of the units there are
    two, and the norm is the same to the last bit on every mesh that the same gradients are sharded over. The host does not
    wait for the device, unless `error_if_nonfinite` is on, gradients are offloaded, or norms are compared between ranks:
    where units lie on several meshes, or plain parameters beside sharded ones are not in `ignored_params`. Reductions that
    still run (`set_is_last_backward`) are joined.

    Args:
        parameters: a model, a parameter, or several. Gradients may be sharded (DTensors on one mesh or several) or
            replicated (DTensors and plain tensors, counted once), on any device, of any floating-point dtype; those
            that are None are left out.
        max_norm: the largest norm, at least 0; `inf` only measures.
        norm_type: order p of the norm, greater than 0; `inf` for the largest absolute value.
        error_if_nonfinite: raise if the norm is nan or inf, on all ranks, and leave the gradients as they are.

    Returns:
        The norm before clipping: a plain scalar tensor, the same on all ranks, in the widest dtype among the gradients
        but at least float32, on the mesh's device. In a step that an elastic replica will drop, as a backward failed in
        it, that of the gradients that are left, 0 without any; they are not scaled then.

    Raises:
        TypeError: `parameters` is neither a module nor tensors.
        ValueError: `max_norm` or `norm_type` makes no sense, a gradient is a DTensor of partial sums, or, with
            `CommPolicy(reduction="tree")`, the `norm_type` is none of 1, 2 and inf.
        StateError: a unit holds gradient sums of earlier micro-batches that were not communicated; or units lie on several
            meshes, one inside the other, and norms differ on ranks of the larger one: they have different experts, say. Or
            a plain parameter beside sharded ones, in no unit, has other gradients on other ranks.
        RuntimeError: the norm is not finite, with `error_if_nonfinite`.
    """
    order, limit = _check_numbers(max_norm, norm_type)
    params = _sharded_for_shown(_distinct(parameters))
    units = _join(params)
    if not isinstance(parameters, nn.Module):
        params = _in_one_order(params, units)
    in_tree = any(unit.in_tree for unit in units)
    if in_tree and order not in (1.0, 2.0, math.inf):
        raise ValueError(
            f"clip_grad_norm_(norm_type={norm_type!r}): with CommPolicy(reduction='tree') the norm is one of order 1, 2 or "
            "inf, which no mesh changes; choose one of them"
        )
    grads = [grad for param in params if (grad := param.grad) is not None]
    if not grads:
        return torch.zeros(())
    shardings = _by_sharding(grads)
    norm = (_norm_of_any_mesh if in_tree else _norm)(shardings, _device_of(grads), order)
    norm = _agreed(norm, units, _in_no_unit(parameters, params, units), order)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"clip_grad_norm_: the gradients' norm of order {order} is {norm.item()}, so they cannot be clipped; find "
            "out which loss was not finite, or pass error_if_nonfinite=False to scale by it all the same"
        )
    # Those of a step that will be dropped stand for pending sums in part, which no factor may change.
    if limit < math.inf and not any(unit.settings.replica_reduce.drops for unit in units):
        _scale(shardings, limit, norm)
    return norm


def _scale(shardings: dict[Groups, Bundles], limit: float, norm: Tensor) -> None:
    # As torch does it, by 1 where there is nothing to clip: to ask would make the host wait.
    factor = (limit / (norm + 1e-6)).clamp_(max=1.0)
    for bundles in shardings.values():
        for (_, device), tensors in bundles.items():
            if tensors:
                torch._foreach_mul_(tensors, factor.to(device))


def _check_numbers(max_norm: float, norm_type: float) -> tuple[float, float]:
    try:
        order, limit = float(norm_type), float(max_norm)
    except (TypeError, ValueError):
        order = limit = math.nan
    if not order > 0 or not limit >= 0:
        raise ValueError(
            f"clip_grad_norm_(max_norm={max_norm!r}, norm_type={norm_type!r}): expected a max_norm of at least 0 and a "
            "norm_type greater than 0 (inf for the largest absolute value)"
        )
    return order, limit


def _distinct(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each parameter once, though it has several names or was given twice."""
    if isinstance(parameters, nn.Module):
        if (unit := unit_of_module(parameters)) is not None:
            await_failure(unit)
        parameters = _parameters_below(parameters)
    elif isinstance(parameters, Tensor):
        parameters = (parameters,)
    elif not isinstance(parameters, Iterable):
        raise TypeError(f"clip_grad_norm_: expected a module or parameters, not {type(parameters).__name__}")
    params: dict[int, Tensor] = {}
    for param in parameters:
        if not isinstance(param, Tensor):
            raise TypeError(
                f"clip_grad_norm_: expected parameters, but one of them is of type {type(param).__name__}; pass the "
                "model, or its parameters()"
            )
        params[id(param)] = param
    return list(params.values())


def _sharded_for_shown(params: list[Tensor]) -> list[Tensor]:
    """Inside of a forward, modules show their unsharded parameters: behind a backward the sharded ones have gradients."""
    if set(map(type, params)) <= {DTensor}:
        return params
    shown = unsharded_params()
    # In a backward it is they that have gradients, which a hook may clip.
    return [shown[id(param)][1].sharded if param.grad is None and id(param) in shown else param for param in params]


def _parameters_below(module: nn.Module) -> Iterator[Tensor]:
    """What `module.parameters()` gives, at a fraction of its cost: no names, no generator for each level."""
    seen = {id(module)}
    stack = [module]
    while stack:
        at = stack.pop()
        for param in at._parameters.values():
            if param is not None:
                yield param
        for child in at._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def _join(params: list[Tensor]) -> list[Unit]:
    """Waits for reductions that run past the end of backward; refuses sums that were never communicated.

    Replicas clip alike though they do not communicate about it: the next all-reduce of gradients tells whether they did.
    Shard ranks, which do, learn whether they clip the same units.

    Returns:
        The units that the parameters are of.
    """
    known: set[int] = set()
    units: list[Unit] = []
    for param in params:
        if id(param) in known or (unit := unit_of(param)) is None:
            continue
        known.update(id(managed.sharded) for managed in unit.params)
        check_communicated(unit, "clip_grad_norm_", may_drop=True)
        units.append(unit)
    note_event_of(CLIP, (comm for unit in units for comm in (unit.shard_comm, unit.replicate_comm)))
    return units


def _in_one_order(params: list[Tensor], units: list[Unit]) -> list[Tensor]:
    """The parameters in an order that all ranks have, though they list them in others, as they do the elements of a set.

    Replicas are to add up their gradients alike to the last bit, and ranks of several meshes to reduce over these in turn.
    """
    in_turn = sorted(units, key=lambda unit: place_of(unit.params[0].sharded))
    places = {id(param.sharded): place for place, param in enumerate(chain(*(unit.params for unit in in_turn)))}
    return sorted(params, key=lambda param: places.get(id(param), len(places)))


def _in_no_unit(given: object, params: list[Tensor], units: list[Unit]) -> dict[str, Tensor]:
    """Plain parameters beside those of units, which no unit was told to ignore, by what to call them.

    Also without a gradient, which another rank may have: the ranks decide alike whether they compare.
    """
    ignored = {key for unit in units for key in unit.ignored}
    plain = [p for p in params if not isinstance(p, DTensor) and p.requires_grad and id(p) not in ignored] if units else []
    if not plain:
        return {}
    names = {id(param): repr(name) for name, param in given.named_parameters()} if isinstance(given, nn.Module) else {}
    return {names.get(id(param), f"number {at} of shape {tuple(param.shape)}"): param for at, param in enumerate(plain)}


def _agreed(norm: Tensor, units: list[Unit], plain: dict[str, Tensor], order: float) -> Tensor:
    """Compares the norm over the largest mesh where ranks may have others.

    They may if units are on several meshes, as no structure tells experts from copies, or `plain` parameters in no unit.

    Returns:
        The largest of the ranks' norms, which were added up in other orders: all ranks are to scale by the same.

    Raises:
        StateError: ranks have others. Dense layers would be scaled differently from rank to rank.
    """
    if len({unit.mesh_ranks for unit in units}) < 2 and not plain:
        return norm
    widest = max(units, key=lambda unit: len(unit.mesh_ranks))
    grads = [param.grad for param in plain.values() if param.grad is not None]
    alone = nn.utils.get_total_norm(grads, order).to(norm.device) if grads else torch.zeros_like(norm)
    known = torch.stack((norm.double(), alone.double())).nan_to_num(nan=math.inf, posinf=math.inf)
    bounds = torch.stack((known, -known))
    for comm in (widest.shard_comm, widest.replicate_comm):
        if comm.group is not None and comm.size > 1:
            all_reduce_now(bounds, dist.ReduceOp.MAX, comm.group, hash((CLIP, 2)), "comparison of clip_grad_norm_")
    (largest, of_plain), (least, least_of_plain) = bounds[0].tolist(), (-bounds[1]).tolist()
    if of_plain > least_of_plain * (1 + _ALIKE):
        raise StateError(
            f"clip_grad_norm_: {len(plain)} parameter(s) beside sharded ones are in no unit ({', '.join([*plain][:3])}"
            f"{', ...' if len(plain) > 3 else ''}), and their gradients are those of each rank alone, with norms from "
            f"{least_of_plain:g} to {of_plain:g}: sharded gradients would be scaled differently from rank to rank. Call "
            "fully_shard on the module that holds them (the root), and make the optimizer afterwards; or sum their "
            "gradients before"
        )
    if largest > least * (1 + _ALIKE):
        raise StateError(
            f"clip_grad_norm_: ranks have norms from {least:g} to {largest:g}, because units on smaller meshes than "
            f"that of {widest.name!r} have other gradients on other ranks, as different experts do; clip the parameters of "
            "each mesh in a call of their own"
        )
    return torch.where(bounds[0, 0].isfinite(), bounds[0, 0].to(norm.dtype), norm)


def _device_of(grads: list[Tensor]) -> torch.device:
    """Where numbers about gradients are reduced: on the first mesh's device, though some may be offloaded, or plain."""
    for grad in grads:
        if isinstance(grad, DTensor):
            return torch.device(grad.device_mesh.device_type)
    return grads[0].device


def _by_sharding(grads: list[Tensor]) -> dict[Groups, Bundles]:
    """The local tensors by the groups over which they are sharded.

    Empty ones are left out, as they have no norm of order inf; but their bundle is there, on every rank of the groups.
    """
    found: dict[Groups, Bundles] = {(): {}}
    mesh = placements = None
    sharded = found[()]
    for grad in grads:
        if isinstance(grad, DTensor):
            spec = grad._spec
            # Neighbours are mostly sharded alike, and to compare is cheaper than to look up.
            if spec.mesh is not mesh or spec.placements != placements:
                mesh, placements = spec.mesh, spec.placements
                sharded = found.setdefault(_groups_of(grad), {})
            local = grad._local_tensor
            local, bundles = local if type(local) is Tensor else grad.to_local(), sharded
        else:
            local, bundles = grad, found[()]
        kind = (local.dtype, local.device)
        if kind not in bundles:
            bundles[kind] = []
        if local.numel():
            bundles[kind].append(local)
    return found


def _groups_of(grad: DTensor) -> Groups:
    mesh = grad.device_mesh
    groups = []
    for axis, placement in enumerate(grad.placements):
        if placement.is_partial():
            raise ValueError(
                f"clip_grad_norm_: a gradient of shape {tuple(grad.shape)} has placements {grad.placements} on {mesh}: "
                "these are partial sums, whose norm says nothing; redistribute() it to Shard or Replicate first"
            )
        if not placement.is_replicate() and mesh.size(axis) > 1:
            groups.append(mesh.get_group(axis))
    return tuple(groups)


def _norm(shardings: dict[Groups, Bundles], device: torch.device, order: float) -> Tensor:
    """The norm over all ranks, a scalar on `device`."""
    dtype = torch.float32
    parts: dict[Groups, Tensor] = {}
    for groups, bundles in shardings.items():
        for (kind, _), tensors in bundles.items():
            dtype = torch.promote_types(dtype, kind.to_real())
            norm = _norm_here(tensors, order, device)
            parts[groups] = _combine(parts[groups], norm, order) if groups in parts else norm
    return _decode(_reduce(parts, order), order).to(dtype)


def _norm_here(tensors: list[Tensor], order: float, device: torch.device) -> Tensor:
    """The norm of one bundle, in the form in which it is reduced."""
    if not tensors:
        return torch.zeros(2 if order == math.inf else 1, dtype=torch.float64, device=device)
    half = tensors[0].dtype.itemsize < 4
    norms = torch._foreach_norm(tensors, order, dtype=torch.float32 if half else None)
    # In float64, as powers will be summed: the square of a float32 overflows from 2e19 on.
    return _encode(torch.linalg.vector_norm(torch.stack(norms), order, dtype=torch.float64).to(device), order)


def _encode(norm: Tensor, order: float) -> Tensor:
    """What is reduced for a norm, 1-D: its power; or itself and if it is nan, which a backend's maximum may drop."""
    if order == math.inf:
        return torch.stack((norm.nan_to_num(nan=0.0, posinf=math.inf), norm.isnan().to(norm.dtype)))
    return norm.pow(order).view(1)


def _decode(value: Tensor, order: float) -> Tensor:
    if order == math.inf:
        return value[0].masked_fill(value[1] > 0, math.nan)
    return value[0].pow(1.0 / order)


def _combine(a: Tensor, b: Tensor, order: float) -> Tensor:
    return torch.maximum(a, b) if order == math.inf else a + b


def _reduce(parts: dict[Groups, Tensor], order: float) -> Tensor:
    """Reduces every part over its groups and joins them: one all-reduce for each group, however many parts have it."""
    op = dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM
    while (group := next((group for groups in parts for group in groups), None)) is not None:
        members = [groups for groups in parts if group in groups]
        values = torch.cat([parts.pop(groups) for groups in members])
        all_reduce_now(values, op, group, hash((CLIP, values.numel(), order)), "all-reduce of clip_grad_norm_")
        for groups, value in zip(members, values.view(len(members), -1), strict=True):
            rest = tuple(other for other in groups if other is not group)
            parts[rest] = _combine(parts[rest], value, order) if rest in parts else value
    return parts[()]


# -- the same on every mesh --------------------------------------------------------------------------------------------

_BITS, _LOW = 56, 34
"""Of a term as an integer, and of the lower of its two parts, which are added apart: the upper ones of 2^40 terms fit."""

_AT_ONCE, _AT_ONCE_ON_DEVICE = 1 << 16, 1 << 22
"""Elements whose terms are made at a time, 24 bytes of memory each: what a CPU's cache holds, what keeps a device busy."""


def _norm_of_any_mesh(shardings: dict[Groups, Bundles], device: torch.device, order: float) -> Tensor:
    """As `_norm`, of order 1, 2 or inf; no order of elements and ranks changes a bit of it."""
    largest = _norm(shardings, device, math.inf)
    if order == math.inf:
        return largest
    finite = largest.isfinite()
    # Of the least float64 a scale would overflow; there terms have fewer bits.
    exponent = torch.frexp(largest.double().masked_fill(~finite, 0.0)).exponent.clamp(min=-900)
    scale = torch.exp2(_BITS / order - exponent.double())
    parts: dict[Groups, Tensor] = {}
    for groups, bundles in shardings.items():
        for tensors in bundles.values():
            total = _total(tensors, order, scale).to(device)
            parts[groups] = _combine(parts[groups], total, order) if groups in parts else total
    if not parts:
        return largest
    upper, lower = _reduce(parts, order).double()
    norm = (upper * 2.0 ** (_LOW - _BITS) + lower * 2.0**-_BITS).pow(1.0 / order) * torch.exp2(exponent.double())
    return torch.where(finite, norm.to(largest.dtype), largest)


def _total(tensors: list[Tensor], order: float, scale: Tensor) -> Tensor:
    """The sum of the terms of some tensors: its upper part and the `_LOW` bits below, both int64."""
    tensors = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors]
    device = tensors[0].device if tensors else scale.device
    factor = scale.to(device)
    total = torch.zeros(2, dtype=torch.int64, device=device)
    upper, lower = total
    at_once = _AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_DEVICE
    most = min(at_once, sum(tensor.numel() for tensor in tensors))
    powers = torch.empty(most, dtype=torch.float64, device=device)
    terms, parts = (torch.empty(most, dtype=torch.int64, device=device) for _ in range(2))
    for values in _portions(tensors, at_once):
        power, term, part = (memory[: values.numel()] for memory in (powers, terms, parts))
        power.copy_(values).mul_(factor)
        term.copy_(power.mul_(power) if order == 2 else power.abs_())
        lower += torch.bitwise_and(term, (1 << _LOW) - 1, out=part).sum()
        upper += torch.bitwise_right_shift(term, _LOW, out=part).sum()
        upper += lower >> _LOW
        lower &= (1 << _LOW) - 1
    return total


def _portions(tensors: list[Tensor], at_once: int) -> Iterator[Tensor]:
    """The elements of tensors of one dtype and device as 1-D tensors of so many at most, small ones together."""
    waiting: list[Tensor] = []
    count = 0
    for tensor in tensors:
        for part in tensor.reshape(-1).split(at_once):
            if waiting and count + part.numel() > at_once:
                yield torch.cat(waiting)
                waiting, count = [], 0
            if part.numel() == at_once:
                yield part
            else:
                waiting.append(part)
                count += part.numel()
    if waiting:
        yield torch.cat(waiting)

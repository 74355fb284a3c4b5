"""Hooks on optimizers' steps: reductions are joined before a step, and parameters have a new version after it.

Both are hooks that torch runs for every optimizer; the first `fully_shard` registers them.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hsdp.errors import StateError
from hsdp.params.dtensors import find_infs_on_all_axes
from hsdp.params.ownership import changes
from hsdp.params.param import originals, shown
from hsdp.schedule.pipeline import ReductionPipeline
from hsdp.schedule.runtime import Runtime, runtime_of
from hsdp.schedule.step_norms import watch_norms
from hsdp.torch_private import leave_out_of_graphs
from hsdp.unit.landing import note_grads_read, refuse_assigned_grads
from hsdp.unit.lookup import all_units, place_of, unit_of, unsharded_params
from hsdp.unit.sharing import gather_gradients
from hsdp.unit.state import refuse_assigned
from hsdp.unit.unit import Unit


class _Held(NamedTuple):
    """An optimizer's units and parameters, found when its parameters had these `ids`, and units had changed so often.

    Parameters are given by their places among all of its groups: torch casts none that has weak references.
    """

    ids: list[int]
    changes: int
    units: list[weakref.ref[Unit]]
    copied: list[int]  # of which torch's optimizers would step a copy
    added: dict[str, int]  # to sharded modules, behind `fully_shard`


_held_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Held]
_held_by = weakref.WeakKeyDictionary()


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _units_of(optimizer: torch.optim.Optimizer) -> list[weakref.ref[Unit]]:
    """The units whose parameters the optimizer steps; looked up again where it has other parameters."""
    ids = list(map(id, _params_of(optimizer)))
    held = _held_by.get(optimizer)
    if held is None or held.changes != changes() or held.ids != ids:
        leave_out_of_graphs()
        params = list(_params_of(optimizer))
        stale = next((originals[param] for param in params if param in originals), None)
        if stale is not None and (owner := stale[0]()) is not None:
            raise StateError(
                f"{type(optimizer).__name__}.step: the optimizer was made before fully_shard and holds the parameter that "
                f"became {stale[1]!r} of unit {owner.name!r}, not the sharded one; make the optimizer after fully_shard"
            )
        full = [param for param in params if param in shown]
        # Those that have gradients are trained: users made them parameters of a plain model of their own.
        place = shown[full[0]] if full and all(param.grad is None for param in full) else None
        if place is not None and (owner := place[0]()) is not None:
            raise StateError(
                f"{type(optimizer).__name__}.step: the optimizer was made while full parameters were shown, and holds the "
                f"one of {place[1]!r} of unit {owner.name!r}, which nobody trains; make it outside of full_params"
            )
        leaves = unsharded_params()
        if (leaf := next((param for param in params if id(param) in leaves), None)) is not None:
            holder, managed = leaves[id(leaf)]
            raise StateError(
                f"{type(optimizer).__name__}.step: the optimizer was made inside of a forward, or behind unshard(), and "
                f"holds the unsharded one of {managed.fqn!r} of unit {holder.name!r}, which nothing steps; make it outside"
            )
        # In one order on all ranks, whatever the order of parameters: units may communicate.
        units = dict.fromkeys(unit for param in sorted(params, key=place_of) if (unit := unit_of(param)) is not None)
        added = _in_no_unit(optimizer, params, units)
        refs = [weakref.ref(unit) for unit in units]
        held = _held_by[optimizer] = _Held(ids, changes(), refs, _copied_as_reals(params), added)
    return held.units


def _copied_as_reals(params: Iterable[nn.Parameter]) -> list[int]:
    """Complex parameters whose `torch.view_as_real` is a copy, whole on each rank: their last dim is cut unevenly."""
    return [
        place
        for place, param in enumerate(params)
        if isinstance(param, DTensor) and param.is_complex() and param.ndim and param.shape[-1] % _parts_of_last_dim(param)
    ]


def _parts_of_last_dim(tensor: DTensor) -> int:
    cuts = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in cuts if placement.is_shard(tensor.ndim - 1))


def _refuse_copies(optimizer: torch.optim.Optimizer) -> None:
    """Raises StateError where the step would silently change copies of parameters.

    torch's optimizers step complex parameters as reals; SGD takes complex numbers. None steps those without gradients.
    """
    held = _held_by.get(optimizer)
    if held is None or not held.copied or isinstance(optimizer, torch.optim.SGD) or hasattr(optimizer, "_hsdp_stepper"):
        return
    params = list(_params_of(optimizer))
    for param in (params[place] for place in held.copied):
        if param.grad is None:
            continue
        unit = unit_of(param)
        name = next((one.fqn for one in unit.params if one.sharded is param), "") if unit is not None else ""
        raise StateError(
            f"{type(optimizer).__name__}.step: parameter {name!r} of shape {tuple(param.shape)} is complex, and its "
            f"last dim does not fall into {_parts_of_last_dim(cast(DTensor, param))} equal parts; torch.view_as_real "
            "copies such a DTensor, and the step would change the copy. Call hsdp.optim.local(optimizer), which steps "
            "local tensors"
        )


def _in_no_unit(
    optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter], units: Collection[Unit]
) -> dict[str, int]:
    """Parameters that were added to sharded modules, perhaps as adapters that an optimizer steps alone, by their names.

    Nothing sums their gradients over ranks. Nor those of parameters beside sharded ones in a module that is no
    unit, of which it warns: the user may sum them.
    """
    beside = bool(units)
    units = units or all_units()
    if all(unit.axes.shard_size * unit.axes.replicate_size == 1 for unit in units):
        return {}
    known = {key for unit in units for key in unit.ignored}
    alone = {at: param for at, param in enumerate(params) if not isinstance(param, DTensor) and id(param) not in known}
    if not alone:
        return {}
    roots = {module for unit in units if (runtime := runtime_of(unit)) is not None for module in runtime.modules()}
    names = {id(param): name for root in roots for name, param in root.named_parameters()}
    outside = [param for param in alone.values() if param.requires_grad and id(param) not in names] if beside else []
    if outside:
        shapes = ", ".join(f"one of shape {tuple(param.shape)}" for param in outside[:3])
        more = ", ..." if len(outside) > 3 else ""
        warnings.warn(
            f"hsdp: {type(optimizer).__name__} steps {len(outside)} parameter(s) beside sharded ones that are in no unit: "
            f"{shapes}{more}. Their gradients are those of each rank alone, and ranks drift apart unless you sum them; "
            "call fully_shard on the module that holds them, and make the optimizer afterwards",
            stacklevel=6,
        )
    return {names[id(param)]: place for place, param in alone.items() if id(param) in names}


def _refuse_added(optimizer: torch.optim.Optimizer) -> None:
    """Raises StateError where the step would let ranks drift apart, in parameters that came behind `fully_shard`."""
    held = _held_by.get(optimizer)
    if held is None or not held.added:
        return
    params = list(_params_of(optimizer))
    names = [repr(name) for name, place in held.added.items() if params[place].grad is not None]
    if names:
        raise StateError(
            f"{type(optimizer).__name__}.step: {len(names)} parameter(s) were added to sharded modules after fully_shard: "
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}. They are in no unit, so that their gradients are "
            "those of each rank alone, and ranks would drift apart; add them before fully_shard (and pass them in "
            "ignored_params if you sum their gradients yourself), or call fully_shard on the new module that holds them"
        )


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """The weights of every unit whose parameters the optimizer stepped have a new version; tells their roots."""
    stepped: dict[Runtime | None, list[Unit]] = {}
    for ref in _units_of(optimizer):
        if (unit := ref()) is not None:
            unit.weights_changed()
            stepped.setdefault(runtime_of(unit), []).append(unit)
    for root, units in stepped.items():
        if root is not None:
            root.stepping = ""
            root.stepped(units)


def _before_optimizer_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Has gradients ready to be stepped, and again those that a closure makes: some optimizers step both, as SAM's."""
    _make_ready(optimizer)
    place = _place_of_closure(optimizer, args) if "closure" not in kwargs else None
    closure = kwargs.get("closure") if place is None else args[place]
    if not callable(closure) or not _units_of(optimizer):
        _weights_change(optimizer)
        return None

    @functools.wraps(closure)
    def ready(*args: Any, **kwargs: Any) -> Any:
        return _evaluate(optimizer, closure, args, kwargs)

    if place is None:
        return args, {**kwargs, "closure": ready}
    return (*args[:place], ready, *args[place + 1 :]), kwargs


def _evaluate(
    optimizer: torch.optim.Optimizer, closure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a user's closure in a step. Operators below this frame are not the step's: see `watch_norms`."""
    _closure_begins(optimizer)
    loss = closure(*args, **kwargs)
    with torch.no_grad():
        _make_ready(optimizer)
    _weights_change(optimizer)
    return loss


def _place_of_closure(optimizer: torch.optim.Optimizer, args: tuple[Any, ...]) -> int | None:
    """Which positional argument of a step is its closure, by the names of its parameters; None if none is.

    A step may take a model, or a function of another kind, which it is to get as it is. One that hides its parameters, as
    those do that wrap others, is taken for one like torch's, whose closure comes first.
    """
    if not any(map(callable, args[1:])):  # the first one is the optimizer
        return None
    try:
        params = list(inspect.signature(type(optimizer).step).parameters.values())
    except (TypeError, ValueError):  # it is not written in Python
        params = []
    for place, param in enumerate(params):
        if param.kind is param.VAR_POSITIONAL and place <= 1:
            params = []
            break
        if "closure" in param.name:
            return place if place < len(args) else None
    return None if params or isinstance(args[1], nn.Module) else 1


def _weights_change(optimizer: torch.optim.Optimizer) -> None:
    """Gives weights a new version before the step, too.

    Behind a step that raises half-way torch runs no hook. With a closure it is behind the closure, in which weights are
    still the old ones.
    """
    for ref in _units_of(optimizer):
        if (unit := ref()) is not None:
            unit.weights_changed()
            if (root := runtime_of(unit)) is not None:
                root.stepping = type(optimizer).__name__


def _closure_begins(optimizer: torch.optim.Optimizer) -> None:
    """A forward in the closure is one of the step's, which goes on: it has not raised."""
    for ref in _units_of(optimizer):
        if (unit := ref()) is not None and (root := runtime_of(unit)) is not None:
            root.stepping = ""


def _make_ready(optimizer: torch.optim.Optimizer) -> None:
    """Joins reductions that run past the end of backward; refuses to step on gradients that were not communicated.

    An optimizer that steps replicas' shares has `_hsdp_steps_shares`, by its `over_replicas=True`. Another one gets whole
    gradients.
    """
    units = [unit for ref in _units_of(optimizer) if (unit := ref()) is not None]
    refuse_assigned(units, "the optimizer's step")
    for unit in units:
        if unit.lent_to_write:
            raise StateError(
                f"the optimizer's step: it was called while full parameters of unit {unit.name!r} are lent to full_params, "
                "whose values take the place of what is stepped; step outside"
            )
        check_communicated(unit, "the optimizer's step")
        unit.join_gather()
        unit.land_shards()
    _refuse_copies(optimizer)
    _refuse_added(optimizer)
    shared = [unit for unit in units if unit.gradients.shared]
    if shared and not getattr(optimizer, "_hsdp_steps_shares", False):
        with torch.no_grad():
            gather_gradients(shared, _params_of(optimizer))
    _warn_of_no_gradients(optimizer, units)


def _warn_of_no_gradients(optimizer: torch.optim.Optimizer, units: list[Unit]) -> None:
    """Warns of a step without any gradient behind a forward with gradients, as `backward(inputs=...)` makes it.

    Sharded parameters are not in the autograd graph, whose leaves are the unsharded ones: torch's engine finds no way to
    them, runs no node, and does not say so. `autograd.grad` raises.
    """
    if not any((runtime := runtime_of(unit)) is not None and runtime.awaits_gradients for unit in units):
        return
    params = [param for param in _params_of(optimizer) if param.requires_grad]
    if params and all(param.grad is None for param in params):
        warnings.warn(
            f"hsdp: {type(optimizer).__name__} steps behind a forward, but no parameter has a gradient. If backward had "
            "inputs=..., sharded parameters cannot be among them: call backward() without, and requires_grad_(False) on "
            "parameters that are to get no gradients",
            stacklevel=5,
        )


def check_communicated(unit: Unit, before: str, may_drop: bool = False) -> None:
    """Has the gradients of a unit ready to be used: reductions under way land, a failed backward is forgotten.

    Args:
        unit: the unit.
        before: the name of the call, for errors.
        may_drop: sums may be pending if the all-reduce stage drops the step anyway.

    Raises:
        StateError: the unit has pending sums, or lost some; the `.data` of a gradient was assigned to.
    """
    # Reductions that run on land first, also under another root: only then is it known whether sums are pending.
    if unit.runtime is not None:
        unit.runtime.settle()
    if unit.gradients.in_flight:
        ReductionPipeline.land_all_of(unit)
    if not (may_drop and unit.settings.replica_reduce.drops):
        unit.gradients.refuse_pending(unit.name, before)
    unit.gradients.cut_whole()
    refuse_assigned_grads(unit.params, unit.name, before)
    note_grads_read(unit.params, unit.context.streams)


@functools.cache
def watch_optimizers() -> None:
    """Registers the hooks, once per process; has `GradScaler` look at all gradients, and steps at whole norms."""
    register_optimizer_step_pre_hook(_before_optimizer_step)
    register_optimizer_step_post_hook(_after_optimizer_step)
    find_infs_on_all_axes()
    watch_norms(_evaluate.__code__)

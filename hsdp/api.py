"""`fully_shard` and `HSDPModule`: arguments in, checks, delegation."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from hsdp.collectives import fingerprint
from hsdp.errors import DivergenceError
from hsdp.mesh import resolve_mesh
from hsdp.param import ManagedParam, Place, PlacementFn, originals
from hsdp.policies import CommPolicy, MixedPrecisionPolicy, check_reduce_op
from hsdp.runtime import Runtime
from hsdp.state import ModuleState
from hsdp.unit import Unit, unit_of

M = TypeVar("M", bound="nn.Module | list[nn.Module]")

_classes: dict[type, type] = {}
"""Original class -> its sharded class."""


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    comm_policy: CommPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> M:
    """Shards the parameters of a module, in place, and makes its forward and backward gather and reduce them.

    Call it bottom-up: on each block of a model, then on the model. Each call makes one *unit*, which is gathered and
    reduced as a whole; it owns the parameters below `module` that no earlier call took. The parameters become DTensors
    under their own names, so make the optimizer afterwards.

    Args:
        module: the module, or a list of modules that form one unit together. Its class becomes `HSDP<Class>`, a
            subclass of both the original class and `HSDPModule`.
        mesh: 1-D `(shard,)`: parameters are sharded over all its ranks (FSDP). 2-D `(replicate, shard)`: sharded over
            the second axis, replicated over the first (HSDP). None: 1-D over every rank of the default group.
        reshard_after_forward: free the whole parameters after forward and gather them again for backward. None: True,
            but False for the outermost unit, whose backward starts right away.
        shard_placement_fn: chooses for each parameter the dim to shard, as `Shard(dim)`; None stands for `Shard(0)`.
            Scalars are kept whole on every rank.
        mp_policy: dtypes of compute, reduction and outputs.
        comm_policy: how it communicates.
        ignored_params: parameters to leave alone; the caller keeps them equal on all ranks.

    Returns:
        `module` itself.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument makes no sense: a mesh with more than two axes, a module that is sharded already or has
            no forward, a parameter that another unit owns, a dim that does not exist, a dtype that cannot be reduced.
        DivergenceError: the ranks of the mesh call it on different parameters.

    Values that differ between ranks are replaced by those of the mesh's first rank.
    """
    modules = _check_modules(module)
    axes = resolve_mesh(mesh)
    policy = _check_type("mp_policy", mp_policy, MixedPrecisionPolicy)
    comm = _check_type("comm_policy", comm_policy, CommPolicy)
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise TypeError(
            f"fully_shard(reshard_after_forward={reshard_after_forward!r}): expected True, False or None (None: True, "
            "but False for the outermost unit)"
        )
    ignored = {id(param) for param in ignored_params or ()}
    name = " + ".join(type(m).__name__ for m in modules)
    found = _collect(modules, ignored)
    for places, param in found:
        _check_param(param, places[0].fqn, name)
    params = [
        ManagedParam(places, param, _choose_dim(param, places[0].fqn, name, shard_placement_fn))
        for places, param in found
    ]
    unit = Unit(name, params, axes, policy, comm, reshard_after_forward)
    _agree(unit, params)
    for managed in params:
        originals[managed.sharded] = (weakref.ref(unit), managed.fqn)
    unit.build()
    state = ModuleState(unit, modules)
    for m in modules:
        _move_buffers(m, axes.device)
        m.__dict__["_hsdp_state"] = state
        m.__class__ = _sharded_class(type(m))
        m.register_load_state_dict_post_hook(_after_load)
    Runtime.generation += 1
    return module


class HSDPModule:
    """What a sharded module can do beyond its own class. Setters reach all sharded modules below it by default."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing a sharded class makes an object of the original class: the sharding belongs to the instance."""
        original = next((base for base in cls.__mro__[1:] if base not in (HSDPModule, object)), None)
        if original is None:
            raise TypeError("HSDPModule is not to be constructed; call hsdp.fully_shard(module)")
        return original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module with its whole parameters; hooks that users put on the module see them too."""
        state: ModuleState = self.__dict__["_hsdp_state"]
        return state.run(cast(nn.Module, self), super().__call__, args, kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            f"{type(self).__name__} is sharded and cannot be deep-copied; copy the module before fully_shard, or shard a "
            "second instance and load this one's state_dict() into it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is sharded and cannot be pickled; save its state_dict() with "
            "torch.distributed.checkpoint"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        unit: Unit = self.__dict__["_hsdp_state"].unit
        if any(param.moved() for param in unit.params):
            unit.rebuild()
        return result

    def _units(self, recurse: bool = True) -> list[Unit]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        units: dict[Unit, None] = {}
        for module in modules:
            if (state := module.__dict__.get("_hsdp_state")) is not None:
                units.setdefault(state.unit)
        return list(units)

    def unshard(self) -> None:
        """Gathers the whole parameters of this module's unit now; the next forward finds them there."""
        for unit in self._units(recurse=False):
            unit.show()

    def reshard(self) -> None:
        """Frees the whole parameters of this module's unit."""
        for unit in self._units(recurse=False):
            unit.reshard()

    def set_requires_grad_sync(self, requires_grad_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward communicates gradients.

        With False, whole gradients are summed on this rank in fp32 (or the reduce dtype, if wider), at the cost of one
        whole gradient of memory, until a backward with True sends the sums.
        """
        for unit in self._units(recurse):
            unit.requires_grad_sync = _check_flag("set_requires_grad_sync", requires_grad_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward sums over replicas; with False, sharded partial sums wait for a backward with True."""
        for unit in self._units(recurse):
            unit.requires_all_reduce = _check_flag("set_requires_all_reduce", requires_all_reduce)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside it do not communicate gradients; the first one after it sends the sums."""
        units = self._units()
        before = [unit.requires_grad_sync for unit in units]
        self.set_requires_grad_sync(False)
        try:
            yield
        finally:
            for unit, flag in zip(units, before, strict=True):
                unit.requires_grad_sync = flag

    def set_reduce_op_type(self, reduce_op: str, *, recurse: bool = True) -> None:
        """Chooses "avg" (the default: gradients are averaged over all ranks of the mesh) or "sum"."""
        op = check_reduce_op(reduce_op, "set_reduce_op_type")
        for unit in self._units(recurse):
            unit.reduce_op = op

    def set_gradient_scaling_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Multiplies reduced gradients by `factor`, on top of the reduce op; applied exactly once."""
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor == 0:
            raise ValueError(f"set_gradient_scaling_factor({factor!r}): expected a number that is not 0")
        for unit in self._units(recurse):
            unit.gradient_scale = float(factor)

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
        """Whether whole parameters are freed after forward and gathered again for backward."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = _check_flag("set_reshard_after_forward", reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether whole parameters are freed as soon as their backward is over; they never outlive the iteration."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = _check_flag("set_reshard_after_backward", reshard_after_backward)


def _sharded_class(cls: type) -> type:
    if cls not in _classes:
        original = cast(Any, cls).forward

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Calling `.forward` directly works as calling the module does, but for the user's hooks on the module.
            state: ModuleState = self.__dict__["_hsdp_state"]
            if torch.compiler.is_compiling() or state.unit.open:
                return original(self, *args, **kwargs)
            return state.run(self, functools.partial(original, self), args, kwargs)

        members = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
        _classes[cls] = type(f"HSDP{cls.__name__}", (HSDPModule, cls), members)
    return _classes[cls]


def _check_modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard([]): the list of modules is empty; pass at least one module")
    for m in modules:
        if not isinstance(m, nn.Module):
            raise TypeError(f"fully_shard takes an nn.Module or a list of them, not {type(m).__name__}")
        if isinstance(m, HSDPModule):
            raise ValueError(f"fully_shard({type(m).__name__}): the module is sharded already; call it once per module")
        if type(m).forward is nn.Module.forward and "forward" not in vars(m):
            raise ValueError(
                f"fully_shard({type(m).__name__}): it has no forward, so hsdp would never see it run; call fully_shard on "
                "each of its children, or on the module that holds it"
            )
    if len(set(map(id, modules))) != len(modules):
        raise ValueError("fully_shard([...]): a module is in the list twice; pass each once")
    return modules


T = TypeVar("T")


def _check_type(name: str, value: T | None, kind: type[T]) -> T:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise TypeError(f"fully_shard({name}=...) takes a {kind.__name__}, not {type(value).__name__}")
    return value


def _check_flag(method: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{method}({value!r}): expected True or False")
    return value


def _collect(modules: list[nn.Module], ignored: set[int]) -> list[tuple[list[Place], nn.Parameter]]:
    """The parameters below `modules` that no nested unit owns, each with all its names."""
    found: dict[int, tuple[list[Place], nn.Parameter]] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        if id(module) in seen or isinstance(module, HSDPModule):
            return
        seen.add(id(module))
        for name, param in module._parameters.items():
            if param is not None and id(param) not in ignored:
                place = Place(weakref.ref(module), name, prefix + name)
                found.setdefault(id(param), ([], param))[0].append(place)
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")

    for index, module in enumerate(modules):
        visit(module, "" if len(modules) == 1 else f"{index}.")
    return list(found.values())


def _check_param(param: nn.Parameter, fqn: str, unit: str) -> None:
    where = f"fully_shard({unit}): parameter {fqn!r} of shape {tuple(param.shape)}"
    owner = unit_of(param)
    if owner is not None or param in originals:
        ref, other = originals.get(param, (lambda: owner, "?"))
        held_by = owner or ref()
        if owner is not None:
            other = next(managed.fqn for managed in owner.params if managed.sharded is param)
        raise ValueError(
            f"{where} is tied to {other!r} of unit {held_by.name if held_by is not None else '(freed)'!r}, which owns it; "
            "shard the smallest module that holds both names as one unit, or untie them"
        )
    if isinstance(param, DTensor):
        raise ValueError(
            f"{where} is a DTensor with placements {param.placements} already; parameters that are sharded otherwise are "
            "not supported; pass it in ignored_params"
        )
    if not param.dtype.is_floating_point:
        raise ValueError(
            f"{where} has dtype {param.dtype}, whose gradients cannot be reduced; make it a buffer, or pass it in "
            "ignored_params"
        )


def _choose_dim(param: nn.Parameter, fqn: str, unit: str, choose: PlacementFn | None) -> int | None:
    placement = choose(param) if choose is not None else None
    if param.ndim == 0:
        return None
    if placement is None:
        return 0
    where = f"fully_shard({unit}, shard_placement_fn=...): for parameter {fqn!r} of shape {tuple(param.shape)}"
    if type(placement) is not Shard:
        raise TypeError(f"{where} it returned {placement!r}; return Shard(dim) or None")
    if not -param.ndim <= placement.dim < param.ndim:
        raise ValueError(f"{where} it returned {placement}, but dims go from {-param.ndim} to {param.ndim - 1}")
    return placement.dim % param.ndim


def _agree(unit: Unit, params: list[ManagedParam]) -> None:
    """All ranks of the mesh shard the same parameters, from the same values."""
    shape = [(p.fqn, p.spec.shape, str(p.dtype), p.spec.dim, p.sharded.requires_grad) for p in params]
    prints = [None if p.sharded.is_meta else fingerprint(p.sharded) for p in params]
    rows = unit.replicate_comm.exchange(unit.shard_comm.exchange((shape, prints)))
    ranks = [(f"rank {r * len(row) + s} of the mesh", told) for r, row in enumerate(rows) for s, told in enumerate(row)]
    _, (shape0, prints0) = ranks[0]
    for who, (other, _) in ranks:
        if other != shape0:
            at = next(
                (i for i, (a, b) in enumerate(zip(shape0, other, strict=False)) if a != b), min(len(shape0), len(other))
            )
            first, second = (str(s[at]) if at < len(s) else "nothing" for s in (shape0, other))
            raise DivergenceError(
                f"fully_shard({unit.name}): the ranks build different models: parameter {at} is {first} on the mesh's "
                f"first rank and {second} on {who}; build the same module everywhere, in the same order"
            )
    with torch.no_grad():
        for i, param in enumerate(params):
            if any(told[1][i] != prints0[i] for _, told in ranks):
                data = param.sharded.detach().to(unit.axes.device).contiguous()
                unit.replicate_comm.broadcast(data)
                unit.shard_comm.broadcast(data)
                param.sharded.copy_(data)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                child._buffers[name] = buffer.to(device)


def _after_load(module: nn.Module, keys: object) -> None:
    module.__dict__["_hsdp_state"].unit.epoch += 1


def state_of(module: nn.Module) -> ModuleState | None:
    """The state that `fully_shard` attached to a module, if it did."""
    return module.__dict__.get("_hsdp_state")

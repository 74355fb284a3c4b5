"""`fully_shard`: arguments in, checks, a unit and its module state out."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parameter import is_lazy

from hsdp.compat import own_policy, put_pipeline_face
from hsdp.errors import DivergenceError
from hsdp.extension import check_extension
from hsdp.fingerprints import fingerprint
from hsdp.inner import block_of, inner_of
from hsdp.mesh import DataParallelMeshDims, resolve_mesh
from hsdp.module import HSDPModule, has_forward, sharded_class
from hsdp.offload import OffloadPolicy
from hsdp.param import ManagedParam, Place, PlacementFn, originals
from hsdp.placement import mergeable
from hsdp.policies import CommPolicy, MixedPrecisionPolicy, ReplicaPolicy, check_replica_policy
from hsdp.registry import unit_of
from hsdp.runtime import Runtime
from hsdp.state import ModuleState, own_state
from hsdp.stepping import watch_optimizers
from hsdp.subclass import extends, wrapper_of
from hsdp.unit import Unit
from hsdp.whole import broadcast, differing, told_by_all, unequal

M = TypeVar("M", bound="nn.Module | list[nn.Module]")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    comm_policy: CommPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    replicate_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    replica_policy: ReplicaPolicy = "broadcast",
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
            but False for the outermost unit and, once the order is known, for the last one, whose backward starts right
            away. An integer k that divides the number of shard ranks: they stay, sharded over groups of k neighbouring
            ranks, so that the gather for backward stays inside such a group (a node, say).
        shard_placement_fn: chooses for each parameter the dim to shard, as `Shard(dim)`; None stands for `Shard(0)`.
            Scalars are kept whole on every rank. It may take the number of shard ranks as a second argument:
            `hsdp.least_padding` does, and chooses what pads least, for experts above all.
        mp_policy: dtypes of compute, reduction and outputs.
        comm_policy: how it communicates.
        offload_policy: where its shards live, and its gradients beside them: `CPUOffloadPolicy()`,
            `DiskOffloadPolicy(directory)`, or on the mesh's device.
        ignored_params: parameters to leave alone; the caller keeps them equal on all ranks.
        replicate_params: parameters that every rank keeps whole; their gradients are summed over all ranks of the mesh in
            the same pipeline. For small ones that are not worth gathering.
        dp_mesh_dims: names the axes of a bigger `mesh` over which to shard and to replicate; several may act as one.
            Without a shard axis nothing is sharded and gradients are all-reduced, as in DDP.
        replica_policy: what becomes of values that differ between ranks, here or in `init_sharded`. "broadcast":
            every rank takes those of the mesh's first rank; only what differs is sent. "check": they are an error. "trust":
            they are not looked for, which saves a pass over the parameters: the caller guarantees equal replicas.

    Parameters may be DTensors already (tensor, sequence or expert parallelism), on a mesh beside the one given here or on
    the bigger one; then what is sharded is the block that each rank holds. With `mesh=None` they are left alone.

    Returns:
        `module` itself.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument makes no sense: a mesh with more than two axes, a module that is sharded already or has
            no forward, a parameter that another unit owns, a dim that does not exist, a dtype that cannot be reduced.
        DivergenceError: the ranks of the mesh call it on different parameters, or on different values where
            `replica_policy` is "check". The module is as it was.
    """
    modules = _check_modules(module)
    axes = resolve_mesh(mesh, _check_mesh_dims(mesh, own_policy(dp_mesh_dims)))
    policy = _check_type("mp_policy", own_policy(mp_policy), MixedPrecisionPolicy)
    comm = _check_type("comm_policy", comm_policy, CommPolicy)
    offload = _check_type("offload_policy", own_policy(offload_policy), OffloadPolicy)
    _check_reshard(reshard_after_forward, axes.shard_size)
    check_replica_policy(replica_policy, "fully_shard")
    ignored = _identities("ignored_params", ignored_params)
    replicated = _identities("replicate_params", replicate_params)
    if not (shard_placement_fn is None or callable(shard_placement_fn)):
        raise TypeError(
            f"fully_shard(shard_placement_fn={shard_placement_fn!r}): expected a function of a parameter that returns "
            "Shard(dim) or None, e.g. lambda param: Shard(1)"
        )
    name = " + ".join(type(m).__name__ for m in modules)
    found = collect_params(modules, ignored)
    if mesh is None:
        found = [(places, param) for places, param in found if not isinstance(param, DTensor) or unit_of(param)]
    for places, param in found:
        check_param(param, places[0].module(), places[0].fqn, name)
    _check_one_device(found, name)
    params = []
    for places, param in found:
        whole = id(param) in replicated
        dim, merged = (None, 1) if whole else choose_dim(
            param, places[0].fqn, name, shard_placement_fn, axes.shard_size
        )
        inner = inner_of(param, axes)
        if inner is not None:
            inner.check(axes, dim, f"fully_shard({name}): parameter {places[0].fqn!r}")
        managed = ManagedParam(places, param, dim, merged, whole, inner)
        if managed.wrapper is not None:
            check_extension(managed, axes, reshard_after_forward, f"fully_shard({name}): parameter {managed.fqn!r}")
        params.append(managed)
    if type(reshard_after_forward) is int and reshard_after_forward == 1:
        reshard_after_forward = False  # a group of one holds everything
    unit = Unit(name, params, axes, policy, comm, reshard_after_forward, offload)
    unit.replica_policy = replica_policy
    unit.ignored = frozenset(ignored)
    _agree(unit, params)
    unit.build()
    state = ModuleState(unit, modules)
    for m in modules:
        _move_buffers(m, axes.device, policy.buffer_dtype)
        m.__dict__["_hsdp_state"] = state
        m.__class__ = sharded_class(type(m))
        put_pipeline_face(m)
    _watch_loads(unit)
    Runtime.generation += 1
    watch_optimizers()
    return module


def _check_modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard([]): the list of modules is empty; pass at least one module")
    for m in modules:
        if not isinstance(m, nn.Module):
            raise TypeError(f"fully_shard takes an nn.Module or a list of them, not {type(m).__name__}")
        if isinstance(m, HSDPModule):
            raise ValueError(f"fully_shard({type(m).__name__}): the module is sharded already; call it once per module")
        if isinstance(m, torch.jit.ScriptModule):
            raise TypeError("fully_shard: a scripted module cannot be sharded; pass the module that was scripted")
        if not has_forward(m):
            raise ValueError(
                f"fully_shard({type(m).__name__}): it has no forward, so hsdp would never see it run; call fully_shard on "
                "each of its children, or on the module that holds it"
            )
    if len(set(map(id, modules))) != len(modules):
        raise ValueError("fully_shard([...]): a module is in the list twice; pass each once")
    return modules


def _check_mesh_dims(mesh: DeviceMesh | None, dims: Any) -> DataParallelMeshDims | None:
    if dims is None:
        return None
    if mesh is None:
        raise ValueError("fully_shard(dp_mesh_dims=...): it names axes of a mesh; pass mesh= too")
    try:  # torch's own class of that name will do
        return DataParallelMeshDims(dims.shard, dims.replicate)
    except AttributeError:
        where = "fully_shard(dp_mesh_dims=...)"
        raise TypeError(f"{where}: expected a DataParallelMeshDims, not {type(dims).__name__}") from None


def _check_reshard(value: Any, shards: int) -> None:
    where = f"fully_shard(reshard_after_forward={value!r})"
    if not (value is None or isinstance(value, (bool, int))):
        raise TypeError(
            f"{where}: expected an integer, or True, False or None (None: True, but False for the outermost unit)"
        )
    if value is not None and not isinstance(value, bool) and (value < 1 or shards % value):
        raise ValueError(
            f"{where}: an integer is the size of the groups that stay sharded after forward and must divide the {shards} "
            f"shard ranks; choose one of {[k for k in range(1, shards + 1) if shards % k == 0]}"
        )


T = TypeVar("T")


def _check_type(name: str, value: T | None, kind: type[T]) -> T:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise TypeError(f"fully_shard({name}=...): expected {kind.__name__} or None, not {type(value).__name__}")
    return value


def collect_params(
    modules: list[nn.Module], ignored: set[int], is_unit: Callable[[nn.Module], bool] | None = None
) -> list[tuple[list[Place], nn.Parameter]]:
    """The parameters below `modules` that no nested unit owns, each with all its names.

    `is_unit` tells which modules below are units of their own; None: those that are sharded.
    """
    found: dict[int, tuple[list[Place], nn.Parameter]] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        if id(module) in seen or (isinstance(module, HSDPModule) if is_unit is None else is_unit(module)):
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


def _identities(name: str, params: Iterable[nn.Parameter] | None) -> set[int]:
    listed = list(params or ())
    for param in listed:
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"fully_shard({name}=...) takes parameters, not {type(param).__name__} ({param!r:.60}); pass the "
                "nn.Parameter objects, e.g. [model.get_parameter(name) for name in names]"
            )
    return {id(param) for param in listed}


def _check_one_device(found: list[tuple[list[Place], nn.Parameter]], unit: str) -> None:
    on_meta = [places[0].fqn for places, param in found if param.is_meta]
    if on_meta and len(on_meta) < len(found):
        real = next(places[0].fqn for places, param in found if not param.is_meta)
        raise ValueError(
            f"fully_shard({unit}): parameter {on_meta[0]!r} is on the meta device and {real!r} is not, so values would be "
            "lost or made up; materialise the module first, or build all of it on meta"
        )


def check_param(param: nn.Parameter, module: nn.Module | None, fqn: str, unit: str) -> None:
    """Raises ValueError if a parameter cannot be one of the unit that is named `unit`."""
    if is_lazy(param):
        raise ValueError(
            f"fully_shard({unit}): parameter {fqn!r} of a lazy module has no shape yet; run a forward of the module first"
        )
    where = f"fully_shard({unit}): parameter {fqn!r} of shape {tuple(param.shape)}"
    owner = unit_of(param)
    name = next((managed.fqn for managed in owner.params if managed.sharded is param), "?") if owner is not None else "?"
    if owner is not None and any(place.module() is module for managed in owner.params for place in managed.places):
        raise ValueError(
            f"{where} belongs to unit {owner.name!r} already, as {name!r}: that was sharded before this module inside "
            "it; call fully_shard bottom-up: on inner modules first, then on the module that holds them"
        )
    if owner is not None or param in originals:
        ref, other = originals.get(param, (lambda: owner, "?"))
        held_by = owner or ref()
        if owner is not None:
            other = name
        raise ValueError(
            f"{where} is tied to {other!r} of unit {held_by.name if held_by is not None else '(freed)'!r}, which owns it; "
            "shard the smallest module that holds both names as one unit, or untie them"
        )
    if isinstance(param, DTensor) and extends(param._local_tensor):
        raise ValueError(
            f"{where} is a DTensor around a {type(param._local_tensor).__name__}, and gather extensions are supported for "
            "parameters that are not DTensors before; shard the plain parameter, or pass it in ignored_params"
        )
    if not isinstance(param, DTensor):
        wrapper_of(param, where)
    if not param.dtype.is_floating_point:
        raise ValueError(
            f"{where} has dtype {param.dtype}, whose gradients cannot be reduced; make it a buffer, or pass it in "
            "ignored_params"
        )


def choose_dim(
    param: nn.Parameter, fqn: str, unit: str, choose: PlacementFn | None, shards: int
) -> tuple[int | None, int]:
    """The dim to shard a parameter on (None: keep it whole), and how many leading dims to cut as one."""
    placement = None if choose is None else choose(param, shards) if _wants_shards(choose) else choose(param)
    if param.ndim == 0:
        return None, 1
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


def _wants_shards(choose: PlacementFn) -> bool:
    """Whether the function takes the number of shard ranks too, as `least_padding` does."""
    try:
        inspect.signature(choose).bind(None, 1)
    except (TypeError, ValueError):
        return False
    return True


def _agree(unit: Unit, params: list[ManagedParam]) -> None:
    """All ranks of the mesh shard the same parameters, and from the same values unless they are trusted."""
    shape: list[tuple[Any, ...]] = [
        (
            p.fqn,
            p.spec.shape,
            str(p.dtype),
            p.spec.dim,
            p.spec.merged,
            p.replicated,
            p.sharded.requires_grad,
            p.sharded.is_meta,
            len(p.places),
            None if p.wrapper is None else p.wrapper.kind.__name__,
        )
        for p in params
    ]
    # What decides the sizes of transfers must be equal too.
    shape.append((repr(unit.mp_policy), repr(unit.comm_policy), repr(unit.reshard_after_forward), unit.replica_policy))
    trusted = unit.replica_policy == "trust"
    prints = [None if trusted or p.sharded.is_meta else fingerprint(block_of(p.sharded)) for p in params]
    told = told_by_all((shape, prints), unit)
    shape0, _ = told[0]
    for rank, (other, _) in enumerate(told):
        if other != shape0:
            at = next(
                (i for i, (a, b) in enumerate(zip(shape0, other, strict=False)) if a != b), min(len(shape0), len(other))
            )
            first, second = (str(s[at]) if at < len(s) else "nothing" for s in (shape0, other))
            raise DivergenceError(
                f"fully_shard({unit.name}): the ranks build different models: parameter or policy {at} is {first} on the "
                f"mesh's first rank and {second} on rank {rank} of the mesh; build the same module everywhere, in "
                "the same order"
            )
    odd = differing([values for _, values in told])
    if odd and unit.replica_policy == "check":
        raise unequal(f"fully_shard({unit.name})", [p.fqn for p in params], odd)
    with torch.no_grad():
        for i, param in enumerate(params):
            if i in odd:
                broadcast(block_of(param.sharded).detach(), unit, unit.replicate_comm, unit.shard_comm)


def _move_buffers(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                where = buffer.device if buffer.is_meta else device  # init_sharded materialises it, in this dtype
                child._buffers[name] = buffer.to(where, dtype if buffer.is_floating_point() else None)


def _watch_loads(unit: Unit) -> None:
    """Loading a state dict, into any module that holds one of the unit's parameters, makes them new."""
    this = weakref.ref(unit)

    def loaded(module: nn.Module, keys: object) -> None:
        if (owner := this()) is not None:
            owner.epoch += 1

    holders = {place.module() for param in unit.params for place in param.places}
    for module in holders:
        if module is not None:
            module.register_load_state_dict_post_hook(loaded)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes another method of a sharded module an entry point, as its forward is: whole parameters, watched outputs.

    Args:
        module: a sharded module.
        method_name: the method, "generate" say. Calls of it on this instance are entries from then on.

    Raises:
        ValueError: the module is not sharded, or has no such method.
    """
    if not isinstance(module, HSDPModule):
        raise ValueError(f"register_forward_method: {type(module).__name__} is not sharded; call fully_shard on it first")
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_forward_method: {type(module).__name__} has no method {method_name!r}")
    # The bound method would keep the module alive from inside: bind anew at each call.
    function, this = getattr(method, "__func__", method), weakref.ref(module)
    bound = hasattr(method, "__func__")

    @functools.wraps(method)
    def entry(*args: Any, **kwargs: Any) -> Any:
        owner = this()
        assert owner is not None, "a module whose method runs is alive"
        call = functools.partial(function, owner) if bound else function
        state = own_state(owner)
        return call(*args, **kwargs) if state.unit.open else state.run(owner, call, args, kwargs)

    setattr(module, method_name, entry)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """FSDP2's name of `register_forward_method`: `method_name` becomes an entry point, if `module` is sharded at all."""
    if isinstance(module, HSDPModule):
        register_forward_method(module, method_name)

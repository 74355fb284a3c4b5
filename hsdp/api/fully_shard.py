"""`fully_shard`: arguments in, checks, a unit and its module state out."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from hsdp.api.fsdp2 import fsdp_state, own_policy, put_fsdp_state_shim
from hsdp.api.module import HSDPModule, has_forward, hidden_by_methods, sharded_class
from hsdp.api.other_meshes import companions, without
from hsdp.api.select import asked_once, collect_params, identities, manage
from hsdp.comm.mesh import DataParallelMeshDims, MeshAxes, resolve_mesh
from hsdp.comm.streams import note_read
from hsdp.comm.tree import check_axes
from hsdp.format import several
from hsdp.offload import OffloadPolicy
from hsdp.params.param import PlacementFn
from hsdp.policies import CommPolicy, MixedPrecisionPolicy, ReplicaPolicy, check_replica_policy
from hsdp.schedule.module_hooks import ModuleHooks, own_state
from hsdp.schedule.optimizer_hooks import watch_optimizers
from hsdp.schedule.root import Root
from hsdp.schedule.runtime import runtime_of
from hsdp.torch_private import in_fake_mode
from hsdp.unit.lookup import STATE, unit_of
from hsdp.unit.state import other_thread
from hsdp.unit.unit import Unit
from hsdp.weights.module_buffers import modules_with_units
from hsdp.weights.replica_check import verify
from hsdp.weights.whole_loads import explain_whole_tensors

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
        module: the module, or a list of modules that form one unit together. Its class becomes `FSDP<Class>`, as
            FSDP2 names it: a subclass of both the original class and `HSDPModule`.
        mesh: 1-D `(shard,)`: parameters are sharded over all its ranks (FSDP). 2-D `(replicate, shard)`: sharded over
            the second axis, replicated over the first (HSDP), or as its axes' names say. None: 1-D over every rank.
        reshard_after_forward: free the unsharded parameters after forward and gather them again for backward. None: True,
            but False for the outermost unit and, once the order is known, for the last one, whose backward starts right
            away. An integer k that divides the number of shard ranks: they stay, sharded over groups of k neighbouring
            ranks, so that the gather for backward stays inside such a group (a node, say).
        shard_placement_fn: chooses for each parameter the dim to shard, as `Shard(dim)`; None stands for `Shard(0)`.
            Scalars count as `replicate_params`. A second argument without a default, or one named `shards`, gets the
            number of shard ranks: `hsdp.least_padding` takes it, and chooses what pads least, for experts above all.
            FSDP2's `ShardPlacementResult` names another mesh; modules of such parameters (experts) become a unit.
        mp_policy, comm_policy: dtypes of compute, reduction and outputs; how it communicates.
        offload_policy: where its shards live, and its gradients beside them: `CPUOffloadPolicy()`,
            `DiskOffloadPolicy(directory)`, or on the mesh's device.
        ignored_params: parameters to leave alone; the caller keeps them equal on all ranks.
        replicate_params: parameters that every rank keeps whole; their gradients are summed over all ranks of the mesh in
            the same pipeline. For small ones that are not worth gathering.
        dp_mesh_dims: names the axes of a bigger `mesh` over which to shard and to replicate; several may act as one.
            Without a shard axis nothing is sharded and gradients are all-reduced, as in DDP.
        replica_policy: what becomes of parameters and buffers whose values differ between ranks, here or in
            `init_sharded`. "broadcast": every rank takes those of the mesh's first rank; only what differs is sent.
            "check": they are an error. "trust": the caller guarantees equal replicas, which saves a pass over them.
            Buffers are those of the unit's modules, persistent or not, but for those of modules whose parameters are
            all in `ignored_params`. Write a buffer that is meant to differ between ranks after the call.

    Parameters may be DTensors already (tensor or expert parallelism), on a mesh beside `mesh` or on the bigger one (there,
    annotated by spmd_types will do): each rank's block is sharded. With `mesh=None` DTensors are left alone.

    Returns:
        `module` itself.

    Raises:
        TypeError: an argument is of the wrong type, tensors are fake, or a module's class cannot have a subclass.
        ValueError: an argument makes no sense: a mesh with more than two axes, a module that is sharded already or has
            no forward, a parameter that another unit owns, a dim that does not exist, an unsupported dtype or `grad_dtype`.
        DivergenceError: the ranks of the mesh call it on different parameters or buffers, or on different values where
            `replica_policy` is "check". The module is as it was.
    """
    modules = _check_modules(module)
    axes = resolve_mesh(mesh, _check_mesh_dims(mesh, own_policy(dp_mesh_dims)))
    policy = _check_type("mp_policy", own_policy(mp_policy), MixedPrecisionPolicy)
    comm = _check_comm(comm_policy, axes)
    offload = _check_type("offload_policy", own_policy(offload_policy), OffloadPolicy)
    reshard = _check_reshard(reshard_after_forward, axes.shard_size)
    check_replica_policy(replica_policy, "fully_shard")
    ignored, replicated = identities("ignored_params", ignored_params), identities("replicate_params", replicate_params)
    choose = _check_placement_fn(shard_placement_fn)
    name = " + ".join(type(m).__name__ for m in modules)
    found = collect_params(modules, ignored)
    if mesh is None:
        found = [(places, param) for places, param in found if not isinstance(param, DTensor) or unit_of(param)]
    apart = companions(modules, found, axes, choose, name)
    params = manage(without(found, apart), modules, name, axes, choose, replicated, reshard)
    alike: dict[str, Any] = {"comm_policy": comm, "offload_policy": offload, "replica_policy": replica_policy}
    alike["replicate_params"] = [param for _, param in found if id(param) in replicated]
    unit = Unit(name, params, axes, policy, comm, reshard, offload, replica_policy, frozenset(ignored))
    _look_at_values(unit, modules)
    unit.trial_gather()
    beside = [one.shard(fully_shard, policy, reshard_after_forward=reshard, **alike) for one in apart]
    _build(unit)
    state = ModuleHooks(unit, modules)
    state.companions = [own_state(one).unit for one in beside]
    _move_buffers(modules, unit)
    _attach(state, modules)
    _watch_loads(unit)
    Root.generation += 1
    watch_optimizers()
    return module


def _attach(state: ModuleHooks, modules: list[nn.Module]) -> None:
    for module in modules:
        module.__dict__[STATE] = state
        module.__class__ = sharded_class(type(module))
        put_fsdp_state_shim(module)


# Where torch's pipelining looks, if hsdp's function stands in the place of torch's.
fully_shard.state = fsdp_state  # type: ignore[attr-defined]


def _check_modules(module: Any) -> list[nn.Module]:
    if in_fake_mode():
        raise TypeError(
            "fully_shard under FakeTensorMode: its tensors have no values, and hsdp compares values; to learn what memory "
            "training takes, make the model under torch.device('meta') and call hsdp.plan(model, mesh=...)"
        )
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
        if hidden := hidden_by_methods(m):
            raise ValueError(
                f"fully_shard({type(m).__name__}): its own {hidden[0]!r} would be hidden by a method of sharded modules "
                "with this name; rename it, or call fully_shard on its children and on the module that holds it"
            )
        try:
            sharded_class(type(m))  # made now: one that cannot be made is to leave the module as it was
        except TypeError as error:
            raise TypeError(
                f"fully_shard({type(m).__name__}): a subclass of its class, which sharded modules get, cannot be made "
                f"({error}); give arguments of __init_subclass__ defaults, or call fully_shard on its children"
            ) from error
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


def _check_reshard(value: Any, shards: int) -> bool | int | None:
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
    return False if type(value) is int and value == 1 else value  # a group of one holds everything


def _check_placement_fn(choose: Any) -> PlacementFn | None:
    if not (choose is None or callable(choose)):
        raise TypeError(
            f"fully_shard(shard_placement_fn={choose!r}): expected a function of a parameter that returns Shard(dim) or "
            "None, e.g. lambda param: Shard(1)"
        )
    return asked_once(choose)


def _check_comm(value: CommPolicy | None, axes: MeshAxes) -> CommPolicy:
    comm = _check_type("comm_policy", value, CommPolicy)
    if comm.reduction == "tree":
        check_axes(axes, "fully_shard(comm_policy=...)")
    return comm


T = TypeVar("T")


def _check_type(name: str, value: T | None, kind: type[T]) -> T:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise TypeError(f"fully_shard({name}=...): expected {kind.__name__} or None, not {type(value).__name__}")
    return value


def _look_at_values(unit: Unit, modules: list[nn.Module]) -> None:
    """Ranks compare values, or make them equal; and gradients that would be lost are told of."""
    verify(unit, modules)
    if had := [param.fqn for param in unit.params if param.sharded.grad is not None]:
        warnings.warn(
            f"fully_shard({unit.name}): {several(len(had), 'parameter')} ({had[0]!r}{', ...' if len(had) > 1 else ''}) had "
            "a gradient, which the sharded ones do not get; step, or call zero_grad(), before",
            stacklevel=3,
        )


def _build(unit: Unit) -> None:
    """Shards the parameters. Each original goes as its shard comes, so that nothing brings them back if memory ends."""
    try:
        unit.build()
    except BaseException:
        warnings.warn(
            f"hsdp: fully_shard({unit.name}) failed when some parameters were sharded already, whose originals are gone: "
            "the module is of no use any more; build the model again",
            stacklevel=3,
        )
        raise


_moved: Any = WeakIdKeyDictionary()
"""By the buffer that was registered before, what `fully_shard` put in its place: modules of later units may share it."""


def _move_buffers(modules: list[nn.Module], unit: Unit) -> None:
    """Brings the buffers of the unit's modules to its device and `buffer_dtype`; those that go to one place stay one."""
    for _, module, owner in modules_with_units(modules, unit):
        for name, buffer in module._buffers.items() if owner is unit else ():
            if buffer is not None:
                # init_sharded materialises what is on the meta device, in this dtype.
                where = buffer.device if buffer.is_meta else unit.axes.device
                dtype = unit.mp_policy.buffer_dtype if buffer.is_floating_point() else None
                module._buffers[name] = _moved_buffer(buffer, where, dtype or buffer.dtype)


def _moved_buffer(buffer: Tensor, where: torch.device, dtype: torch.dtype) -> Tensor:
    before: Tensor | None = _moved[buffer]() if buffer in _moved else None
    if before is not None and before.device == where and before.dtype == dtype:
        return before
    moved = buffer.to(where, dtype)
    if moved is not buffer:
        note_read(buffer)
        _moved[buffer] = weakref.ref(moved)
    return moved


def _watch_loads(unit: Unit) -> None:
    """State dicts are of sharded parameters, and loads make them new, also of a module that holds one of the unit's."""
    this = weakref.ref(unit)

    def saves(*_: object) -> None:
        if (owner := this()) is not None:
            _refuse_beside(owner, "state_dict()")
            owner.shadows.unregister()  # inside a forward

    def saved(*_: object) -> None:
        if (owner := this()) is not None and owner.calls and owner.open:
            owner.shadows.register()  # which goes on

    def loads(*_: object) -> None:
        if (owner := this()) is not None:
            _refuse_beside(owner, "load_state_dict()")
            owner.shadows.unregister()
            owner.join_gather()

    def loaded(module: nn.Module, keys: object) -> None:
        if (owner := this()) is not None:
            owner.weights_changed()

    for holder in {module for param in unit.params for module, _ in param.holders()}:
        holder.register_state_dict_pre_hook(saves)
        holder.register_state_dict_post_hook(saved)
        holder.register_load_state_dict_pre_hook(loads)
        holder.register_load_state_dict_post_hook(loaded)
        holder.register_load_state_dict_pre_hook(explain_whole_tensors)


def _refuse_beside(unit: Unit, what: str) -> None:
    """Raises StateError if another thread runs the model: each would find the other's parameters in the modules.

    On a device beside a forward only: there, all backwards run in another thread, and a failed one may still be known.
    """
    runtime = runtime_of(unit)
    if runtime is not None and (runtime.depth or not runtime.streams.active) and runtime.runs_elsewhere():
        raise other_thread(unit, what)

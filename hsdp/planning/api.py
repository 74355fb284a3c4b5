"""`plan` and `compare`: the questions of a user, turned into facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hsdp.api.shard_units import Pattern
from hsdp.comm.groups import backend_name
from hsdp.comm.mesh import MeshAxes, resolve_mesh
from hsdp.offload import OffloadPolicy
from hsdp.params.param import PlacementFn
from hsdp.planning.activations import Recompute
from hsdp.planning.data import Assumptions, backend_of
from hsdp.planning.experts import with_active
from hsdp.planning.facts import facts_of
from hsdp.planning.machines import MACHINES, Machine, machine_of
from hsdp.planning.optimizers import Kind
from hsdp.planning.plans import Comparison, Plan
from hsdp.planning.traffic import Link
from hsdp.policies import CommPolicy, MixedPrecisionPolicy
from hsdp.unit.lookup import class_name, unit_of_module, units_below

Mesh = DeviceMesh | Sequence[int] | int


def plan(
    model: nn.Module,
    *,
    mesh: Mesh | None = None,
    tokens_per_rank: int,
    units: Pattern | Iterable[Pattern] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    comm_policy: CommPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    replicate_params: Iterable[nn.Parameter] | None = None,
    active: Mapping[str, float] | None = None,
    micro_batches: int = 1,
    optimizer: Kind = "elementwise",
    optimizer_states: int = 2,
    over_replicas: bool = False,
    activations: int | None = None,
    seq_len: int | None = None,
    machine: Machine | str | None = None,
    link: Link | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    memory: int | None = None,
    recompute: Recompute = False,
    backend: str | None = None,
) -> Plan:
    """What each unit of a model holds and communicates, and what a step needs in memory and time.

        print(hsdp.plan(model, mesh=(8, 64), tokens_per_rank=8192, memory=80 * 2**30))

    Bytes and numbers of collectives are those of a backend, exactly: they come from the planner that `fully_shard` uses,
    and from the order in which the library works. (Ranks that share memory make fewer calls.) Memory is that of parameters,
    gradients, communication, activations and, nearly, the optimizer's step, without what the allocator, CUDA and NCCL take.
    Times are those of a roofline: see `Machine`, `Link` and `flops`. All parameters are used. `print(plan)` says the rest.

    Args:
        model: the model, sharded already or not yet. It may be on the meta device, where it takes no memory.
        mesh: `(replicas, shards)`, a number of shard ranks, or a device mesh; it need not exist, and no process group is
            needed. None: that of a model that is sharded, if all its units (those of experts, too) are on one of this size.
        tokens_per_rank: tokens of one micro-batch on one rank.
        units: for a model that is not sharded, what becomes a unit: patterns as for `shard_units`. None: its blocks, which
            are the elements of its outermost lists of modules, and the rest.
        mp_policy, comm_policy, offload_policy, reshard_after_forward, shard_placement_fn, ignored_params, replicate_params:
            as for `fully_shard`. For a sharded model the first four replace its own. Offloaded shards travel in no time.
        active: which part of experts computes with a token, by globs over parameters' names: `{"**.experts.**": 2 / 64}`.
        micro_batches, optimizer, optimizer_states, over_replicas, activations, seq_len, memory, recompute: see
            `Assumptions`.
        machine: what ranks run on, a `Machine` or the name of one of `hsdp.planning.MACHINES`. None: "cpu" where the
            backend is gloo, else "h100".
        link, flops, bandwidth: see `Assumptions`; None: those of the machine.
        backend: of the process groups. None: that of the mesh, or, for one that does not exist, "gloo" if the machine is
            "cpu" and "nccl" if not.

    Raises:
        TypeError, ValueError: an argument makes no sense, or is refused by `fully_shard` or `shard_units`.
    """
    facts = facts_of(
        model,
        units,
        mp_policy=mp_policy,
        comm_policy=comm_policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored_params,
        replicate_params=replicate_params,
    )
    sizes = _read_mesh(model, mesh, backend_of(backend, "gloo" if machine in ("cpu", MACHINES["cpu"]) else "nccl"))
    backend = backend_of(backend, sizes.backend)
    rates = machine_of(machine or ("cpu" if backend == "gloo" else "h100"))
    assumed = Assumptions(
        tokens_per_rank=tokens_per_rank,
        micro_batches=micro_batches,
        optimizer=optimizer,
        optimizer_states=optimizer_states,
        over_replicas=over_replicas,
        activations=activations,
        seq_len=seq_len,
        machine=rates.title,
        link=rates.link if link is None else link,
        flops=rates.flops if flops is None else flops,
        bandwidth=rates.bandwidth if bandwidth is None else bandwidth,
        memory=memory,
        recompute=recompute,
        backend=backend,
        streams=sizes.streams and backend != "gloo",
    )
    return Plan.of(class_name(model), with_active(facts, active), sizes.replicas, sizes.shards, assumed)


def compare(model: nn.Module, meshes: Iterable[Mesh], **options: Any) -> Comparison:
    """Plans of a model on several meshes, side by side.

        print(hsdp.planning.compare(model, [(8, 64), (16, 32), (32, 16)], tokens_per_rank=8192))

    Args:
        model: as for `plan`.
        meshes: each as `mesh` in `plan`.
        options: the other arguments of `plan`.
    """
    # An iterator would be used up by the first plan, and the others would be those of a model with other units.
    options = {name: list(value) if isinstance(value, Iterator) else value for name, value in options.items()}
    return Comparison(tuple(plan(model, mesh=mesh, **options) for mesh in meshes))


class _MeshFacts(NamedTuple):
    """What a plan needs to know of a mesh; `streams`: a device's streams order the work."""

    replicas: int
    shards: int
    backend: str
    streams: bool


def _read_mesh(model: nn.Module, mesh: Mesh | None, backend: str) -> _MeshFacts:
    if mesh is None:
        units = units_below(model)
        if not units:
            raise ValueError(
                f"plan({type(model).__name__}): the model is not sharded, so the mesh must be told; pass mesh=(replicas, "
                "shards), e.g. mesh=(8, 64)"
            )
        _refuse_several_meshes(model, units[0].axes)
        return _facts_of(units[0].axes)
    if isinstance(mesh, DeviceMesh):
        return _facts_of(resolve_mesh(mesh))
    sizes = tuple(mesh) if isinstance(mesh, Sequence) else (mesh,)
    if len(sizes) not in (1, 2) or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(
            f"plan(mesh={mesh!r}): expected (replicas, shards), a number of shard ranks, or a DeviceMesh, e.g. mesh=(8, 64)"
        )
    replicas, shards = (1, *sizes)[-2:]
    return _MeshFacts(replicas, shards, backend, streams=backend != "gloo")


def _refuse_several_meshes(model: nn.Module, first: MeshAxes) -> None:
    for name, module in model.named_modules():
        unit = unit_of_module(module)
        if unit is not None and _sizes(unit.axes) != _sizes(first):
            raise ValueError(
                f"plan({class_name(model)}): the unit {name!r} is on a mesh of {unit.axes} and others on one of {first}; a "
                "plan is of one mesh: plan the parts by themselves, or pass mesh=(replicas, shards) to take all to be on it"
            )


def _sizes(axes: MeshAxes) -> tuple[int, int]:
    return axes.replicate_size, axes.shard_size


def _facts_of(axes: MeshAxes) -> _MeshFacts:
    on_cpu = axes.device.type in ("cpu", "meta")
    group = axes.shard_group or axes.replicate_group
    assert group is not None, "a mesh has an axis, and an axis a group"
    return _MeshFacts(*_sizes(axes), backend_name(group, axes.device), streams=not on_cpu)

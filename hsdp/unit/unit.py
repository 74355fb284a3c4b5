"""A unit: the parameter group that one `fully_shard` call manages, gathered, opened, closed and reduced as one.

Its unsharded parameters are those of unsharded.py. Gradients arrive one by one in autograd's accumulation hooks and leave
together as the operands of one reduction.
"""

from __future__ import annotations

import weakref
import zlib
from dataclasses import replace
from operator import or_
from typing import Any, Protocol

import torch
from torch import Tensor

from hsdp.comm.collectives import Comm, twin_of
from hsdp.comm.custom import AllGather, ReduceScatter
from hsdp.comm.groups import subgroup
from hsdp.comm.mesh import MeshAxes
from hsdp.comm.observer import CommContext, Observer, Point
from hsdp.comm.streams import Streams
from hsdp.comm.tree import TREE
from hsdp.errors import HSDPError, StateError
from hsdp.offload import OffloadPolicy
from hsdp.params.ownership import forget, refuse_tied, register
from hsdp.params.param import ManagedParam
from hsdp.policies import CommPolicy, MixedPrecisionPolicy, ReplicaPolicy
from hsdp.torch_private import graph_task, outside_transforms, plain_access, will_execute
from hsdp.unit.composite_group import CompositeGroup
from hsdp.unit.dtype_group import DtypeGroup, GroupKey, thresholds_for, unpacks_first
from hsdp.unit.extension_group import ExtensionGroup
from hsdp.unit.gradients import Gradients
from hsdp.unit.readers import Readers
from hsdp.unit.settings import UnitSettings
from hsdp.unit.shadows import Shadows, requires_grad_of
from hsdp.unit.state import FORWARD, IDLE, TrainingState, UnitActivity, expect, stale, unentered
from hsdp.unit.unsharded import UNSHARDED, UnshardedParams
from hsdp.unit.write_guard import WriteGuard


class Schedule(Protocol):
    """The schedule of a root, as far as its units and callers with a unit ask it: `schedule.runtime.Runtime`."""

    def in_backward(self) -> bool:
        """Whether a backward of the root runs at this moment."""
        ...

    def state_of(self, unit: Unit) -> TrainingState | None:
        """What the root's backward does with `unit`."""
        ...

    def recover(self, reason: str = ...) -> None:
        """Forgets a backward that raised."""
        ...

    def settle(self) -> None:
        """Makes gradients ready to be read."""
        ...

    def has_graphs(self) -> bool:
        """Whether a graph of gradients reads unsharded parameters."""
        ...

    def has_entered(self, unit: Unit) -> bool:
        """Whether the backward under way has entered `unit`."""
        ...

    def enter_task(self) -> None:
        """Joins the graph task under way."""
        ...


class Unit(UnitActivity, UnshardedParams):
    """A parameter group.

    Attributes:
        name: qualified name of its module below the root (a class name until a root is known).
        params: its parameters, in the order of `named_parameters`.
        mesh_ranks: the ranks of its mesh, which gather and reduce it in one order.
        in_tree: its gradients are added in the order of the tree over data ranks.
        settings: what users may change about it.
        ignored: identities of the parameters that its `fully_shard` was told to leave alone.
        runtime: the root's runtime, weakly held by `runtime_ref`.
        forward_version: `version` at the last forward.
        gradients: this rank's gradients, on their way to `.grad`.
        trainable: which parameters are reduced: wanted in the last forward, or one whose backward or sums are to come.
        remaining: for each graph task under way, how many of the unit's gradients it has still to make.
    """

    def __init__(
        self,
        name: str,
        params: list[ManagedParam],
        axes: MeshAxes,
        mp_policy: MixedPrecisionPolicy,
        comm_policy: CommPolicy,
        reshard_after_forward: bool | int | None,
        offload: OffloadPolicy,
        replica_policy: ReplicaPolicy,
        ignored: frozenset[int],
    ) -> None:
        UnitActivity.__init__(self)
        UnshardedParams.__init__(self)
        self.name = name
        self.params = params
        self.axes = axes
        self.mp_policy = mp_policy
        self.comm_policy = comm_policy
        self.offload = offload
        self.replica_policy = replica_policy
        self.ignored = ignored
        self.settings: UnitSettings[Unit] = UnitSettings(reshard_after_forward)
        self.mesh_ranks = axes.ranks
        self.in_tree = comm_policy.reduction == "tree"
        if self.in_tree:
            self.settings.replica_reduce = TREE

        # Its place among its root's units, known once a root is.
        self.runtime_ref: weakref.ref[Schedule] | None = None
        self.parent: Unit | None = None
        self.key = 0

        self._registered: list[int] = []  # identities of its sharded parameters in the table of owners
        weakref.finalize(self, forget, self._registered)

        self.context = CommContext(Streams(axes.device))
        self.gradients = Gradients(params, self.settings, self.context, axes.shard_size * axes.replicate_size)
        this = weakref.ref(self)
        self.gradients.sentinels.owner = lambda: None if (unit := this()) is None else (unit, unit.runtime)
        self.trainable: tuple[bool, ...] = ()
        self._wanted: tuple[bool, ...] = ()
        self._nodes: list[Any] = []
        self.remaining: dict[int, int] = {}

        # Communication.
        self.readers = Readers() if self.context.streams.active else None
        place, shares = (axes.device, self.context), comm_policy.shared_memory
        self.shard_comm = Comm(axes.shard_group, axes.shard_rank, axes.shard_size, *place, shares)
        self.scatter_comm = self.shard_comm
        self.replicate_comm = Comm(axes.replicate_group, axes.replicate_rank, axes.replicate_size, *place, shares)
        self.part_comm = self._comm_of_parts(reshard_after_forward)
        self._parts = 1 if self.part_comm is None else self.part_comm.size

    def _comm_of_parts(self, parts: bool | int | None) -> Comm | None:
        """The group of `parts` neighbouring ranks over which parameters stay sharded after forward, if they do."""
        axes = self.axes
        if type(parts) is not int or not 1 < parts < axes.shard_size:
            return None
        assert axes.shard_group is not None, "an axis of several ranks has a group"
        group = subgroup(axes.shard_group, axes.shard_rank, parts, axes.device)
        return Comm(group, axes.shard_rank % parts, parts, axes.device, self.context, self.comm_policy.shared_memory)

    # -- building ------------------------------------------------------------------------------------------------

    def trial_gather(self) -> None:
        """Runs user code that may fail before `build` shards anything: the parameters are still the original ones."""
        self._make_dtype_groups(self.axes.device)
        for group in self.dtype_groups:
            group.trial_gather()

    def build(self) -> None:
        """Shards the original parameters one at a time: at most one is in memory twice."""
        for group in self.dtype_groups:
            for index, param in enumerate(group.params):
                param.shard(group.local(index), group.layout.pieces[index], self.axes, weakref.ref(self))
        self._arrange()

    def rebuild(self, loses_sums: bool = False) -> None:
        """Makes the buffers anew around sharded parameters that were moved, cast, replaced or materialised.

        Args:
            loses_sums: pending gradient sums are marked as lost.

        Raises:
            StateError: sums are pending, and `loses_sums` is off. Those of replaced parameters went with these.
        """
        if self.lent:
            expect(self, "use of the sharded parameters", IDLE)
        if self.gradients.in_flight and (runtime := self.runtime) is not None:
            runtime.settle()  # reductions that run on behind a backward use the old buffers
        self.land_shards()
        self.let_go()
        self.reshard()
        self.weights_changed()
        self.shadows.spoil()
        for param in self.params:
            if param.moved():
                refuse_tied(param, self.name)
                param.adopt(self.name)
        lost = loses_sums and self.gradients.is_pending()
        if not loses_sums:
            self.gradients.refuse_pending(self.name, "use of parameters that were moved, cast or replaced")
        devices = self.devices()
        if len(devices) != 1:
            raise StateError(
                f"unit {self.name!r} has parameters on several devices {sorted(map(str, devices))}; move them together"
            )
        device = devices.pop()
        self._make_dtype_groups(self.axes.device if device == self.offload.home(self.axes.device) else device)
        for group in self.dtype_groups:
            for index, param in enumerate(group.params):
                param.piece = group.layout.pieces[index]
                param.rehome(group.local(index))
        self._arrange()
        if lost:
            self.gradients.lose()

    def devices(self) -> set[torch.device]:
        """Where the sharded parameters are at present: on one device, but while they are moved."""
        return {param.sharded._local_tensor.device for param in self.params}  # type: ignore[attr-defined]

    def _make_dtype_groups(self, device: torch.device) -> None:
        groups: dict[GroupKey, list[int]] = {}
        for slot, param in enumerate(self.params):
            wrapper = param.wrapper
            composite = wrapper is not None and wrapper.composite
            kind = GroupKey.of(param.dtype, self.mp_policy, param.replicated, wrapper is not None, composite)
            groups.setdefault(kind, []).append(slot)
        self.dtype_groups = []
        if self.params and self.params[0].sharded.is_meta:
            device = torch.device("meta")
        for kind, slots in groups.items():
            thresholds = thresholds_for(self.comm_policy, kind, *self.shard_comm.thresholds)
            place = [self.params[slot] for slot in slots], slots, self.axes, thresholds, self._parts, self.offload
            if kind.extension:
                made_of = CompositeGroup if kind.composite else ExtensionGroup
                group: DtypeGroup = made_of(kind, *place, weakref.ref(self), self.mp_policy)
            else:
                group = DtypeGroup(kind, *place)
            group.allocate(device)
            self.dtype_groups.append(group)

    def _arrange(self) -> None:
        self.gradients.arrange(self.dtype_groups)
        self._sharded = [param.sharded for param in self.params]
        register(self._sharded, self, self._registered)
        self._wire_signature = 0
        self.whole_bytes = sum(group.whole_bytes for group in self.dtype_groups)
        self._reads_host = any(group.shard.device != group.device for group in self.dtype_groups)
        self._on_meta = any(group.shard.is_meta for group in self.dtype_groups)
        self._columns = [columns for group in self.dtype_groups for columns in group.columns()]
        for group in self.dtype_groups:
            group.arrange()
            self._wire_signature = 31 * self._wire_signature + group.wire_signature  # xor would cancel equal ones
        self.unpacks_first = unpacks_first(sum(group.staging_bytes for group in self.dtype_groups), self.whole_bytes)
        self._versioned = [
            tensor for param in self.params for tensor in (param.sharded, param.local) if not tensor.is_inference()
        ]
        for param in self.params:
            param.node = param.trained = None
        self.shadows = Shadows(self.params)
        self.trainable = self._wanted = ()
        self.choose_trainable(afresh=True)
        self.forward_version = self.version
        self.shadows.mend()

    def _watch(self, slot: int) -> None:
        """Hooks autograd's accumulation into an unsharded parameter: counts what the graph task is still to make.

        The gradient stays where it is: code that runs backwards inside of a backward may read, edit or remove it.
        """
        param = self.params[slot]
        unsharded, this = param.trained, weakref.ref(self)
        assert unsharded is not None, "only an arranged parameter is watched"
        with torch.inference_mode(False), torch.enable_grad(), self.context.streams.at_home():
            param.node = torch.autograd.graph.get_gradient_edge(unsharded).node

        remaining = self.remaining  # holds numbers: a reference to parameters would keep them alive from here on

        def accumulated(tensor: Tensor) -> None:
            unit = this()
            if unit is None:
                return
            # Inlined: a method would cost a Python call for each gradient of a model.
            task = graph_task()
            if task not in remaining or unit.residency is not UNSHARDED:
                unit._admit(slot, tensor, task)
            arrivals = unit.gradients.arrivals
            if arrivals.leaves.setdefault(slot, tensor) is not tensor:
                arrivals.add(slot, tensor)
            remaining[task] = left = remaining[task] - 1
            if not left:
                unit._all_arrived()

        unsharded.register_post_accumulate_grad_hook(accumulated)

    def check_opened(self) -> None:
        """Raises StateError if what `unshard` shows was written to; if those are the shards themselves, all is well."""
        if self.open and not any(group.is_shard for group in self.dtype_groups):
            self.check_unwritten()

    # -- gathering -----------------------------------------------------------------------------------------------

    @property
    def runtime(self) -> Schedule | None:
        """The runtime of the root that the unit belongs to at present."""
        return None if self.runtime_ref is None else self.runtime_ref()

    def join(self, runtime: Schedule, streams: Streams, parent: Unit | None, name: str) -> None:
        """Puts the unit under a root."""
        self.runtime_ref = weakref.ref(runtime)
        self.context.streams = streams
        self.parent = parent
        if name != self.name or not self.key:
            self.name = name
            self.key = zlib.crc32(name.encode()) << 2

    def observe(self, observer: Observer | None) -> None:
        """Tells `observer` from now on what the unit and its process groups do; None: stops."""
        self.context.observer = observer

    def separate_reduce_scatters(self, separate: bool) -> None:
        """Gives its reduce-scatters a process group of their own, or takes it back. All ranks of the unit call it."""
        self.scatter_comm = twin_of(self.shard_comm) if separate else self.shard_comm

    def gather_by(self, custom: AllGather | None) -> None:
        """Sets the collective of gathers, those of parts too; None: the backend's."""
        parts = () if self.part_comm is None else (self.part_comm,)
        self._exchange_by("custom_all_gather", custom, self.shard_comm, *parts)

    def reduce_scatter_by(self, custom: ReduceScatter | None) -> None:
        """Sets the collective of reduce-scatters; None: the backend's."""
        self._exchange_by("custom_reduce_scatter", custom, self.shard_comm, self.scatter_comm)
        self.settings.reduces_by_custom = custom is not None

    def _exchange_by(self, which: str, custom: object, *comms: Comm) -> None:
        before = getattr(self.shard_comm, which)
        for comm in comms:
            setattr(comm, which, custom)
        if not any(group.lies_otherwise(self.shard_comm.thresholds[-1]) for group in self.dtype_groups):
            return
        try:  # users' collectives know equal parts only: other parameters travel unevenly now
            self.gradients.refuse_pending(self.name, f"set_{which}")
            self.rebuild()
        except HSDPError:
            for comm in comms:
                setattr(comm, which, before)
            raise

    def bound_reduce_scatters(self, most: int) -> None:
        """Bounds the reductions that hold unsharded gradients, in a root."""
        self.comm_policy = replace(self.comm_policy, max_inflight_reduce_scatters=most)

    def begin_forward(self, afresh: bool) -> None:
        """A forward begins that reads its unsharded parameters; `afresh` as in `choose_trainable`."""
        self.choose_trainable(afresh)
        self.forward_version = self.version
        if self._shard_prints is not None and not (self.holds_unsharded or self.retained):
            self._shard_prints = None  # of a gather that was interrupted outside of a pass

    def enter_forward(self, afresh: bool) -> None:
        """The forward of one of its modules begins."""
        self.calls += 1
        self.begin_forward(afresh)
        self.state = FORWARD

    def leave_forward(self) -> None:
        """The forwards of all of its modules ended.

        Raises:
            StateError: a forward wrote to an unsharded parameter.
        """
        self.ran.clear()
        self.state = IDLE
        self.check_unwritten()

    def choose_trainable(self, afresh: bool) -> None:
        """Notes which parameters want gradients, as users may have changed it since.

        A reduction covers all forwards before it, also of what was frozen since. `afresh`: they have had their backwards.
        """
        with plain_access():
            wanted = tuple(map(requires_grad_of, self._sharded))
        if wanted != self._wanted or self.shadows.toggled:
            with outside_transforms():  # the forward may be under one of torch.func: what it makes ends with it
                self._show_wanted(wanted)
            self._note_nodes()
        mask = wanted
        if mask != self.trainable and self.trainable and (not afresh or self.gradients.is_pending()):
            mask = tuple(map(or_, wanted, self.trainable))
        if mask != self.trainable:
            self.gradients.choose(mask, self.name)
            self.trainable = mask
            self._note_nodes()

    def _note_nodes(self) -> None:
        """Notes the nodes at which gradients arrive that take part in reductions."""
        chosen = zip(self.params, self.trainable, strict=True) if self.trainable else ()  # empty before the first choice
        self._nodes = [param.node for param, trains in chosen if trains]

    def _show_wanted(self, wanted: tuple[bool, ...]) -> None:
        for slot, (param, wants) in enumerate(zip(self.params, wanted, strict=True)):
            if wants:
                param.refuse_untrainable(self.name)
            if param.unsharded is not None:
                if param.trained is not None and param.node is None:
                    self._watch(slot)  # thawed where it was shown: a graph may lead to the leaf, whatever is wanted now
                param.choose(wants)
                if wants and param.node is None:
                    self._watch(slot)
        self._wanted = wanted
        self.shadows.choose()
        self.guard = WriteGuard(self.dtype_groups, self._fillings, self.guard)
        if self.residency is not UNSHARDED and not self.retained:
            self.guard.freed()

    # -- gradients -----------------------------------------------------------------------------------------------

    def will_get_gradients(self) -> bool:
        """Whether the present graph task will make a gradient of one of the unit's parameters."""
        return any(map(will_execute, self._nodes))

    def begin_task(self, task: int) -> None:
        """Asks the engine which of the unit's gradients graph task `task` will make."""
        self.remaining[task] = sum(map(will_execute, self._nodes))

    def _admit(self, slot: int, unsharded: Tensor, task: int) -> None:
        """A gradient arrived in a graph task that has not entered the unit, or the unit is not whole.

        Raises:
            StateError: the unit was never entered: the backward read memory that no gather had filled.
        """
        runtime = self.runtime
        if runtime is None or (self.residency is not UNSHARDED and not runtime.has_entered(self)):
            unsharded.grad = None  # no reduction has it, and the next backward would add to it
            raise unentered(self, f"parameter {self.params[slot].fqn!r}")
        if task not in self.remaining:
            runtime.enter_task()
            self.begin_task(task)

    def _all_arrived(self) -> None:
        """The graph task has made its last gradient of the unit."""
        runtime = self.runtime
        assert runtime is not None, "the root of a backward is alive"
        # Entering a unit compares versions; a unit that stayed whole since its forward may be trained without.
        if not runtime.has_entered(self) and (self.version != self.forward_version or not self.shards_unchanged()):
            raise stale(self)
        if self.context.observer is not None:
            self.context.observer.passes(Point.BACKWARD_LEFT, self)

    def take_outside(self) -> bool:
        """Takes gradients that users put on unsharded parameters, without accumulation; returns whether there were any."""
        return self.gradients.arrivals.add_outside(zeroed=self.gradients.heed_zero_grad())

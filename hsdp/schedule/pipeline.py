"""`ReductionPipeline`: reduces every unit's gradients, one layer's stage beside another layer's.

         unit 3   [ RS ][ AR      ]
         unit 2         [ RS ][ AR      ]          AR(k) runs while RS(k+1) and the backward of further layers run
         unit 1               [ RS ][ AR      ]

reduce_queue.py decides which stage is next; this file runs it. On a device the all-reduce of a reduction is enqueued on
its own stream behind the event of its reduce-scatter, at once. On the CPU the host waits for the reduce-scatter first:
at a fixed point, when a later reduction needs its place: then all ranks start the collectives of a group in
one order, among each other and among the user's own. Landings, too, come at fixed points: whatever has landed when a
user's hook runs, or when a backward fails, is the same on all ranks, bit for bit.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from hsdp.comm.backends import MULTIPLIED
from hsdp.comm.custom import is_exact
from hsdp.comm.reals import as_reals, uneven_as_reals
from hsdp.comm.replica_reduce import DEFAULT
from hsdp.comm.streams import Streams, host_wait
from hsdp.comm.tree import reduce_scatter
from hsdp.comm.uneven import Uneven
from hsdp.comm.work import CommWork, TwoPhases, abandon
from hsdp.errors import HSDPError
from hsdp.policies import CommPolicy
from hsdp.schedule.reduce_queue import Bucket, ReduceQueue
from hsdp.schedule.scaling import Scaling, scaling_of
from hsdp.unit.deferred_sums import join_deferred
from hsdp.unit.landing import note_grads_read
from hsdp.unit.reduce_plan import GroupReduction
from hsdp.unit.unit import Unit


class Reduction:
    """One unit's trip through the pipeline, with its own buffers.

    Attributes:
        unit, source: the unit whose gradients it reduces.
        replicas: ranks over which it is all-reduced; 0: replicas that are not in the mesh, which the all-reduce stage
            counts.
        parts: its operands, by dtype group, in one part each.
        all_reduce: whether its sums, over replicas too, become gradients; if not, they become the unit's deferred sums. In
            a tree these are over replicas as well: what micro-batches add must not depend on where replicas begin.
        factor: its sums are multiplied with it.
        in_tree: its sums have the order of the tree over data ranks.
        offloads: its gradients leave the device.
    """

    __slots__ = ("all_reduce", "factor", "in_tree", "key", "offloads", "parts", "replicas", "source", "unit")

    def __init__(self, unit: Unit, parts: list[GroupReduction], all_reduce: bool) -> None:
        self.unit = self.source = unit
        self.replicas = 0 if unit.settings.replica_reduce.beyond_mesh else unit.replicate_comm.size
        self.parts = parts
        self.all_reduce = all_reduce
        self.factor = unit.settings.factor(unit.gradients.ranks)
        self.in_tree = unit.in_tree
        self.offloads = False
        # With the factor: ranks that scale differently would train on gradients that do not fit together.
        keys = [unit.key + 1, self.factor]
        for part in parts:
            keys.append(part.plan.key)
            self.offloads = self.offloads or part.plan.offload is not None
            if all_reduce and part.plan.shares is not None:
                part.replica_buffers = part.plan.shares.buffers()
        self.key = hash(tuple(keys))

    def scaling(self, part: GroupReduction) -> Scaling:
        """When the sums of one of its parts are multiplied with its factor, and by how much."""
        return scaling_of(self.factor, part.plan.kind.reduce, self.replicas > 1, self.in_tree)

    def scatter_bytes(self) -> int:
        """Bytes of unsharded gradients that it holds."""
        return sum([part.plan.scatter_bytes for part in self.parts])

    def reduce_bytes(self) -> int:
        """Bytes of its reduction buffers."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.operands)

    def fits(self, other: Reduction) -> bool:
        """Whether it may share a collective with another one."""
        a, b = self.unit, other.unit
        return (
            a.in_tree == b.in_tree
            and a.scatter_comm.group is b.scatter_comm.group
            and a.scatter_comm.custom_reduce_scatter is b.scatter_comm.custom_reduce_scatter
            and a.replicate_comm.group is b.replicate_comm.group
            and a.settings.replica_reduce is b.settings.replica_reduce
            and self.all_reduce == other.all_reduce
        )

    @property
    def is_void(self) -> bool:
        """Whether its backward has failed, so that it must not land."""
        return any(part.void for part in self.parts)


class ReductionBucket(Bucket[Reduction]):
    """Reductions with the collective that they share at present, which `key` identifies for the ranks' divergence guard."""

    work: CommWork

    def __init__(self, items: list[Reduction]) -> None:
        self.items = items
        first = items[0]
        self.name, self.key = first.unit.name, first.key
        if len(items) > 1:
            self.name, self.key = " + ".join(r.unit.name for r in items), hash(tuple(r.key for r in items))

    def mark_unused(self) -> None:
        """Marks all of its parameters as unused on this rank, whatever forwards did."""
        for reduction in self.items:
            for part in reduction.parts:
                part.used = [False] * len(part.used)


class ReductionPipeline(ReduceQueue[Reduction, ReductionBucket]):
    """The queue of one root; the class knows every live one.

    Args:
        streams: the root's side streams.
        policy: the root's bounds and bucket sizes.

    Attributes:
        streams: as given.
        number: of the pipeline among all of the process.
    """

    live: ClassVar[weakref.WeakSet[ReductionPipeline]] = weakref.WeakSet()
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, streams: Streams, policy: CommPolicy) -> None:
        super().__init__(policy, streams.active)
        self.streams = streams
        self.number = next(ReductionPipeline._numbers)
        self._offloads = False
        self._errors: list[Exception] = []
        ReductionPipeline.live.add(self)

    @classmethod
    def land_all_of(cls, unit: Unit) -> None:
        """Waits for the reductions of a unit under whatever root: it may have had another one when they began."""
        # All ranks drain in one order: that in which they made their pipelines.
        for pipeline in sorted(cls.live, key=attrgetter("number")):
            if any(reduction.unit is unit for reduction in pipeline.items()):
                with torch.no_grad(), pipeline.streams.at_home():
                    pipeline.drain()
                note_grads_read(unit.params, pipeline.streams)

    def drain(self) -> None:
        """Waits for every stage of every reduction; all gradients have landed after it.

        Raises:
            Exception: what a user's hook, or a gradient that does not fit, raised when a reduction landed: the first.
        """
        super().drain()
        if self._offloads:
            self._offloads = False
            host_wait(self.streams.device)
        self.tell_errors()

    def tell_errors(self) -> None:
        """Raises the first of the errors that landings raised since."""
        if self._errors:
            first = self._errors[0]
            self._errors = []
            raise first

    def abort(self) -> None:
        """Forgets the reductions of the backward that failed; those of earlier ones, which run on, still land.

        Work in flight is waited for; its errors are swallowed, as one was raised already.
        """
        failed: set[int] = set()
        for bucket in self.under_way():
            try:
                bucket.work.wait()
            except HSDPError:
                abandon(bucket.work)
                failed.update(map(id, bucket.items))
            for reduction in bucket.items:
                if id(reduction) in failed or reduction.is_void:
                    for part in reduction.parts:
                        part.release_inputs(ended=bucket.work.done())
                if id(reduction) in failed and not reduction.is_void:
                    reduction.unit.gradients.lose(reduction.parts)
        self.keep(lambda reduction: id(reduction) not in failed and not reduction.is_void)
        self._errors = []
        if len(self) or self._offloads:  # landed gradients may be on their way to the host, too
            self.drain()

    # -- carrying out what the queue decides ---------------------------------------------------------------------

    def start_scatter(self, items: list[Reduction]) -> ReductionBucket:
        """See `ReduceQueue`. Behind the sum every gradient is scaled, exactly once."""
        bucket = ReductionBucket(items)
        if not self.ordered_by_streams:
            bucket.work = _scatter(bucket)
            return bucket
        # Behind the compute stream, which wrote the operands. Host and compute stream go on: nothing that is enqueued
        # later writes to the operands, as they are the reduction's alone.
        with self.streams.on("scatter"):
            bucket.work = _scatter(bucket)
        return bucket

    def lose(self, items: list[Reduction]) -> None:
        """See `ReduceQueue`. Reductions of the backward under way, which fails now, are undone with it."""
        for reduction in items:
            if not reduction.parts[0].undoable:
                reduction.unit.gradients.lose(reduction.parts)

    def release(self, bucket: ReductionBucket) -> None:
        """See `ReduceQueue`."""
        # The compute stream is behind the reduce-scatter now: its allocator may reuse this memory.
        for reduction in bucket.items:
            for part in reduction.parts:
                part.release_inputs()
            if reduction.unit.context.observer is not None:
                reduction.unit.context.observer.allocates(reduction.unit)

    def start_deferral(self, item: Reduction, behind: ReductionBucket) -> ReductionBucket:
        """See `ReduceQueue`. Sums of `item`, `behind` a reduce-scatter, are added on the compute stream, their owner."""
        bucket = ReductionBucket([item])
        bucket.work = behind.work
        bucket.at_rest = not self.streams.active
        return bucket

    def start_all_reduce(self, items: list[Reduction], behind: ReductionBucket) -> ReductionBucket:
        """See `ReduceQueue`. `items` are `behind` a reduce-scatter; with one replica there is no collective."""
        bucket = ReductionBucket(items)
        deferred: list[Reduction] = []
        # Here, on the compute stream: pending sums are memory of that stream, and gradients that users zeroed meanwhile
        # must be out of them before they are added.
        for reduction in items:
            gradients = reduction.unit.gradients
            if gradients.sentinels.up:
                gradients.heed_zero_grad()
            if reduction.all_reduce and gradients.deferred_sums is not None:
                deferred.append(reduction)
        if not self.ordered_by_streams:
            self._start_all_reduce(bucket, behind, deferred)
            return bucket
        # Deferred sums were written on the compute stream.
        written = self.streams.mark() if deferred else None
        with self.streams.after("replicate", behind.work.event):
            self.streams.join(written)
            self._start_all_reduce(bucket, behind, deferred)
        return bucket

    def _start_all_reduce(self, bucket: ReductionBucket, behind: ReductionBucket, deferred: list[Reduction]) -> None:
        for reduction in deferred:
            reduction.unit.gradients.hand_over_deferred(reduction.parts)
            if not reduction.in_tree:
                for part in reduction.parts:
                    join_deferred(part)
        items, goes_on = bucket.items, False
        unit, stage = items[0].unit, items[0].unit.settings.replica_reduce
        rounds = items[0].replicas > 1 and stage is not DEFAULT and not stage.exact
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        tensors: list[Tensor] = []
        flags: list[Tensor] = []
        has_complex = False
        for reduction in items:
            hook = reduction.unit.settings.all_reduce_hook
            goes_on = goes_on or reduction.in_tree or reduction.offloads or hook is not None
            for part in reduction.parts:
                goes_on = goes_on or part.late_factor != 1.0
                has_complex = has_complex or part.plan.kind.reduce.is_complex
                if rounds:
                    tensors += part.values()
                    flags.append(part.flags())
                elif part.replica_buffers is None:
                    tensors += part.operands
                else:
                    sent, left, whole = part.share_out()
                    inputs += sent
                    outputs += left
                    tensors += whole
        if has_complex:
            inputs, outputs, tensors, flags = map(as_reals, (inputs, outputs, tensors, flags))
        finish = partial(self._finish, items) if goes_on else None
        if inputs:
            comm = unit.replicate_comm
            bucket.work = comm.reduce_scatter(bucket, bucket.key, outputs, inputs, tensors, finish)
        elif flags:
            comm, key = unit.replicate_comm, hash((bucket.key, 1))
            sums = stage.start(bucket, bucket.key, tensors, comm, None)
            exact = partial(comm.all_reduce, bucket, key, flags, finish)
            bucket.work = TwoPhases(comm, "all-reduce", bucket, [sums], exact)
        elif items[0].replicas != 1:
            bucket.work = stage.start(bucket, bucket.key, tensors, unit.replicate_comm, finish)
        else:
            # Where nothing follows the reduce-scatter, it is the last work before the landing.
            follows = finish is not None or deferred
            bucket.work = unit.shard_comm.local("landing", bucket, finish) if follows else behind.work
            bucket.at_rest = not self.ordered_by_streams

    def _finish(self, reductions: list[Reduction]) -> None:
        """Runs users' hooks behind the all-reduce, and the copies to where offloaded shards live.

        In a tree, sums are scaled here, and deferred sums are added, each scaled by its own factor.
        """
        for reduction in reductions:
            if reduction.in_tree:
                for part in reduction.parts:
                    part.scale_late()
                    join_deferred(part)
            if not reduction.all_reduce:
                continue
            for part in reduction.parts:
                part.scale_late()
            hook = reduction.unit.settings.all_reduce_hook
            if hook is not None:
                try:
                    for part in reduction.parts:
                        for tensor in part.values():
                            hook(tensor)
                except Exception as error:
                    self._note(error, reduction)
            for part in reduction.parts:
                part.store()

    def land(self, bucket: ReductionBucket) -> None:
        """See `ReduceQueue`. An error that a landing raises does not break the queue: `drain` raises it, at rest."""
        for reduction in bucket.items:
            self._offloads = self._offloads or reduction.offloads
            gradients, observer = reduction.unit.gradients, reduction.unit.context.observer
            if observer is not None:
                observer.begins("landing", reduction.unit)
            try:
                (gradients.land if reduction.all_reduce else gradients.defer)(reduction.parts)
            except Exception as error:
                self._note(error, reduction)
            finally:
                if observer is not None:
                    observer.ends("landing", reduction.unit)

    def _note(self, error: Exception, reduction: Reduction) -> None:
        """Keeps an error until `tell_errors`. Its backward fails then; if that is over, its sums are lost."""
        self._errors.append(error)
        if not reduction.parts[0].undoable:
            reduction.unit.gradients.lose()


def _scatter(bucket: ReductionBucket) -> CommWork:
    """Starts the reduce-scatter of a bucket, with what `Scaling` has before it, in it and behind it."""
    first = bucket.items[0]
    comm = first.unit.scatter_comm
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    uneven: list[Uneven] = []
    replicated: list[Tensor] = []
    scaled: list[tuple[GroupReduction, float]] = []
    flagged: list[tuple[GroupReduction, Tensor]] = []
    factors: set[float] = set()
    custom = comm.custom_reduce_scatter
    rounds = custom is not None and not is_exact(custom)
    in_sum = comm.multiplies and custom is None and not first.in_tree
    has_complex = False
    for reduction in bucket.items:
        for part in reduction.parts:
            inputs += part.inputs
            outputs += part.outputs
            uneven += part.uneven
            if part.plan.kind.replicated and comm.size > 1:
                replicated += part.operands
            elif rounds and part.inputs:
                flagged.append((part, part.plan.flags_of(part.used)))
            scaling = reduction.scaling(part)
            if scaling.before != 1.0:
                in_sum = False
                terms = [*part.inputs, *(one.whole for one in part.uneven)] or part.values()
                torch._foreach_mul_(terms, scaling.before)
            has_complex = has_complex or part.plan.kind.reduce.is_complex
            in_sum = in_sum and part.plan.kind.reduce in MULTIPLIED
            part.late_factor = scaling.after_all_reduce
            scaled.append((part, scaling.after_scatter))
            factors.add(scaling.after_scatter)

    def scale() -> None:
        for part, factor in scaled:
            if factor != 1.0:
                torch._foreach_mul_(part.values(), factor)
        for part, flags in flagged:
            part.flags().copy_(flags)

    replicated += [flags for _, flags in flagged]
    if has_complex:
        inputs, outputs, replicated = map(as_reals, (inputs, outputs, replicated))
        uneven = uneven_as_reals(uneven)
    if not inputs and not replicated:
        return comm.local("scale", bucket, scale)
    if first.in_tree:
        return reduce_scatter(comm, bucket, bucket.key, outputs, inputs, replicated, scale, uneven)
    if in_sum and not replicated and len(factors) == 1 and min(factors) > 0.0:
        # The used-flags that go with the gradients are scaled too: only whether they are 0 matters, which flags of
        # micro-batches whose factors have other signs might add up to.
        return comm.reduce_scatter(bucket, bucket.key, outputs, inputs, [], None, factors.pop(), uneven)
    return comm.reduce_scatter(bucket, bucket.key, outputs, inputs, replicated, scale, 1.0, uneven)

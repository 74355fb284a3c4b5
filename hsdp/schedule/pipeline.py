"""`ReductionPipeline`: the queue in which every unit's gradients are reduced, one layer's stage beside another's.

    FILLED --reduce-scatter--> SCATTERING --> (BUCKETED) --all-reduce--> REDUCING --> LANDED

         unit 3   [ RS ][ AR      ]
         unit 2         [ RS ][ AR      ]          AR(k) runs while RS(k+1) and the backward of further layers run
         unit 1               [ RS ][ AR      ]

On a device the all-reduce of a reduction is enqueued on its own stream behind the event of its reduce-scatter, at once.
On the CPU the host must see the reduce-scatter done first. It waits for it at a fixed point, when a later reduction
needs its place, and not when a poll happens to find it done: then all ranks start the collectives of a group in one
order, among each other and among the user's own. Two bounds hold memory: reductions that still hold unsharded gradients,
and reductions behind their reduce-scatter.

Reductions land at fixed points too, in order: where a bound asks for their place, and in `drain`. What has landed when a
user's hook runs, when gradients come from elsewhere or when a backward fails is then the same on all ranks, to the bit. An
error that a landing raises does not break the queue: `drain` raises it, once everything is at rest.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from functools import partial
from typing import ClassVar

import torch

from hsdp.comm.streams import Event, Streams, host_wait
from hsdp.comm.work import CommWork, abandon
from hsdp.errors import HSDPError
from hsdp.policies import CommPolicy
from hsdp.unit.reduce_plan import GroupReduction
from hsdp.unit.unit import Unit


class Stage(enum.Enum):
    """Where a reduction is."""

    FILLED = "filled"
    SCATTERING = "scattering"
    BUCKETED = "bucketed"
    REDUCING = "reducing"
    LANDED = "landed"


class Reduction:
    """One unit's trip through the pipeline, with its own buffers.

    Attributes:
        unit: whose gradients they are.
        parts: its operands, one part per dtype group;
        all_reduce: whether replicas are summed now; if not, the sums become the unit's partial sums.
        stage: where it is.
        factor: what its sums are multiplied with.
        offloads: its gradients leave the device.
    """

    __slots__ = ("all_reduce", "factor", "offloads", "op", "parts", "stage", "unit")

    def __init__(self, unit: Unit, parts: list[GroupReduction], all_reduce: bool) -> None:
        self.unit = unit
        self.parts = parts
        self.all_reduce = all_reduce
        self.stage = Stage.FILLED
        self.factor = unit.factor()
        self.offloads = any([part.plan.offload for part in parts])
        # The factor too: ranks that scale differently would train on gradients that do not fit together.
        self.op = hash((unit.op + 1, self.factor, *[part.plan.op for part in parts]))

    def scatter_bytes(self) -> int:
        """Bytes of unsharded gradients that it holds."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.inputs)

    def reduce_bytes(self) -> int:
        """Bytes of its reduction buffers."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.operands)


class Bucket:
    """Reductions that share a collective. Often one; small neighbours travel together if the policy says so."""

    __slots__ = ("at_rest", "comm_work", "name", "reductions", "scatter")

    def __init__(self, reductions: list[Reduction]) -> None:
        self.reductions = reductions
        self.at_rest = False  # nothing is under way by construction, whatever the timing
        self.name = reductions[0].unit.name if len(reductions) == 1 else " + ".join(r.unit.name for r in reductions)
        self.scatter: CommWork
        self.comm_work: CommWork

    @property
    def op(self) -> int:
        """Identifies the bucket for the ranks' divergence guard."""
        return self.reductions[0].op if len(self.reductions) == 1 else hash(tuple(r.op for r in self.reductions))


class ReductionPipeline:
    """The queue of one root; the class knows every live one.

    Args:
        streams: the root's side streams.
        policy: the root's bounds and bucket sizes.
    """

    live: ClassVar[weakref.WeakSet[ReductionPipeline]] = weakref.WeakSet()

    def __init__(self, streams: Streams, policy: CommPolicy) -> None:
        self.streams = streams
        self.policy = policy
        self._filling: list[Reduction] = []
        self._holding: deque[Bucket] = deque()
        self._scattered: list[Reduction] = []
        self._behind: Event = None
        self._reducing: deque[Bucket] = deque()
        self._offloads = False
        self._errors: list[Exception] = []
        ReductionPipeline.live.add(self)

    def __len__(self) -> int:
        """Reductions that have not landed."""
        buckets = {id(bucket): len(bucket.reductions) for bucket in (*self._holding, *self._reducing)}
        return len(self._filling) + len(self._scattered) + sum(buckets.values())

    def submit(self, reduction: Reduction) -> None:
        """Takes a filled reduction; starts its reduce-scatter once its bucket is full and the bound allows it."""
        assert reduction.stage is Stage.FILLED, f"reduction of {reduction.unit.name!r} was submitted twice"
        if self._filling and not _fit(self._filling[0], reduction):
            self._start_scatter()
        self._filling.append(reduction)
        least = self.policy.reduce_scatter_bucket_bytes
        if not least or sum(r.scatter_bytes() for r in self._filling) >= least:
            self._start_scatter()
        self.advance()

    def make_room(self) -> None:
        """Waits for what the next `submit` would wait for, before its operands are made: they would be memory on top.

        On a device nothing is waited for here: the host goes on, and the streams keep the order.
        """
        if self.streams.active or self.policy.reduce_scatter_bucket_bytes:
            return
        while len(self._holding) >= self.policy.max_inflight_reduce_scatters:
            self._release()
        while len(self._reducing) >= self.policy.max_inflight_all_reduces:
            self._land()

    def advance(self) -> None:
        """Lands what waits for no collective. What does is not landed when it happens to be done: that is timing."""
        while self._reducing and self._reducing[0].at_rest:
            self._land()

    def drain(self) -> None:
        """Waits for every stage of every reduction; all gradients have landed after it.

        Raises:
            Exception: what a user's hook, or a gradient that does not fit, raised when a reduction landed: the first.
        """
        if self._filling:
            self._start_scatter()
        while self._holding:
            self._release()
        if self._scattered:
            self._start_all_reduce()
        while self._reducing:
            self._land()
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
        for bucket in (*self._holding, *self._reducing):
            unsharded = True
            for comm_work in {bucket.scatter, bucket.comm_work}:
                try:
                    comm_work.wait()
                except HSDPError:
                    abandon(comm_work)
                    unsharded = False
            stays = _valid(bucket.reductions)
            for reduction in bucket.reductions:
                if not unsharded or reduction not in stays:
                    for part in reduction.parts:
                        part.release_inputs(ended=bucket.scatter.done())
            if not unsharded:
                for reduction in stays:
                    reduction.unit.gradients.lose()
            bucket.reductions = stays if unsharded else []
        self._filling, self._scattered = _valid(self._filling), _valid(self._scattered)
        self._holding = deque(bucket for bucket in self._holding if bucket.reductions)
        self._reducing = deque(bucket for bucket in self._reducing if bucket.reductions)
        self._errors = []
        if len(self):
            self.drain()

    # -- FILLED -> SCATTERING ------------------------------------------------------------------------------------

    def _start_scatter(self) -> None:
        while len(self._holding) >= self.policy.max_inflight_reduce_scatters:
            self._release()
        bucket, self._filling = Bucket(self._filling), []
        with self.streams.on("scatter"):
            bucket.scatter = bucket.comm_work = _scatter(bucket)
        for reduction in bucket.reductions:
            reduction.stage = Stage.SCATTERING
        self._holding.append(bucket)
        if self.streams.active:
            self._queue_all_reduce(bucket)

    def _release(self) -> None:
        """The oldest bucket's shards are summed: its operands go. On the CPU the next stage can start only now."""
        bucket = self._holding[0]
        bucket.scatter.wait()
        self._holding.popleft()
        for reduction in bucket.reductions:
            for part in reduction.parts:
                part.release_inputs()
        if not self.streams.active:
            self._queue_all_reduce(bucket)

    # -- SCATTERING -> BUCKETED -> REDUCING ----------------------------------------------------------------------

    def _queue_all_reduce(self, bucket: Bucket) -> None:
        """Behind the reduce-scatter: keeps partial sums for a later micro-batch, or joins the all-reduce bucket."""
        self._behind = bucket.scatter.event
        for reduction in bucket.reductions:
            if not reduction.all_reduce:
                self._start_deferral(reduction, bucket)
                continue
            if reduction.unit.replicate_comm.size == 1:
                self._start_all_reduce_of([reduction])
                continue
            if self._scattered and not _fit(self._scattered[0], reduction):
                self._start_all_reduce()
            self._scattered.append(reduction)
            reduction.stage = Stage.BUCKETED
            least = self.policy.all_reduce_bucket_bytes
            if not least or sum(r.reduce_bytes() for r in self._scattered) >= least:
                self._start_all_reduce()

    def _start_deferral(self, reduction: Reduction, scattered: Bucket) -> None:
        """Queues partial sums like all others. They are added where they land, on the compute stream: it is theirs."""
        while len(self._reducing) >= self.policy.max_inflight_all_reduces:
            self._land()
        bucket = Bucket([reduction])
        bucket.scatter = bucket.comm_work = scattered.scatter
        bucket.at_rest = not self.streams.active
        reduction.stage = Stage.REDUCING
        self._reducing.append(bucket)
        self.advance()

    def _start_all_reduce(self) -> None:
        reductions, self._scattered = self._scattered, []
        self._start_all_reduce_of(reductions)

    def _start_all_reduce_of(self, reductions: list[Reduction]) -> None:
        while len(self._reducing) >= self.policy.max_inflight_all_reduces or self._defers(reductions):
            self._land()
        bucket = Bucket(reductions)
        unit = reductions[0].unit
        deferred = False
        for reduction in reductions:
            reduction.unit.gradients.heed_zero_grad()
            deferred = deferred or reduction.unit.gradients.partial is not None
        # Deferred sums were written on the compute stream.
        written = self.streams.mark() if deferred else None
        with self.streams.after("replicate", self._behind):
            self.streams.join(written)
            for reduction in reductions:
                reduction.unit.gradients.join_partial(reduction.parts)
                reduction.stage = Stage.REDUCING
            finish = partial(self._finish, reductions) if any(map(_has_more, reductions)) else None
            if unit.replicate_comm.size > 1:
                tensors = [t for r in reductions for part in r.parts for t in part.operands]
                bucket.comm_work = unit.settings.replica_reduce.start(
                    bucket, bucket.op, tensors, unit.replicate_comm, finish
                )
            else:
                bucket.comm_work = unit.shard_comm.local("landing", bucket, finish)
                bucket.at_rest = not self.streams.active
        bucket.scatter = bucket.comm_work
        self._reducing.append(bucket)

    def _defers(self, reductions: list[Reduction]) -> bool:
        """Whether sums that these will be added to are still on their way."""
        units = {reduction.unit for reduction in reductions}
        return any(not r.all_reduce and r.unit in units for bucket in self._reducing for r in bucket.reductions)

    def _finish(self, reductions: list[Reduction]) -> None:
        """What follows the all-reduce: users' hooks, and the copies to where offloaded shards live."""
        for reduction in reductions:
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

    # -- REDUCING -> LANDED --------------------------------------------------------------------------------------

    def _land(self) -> None:
        bucket = self._reducing[0]
        bucket.comm_work.wait()
        self._reducing.popleft()
        for reduction in bucket.reductions:
            reduction.stage = Stage.LANDED
            self._offloads = self._offloads or reduction.offloads
            gradients = reduction.unit.gradients
            undoable = gradients.is_open(reduction.parts)
            try:
                (gradients.land if reduction.all_reduce else gradients.defer)(reduction.parts)
            except Exception as error:
                self._note(error, reduction, undoable)

    def _note(self, error: Exception, reduction: Reduction, undoable: bool | None = None) -> None:
        """Keeps an error for later. Its backward fails then; if that is over, its sums are lost."""
        self._errors.append(error)
        gradients = reduction.unit.gradients
        if not (gradients.is_open(reduction.parts) if undoable is None else undoable):
            gradients.lose()


def _valid(reductions: list[Reduction]) -> list[Reduction]:
    """Those whose backward has not failed."""
    return [reduction for reduction in reductions if not any(part.void for part in reduction.parts)]


def _fit(first: Reduction, other: Reduction) -> bool:
    """Whether two reductions may share a collective."""
    a, b = first.unit, other.unit
    return (
        a.scatter_comm.group is b.scatter_comm.group
        and a.scatter_comm.custom_reduce_scatter is b.scatter_comm.custom_reduce_scatter
        and a.replicate_comm.group is b.replicate_comm.group
        and a.settings.replica_reduce is b.settings.replica_reduce
        and first.all_reduce == other.all_reduce
    )


def _scatter(bucket: Bucket) -> CommWork:
    """Starts the reduce-scatter of a bucket; behind it every sum is scaled, exactly once."""
    comm = bucket.reductions[0].unit.scatter_comm
    parts = [(part, _split_factor(r, part)) for r in bucket.reductions for part in r.parts]
    inputs = [tensor for part, _ in parts for tensor in part.inputs]
    outputs = [tensor for part, _ in parts for tensor in part.outputs]
    replicated = [t for part, _ in parts if part.plan.kind.replicated for t in part.operands] if comm.size > 1 else []
    for part, (before, _) in parts:
        if before != 1.0:
            torch._foreach_mul_(part.inputs or part.values(), before)

    def scale() -> None:
        for part, (_, after) in parts:
            if after != 1.0:
                torch._foreach_mul_(part.values(), after)

    if inputs or replicated:
        return comm.reduce_scatter(bucket, bucket.op, outputs, inputs, replicated, scale)
    return comm.local("scale", bucket, scale)


def _split_factor(reduction: Reduction, part: GroupReduction) -> tuple[float, float]:
    """The unit's factor, as one to apply before the sum over shards and one after it.

    fp16 overflows at 65504: half of the division (in powers of two) comes before the sum, so that neither the terms
    vanish nor their sum overflows.
    """
    factor = reduction.factor
    if part.plan.kind.reduce is not torch.float16:
        return 1.0, factor
    ranks = reduction.unit.axes.shard_size * reduction.unit.axes.replicate_size
    before = 0.5 ** (ranks.bit_length() // 2)
    return before, factor / before


def _has_more(reduction: Reduction) -> bool:
    """Whether something follows the all-reduce on its stream."""
    return reduction.offloads or reduction.unit.settings.all_reduce_hook is not None

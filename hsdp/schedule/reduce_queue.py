"""`ReduceQueue`: which reduction is sent, waited for and landed next. Decisions alone, without tensors.

    FILLED --scatter--> HOLDING --release--> (BUCKETED) --all_reduce / defer--> REDUCING --land--> landed

The engine (`pipeline.py`) and the planner (`hsdp.planning`) each carry out, in their own way, the decisions of this one
queue: the plan is what happens.

Two bounds hold memory: buckets that still hold unsharded gradients, and buckets behind their reduce-scatter. Everything is
waited for at fixed points, in order: where a bound asks for the place, and in `drain`. Nothing depends on which collective
has ended already, which would be each rank's own timing: all ranks start the collectives of a group in one order, and what
has landed at any moment is the same on all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from hsdp.policies import CommPolicy
from hsdp.schedule.byte_budget import units_in_budget


class Queued(Protocol):
    """A reduction, as far as the queue needs to know it."""

    all_reduce: bool
    """Its sums are over replicas too, and land; if not, they are kept for a later reduction of the same source."""

    @property
    def source(self) -> object:
        """The unit whose gradients it reduces."""
        ...

    @property
    def replicas(self) -> int:
        """Ranks over which it is all-reduced; 1: there is no collective."""
        ...

    @property
    def in_tree(self) -> bool:
        """Replicas are summed now, also where its sums are kept: in a tree micro-batches are added behind ranks."""
        ...

    def scatter_bytes(self) -> int:
        """Bytes of unsharded gradients that it holds."""
        ...

    def reduce_bytes(self) -> int:
        """Bytes of its reduction buffers."""
        ...

    def fits(self, other: Any) -> bool:
        """Whether it may share a collective with another one."""
        ...


class Waited(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Blocks until it is over: the host on the CPU, the current stream on a device."""
        ...


ItemT = TypeVar("ItemT", bound=Queued)


class Bucket(Generic[ItemT]):
    """Reductions that share a collective. Often one; small neighbours travel together if the policy says so.

    Attributes:
        items: the reductions.
        work: its collective, to wait for; None where nothing is communicated.
        at_rest: no collective is under way, by construction, whatever the timing.
    """

    at_rest = False
    work: Waited | None = None

    def __init__(self, items: list[ItemT]) -> None:
        self.items = items


BucketT = TypeVar("BucketT", bound=Bucket[Any])


class ReduceQueue(ABC, Generic[ItemT, BucketT]):
    """The queue of one root. Subclasses carry out its decisions.

    Args:
        policy: the root's bounds and bucket sizes.
        streams: whether streams order the work (a device) or the host does (the CPU).
    """

    def __init__(self, policy: CommPolicy, streams: bool) -> None:
        self.policy = policy
        self.ordered_by_streams = streams
        self._filling: list[ItemT] = []
        self._holding: deque[BucketT] = deque()
        self._bucketed: list[ItemT] = []
        self._behind: BucketT | None = None
        self._reducing: deque[BucketT] = deque()

    # -- carried out by subclasses -------------------------------------------------------------------------------

    @abstractmethod
    def start_scatter(self, items: list[ItemT]) -> BucketT:
        """Starts the reduce-scatter of reductions; returns their bucket."""

    @abstractmethod
    def release(self, bucket: BucketT) -> None:
        """The reduce-scatter of a bucket was waited for: frees its unsharded gradients."""

    @abstractmethod
    def start_all_reduce(self, items: list[ItemT], behind: BucketT) -> BucketT:
        """Starts the all-reduce of reductions, behind the reduce-scatter of a bucket; returns their bucket."""

    @abstractmethod
    def start_deferral(self, item: ItemT, behind: BucketT) -> BucketT:
        """Queues sums that are kept: they are added where they land. Returns their bucket."""

    @abstractmethod
    def land(self, bucket: BucketT) -> None:
        """The last collective of a bucket was waited for: its reductions become gradients, or sums that are kept."""

    def lose(self, items: list[ItemT]) -> None:
        """Reductions whose next stage could not be started have left the queue: they will never land."""

    # -- decided here --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many `items` there are."""
        return len(self.items())

    def items(self) -> list[ItemT]:
        """Reductions that have not landed, or whose inputs were not released: by streams, a stage overtakes the host."""
        under_way = (item for bucket in self.under_way() for item in bucket.items)
        return list({id(item): item for item in (*self._filling, *self._bucketed, *under_way)}.values())

    def under_way(self) -> Iterator[BucketT]:
        """Buckets with a collective that was not waited for."""
        yield from self._holding
        yield from self._reducing

    def submit(self, item: ItemT) -> None:
        """Takes a filled reduction; starts its reduce-scatter once its bucket is full and the bound allows it."""
        if self._filling and not self._filling[0].fits(item):
            self._scatter()
        self._filling.append(item)
        least = self.policy.reduce_scatter_bucket_bytes
        if not least or sum(item.scatter_bytes() for item in self._filling) >= least:
            self._scatter()
        if self._reducing and self._reducing[0].at_rest:
            self.advance()

    def make_room(self, scatter_bytes: int) -> None:
        """Waits as the next `submit` would, before its operands are made, which would be memory on top.

        On a device the compute stream waits for reduce-scatters, behind which it will make casts; the host goes on.

        Args:
            scatter_bytes: those of unsharded gradients that the next reduction will hold.
        """
        if self.policy.reduce_scatter_bucket_bytes:
            return
        if self.ordered_by_streams:
            if self._holding:
                self._release_for(scatter_bytes)
            return
        while len(self._holding) >= self.policy.max_inflight_reduce_scatters:
            self._release()
        while len(self._reducing) >= self.policy.max_inflight_all_reduces:
            self._land()
        if self._reducing and self._reducing[0].at_rest:
            self.advance()

    def advance(self) -> None:
        """Lands buckets without a collective under way. Ended collectives do not count: that is each rank's timing.

        After `make_room` and `submit` the oldest bucket has a collective: only these two bring other buckets to the front.
        """
        while self._reducing and self._reducing[0].at_rest:
            self._land()

    def drain(self) -> None:
        """Waits for every stage of every reduction."""
        if self._filling:
            self._scatter()
        while self._holding:
            self._release()
        if self._bucketed:
            self._all_reduce_bucketed()
        while self._reducing:
            self._land()

    def keep(self, stays: Callable[[ItemT], bool]) -> None:
        """Forgets the reductions that do not stay, and buckets of which none does, whose collectives are waited for."""
        self._filling = list(filter(stays, self._filling))
        self._bucketed = list(filter(stays, self._bucketed))
        if not self._bucketed:
            self._behind = None
        for bucket in self.under_way():
            bucket.items = list(filter(stays, bucket.items))
        self._holding = deque(bucket for bucket in self._holding if bucket.items)
        self._reducing = deque(bucket for bucket in self._reducing if bucket.items)

    # -- FILLED -> HOLDING -> BUCKETED -> REDUCING -> landed -------------------------------------------------------

    def _scatter(self) -> None:
        if self._holding:
            self._release_for(sum(item.scatter_bytes() for item in self._filling))
        items, self._filling = self._filling, []
        try:
            bucket = self.start_scatter(items)
        except BaseException:
            self.lose(items)
            raise
        self._holding.append(bucket)
        if self.ordered_by_streams:  # the next stage is enqueued behind the event of this one, at once
            self._go_on(bucket)

    def _release_for(self, nbytes: int) -> None:
        """Releases buckets until there is room for one of so many bytes."""
        # With the new bucket: as the queue is drained from the oldest one, sizes are read from the newest.
        held = (sum(item.scatter_bytes() for item in bucket.items) for bucket in reversed(self._holding))
        room = units_in_budget([nbytes, *held], self.policy.max_inflight_reduce_scatters)
        while len(self._holding) >= room:
            self._release()

    def _release(self) -> None:
        """The oldest bucket's shards are summed. Where the host orders the work, the next stage can start only now."""
        bucket = self._holding[0]
        if bucket.work is not None:
            bucket.work.wait()  # if it raises, the bucket is still there for the clean-up
        self._holding.popleft()
        try:
            self.release(bucket)
        except BaseException:
            self.lose(bucket.items)
            raise
        if not self.ordered_by_streams:
            self._go_on(bucket)

    def _go_on(self, bucket: BucketT) -> None:
        """The next stage of a bucket. Where it cannot be started, the reductions that have none are lost."""
        try:
            self._start_next(bucket)
        except BaseException:
            kept = {id(item) for other in self._reducing for item in other.items} | set(map(id, self._bucketed))
            self.lose([item for item in bucket.items if id(item) not in kept])
            raise

    def _start_next(self, bucket: BucketT) -> None:
        """Behind the reduce-scatter: sums that are kept for a later micro-batch, or those for an all-reduce."""
        for item in bucket.items:
            if not item.all_reduce and not (item.in_tree and item.replicas > 1):
                if any(other.source == item.source for other in self._bucketed):
                    self._all_reduce_bucketed()  # or it would be added to what these sums become, which is over
                while len(self._reducing) >= self.policy.max_inflight_all_reduces:
                    self._land()
                self._reducing.append(self.start_deferral(item, bucket))
                self.advance()
            elif item.replicas == 1:
                self._all_reduce([item], bucket)
            else:
                if self._bucketed and not self._bucketed[0].fits(item):
                    self._all_reduce_bucketed()
                least = self.policy.all_reduce_bucket_bytes
                if not least and not self._bucketed:
                    self._all_reduce([item], bucket)
                    continue
                self._bucketed.append(item)
                self._behind = bucket
                if not least or sum(item.reduce_bytes() for item in self._bucketed) >= least:
                    self._all_reduce_bucketed()

    def _all_reduce_bucketed(self) -> None:
        assert self._behind is not None, "what is all-reduced was reduce-scattered"
        items, self._bucketed = self._bucketed, []
        behind, self._behind = self._behind, None  # not held for longer: a bucket holds its buffers
        self._all_reduce(items, behind)

    def _all_reduce(self, items: list[ItemT], behind: BucketT) -> None:
        # Sums that this bucket will be added to must have landed, whatever room there is: a side stream, or the backend,
        # may still be writing them.
        try:
            while len(self._reducing) >= self.policy.max_inflight_all_reduces or self._defers(items):
                self._land()
            self._reducing.append(self.start_all_reduce(items, behind))
        except BaseException:
            self.lose(items)
            raise

    def _defers(self, items: list[ItemT]) -> bool:
        """Whether sums that these will be added to are still on their way."""
        kept = [one.source for bucket in self._reducing for one in bucket.items if not one.all_reduce]
        return bool(kept) and any(item.source in kept for item in items)

    def _land(self) -> None:
        bucket = self._reducing[0]
        if bucket.work is not None:
            bucket.work.wait()
        # Out of the queue before it lands: a user's hook that runs there may drain the rest (`flush` lands outside of
        # backwards).
        self._reducing.popleft()
        self.land(bucket)

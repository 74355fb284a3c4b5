"""`ReduceQueue`: decisions without tensors, over random reductions and policies, by the host and by streams."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from hsdp.policies import CommPolicy
from hsdp.schedule.byte_budget import units_in_budget
from hsdp.schedule.reduce_queue import Bucket, ReduceQueue


class Item(NamedTuple):
    """A reduction: the `number`th that was submitted, `kind` tells which fit together."""

    number: int
    source: int
    all_reduce: bool
    replicas: int
    kind: int
    nbytes: int
    in_tree: bool = False

    def scatter_bytes(self) -> int:
        return self.nbytes

    def reduce_bytes(self) -> int:
        return self.nbytes // 2

    def fits(self, other: Item) -> bool:
        return (self.kind, self.all_reduce) == (other.kind, other.all_reduce)


class Written(Bucket[Item]):
    """A bucket that notes when it is waited for."""

    def __init__(self, items: list[Item], waits: list[tuple[str, tuple[int, ...]]], what: str) -> None:
        super().__init__(items)
        self.waits, self.what, self.work = waits, what, self

    def wait(self) -> None:
        self.waits.append((f"wait {self.what}", numbers(self.items)))


def numbers(items: list[Item]) -> tuple[int, ...]:
    return tuple(item.number for item in items)


class Queue(ReduceQueue[Item, Written]):
    """Writes down what it is told, and checks at every step what bounds promise."""

    def __init__(self, policy: CommPolicy, streams: bool) -> None:
        super().__init__(policy, streams)
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.scattered: set[int] = set()

    def _bucket(self, verb: str, items: list[Item], at_rest: bool = False) -> Written:
        self.log.append((verb, numbers(items)))
        bucket = Written(items, self.log, verb)
        bucket.at_rest = at_rest
        return bucket

    def start_scatter(self, items: list[Item]) -> Written:
        assert len({(item.kind, item.all_reduce) for item in items}) == 1, "what shares a collective fits"
        self.scattered.update(numbers(items))
        return self._bucket("scatter", items)

    def release(self, bucket: Written) -> None:
        self.log.append(("release", numbers(bucket.items)))

    def start_all_reduce(self, items: list[Item], behind: Written) -> Written:
        assert self.scattered.issuperset(numbers(items))
        assert len({item.kind for item in items}) == 1, "what shares a collective fits"
        return self._bucket("all-reduce", items, at_rest=items[0].replicas == 1 and not self.ordered_by_streams)

    def start_deferral(self, item: Item, behind: Written) -> Written:
        return self._bucket("defer", [item], at_rest=not self.ordered_by_streams)

    def land(self, bucket: Written) -> None:
        self.log.append(("land", numbers(bucket.items)))

    def check(self) -> None:
        """The bounds hold."""
        sizes = [sum(item.nbytes for item in bucket.items) for bucket in reversed(self._holding)]
        assert len(sizes) <= max(1, units_in_budget(sizes, self.policy.max_inflight_reduce_scatters))
        assert 2 * sum(sizes) <= (2 * self.policy.max_inflight_reduce_scatters + 1) * max(sizes, default=0)
        assert len(self._reducing) <= self.policy.max_inflight_all_reduces


def _landed(queue: Queue) -> set[int]:
    return {number for verb, bucket in queue.log if verb == "land" for number in bucket}


POLICIES = st.builds(
    CommPolicy,
    max_inflight_reduce_scatters=st.integers(1, 4),
    max_inflight_all_reduces=st.integers(1, 4),
    reduce_scatter_bucket_bytes=st.sampled_from([0, 0, 64, 300]),
    all_reduce_bucket_bytes=st.sampled_from([0, 0, 64, 300]),
)


@st.composite
def programs(draw: st.DrawFn) -> list[Item]:
    replicas = draw(st.sampled_from([1, 2]))
    sources, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    kinds = draw(st.lists(st.integers(0, 1), min_size=sources, max_size=sources))
    sizes = draw(st.lists(st.integers(1, 200), min_size=sources, max_size=sources))
    items: list[Item] = []
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        for source in reversed(range(sources)):
            items.append(Item(len(items), source, last, replicas, kinds[source], sizes[source]))
    return items


@given(policy=POLICIES, streams=st.booleans(), program=programs(), makes_room=st.booleans(), data=st.data())
def test_every_reduction_lands_once_in_order_within_the_bounds(
    policy: CommPolicy, streams: bool, program: list[Item], makes_room: bool, data: st.DataObject
) -> None:
    queue = Queue(policy, streams)
    for item in program:
        if makes_room:
            queue.make_room(item.nbytes)
        there = len(queue.log)
        queue.submit(item)
        if makes_room and not policy.reduce_scatter_bucket_bytes:
            submitted = [verb for verb, _ in queue.log[there:]]
            assert "release" not in submitted, "what the next reduction waits for was waited for before it was made"
        queue.check()
        landed = _landed(queue)
        there, waiting = set(numbers(queue.items())), set(range(item.number + 1)) - landed
        assert there >= waiting if streams else there == waiting
        if data.draw(st.integers(0, 7)) == 0:
            queue.drain()
            assert not len(queue)
    queue.drain()
    assert not len(queue)

    flat = {
        verb: [number for found, bucket in queue.log if found == verb for number in bucket]
        for verb in ("scatter", "release", "land")
    }
    assert all(found == list(range(len(program))) for found in flat.values()), "each once, in the order of submission"
    at = {(verb, number): place for place, (verb, bucket) in enumerate(queue.log) for number in bucket}
    for item in program:
        number = item.number
        assert at["wait scatter", number] < at["release", number]
        stage = "all-reduce" if item.all_reduce else "defer"
        assert at["scatter", number] < at[stage, number] < at[f"wait {stage}", number] < at["land", number]
        if not streams:
            assert at["release", number] < at[stage, number], "the host sees a reduce-scatter done before it goes on"
        if item.all_reduce:  # what was deferred has landed: it is a part of the sum
            deferred = [other.number for other in program if other.source == item.source and not other.all_reduce]
            assert all(at["land", other] < at["all-reduce", number] for other in deferred)


@given(policy=POLICIES, streams=st.booleans(), program=programs(), data=st.data())
def test_what_does_not_stay_is_forgotten_and_all_else_lands(
    policy: CommPolicy, streams: bool, program: list[Item], data: st.DataObject
) -> None:
    queue = Queue(policy, streams)
    stop = data.draw(st.integers(0, len(program)))
    for item in program[:stop]:
        queue.submit(item)
    there = numbers(queue.items())
    stay = {number for number in there if data.draw(st.booleans())}
    landed, queue.log = _landed(queue), []
    queue.keep(lambda item: item.number in stay)
    assert set(numbers(queue.items())) == stay
    queue.drain()
    assert _landed(queue) == stay - landed


@given(policy=POLICIES, program=programs())
def test_a_pass_repeats_itself(policy: CommPolicy, program: list[Item]) -> None:
    """Nothing is left of a pass in the next one: all ranks do alike, whatever each did before."""
    queue = Queue(policy, streams=False)
    logs = []
    for _ in range(2):
        queue.log = []
        for item in program:
            queue.submit(item)
        queue.drain()
        logs.append(queue.log)
    assert logs[0] == logs[1]

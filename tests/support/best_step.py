"""The best schedule of a training step, from the durations of its parts: what no library can beat by much.

    host       F1 F2 ... Fn  Bn ... B2 B1           computes, one layer after the other
    shard      A1 A2 ... An  An ... A1  Rn ... R1   gathers and reduce-scatters: one link, one at a time
    replicate                           Sn ... S1   all-reduces

F(k) and B(k) need their gather, R(k) needs B(k), S(k) needs R(k). The order on the shard link is free: several simple
rules are tried, and the shortest schedule counts. Nothing limits how far ahead gathers run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Durations:
    """Of one unit's parts, seconds (or any unit). All units are alike."""

    forward: float
    backward: float
    gather: float
    scatter: float
    all_reduce: float


@dataclass(eq=False)
class Task:
    """Something that takes a resource for a while, once what it needs is done."""

    resource: str
    duration: float
    needs: list[Task]
    rank: tuple[float, ...] = ()
    """The smallest goes first among those that are ready."""
    end: float = math.inf
    waits: int = field(init=False)
    next: list[Task] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waits = len(self.needs)
        for other in self.needs:
            other.next.append(self)


def makespan(tasks: list[Task]) -> float:
    """When the last task ends, if every resource takes the first of those that are ready as soon as it is free."""
    ready: dict[str, list[tuple[tuple[float, ...], int, Task]]] = {task.resource: [] for task in tasks}
    for number, task in enumerate(tasks):
        if not task.waits:
            heapq.heappush(ready[task.resource], (task.rank, number, task))
    numbers = {task: number for number, task in enumerate(tasks)}
    busy: dict[str, Task] = {}
    running: list[tuple[float, int, Task]] = []
    now = 0.0
    while True:
        for resource, queue in ready.items():
            if resource not in busy and queue:
                task = heapq.heappop(queue)[2]
                busy[resource] = task
                heapq.heappush(running, (now + task.duration, numbers[task], task))
        if not running:
            break
        now, _, done = heapq.heappop(running)
        done.end = now
        del busy[done.resource]
        for task in done.next:
            task.waits -= 1
            if not task.waits:
                heapq.heappush(ready[task.resource], (task.rank, numbers[task], task))
    return max(task.end for task in tasks)


def best_step(
    times: Durations, units: int, micro_batches: int = 1, deferred: bool = False, keep_last: bool = True
) -> float:
    """The shortest step found.

    Args:
        times: how long each part of a unit takes alone.
        units: how many units run one after the other.
        micro_batches: forward and backward passes in the step.
        deferred: all-reduce in the last micro-batch only, else in each.
        keep_last: the last unit stays whole between forward and backward, as its backward comes at once.
    """
    rules: list[Callable[[str, int], tuple[float, ...]]] = [
        lambda kind, use: (use,),  # in the order of the host's program
        lambda kind, use: (kind != "gather", use),
        lambda kind, use: (kind == "gather", use),
    ]
    return min(makespan(_tasks(times, units, micro_batches, deferred, keep_last, rule)) for rule in rules)


def _tasks(
    times: Durations,
    units: int,
    micro_batches: int,
    deferred: bool,
    keep_last: bool,
    rule: Callable[[str, int], tuple[float, ...]],
) -> list[Task]:
    tasks: list[Task] = []
    host: list[Task] = []  # the last task of the host's program
    count = 0

    def add(resource: str, kind: str, duration: float, needs: list[Task], use: int) -> Task:
        task = Task(resource, duration, needs, rule(kind, use))
        tasks.append(task)
        return task

    for micro in range(micro_batches):
        for backward in (False, True):
            for place in range(units):
                count += 1
                needs = list(host)
                if not (backward and keep_last and place == 0):
                    needs.append(add("shard", "gather", times.gather, [], count))
                host = [add("host", "compute", times.backward if backward else times.forward, needs, count)]
                if backward:
                    # It can start behind its own compute at the earliest: it ranks with what is computed next.
                    scatter = add("shard", "scatter", times.scatter, host, count + 1)
                    if micro == micro_batches - 1 or not deferred:
                        add("replicate", "all_reduce", times.all_reduce, [scatter], count)
    return tasks

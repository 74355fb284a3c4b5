"""A simulated clock, and a store and a process group that go by it: what many ranks in one process stand on.

A rank is a thread. It runs until it sleeps or waits; then that rank goes on whose time comes first, so that a run is the
same each time.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
STACK_BYTES = 512 * 1024
"""Of a rank's thread."""


# -- time --------------------------------------------------------------------------------------------------------------


class Turn:
    """A rank's thread, as the clock knows it.

    Attributes:
        go: held while it is not the thread's turn.
        entry: number of the entry in the clock's queue that counts; earlier ones are void.
    """

    def __init__(self) -> None:
        self.go = threading.Lock()
        self.go.acquire()
        self.entry = -1


class Clock:
    """Simulated time, and the threads that it passes for. The guard finds it where it looks for the module `time`.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Turn]] = []
        self._numbers = itertools.count()
        self._own = threading.local()
        self._unfinished = 0
        self._idle = threading.Event()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.park(self.now + seconds)

    def turn(self) -> Turn:
        """That of the thread that asks."""
        turn: Turn = self._own.turn
        return turn

    def wake(self, turn: Turn, at: float) -> None:
        """A parked thread goes on at that time, and not when it was to go on before."""
        turn.entry = next(self._numbers)
        heapq.heappush(self._queue, (at, turn.entry, turn))

    def park(self, until: float) -> None:
        """The thread that asks goes on at that time, or when somebody wakes it."""
        turn = self.turn()
        self.wake(turn, until)
        self._pass_on()
        turn.go.acquire()

    def run(self, mains: list[Callable[[], None]]) -> None:
        """Runs each function in a thread of its own until all have ended. They raise nothing."""
        usual = threading.stack_size(STACK_BYTES)
        self._unfinished = len(mains)
        for main in mains:
            self.wake(turn := Turn(), self.now)
            threading.Thread(target=self._run_one, args=(main, turn), daemon=True).start()
        threading.stack_size(usual)
        self._pass_on()
        self._idle.wait()
        assert not self._unfinished, f"{self._unfinished} ranks raised, or wait for ever"

    def _run_one(self, main: Callable[[], None], turn: Turn) -> None:
        turn.go.acquire()
        self._own.turn = turn
        try:
            main()
            self._unfinished -= 1
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._queue:
            at, entry, turn = heapq.heappop(self._queue)
            if turn.entry == entry:
                self.now = at
                turn.go.release()
                return
        self._idle.set()


# -- the store ---------------------------------------------------------------------------------------------------------


class Server:
    """A store's server, which carries out one operation after the other.

    Args:
        clock: its time.
        each: seconds that an operation takes it.

    Attributes:
        values: by key.
    """

    def __init__(self, clock: Clock, each: float) -> None:
        self._clock = clock
        self._each = each
        self._free = 0.0
        self._waiting: dict[str, list[Turn]] = {}
        self.values: dict[str, bytes] = {}

    def done(self) -> float:
        """Takes an operation on; returns when it will be done.

        Its effect shows at once: whoever could see it too early has its own operation behind it.
        """
        self._free = max(self._free, self._clock.now) + self._each
        return self._free

    def write(self, key: str, value: bytes) -> bytes:
        """Sets a key; those who wait for it get their answers one after the other."""
        self.values[key] = value
        for turn in self._waiting.pop(key, ()):
            self._clock.wake(turn, self.done())
        return value

    def wait(self, key: str, patience: float) -> None:
        """Waits until a key is set."""
        if key in self.values:
            return
        turns = self._waiting.setdefault(key, [])
        turns.append(self._clock.turn())
        self._clock.park(self._clock.now + patience)
        if key not in self.values:
            turns.remove(self._clock.turn())
            raise dist.DistStoreError(f"nobody has set {key} within {patience} s")


class Client:
    """A rank's client of the server: the operations of torch's stores that the guard uses.

    Args:
        prefix: of its keys.
        server: the server.
        clock: the time of both.
        calls: where operations are counted, by method.
        away: seconds that the rank's machine is busy with others before an operation.
    """

    def __init__(
        self, prefix: str, server: Server, clock: Clock, calls: Counter[str], away: Callable[[], float] | None
    ) -> None:
        self._prefix = prefix
        self._server = server
        self._clock = clock
        self._calls = calls
        self._away = away
        self._patience = 300.0

    def _operate(self, method: str, key: str, effect: Callable[[str, bytes], T]) -> T:
        """Counts an operation, gives `effect` the key and its value, and goes on when the server has answered."""
        self._calls[method] += 1
        if self._away is not None:
            self._clock.sleep(self._away())
        found = effect(self._prefix + key, self._server.values.get(self._prefix + key, b""))
        self._clock.park(self._server.done())
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        self._operate("set", key, lambda at, _: self._server.write(at, value.encode()))

    def append(self, key: str, value: str) -> None:
        self._operate("append", key, lambda at, found: self._server.write(at, found + value.encode()))

    def add(self, key: str, amount: int) -> int:
        return int(self._operate("add", key, lambda at, found: self._server.write(at, b"%d" % (int(found or 0) + amount))))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        def effect(at: str, found: bytes) -> bytes:
            return self._server.write(at, desired.encode()) if found == expected.encode() else found or expected.encode()

        return self._operate("compare_set", key, effect)

    def check(self, keys: list[str]) -> bool:
        return all([self._operate("check", key, lambda at, _: at in self._server.values) for key in keys])

    def delete_key(self, key: str) -> bool:
        return self._operate("delete_key", key, lambda at, _: self._server.values.pop(at, None) is not None)

    def get(self, key: str) -> bytes:
        self._operate("get", key, lambda *_: None)
        self._server.wait(self._prefix + key, self._patience)
        return self._server.values[self._prefix + key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        for key in keys:
            self._operate("wait", key, lambda *_: None)
            self._server.wait(self._prefix + key, timeout.total_seconds())


# -- the process group -------------------------------------------------------------------------------------------------


class AllReduce:
    """An all-reduce of the whole group, which is also the handle that each rank has of it."""

    def __init__(self, clock: Clock, world: int) -> None:
        self._clock = clock
        self._world = world
        self._joined: list[Tensor] = []
        self._waiting: list[Turn] = []

    def join(self, tensor: Tensor) -> AllReduce:
        """A rank takes part. The last one writes the result for all: the greatest, which is what the guard asks for."""
        self._joined.append(tensor)
        if self.is_completed():
            greatest = torch.stack(self._joined).amax(0)
            for one in self._joined:
                one.copy_(greatest)
            for turn in self._waiting:
                self._clock.wake(turn, self._clock.now)
        return self

    def is_completed(self) -> bool:
        return len(self._joined) == self._world

    def wait(self, timeout: timedelta) -> bool:
        if not self.is_completed():
            self._waiting.append(self._clock.turn())
            self._clock.park(self._clock.now + timeout.total_seconds())
            if not self.is_completed():
                self._waiting.remove(self._clock.turn())
                raise RuntimeError("the all-reduce did not end in time")
        return True


class Backend:
    """A rank's backend: its n-th all-reduce is the n-th of all ranks."""

    def __init__(self, clock: Clock, world: int, started: list[AllReduce]) -> None:
        self._clock = clock
        self._world = world
        self._started = started
        self._count = 0

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> AllReduce:
        if self._count == len(self._started):
            self._started.append(AllReduce(self._clock, self._world))
        self._count += 1
        return self._started[self._count - 1].join(tensors[0])

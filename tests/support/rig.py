"""Worker pools: run a test function on every rank of a gloo group, in processes that outlive the test.

    parent (pytest)                      rank r (one process each, started once)
    pool.run(fn, *args) --- pipe ------> call:    fn(env, *args), then gc.collect()
                        <-- Outcome ----          value | error + traceback, warnings
                        --- pipe ------> check:   are the groups in step, was global state left changed?

Processes come from a fork server that has torch imported, so that replacing a pool costs a fraction of a
second. After an error on a rank the process groups are made anew, after a hang or a death the processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.worker import Outcome, RankEnv, worker_main

__all__ = ["Outcome", "Pool", "PoolTimeout", "RankEnv", "RemoteError", "describe", "fake_world", "run_procs"]

PRELOAD = [
    "__main__",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
"""What the fork server imports: not hsdp, whose debug mode each rank chooses. A process of pytest has one such server."""

_MOST_GROUPS = 16
"""Of more, new ones are made: a thread of each of gloo's groups wakes up a hundred times a second, however idle it is."""

_PATIENCE = 3.0  # seconds that the other ranks get once one has failed: they are probably waiting for it
_SETUP_TIMEOUT = 120.0
_BETWEEN_STALLS, _STALLS = (0.0, 0.03), (0.001, 0.004, 0.015, 0.06, 0.15)  # seconds


class RemoteError(RuntimeError):
    """A function failed on some ranks; `outcomes` has what every rank did."""

    def __init__(self, headline: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(f"{headline}\n{describe(outcomes)}")
        self.outcomes = list(outcomes)


class PoolTimeout(RemoteError):  # noqa: N818  (a name that says it all)
    """A function did not end in time on some ranks; their stacks are in the message."""


class Pool:
    """`world_size` worker processes with a gloo group between them, started at the first run.

    Args:
        world_size: number of ranks.
        group_timeout: seconds after which a collective gives up.
        grouped: False leaves the processes without a default group.
        device: that of the ranks' meshes, in torch's words: "cpu", "cuda", or the emulated one of `tests.support.device`.
    """

    def __init__(self, world_size: int, *, group_timeout: float = 20.0, grouped: bool = True, device: str = "cpu") -> None:
        self.world_size = world_size
        self.starts = 0  # how often processes were started
        self._default_timeout = group_timeout
        self._group_timeout: float | None = None  # that of the present group; None = make a new group first
        self._grouped = grouped
        self._device = device
        self._generation = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._log_offsets: list[int] = []

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, group_timeout: float | None = None
    ) -> list[Any]:
        """Run `fn(env, *args)` on all ranks; returns what it returned, in rank order.

        `fn` is a function of a module, `args` and results are picklable. `group_timeout` makes this run's
        collectives give up earlier or later than the pool's others.

        Raises:
            RemoteError: it raised on a rank, a rank died, or the run left the ranks in a bad state. Ranks that do
                not end within 3 seconds of another's failure are stopped, and their stacks shown.
            PoolTimeout: it did not end within `timeout` seconds.
        """
        outcomes = self._run(fn, args, timeout, group_timeout, patience=_PATIENCE)
        failed = [str(one.rank) for one in outcomes if not one.ok]
        if failed:
            ranks = f"rank{'s' * (len(failed) > 1)} {', '.join(failed)}"
            raise RemoteError(f"{_name(fn)} failed on {ranks} of {self.world_size}", outcomes)
        return [one.value for one in outcomes]

    def run_raw(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, group_timeout: float | None = None
    ) -> list[Outcome]:
        """As `run`, but errors and deaths of ranks are returned, and no rank is hurried when one fails."""
        return self._run(fn, args, timeout, group_timeout, patience=None)

    def close(self) -> None:
        """End the processes. The next run would start new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._processes, self._pipes, self._group_timeout = [], [], None

    @contextlib.contextmanager
    def stalling(self, seed: str) -> Iterator[None]:
        """Meanwhile ranks are stopped one by one, at random moments: what depends on who is first shows."""
        draw, ended = random.Random(seed), threading.Event()

        def stall() -> None:
            while not ended.wait(draw.uniform(*_BETWEEN_STALLS)):
                if not self._processes:
                    continue
                pid = draw.choice(self._processes).pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(draw.choice(_STALLS))
                    os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=stall, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        group_timeout: float | None,
        patience: float | None,
    ) -> list[Outcome]:
        payload = _payload(fn, args)
        self._prepare(group_timeout or self._default_timeout)
        try:
            outcomes = self._exchange("call", payload, timeout=timeout, patience=patience)
            hurried = patience is not None and any(one.error not in (None, "Hung") for one in outcomes)
            if any(one.error == "Hung" for one in outcomes) and not hurried:
                raise PoolTimeout(f"{_name(fn)} did not end within {timeout:g} s", outcomes)
            if not all(one.ok for one in outcomes):
                self._recover(outcomes)
                return outcomes
            checks = self._exchange("check", timeout=_SETUP_TIMEOUT, patience=None)
            if not all(one.ok for one in checks):
                self._recover(checks)
                raise RemoteError(f"{_name(fn)} ran, but left the ranks in a bad state", checks)
            groups = {one.value for one in checks}
            # Where ranks made groups of their own, they would disagree about the names of the next ones.
            if len(groups) > 1 or max(groups) > _MOST_GROUPS:
                self._group_timeout = None
        except BaseException as error:
            if not isinstance(error, RemoteError) or isinstance(error, PoolTimeout):
                self.close()  # a timeout, or Ctrl-C while waiting: the workers' state is unknown
            raise
        return outcomes

    def _prepare(self, group_timeout: float) -> None:
        """Have processes, and a group with this timeout."""
        if not all(process.is_alive() for process in self._processes):
            self.close()  # one died while idle: no fault of the next run
        if self._group_timeout == group_timeout:
            return
        for last_try in (False, True):
            if not self._processes:
                self._start()
            self._generation += 1
            command = ("regroup", self._generation, group_timeout)
            outcomes = self._exchange(*command, timeout=_SETUP_TIMEOUT, patience=_PATIENCE)
            if all(one.ok for one in outcomes):
                self._group_timeout = group_timeout
                return
            self.close()
            if last_try:
                raise RemoteError("could not make the process groups", outcomes)

    def _recover(self, outcomes: Sequence[Outcome]) -> None:
        """After a failure: new process groups for the next run, and new processes if one is gone."""
        self._group_timeout = None
        if any(one.error in ("Died", "Hung") for one in outcomes):
            self.close()

    def _start(self) -> None:
        self.starts += 1
        self._directory = tempfile.mkdtemp(prefix="hsdp-rig-")
        # The store lives here, so that it outlives any rank. Port 0: the system finds a free one.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            context.set_forkserver_preload(PRELOAD)
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            args = (theirs, rank, self.world_size, self._store.port, self._grouped, str(self._log(rank)), self._device)
            process = context.Process(target=worker_main, args=args, daemon=True)
            process.start()
            theirs.close()  # or its end of file would never be seen
            self._processes.append(process)
            self._pipes.append(mine)

    def _log(self, rank: int) -> Path:
        return Path(self._directory, f"rank{rank}.log")

    def _exchange(self, *command: Any, timeout: float, patience: float | None) -> list[Outcome]:
        """Send a command to every rank and wait for the answers; ranks that are late are killed."""
        message = pickle.dumps(command)
        logs = map(self._log, self._ranks())
        self._log_offsets = [log.stat().st_size if log.exists() else 0 for log in logs]
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it died since the last run: its answer will say so
                pipe.send_bytes(message)
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        while waiting := {self._pipes[rank]: rank for rank in self._ranks() if rank not in outcomes}:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes.update(self._kill_hung(sorted(waiting.values())))
            for pipe in ready:
                outcomes[waiting[pipe]] = self._receive(waiting[pipe])
            if patience is not None and not all(one.ok for one in outcomes.values()):
                deadline = min(deadline, time.monotonic() + patience)
                patience = None
        return [outcomes[rank] for rank in self._ranks()]

    def _ranks(self) -> range:
        return range(self.world_size)

    def _receive(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(10)
            return Outcome(rank, None, "Died", f"exit code {process.exitcode}", output=self._output(rank, limit=20_000))
        if outcome.ok:
            return replace(outcome, value=pickle.loads(outcome.value))
        return replace(outcome, output=self._output(rank))

    def _kill_hung(self, ranks: Sequence[int]) -> dict[int, Outcome]:
        """Make each rank print its Python stacks and die (faulthandler does that on SIGABRT)."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGABRT)
        outcomes = {}
        for rank in ranks:
            self._processes[rank].join(10)
            output, _, stacks = self._output(rank, limit=100_000).partition("Fatal Python error: Aborted\n")
            stack = _main_stack(stacks)
            outcomes[rank] = Outcome(rank, None, "Hung", "stopped by the rig", stack, output[-2000:])
        return outcomes

    def _output(self, rank: int, limit: int = 4000) -> str:
        """What a rank printed since the last command: the end, and the beginning, where a process tells why it aborts."""
        with open(self._log(rank), errors="replace") as log:
            log.seek(self._log_offsets[rank])
            printed = log.read()
        return printed if len(printed) <= limit else f"{printed[: limit // 4]}\n...\n{printed[-limit:]}"


def run_procs(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 20.0,
    grouped: bool = True,
) -> list[Any]:
    """`Pool.run` in `n` fresh processes, ended afterwards; `grouped=False`: without a default group."""
    with Pool(n, group_timeout=group_timeout, grouped=grouped) as pool:
        return pool.run(fn, *args, timeout=timeout)


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[RankEnv]:
    """Pretend to be `rank` of `size` ranks: collectives return at once and move nothing.

    For counts, schedules and memory. The process must have no default group: pytest's own has none, elsewhere
    `run_procs(fn, 1, grouped=False)` gives a fresh one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("fake_world: there is a default group already; use run_procs(..., grouped=False)")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield RankEnv(rank, size)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", fn))


def _payload(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if "<" in _name(fn) and hasattr(fn, "__qualname__"):
        raise ValueError(f"{_name(fn)}: workers find functions by name; move it to its module's top level")
    return pickle.dumps((fn, args))


def _main_stack(dump: str) -> str:
    """Of faulthandler's dump of all threads, those that are not the rig's reader."""
    threads = [one for one in dump.split("\n\n") if "_read_commands" not in one]
    return "\n\n".join(threads).partition("\nExtension modules:")[0]


def describe(outcomes: Sequence[Outcome]) -> str:
    """One block per different outcome, the likeliest cause first, with the ranks that had it.

    A rank that died comes before those that raised, which may have lost their connection to it, and these before ranks
    that hung, which waited for them: whoever shows the beginning of a long text shows the cause.
    """
    order = {"Died": 0, "Hung": 2}
    blocks: dict[str, list[int]] = {}
    for one in sorted(outcomes, key=lambda one: 3 if one.ok else order.get(one.error or "", 1)):
        text = "returned\n" if one.ok else f"{one.error}: {one.message}\n{one.traceback}"
        if one.output.strip():
            text += f"--- printed:\n{one.output}"
        blocks.setdefault(text, []).append(one.rank)
    return "\n".join(f"=== ranks {', '.join(map(str, ranks))}: {text}" for text, ranks in blocks.items())

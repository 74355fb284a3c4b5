"""Kills a rank with SIGKILL again and again, while it trains and while it saves, and checks that nothing is lost.

    python -m tests.soak.checkpoint_crash --training 20 --saving 20 --seed 1 --log benchmarks/results/kills.txt

One *launch* is a set of processes that train from the latest checkpoint on, each time on another mesh. The parent kills
one of them: while training, at a random moment; while saving, by turns at a random moment or, from inside, at a random
call of the code that saves, so that also the shortest stretches (between two renames) are hit. Then it checks that

- the other ranks end by themselves, with an error, within the timeout;
- every checkpoint in the directory is complete, and the latest one is the last that any rank was told of, or later;
- the next launch goes on from there, and in the end the loss of every step, whatever launch computed it last, equals that
  of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hsdp import checkpoint
from tests.checkpoint import models as cm
from tests.support.facts import header, in_words
from tests.support.rig import PRELOAD

Mesh = tuple[int, int]
MESHES: list[Mesh] = [(1, 2), (2, 1)]
TIMEOUT = 10.0  # seconds: of collectives
GRACE = TIMEOUT + 2  # for survivors to end by themselves
SAVE_EVERY = 3
KEEP = 2


@dataclass(frozen=True)
class Orders:
    """What one launch is told.

    Attributes:
        until: number of steps in all.
        die_at_call: rank, number of the save (counted from 0 in this launch) and number of the Python call in it at
            which the rank kills itself; None: nowhere.
    """

    directory: str
    mesh: Mesh
    port: int
    until: int
    die_at_call: tuple[int, int, int] | None = None


def worker(rank: int, orders: Orders, pipe: Connection) -> None:
    """One rank of one launch; tells the parent where it is."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # how the parent asks a rank that hangs where it is
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", orders.port, is_master=False, wait_for_workers=False)
    world = orders.mesh[0] * orders.mesh[1]
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT))
        _train(rank, world, orders, pipe)
        dist.destroy_process_group()
    except Exception as error:  # the end of a survivor: told, then out
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        os._exit(1)


def _train(rank: int, world: int, orders: Orders, pipe: Connection) -> None:
    mesh = init_device_mesh("cpu", orders.mesh, mesh_dim_names=("replicate", "shard"))
    model = cm.build(mesh)
    optimizer = cm.two_groups(model)
    loaded = checkpoint.resume(orders.directory, model, optimizer)
    done = 0 if loaded is None else loaded.extra["done"]
    assert loaded is None or loaded.step == done
    pipe.send(("begun", done))
    saves = 0
    for step in range(done, orders.until):
        loss = cm.train(model, optimizer, [step], rank, world)[0]
        pipe.send(("step", step, loss))
        if (step + 1) % SAVE_EVERY == 0:
            in_background = saves % 2 == 1
            pipe.send(("saving", step + 1, saves))
            with _Death(rank, saves, orders.die_at_call) as death:
                handle = checkpoint.save(
                    orders.directory,
                    model,
                    optimizer,
                    {"done": step + 1},
                    step=step + 1,
                    keep=KEEP,
                    async_=in_background and orders.die_at_call is None,
                )
                handle.wait()
            pipe.send(("saved", step + 1, death.calls))
            saves += 1
    pipe.send(("finished",))


class _Death:
    """Counts the Python calls made in its body; at the given one the process is gone, as by `kill -9`."""

    def __init__(self, rank: int, save: int, die_at_call: tuple[int, int, int] | None) -> None:
        self.calls = 0
        self._at = die_at_call[2] if die_at_call is not None and die_at_call[:2] == (rank, save) else None

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            self.calls += 1
            if self.calls == self._at:
                os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> _Death:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if self._at is not None:  # this save took fewer calls than the one they were counted in
            os.kill(os.getpid(), signal.SIGKILL)


# -- the parent --------------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One set of processes, and what they told."""

    processes: list[Any]
    pipes: list[Connection]
    store: Any
    losses: dict[int, dict[int, float]] = field(default_factory=dict)  # by step, by rank
    told: list[list[tuple[Any, ...]]] = field(default_factory=list)  # by rank
    last_saved: int = 0
    calls: dict[int, int] = field(default_factory=dict)  # by rank: Python calls in one save

    def read(self, timeout: float) -> list[tuple[int, tuple[Any, ...]]]:
        """New messages as (rank, message); ends of processes are none."""
        found = []
        for pipe in wait([p for p in self.pipes if not p.closed], timeout):
            rank = self.pipes.index(pipe)  # type: ignore[arg-type]
            try:
                message = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                self.pipes[rank].close()
                continue
            self.told[rank].append(message)
            if message[0] == "step":
                self.losses.setdefault(message[1], {})[rank] = message[2]
            elif message[0] == "saved":
                self.last_saved = max(self.last_saved, message[1])
                self.calls[rank] = message[2]
            found.append((rank, message))
        return found

    @property
    def alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]

    def somebody_was_killed(self) -> bool:
        wait([process.sentinel for process in self.processes], 5)
        return any(process.exitcode == -signal.SIGKILL for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def launch(orders: Orders) -> Launch:
    """Starts the processes of one launch, from a fork server that has torch imported."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    orders = Orders(orders.directory, orders.mesh, store.port, orders.until, orders.die_at_call)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    running = Launch([], [], store)
    for rank in range(orders.mesh[0] * orders.mesh[1]):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(rank, orders, theirs), daemon=True)
        process.start()
        theirs.close()
        running.processes.append(process)
        running.pipes.append(mine)
        running.told.append([])
    return running


class CrashRun:
    """A whole run: kills, checks, and the log."""

    def __init__(self, directory: Path, seed: int, meshes: Sequence[Mesh], command: str, log: Path | None) -> None:
        self.directory = directory
        self.meshes = meshes
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.losses: dict[int, dict[int, float]] = {}
        self.done = 0  # steps behind the latest checkpoint
        self._log = log
        self._launches = 0
        self._say(command)
        self._say(in_words(header()))
        self._say(f"timeout of collectives: {TIMEOUT:g} s")

    def _say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.write_text("\n".join(self.lines) + "\n")

    def _choose_rank(self) -> int:
        """One of the next launch's."""
        return self.rng.randrange(math.prod(self.meshes[self._launches % len(self.meshes)]))

    def _orders(self, until: int, die: tuple[int, int, int] | None = None) -> Orders:
        mesh = self.meshes[self._launches % len(self.meshes)]
        self._launches += 1
        return Orders(str(self.directory), mesh, 0, until, die)

    def kill_in_training(self) -> None:
        """SIGKILL at a random moment of a random step."""
        victim_step = self.done + self.rng.randrange(1, 2 * SAVE_EVERY + 1)
        delay = self.rng.uniform(0, 0.01)
        victim = self._choose_rank()
        running = launch(self._orders(victim_step + 100))
        self._follow(running, lambda rank, message: message[:2] == ("step", victim_step) and rank == victim)
        time.sleep(delay)
        self._kill(running, victim, f"{delay * 1000:.1f} ms after step {victim_step}")

    def kill_in_saving_from_outside(self) -> None:
        """SIGKILL at a random moment after a random save began."""
        number = self.rng.randrange(3)
        delay = self.rng.uniform(0, 0.03)
        victim = self._choose_rank()
        running = launch(self._orders(self.done + 100))
        self._follow(running, lambda rank, message: message[0] == "saving" and message[2] == number and rank == victim)
        time.sleep(delay)
        in_save = running.told[victim][-1][0] == "saving" and not running.pipes[victim].poll()
        kind = "background" if number % 2 else "foreground"
        where = f"{delay * 1000:.1f} ms after save {number} ({kind}) began, {'inside it' if in_save else 'just over'}"
        self._kill(running, victim, where)

    def kill_in_saving_from_inside(self, calls: int) -> None:
        """SIGKILL by itself at a random call of the code that saves; `calls`: how many there are, about."""
        victim, number = self._choose_rank(), self.rng.randrange(2)
        at = self.rng.randrange(1, calls + 1)
        running = launch(self._orders(self.done + 100, (victim, number, at)))
        self._follow(running, lambda rank, message: not running.processes[victim].is_alive())
        self._kill(running, victim, f"at call {at} of {calls} of save {number}")

    def _follow(self, running: Launch, reached: Any) -> None:
        """Reads what is told until `reached(rank, message)`."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for rank, message in running.read(0.05) or [(-1, ("nothing",))]:
                if message[0] == "error":  # perhaps of a survivor, told before the other's end was seen
                    assert running.somebody_was_killed(), f"rank {rank}: {message[1]}"
                if reached(rank, message):
                    return
        running.end()
        raise AssertionError(f"the place to kill was not reached; told: {[told[-1:] for told in running.told]}")

    def _kill(self, running: Launch, victim: int, where: str) -> None:
        process = running.processes[victim]
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        assert process.exitcode == -signal.SIGKILL, f"rank {victim} ended with {process.exitcode}"
        killed = time.monotonic()
        while running.alive and time.monotonic() - killed < GRACE:
            running.read(0.05)
        survived = running.alive
        while running.read(0):
            pass
        took = time.monotonic() - killed
        for rank in survived:
            os.kill(running.processes[rank].pid, signal.SIGUSR1)
            time.sleep(1)
        running.end()
        assert not survived, f"ranks {survived} hung for {took:.1f} s after rank {victim} was killed {where}"
        others = [told[-1] for rank, told in enumerate(running.told) if rank != victim]
        assert all(other[0] == "error" for other in others), f"not all noticed: {others}"
        error = others[0][1].partition(":")[0]
        self._check(running, f"rank {victim} killed {where}; the others ended in {took:.1f} s ({error})")

    def _check(self, running: Launch, what: str) -> None:
        for step, by_rank in running.losses.items():
            if len(by_rank) == len(running.processes):
                self.losses[step] = by_rank
        complete = sorted(path for path in self.directory.iterdir() if not path.name.startswith("."))
        for path in complete:
            checkpoint.verify(path)
        last = checkpoint.latest(self.directory)
        assert last is not None, "no checkpoint is left"
        self.done = checkpoint.verify(last).step or 0
        assert self.done >= running.last_saved, f"step {running.last_saved} was saved, the latest is of {self.done}"
        leftovers = len(list(self.directory.iterdir())) - len(complete)
        self._say(f"{what}; latest {self.done}, {len(complete)} complete, {leftovers} leftovers")

    def run_undisturbed(self, until: int) -> int:
        """One launch that nobody disturbs; returns the Python calls in a save on the rank that makes most."""
        running = launch(self._orders(until, (-1, -1, -1)))
        while running.alive:
            for rank, message in running.read(0.05):
                assert message[0] != "error", f"rank {rank}: {message[1]}"
        while running.read(0):
            pass
        assert all(told[-1] == ("finished",) for told in running.told), [told[-1] for told in running.told]
        self._check(running, f"undisturbed to step {until}")
        return max(running.calls.values())


def crash_run(
    directory: Path,
    num_training: int,
    num_saving: int,
    seed: int,
    meshes: Sequence[Mesh] = MESHES,
    log: Path | None = None,
) -> int:
    """Runs everything; returns the number of steps whose losses were compared.

    Raises:
        AssertionError: something was lost, half-written, or hung.
    """
    command = f"python -m tests.soak.checkpoint_crash --training {num_training} --saving {num_saving} --seed {seed}"
    command += f" --meshes {','.join(f'{replicas}x{shards}' for replicas, shards in meshes)}"
    run = CrashRun(directory / "checkpoints", seed, meshes, command, log)
    run.directory.mkdir(parents=True)
    calls = run.run_undisturbed(SAVE_EVERY)
    kinds = ["training"] * num_training + [("outside", "inside")[i % 2] for i in range(num_saving)]
    run.rng.shuffle(kinds)
    for kind in kinds:
        if kind == "training":
            run.kill_in_training()
        elif kind == "outside":
            run.kill_in_saving_from_outside()
        else:
            run.kill_in_saving_from_inside(calls)
    until = (run.done // SAVE_EVERY + 2) * SAVE_EVERY
    run.run_undisturbed(until)
    compare(run.losses, until)
    run._say(f"{len(kinds)} kills, {until} steps: every loss equals that of the uninterrupted run")
    return until


def compare(losses: dict[int, dict[int, float]], until: int) -> None:
    """The losses of all launches against those of one process that nobody disturbs."""
    model = cm.build(None)
    expected = cm.train(model, cm.two_groups(model), range(until))
    for step in range(until):
        found = sum(losses[step].values()) / len(losses[step])
        assert abs(found - expected[step]) <= 1e-11 * max(1.0, abs(expected[step])), (step, found, expected[step])


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=int, default=20, help="kills while training")
    parser.add_argument("--saving", type=int, default=20, help="kills while saving")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--meshes", default="1x2,2x1", help="by turns, replicas x shards; at most 4 ranks")
    parser.add_argument("--log", type=Path)
    options = parser.parse_args(argv)
    meshes = [(int(r), int(s)) for r, _, s in (mesh.partition("x") for mesh in options.meshes.split(","))]
    with tempfile.TemporaryDirectory(prefix="hsdp-crash-") as directory:
        crash_run(Path(directory), options.training, options.saving, options.seed, meshes, options.log)
    print(json.dumps({"training": options.training, "saving": options.saving, "seed": options.seed, "ok": True}))


if __name__ == "__main__":
    main()

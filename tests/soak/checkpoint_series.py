"""What goes wrong on a machine, twenty times each while checkpoints are saved, pruned and loaded on four ranks.

    python -m tests.soak.checkpoint_series --times 20 --log benchmarks/results/checkpoint_series.txt

    kill          one rank is gone, as by kill -9
    full          the disk is full: a small tmpfs, filled by a file of another's
    read-only     the directory's permissions are taken away, or its file system is mounted read-only from the start
    failing       one rank's disk says "Input/output error", or one rank gives something that cannot be saved
    destroyed     the process group is destroyed, on one rank or on all

Each happens at a random file operation, or between two tensors, of a random rank. Afterwards every rank that lives has
ended with a checkpoint or with a CheckpointError; where no rank was lost, with one text on all, which tells the cause.
Every complete checkpoint is whole; the last one is the last that any rank was told of, or later, and holds the values
of its step bit for bit. A model that was loading has all values of before, or all of the checkpoint. The next save
succeeds and leaves nothing behind of the failed one. Needs root and Linux, for the tmpfs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.harness import header, in_words
from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError
from hsdp.checkpoint.lock import LOCK
from tests.checkpoint import models as cm
from tests.soak.disks import fill_disk, obeying, remount, small_disk
from tests.support import rig
from tests.support.rig import Outcome, Pool, RankEnv

WORLD, MESH = 4, (2, 2)
MOMENTS = ("saving", "saving in the background", "pruning", "loading")
FAULTS = ("kill", "full", "read-only", "failing", "destroyed")
TIMEOUT = 30.0  # seconds: of the groups

CAUSES = {
    "kill": "lost contact",
    "full": "No space left on device|no space left for it",
    "read-only": "Permission denied|Read-only file system",
    "failing": r"Input/output error|'extra' is a builtins.object, which cannot be saved",
    "destroyed": "lost contact",
}
"""What every rank is told."""

_FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir")


@dataclass(frozen=True)
class Case:
    """What is to go wrong, where and when.

    Attributes:
        victims: the ranks on which it happens.
        at: number of the event before which it happens; -1: never.
        variant: of the fault: another way in which it can happen.
    """

    moment: str
    fault: str
    victims: tuple[int, ...] = ()
    at: int = -1
    variant: int = 0


@dataclass(frozen=True)
class Told:
    """What one rank says: how it ended, how many events there were, which values its model has, what lay on disk before."""

    error: str | None
    events: int
    values: set[int]
    seconds: float
    names: list[str]


# -- on a rank ---------------------------------------------------------------------------------------------------------


class Trap:
    """Counts the file operations in a directory, and the calls of `progress`, and does something at one of them."""

    current: Trap | None = None
    _watching = False

    def __init__(self, case: Case, directory: Path, action: Callable[[], None]) -> None:
        self.events = 0
        self._case = case
        self._directory = str(directory)
        self._action = action
        self._armed = case.moment != "pruning"

    def __enter__(self) -> Trap:
        if not Trap._watching:  # such hooks stay for good
            sys.addaudithook(lambda event, args: Trap.current.see(event, args) if Trap.current is not None else None)
            Trap._watching = True
        Trap.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Trap.current = None

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        progress = event == "series.progress"
        if not progress and not (event in _FILE_EVENTS and str(args[0]).startswith(self._directory)):
            return
        self._armed |= event == "os.rename" and str(args[1]).endswith(".trash")
        if self._armed and not (progress and self._case.fault == "failing"):
            self.events += 1
            if self.events - 1 == self._case.at:
                Trap.current = None
                self._action()
                Trap.current = self

    @staticmethod
    def progress(done: int, total: int) -> None:
        sys.audit("series.progress")


@functools.cache
def first_values() -> dict[str, Tensor]:
    """What the model begins with, whole."""
    return dict(cm.build(None).state_dict())


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gives everything that is saved the values of a step: those at its beginning, and the step added to them."""
    first = first_values()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            whole = first[name] + step
            if isinstance(value, DTensor):
                offsets, sizes = (chunk := value.__create_chunk_list__()[0]).offsets, chunk.sizes
                for dim in range(whole.ndim):
                    whole = whole.narrow(dim, offsets[dim], sizes[dim])
                value._local_tensor.copy_(whole)
            else:
                value.copy_(whole)
        for state in optimizer.state.values():
            for held in state.values():
                (held._local_tensor if isinstance(held, DTensor) else held).fill_(step)


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> set[int]:
    """Of these steps those whose values are in the model and the optimizer; -1 for values of no step."""

    def parts() -> list[Tensor]:
        tensors = [*model.state_dict().values(), *(held for state in optimizer.state.values() for held in state.values())]
        return [(one._local_tensor if isinstance(one, DTensor) else one).detach().clone() for one in tensors]

    held = parts()
    found = set()
    for step in steps:
        fill(model, optimizer, step)
        if any(a.numel() and torch.equal(a, b) for a, b in zip(held, parts(), strict=True)):
            found.add(step)
            if all(torch.equal(a, b) for a, b in zip(held, parts(), strict=True)):
                return {step}
    return found | {-1}


def strike(case: Case, mount: Path) -> None:
    """The fault."""
    if case.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.fault == "full":
        fill_disk(mount)
    elif case.fault == "read-only":
        for path in (mount / "run", *(mount / "run").glob("**/")):
            path.chmod(0o555)
    elif case.fault == "destroyed":
        dist.destroy_process_group()
    else:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class EndedError(Exception):
    """Ends a run whose groups are gone, so that the rig makes new ones; carries what the rank tells."""


def attempt(env: RankEnv, mount: str, step: int, case: Case) -> Told:
    """On a rank: saves `step`, which must go well, and then does what the case says with the values of `step + 1`."""
    model, optimizer = prepared(env)
    fill(model, optimizer, step)
    checkpoint.save(Path(mount, "run"), model, optimizer, step=step, keep=2)
    names = sorted(path.name for path in Path(mount, "run").iterdir())
    dist.barrier()
    return struck(env.rank, case, Path(mount), model, optimizer, step, names)


def again(env: RankEnv, mount: str, step: int, case: Case) -> Told:
    """As `attempt`, without the save that must go well: the file system cannot be written to."""
    model, optimizer = prepared(env)
    return struck(env.rank, case, Path(mount), model, optimizer, step, [])


def prepared(env: RankEnv) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on this rank's groups, stepped once, made once."""
    held: dict[str, Any] = vars(env)
    if "series" not in held:
        model = cm.build(env.mesh(MESH))
        optimizer = cm.two_groups(model)
        cm.train(model, optimizer, [0], env.rank, WORLD)
        held["series"] = model, optimizer
    made: tuple[nn.Module, torch.optim.Optimizer] = held["series"]
    return made


def struck(
    rank: int,
    case: Case,
    mount: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    names: list[str],
) -> Told:
    """Saves step + 1, or loads step, while something goes wrong."""
    mine, asked = rank in case.victims, case
    fill(model, optimizer, step + 1)
    started, error = time.perf_counter(), None
    if case.fault == "full" and case.variant % 4 == 0 and mine:
        fill_disk(mount)
        case = replace(case, at=-1)
    unsavable = object() if mine and case.fault == "failing" and case.variant % 2 and "saving" in case.moment else None
    at_once = case.fault == "destroyed" and case.variant % 2 and case.moment == "saving in the background"
    if unsavable is not None or at_once or not mine:
        case = replace(case, at=-1)
    with obeying(), Trap(case, mount, lambda: strike(case, mount)) as trap:
        try:
            if case.moment == "loading":
                checkpoint.load(mount / "run", model, optimizer, progress=Trap.progress)
            else:
                handle = checkpoint.save(
                    mount / "run",
                    model,
                    optimizer,
                    unsavable,
                    step=step + 1,
                    keep=1 if case.moment == "pruning" else None,
                    async_=case.moment == "saving in the background",
                    progress=Trap.progress,
                )
                if at_once and mine:
                    dist.destroy_process_group()
                handle.wait()
        except CheckpointError as told:
            error = str(told)
    seconds = time.perf_counter() - started
    told = Told(error, trap.events, values_of(model, optimizer, (step, step + 1)), seconds, names)
    if asked.fault == "destroyed":
        raise EndedError(json.dumps([told.error, told.events, sorted(told.values), told.seconds, told.names]))
    return told


# -- the parent --------------------------------------------------------------------------------------------------------


class Series:
    """All cases, in one directory, which goes on from case to case as a run does that is started again."""

    def __init__(self, mount: Path, seed: int, say: Callable[[str], None]) -> None:
        self._mount = mount
        self._random = random.Random(seed)
        self._say = say
        rig._PRELOAD.append("torch._dynamo")  # which optimizers import at their first step, in every new process
        self._pool = Pool(WORLD, group_timeout=TIMEOUT)
        self._step = 1
        self._whole = cm.build(None)
        self._optimizer = cm.two_groups(self._whole)
        cm.train(self._whole, self._optimizer, [0])
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def run(self, times: int, faults: Sequence[str], after_round: Callable[[], None]) -> None:
        """Everything, in rounds of one of each.

        Raises:
            AssertionError: a promise was broken.
        """
        try:
            events = {}
            for moment in MOMENTS:
                for counted in ("none", "failing"):  # a disk fails at file operations only
                    events[moment, counted] = [one.value.events for one in self._attempt(Case(moment, counted))]
                    self._check(Case(moment, "none"), [])
            for number in range(times):
                for moment in MOMENTS:
                    for fault in faults:
                        self._one(moment, fault, number, events[moment, "failing" if fault == "failing" else "none"])
                after_round()
        finally:
            self._pool.close()

    def table(self) -> list[str]:
        """How often each fault ended how."""
        found = dict(sorted(self.counts.items()))
        rows = [f"{moment:26}{fault:12}{ended:14}{count:4}" for (moment, fault, ended), count in found.items()]
        return [f"{sum(found.values())} faults on {WORLD} ranks; nothing lost, every promise kept", "", *rows]

    def _one(self, moment: str, fault: str, number: int, events: list[int]) -> None:
        able = [rank for rank in range(WORLD) if events[rank]]
        if fault == "destroyed" and number % 4 < 2 and moment != "pruning":
            victims: tuple[int, ...] = tuple(able)
        else:
            victims = (self._random.choice([r for r in able if fault != "failing" or moment == "loading" or r < 2]),)
        at = self._random.randrange(min(events[rank] for rank in victims))
        case = Case(moment, fault, victims, at, number)
        with self._mended():
            outcomes = self._attempt(case)
        self._check(case, outcomes)

    @contextlib.contextmanager
    def _mended(self) -> Iterator[None]:
        """Puts everything right afterwards."""
        yield
        (self._mount / "another's").unlink(missing_ok=True)
        for path in (self._mount / "run").glob("**/"):
            path.chmod(0o777)

    def _attempt(self, case: Case) -> list[Outcome]:
        function = attempt
        remounted = case.fault == "read-only" and case.variant % 4 == 0
        if remounted:
            self._pool.run(attempt, str(self._mount), self._step, Case("loading", "none"))
            self._pool.close()  # an open file, like the lock, keeps a file system writable
            remount(self._mount, "ro")
            function, case = again, replace(case, at=-1)
        try:
            run = self._pool.run_raw(function, str(self._mount), self._step, case, timeout=150.0)
        finally:
            if remounted:
                remount(self._mount, "rw")
        hung = [one for one in run if one.error == "Hung"]
        assert not hung, f"{case}: ranks hang: {hung[0].traceback[-3000:]}"
        return [_carried(one) for one in run]

    def _check(self, case: Case, outcomes: list[Outcome]) -> None:
        what = f"{case.moment}, {case.fault} {case.variant}, rank {case.victims} at {case.at}, step {self._step}"
        dead = [one.rank for one in outcomes if one.error == "Died"]
        assert dead == (list(case.victims) if case.fault == "kill" else []), f"{what}: ranks {dead} died"
        assert all(one.ok or one.error == "Died" for one in outcomes), f"{what}: {outcomes}"
        told = {one.rank: one.value for one in outcomes if one.ok}
        texts = {one.error for one in told.values()}
        for text in texts - {None}:
            assert re.search(CAUSES[case.fault], text), f"{what}: {text}"
        if case.fault in ("full", "read-only", "failing"):
            assert len(texts) == 1, f"{what}: ranks were told {texts}"
        if case.moment == "loading":
            for rank, one in told.items():
                fine = one.values == {self._step} or (one.values == {self._step + 1} and one.error is not None)
                partly = "partly changed" in (one.error or "")
                assert fine or partly, f"{what}: rank {rank} has {one.values} after {one.error}"
            assert case.fault not in ("full", "read-only") or texts == {None}, f"{what}: {texts}"
        for one in told.values():  # of the save that came after what went wrong before
            complete = [name for name in one.names if name.startswith("step-")]
            assert one.names in ([], [LOCK, *complete]) and len(complete) <= 2, f"{what}: {one.names} lay there"
        self._on_disk(what, case, texts)
        ended = "told on all" if None not in texts else "completed" if len(texts) == 1 else "told on some"
        if outcomes:
            self.counts[case.moment, case.fault, ended] += 1
            slowest = max(one.seconds for one in told.values())
            said = sorted({re.sub(r"\S*/run\S*", "RUN", text or "completed")[:150] for text in texts})
            self._say(f"{what}: {' / '.join(said)} ({slowest:.1f} s)")
        self._step += 2

    def _on_disk(self, what: str, case: Case, texts: set[str | None]) -> None:
        """The last checkpoint is there, whole, with its values."""
        directory = self._mount / "run"
        for path in sorted(directory.glob("step-*")):
            checkpoint.verify(path)
        last = checkpoint.load(directory, self._whole, self._optimizer).step
        saved = case.moment != "loading" and (None in texts or case.fault == "none")
        assert last in ({self._step + 1} if saved else {self._step, self._step + 1}), f"{what}: the last one is of {last}"
        assert values_of(self._whole, self._optimizer, (self._step, self._step + 1)) == {last}, f"{what}: other values"


def _carried(outcome: Outcome) -> Outcome:
    """The outcome of a rank that ended by `EndedError`, as if it had returned."""
    if outcome.error != "EndedError":
        return outcome
    error, events, values, seconds, names = json.loads(outcome.message)
    return Outcome(outcome.rank, Told(error, events, set(values), seconds, names))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="of each fault at each moment")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="which (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args(argv)
    if os.getuid():
        parser.error("mounting a small disk needs root")
    torch.set_num_threads(1)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    chosen = "" if options.faults == FAULTS else f" --faults {' '.join(options.faults)}"
    command = f"python -m tests.soak.checkpoint_series --times {options.times} --seed {options.seed}{chosen}"
    head = [command, in_words(header())]
    with tempfile.TemporaryDirectory(prefix="hsdp-series-") as name, small_disk(Path(name, "disk")) as mount:
        series = Series(mount, options.seed, say)

        def write() -> None:  # after each round: a run that is cut short leaves what it saw
            if options.log is not None:
                options.log.write_text("\n".join([*head, *series.table(), "", *lines]) + "\n")

        series.run(options.times, options.faults, write)
    print("\n".join([*head, *series.table()]))


if __name__ == "__main__":
    main()

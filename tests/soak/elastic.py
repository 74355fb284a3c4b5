"""Replicas of two ranks on this machine, killed and started again at random: what remains goes on, and nothing is lost.

    python -m tests.soak.elastic --replicas 3 --kills 40 --log benchmarks/results/elastic.log

A kill is SIGKILL of one rank, of a replica, or of two replicas in turn: at a moment that the rank is told beforehand (in
its forward, all-reduce, healing, ...), or at any time. As torchrun does, the rest of a replica goes with its rank, and the
replica is started again after a while, with other weights. At the end every step that was taken is compared:

    among replicas    the digests of weights and optimizer states of ranks with the same number are equal
    with a twin       one process that takes the same steps of the same batches has the same losses

After each kill somebody takes a step within the manager's time-out. With `--stops`, some replicas are stopped (SIGSTOP),
and killed once the others have gone on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.elastic import MOMENTS, Place, run_rank, twin_losses
from tests.support.facts import header, in_words

RANKS = 2
TIMEOUT = 10.0
"""The manager's, in seconds."""
STUCK = 240.0
"""Seconds without a step, of anybody, after which the run has failed."""


@dataclass
class Replica:
    """One replica: its processes, and what they share with this one."""

    number: int
    incarnation: int = -1
    store: Any = None
    processes: list[Any] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    starts_at: float = 0.0

    @property
    def runs(self) -> bool:
        return bool(self.processes)

    def step(self) -> int:
        return min((value.value for value in self.steps), default=-1)


class Run:
    """Some replicas and a lighthouse; `tick` starts again what has died."""

    def __init__(self, folder: Path, replicas: int, seed: int, stops: bool = False, **options: Any) -> None:
        from torchft.coordination import LighthouseServer

        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30000, quorum_tick_ms=20, heartbeat_timeout_ms=1500
        )
        self.folder = folder
        self.stops = stops
        self.options = options
        self.random = random.Random(seed)
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.elastic", "torchft", "hsdp"])
        self.last = self._context.Value("i", 1 << 30)
        self.replicas = [Replica(number) for number in range(replicas)]
        self.moments: list[str] = []
        self.lines: list[str] = []
        self.failures: list[str] = []
        self._moved_at = time.monotonic()
        self._furthest = -1

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def start(self, replica: Replica) -> None:
        replica.incarnation += 1
        replica.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # TCPStore counts on a process of its own replica; here it lives as long as that replica does.
        replica.told = [self._context.Value("i", 0) for _ in range(RANKS)]
        replica.steps = [self._context.Value("i", -1) for _ in range(RANKS)]
        replica.processes = []
        for rank in range(RANKS):
            place = Place(
                replica.number,
                replica.incarnation,
                rank,
                RANKS,
                replica.store.port,
                self.lighthouse.address(),
                self.folder,
                timeout=TIMEOUT,
                **self.options,
            )
            process = self._context.Process(
                target=run_rank, args=(place, replica.told[rank], replica.steps[rank], self.last), daemon=True
            )
            process.start()
            replica.processes.append(process)

    def kill(self, replica: Replica) -> None:
        """SIGKILL for all that is left of a replica."""
        for process in replica.processes:
            process.kill()
        self._bury(replica)

    def _bury(self, replica: Replica) -> None:
        for process in replica.processes:
            process.kill()
            process.join()
        replica.processes = []
        replica.store = None
        replica.starts_at = time.monotonic() + self.random.uniform(0.1, 2.0)

    def tick(self) -> list[Replica]:
        """Looks once at all of them; returns those that have lost a rank since.

        Raises:
            TimeoutError: nobody takes steps any more.
        """
        sentinels = [process.sentinel for replica in self.replicas for process in replica.processes]
        if sentinels:
            multiprocessing.connection.wait(sentinels, timeout=0.01)
        else:
            time.sleep(0.01)
        lost = []
        for replica in self.replicas:
            codes = [process.exitcode for process in replica.processes]
            if any(code is not None for code in codes) and codes != [0] * len(codes):
                if self.is_over() and 0 in codes and not any(codes):
                    continue  # the other rank is about to end
                # Beside a rank that was killed, another one may have failed before this process has looked.
                own = [code for code in codes if code not in (None, 0, -9)]
                if own and -9 not in codes:
                    told = "\n".join(self._last_words(replica, rank) for rank in range(RANKS))
                    raise AssertionError(f"replica {replica.number}.{replica.incarnation} ended by itself: {codes}\n{told}")
                self._bury(replica)
                lost.append(replica)
            elif not codes and time.monotonic() > replica.starts_at and not self.is_over():
                self.start(replica)
        furthest = max(replica.step() for replica in self.replicas)
        if furthest != self._furthest:
            self._furthest, self._moved_at = furthest, time.monotonic()
        elif time.monotonic() - self._moved_at > STUCK:
            raise TimeoutError(f"no step for {STUCK:g} seconds; the replicas are at {[r.step() for r in self.replicas]}")
        return lost

    def _last_words(self, replica: Replica, rank: int) -> str:
        name = f"replica{replica.number}.{replica.incarnation}.{rank}"
        return f"--- {name}\n{(self.folder / f'{name}.err').read_text(errors='replace')[-3000:]}"

    def is_over(self) -> bool:
        return self.last.value < 1 << 30

    def until(self, condition: Any, seconds: float) -> bool:
        """Waits for a condition; returns whether it came true in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.tick()
        return True

    def end(self) -> None:
        """Lets all take a few steps more and stop at the same one."""
        self.until(self.all_together, STUCK)
        self.last.value = max(replica.step() for replica in self.replicas) + 12
        self.until(lambda: all(p.exitcode == 0 for r in self.replicas for p in r.processes), STUCK)
        for replica in self.replicas:
            if any(process.exitcode != 0 for process in replica.processes):
                self.failures.append(f"replica {replica.number} did not end: {[p.exitcode for p in replica.processes]}")
            self.kill(replica)

    def all_together(self) -> bool:
        """Whether all replicas run, and are at the same step, or next to it."""
        steps = [replica.step() for replica in self.replicas]
        return all(replica.runs for replica in self.replicas) and min(steps) >= 0 and max(steps) - min(steps) <= 1


# -- kills -------------------------------------------------------------------------------------------------------------


def kill_some(run: Run, count: int) -> list[dict[str, Any]]:
    """Kills `count` times; returns what and when."""
    kills: list[dict[str, Any]] = []
    while len(kills) < count:
        assert run.until(run.all_together, STUCK), "they did not come together"
        start = max(replica.step() for replica in run.replicas)
        run.until(lambda: max(r.step() for r in run.replicas) > start + run.random.randrange(1, 6), STUCK)
        first, second = run.random.sample(run.replicas, 2)
        kinds = ["rank at a moment", "rank at a moment", "rank", "replica", "two in turn"]
        kind = run.random.choice(kinds + ["stopped", "stopped"] * run.stops)
        if kind == "stopped":
            _stop_one(run, first, kills)
        elif kind == "two in turn" and len(run.replicas) > 2:
            _kill_one(run, first, kills, "two in turn, the first")
            if run.random.random() < 0.5:  # with the first one gone, or while it is being healed
                run.until(lambda: first.step() >= 0, 20)
            run.until(lambda: False, run.random.uniform(0, 0.5))
            if second.runs:
                _kill_one(run, second, kills, "two in turn, the second")
        elif kind == "rank at a moment":
            _kill_at(run, first, kills)
        else:
            _kill_one(run, first, kills, kind)
    return kills


def _kill_one(run: Run, replica: Replica, kills: list[dict[str, Any]], kind: str) -> None:
    if kind == "replica":
        run.kill(replica)
    else:
        incarnation = replica.incarnation
        replica.processes[run.random.randrange(RANKS)].kill()
        run.until(lambda: not replica.runs or replica.incarnation > incarnation, 15)
    _note(run, replica, kills, kind, "any")


def _stop_one(run: Run, replica: Replica, kills: list[dict[str, Any]]) -> None:
    """Stops all ranks of a replica at any time, and kills them once others have taken steps without it."""
    for process in replica.processes:
        os.kill(process.pid, signal.SIGSTOP)
    _note(run, replica, kills, "stopped", "any")
    before = replica.step()
    others = [other for other in run.replicas if other is not replica]
    run.until(lambda: max(other.step() for other in others) > before + 3, 3 * TIMEOUT)
    run.kill(replica)


def _kill_at(run: Run, replica: Replica, kills: list[dict[str, Any]]) -> None:
    """Tells one rank to die at a moment, and waits until it has; for healing, it is started anew before."""
    if not run.moments:  # each in its turn, in another order every time
        run.moments = [name for name in MOMENTS if name != "saving" or run.options.get("checkpoints")]
        run.random.shuffle(run.moments)
    moment, rank = run.moments.pop(), run.random.randrange(RANKS)
    if moment in ("healing", "healed"):
        before = replica.incarnation
        run.kill(replica)
        _note(run, replica, kills, "replica", "any")
        if len(run.replicas) > 2 and moment == "healing" and run.random.random() < 0.5:
            replica = run.random.choice([other for other in run.replicas if other is not replica])  # one that heals it
        else:
            run.until(lambda: replica.runs and replica.incarnation > before, 10)
    incarnation = replica.incarnation
    replica.told[rank].value = 1 + MOMENTS.index(moment)
    died = run.until(lambda: not replica.runs or replica.incarnation > incarnation, 15)
    if died:
        _note(run, replica, kills, "rank at a moment", moment)
    else:
        replica.told[rank].value = 0
        run.say(f"          replica {replica.number}  did not come to the moment {moment} in time")


def _note(run: Run, replica: Replica, kills: list[dict[str, Any]], kind: str, moment: str) -> None:
    kills.append({"at": time.time(), "replica": replica.number, "kind": kind, "moment": moment})
    others = ", ".join(f"{r.number}: {r.step()}" for r in run.replicas if r is not replica)
    run.say(f"kill {len(kills):3}  replica {replica.number}  {kind:24} moment {moment:11} others at step {others}")


# -- what came of it ---------------------------------------------------------------------------------------------------


def read_lines(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # the last one of a rank that was killed may be cut
                found.append(json.loads(line))
    return sorted(found, key=lambda line: line["at"])


def history(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The line of each step that stayed: a step that somebody took alone and did not survive was taken again later."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["took"]:
            steps[line["step"]] = line
    assert sorted(steps) == list(range(len(steps))), "a step is missing"
    return [steps[step] for step in range(len(steps))]


def compare(lines: list[dict[str, Any]], accumulate: int, rtol: float) -> dict[str, Any]:
    """Compares all steps that stayed, among replicas and with the twin.

    Raises:
        AssertionError: they differ.
    """
    kept = history(lines)
    first = 0
    for line in kept:
        assert line["first"] == first, f"step {line['step']} begins with batch {line['first']} instead of {first}"
        first += line["replicas"]
    twin = twin_losses([(line["first"], line["replicas"]) for line in kept], RANKS, accumulate)
    digests: dict[tuple[int, int], set[str]] = {}
    pairs = healed = losses = 0
    worst = 0.0
    for line in lines:
        stays = line["took"] and line["quorum"] == kept[line["step"]]["quorum"]
        if not stays:
            continue
        seen = digests.setdefault((line["step"], line["rank"]), set())
        pairs += bool(seen)
        seen.add(line["digest"])
        assert len(seen) == 1, f"step {line['step']}: ranks {line['rank']} differ in weights or optimizer states"
        healed += not line["takes_part"]
        if line["takes_part"]:
            expected = torch.tensor(twin[line["step"]][line["batch"], line["rank"]], dtype=torch.float64)
            found = torch.tensor(line["losses"], dtype=torch.float64)
            worst = max(worst, float(((found - expected) / expected).abs().max()))
            losses += 1
    assert worst <= rtol, f"losses differ from the twin's by {worst:.2e}"
    return {
        "steps": len(kept),
        "batches": first,
        "steps with all": sum(line["replicas"] == max(k["replicas"] for k in kept) for line in kept),
        "dropped by a rank": sum(not line["took"] for line in lines),
        "taken and lost": sum(bool(line["took"]) and line["quorum"] != kept[line["step"]]["quorum"] for line in lines),
        "steps of ranks while they were healed": healed,
        "digests compared": pairs,
        "losses compared": losses,
        "greatest difference from the twin": f"{worst:.1e}",
        "first loss": round(sum(kept[0]["losses"]), 4),
        "last loss": round(sum(kept[-1]["losses"]), 4),
    }


def pauses(lines: list[dict[str, Any]], kills: list[dict[str, Any]]) -> list[float]:
    """Seconds from each kill to the next step that somebody took."""
    taken = [line["at"] for line in lines if line["took"]]
    return [min((at - kill["at"] for at in taken if at > kill["at"]), default=float("inf")) for kill in kills]


def soak(folder: Path, replicas: int, kills: int, seed: int, stops: bool = False, **options: Any) -> list[str]:
    """One run; returns its log.

    Raises:
        AssertionError, TimeoutError: something is not as it should be.
    """
    run = Run(folder, replicas, seed, stops, **options)
    began = time.monotonic()
    run.say(
        f"# {replicas} replicas x {RANKS} ranks, {kills} kills{' and stops' * stops}, seed {seed}, {options or 'plain'}"
    )
    try:
        killed = kill_some(run, kills)
        run.end()
    finally:
        run.last.value = 0
        for replica in run.replicas:
            run.kill(replica)
        run.lighthouse.shutdown()
    lines = read_lines(folder)
    results = compare(lines, options.get("accumulate", 1), 5e-2 if options.get("bf16") else 1e-9)
    waits = sorted(pauses(lines, killed))
    for name, value in results.items():
        run.say(f"{name}: {value}")
    run.say(f"seconds from a kill to the next step of anybody: median {waits[len(waits) // 2]:.2f}, most {waits[-1]:.2f}")
    kinds = Counter(f"{kill['kind']}: {kill['moment']}" for kill in killed)
    run.say(f"kills by kind and moment: {', '.join(f'{kind} {number}' for kind, number in kinds.items())}")
    run.say(f"{len(killed)} kills in {time.monotonic() - began:.0f} s; ended by themselves: {run.failures or 'none'}")
    assert not run.failures, run.failures
    assert waits[-1] <= TIMEOUT, f"nobody took a step for {waits[-1]:.1f} s after a kill"
    return run.lines


def main() -> None:
    parser = argparse.ArgumentParser(description="kill elastic replicas at random, and see the others go on")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--checkpoints", action="store_true", help="save, and start again from what was saved")
    parser.add_argument("--waits", action="store_true", help="begin steps with the quorum (use_async_quorum=False)")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")
    parser.add_argument("--stops", action="store_true", help="stop some replicas before they are killed")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that each step waits")
    parser.add_argument("--log", type=Path, help="append the log to this file")
    told = vars(parser.parse_args())
    log = told.pop("log")
    replicas, kills, seed = told.pop("replicas"), told.pop("kills"), told.pop("seed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        lines = soak(Path(folder), replicas, kills, seed, **told)
    if log is not None:
        with log.open("a") as stream:
            stream.write("\n".join([f"# {in_words(header())}", *lines, ""]) + "\n")


if __name__ == "__main__":
    main()

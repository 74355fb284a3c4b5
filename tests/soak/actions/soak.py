"""A soak over random programs of user actions, on a sharded model and on its twin, with a table of what came of them.

    python -m tests.soak.actions --programs 20000 --ranks 2 --mesh 1d --seed 0 --log actions.log
    python -m tests.soak.actions --programs 500 --ranks 4 --mesh 2x2 --seed 0 --without max_norm toggles
    python -m tests.soak.actions --programs 500 --ranks 2 --system fsdp2        PyTorch's own, for information
    python -m tests.soak.actions --programs 500 --device emul          with delays and a detector of races; or cuda
    python -m tests.soak.actions --show 0:17                                    prints a program

Each class of failures is told with its count, its seeds, and a program of it that was shrunk. See `programs.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import IO, Any

from tests.soak.actions.fsdp2 import LEFT_OUT
from tests.soak.actions.play import run_programs
from tests.soak.actions.programs import FEATURES, SHAPES, draw, smaller
from tests.support import device as emulator
from tests.support.facts import header
from tests.support.rig import Pool, RemoteError

BATCH = 40
GROUP_TIMEOUT = 20.0


@dataclass
class Tally:
    """What came of programs.

    Attributes:
        equal: programs that ended equal, with or without errors that were owed.
        named: such errors, by type and action; `planned`: exceptions that both sides raised.
        failed: by class, the failed programs with what was told.
    """

    equal: int = 0
    planned: int = 0
    named: Counter[str] = field(default_factory=Counter)
    failed: dict[str, list[tuple[Any, str]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def failures(self) -> int:
        return sum(map(len, self.failed.values()))


def run_all(
    pool: Pool,
    programs: Sequence[Any],
    system: str = "hsdp",
    stop_at: int = 0,
    runner: Any = None,
    group_timeout: float = GROUP_TIMEOUT,
) -> Tally:
    """Runs programs on the pool's ranks, a batch per call; goes on behind failures, up to `stop_at` of them if given."""
    tally, at = Tally(), 0
    call = (run_programs,) if runner is None else runner
    while at < len(programs):
        batch = list(programs[at : at + BATCH])
        try:
            verdicts = pool.run(*call, batch, system, timeout=60.0 + 3.0 * len(batch), group_timeout=group_timeout)
        except RemoteError as error:
            place, failure, told, done = _first_failure(pool, batch, system, error, call)
            tally.failed[failure].append((batch[place], told))
            tally.equal += place
            for named, planned in done:
                tally.named.update(named)
                tally.planned += planned
            at += place + 1
            if stop_at and tally.failures >= stop_at:
                break
            continue
        tally.equal += len(batch)
        at += len(batch)
        for verdict in verdicts[0]:
            tally.named.update(verdict.named)
            tally.planned += verdict.planned
    return tally


def _first_failure(
    pool: Pool, batch: list[Any], system: str, error: RemoteError, call: Any
) -> tuple[int, str, str, list[Any]]:
    """The place of the first failed program of a job, its class, what was told, and what came of those before it."""
    content = [json.loads(one.message) for one in error.outcomes if one.error == "Failed"]
    if content:
        # The first program, and of its failures the one that is the cause of the others: no time-out, with a text.
        content.sort(
            key=lambda one: (one["at"], "Collective" in one["failure"] + one["told"], "other ranks" in one["told"])
        )
        lost = [one for one in error.outcomes if one.error != "Failed"]
        hung = [f"rank {one.rank} {one.error}: {one.message}\n{one.traceback[:6000]}\n{one.output[:6000]}" for one in lost]
        first = content[0]
        return first["at"], first["failure"], "\n".join([first["told"], *hung]), first["done"]
    if len(batch) > 1:  # nobody could tell: one by one
        for place, program in enumerate(batch):
            try:
                pool.run(*call, [program], system, timeout=60.0, group_timeout=GROUP_TIMEOUT)
            except RemoteError as alone:
                return place, *_first_failure(pool, [program], system, alone, call)[1:3], []
        return len(batch) - 1, "only in company", str(error)[:3000], []
    return 0, "/".join(sorted({str(one.error) for one in error.outcomes if not one.ok})), str(error)[:3000], []


def shrink(
    pool: Pool,
    program: Any,
    failure: str,
    system: str = "hsdp",
    tries: int = 150,
    runner: Any = None,
    smaller: Callable[[Any], Iterator[Any]] = smaller,
    group_timeout: float = GROUP_TIMEOUT,
) -> tuple[Any, str]:
    """A smaller program that fails in the same class, and what it tells; `smaller` gives candidates."""
    told, again = "", True
    while again and tries > 0:
        again = False
        for other in smaller(program):
            tries -= 1
            if tries <= 0:
                break
            failed = run_all(pool, [other], system, runner=runner, group_timeout=group_timeout).failed
            if failure in failed:
                program, told, again = other, failed[failure][0][1], True
                break
    return program, told


def table(tally: Tally, programs: int) -> str:
    """What came of the programs, for people."""
    lines = [f"{programs} programs: {tally.equal} equal, {tally.failures} failed; {tally.planned} planned exceptions"]
    lines += [f"  {count:6} owed: {name}" for name, count in tally.named.most_common()]
    for name, found in sorted(tally.failed.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {len(found):6} FAILED: {name} (seeds {', '.join(p.seed for p, _ in found[:6])})")
    return "\n".join(lines)


def tell(pool: Pool, tally: Tally, count: int, start: float, log: IO[str], tries: int, **how: Any) -> None:
    """Prints what came of `count` programs since `start`, and of each class of failures the smallest one, shrunk.

    Args:
        tries: of `shrink`; 0: do not shrink.
        how: what else it takes.
    """
    print(table(tally, count), file=log, flush=True)
    print(f"{time.monotonic() - start:.0f} s", file=log, flush=True)
    for failure, found in tally.failed.items():
        small, why = min(found, key=lambda one: len(one[0].actions))
        if tries:
            small, told = shrink(pool, small, failure, tries=tries, **how)
            why = told or why
        print(f"\n=== {failure}\n{small}\n{why}", file=log, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns how many programs failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2)
    parser.add_argument("--mesh", choices=["1d", "2d", "2x2"], default="1d")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--device", default="cpu", help="of the sharded side: cpu, cuda, or emul, the emulated one")
    parser.add_argument("--system", choices=["hsdp", "fsdp2"], default="hsdp")
    parser.add_argument("--without", nargs="*", choices=sorted(FEATURES), default=[])
    parser.add_argument("--only", nargs="*", choices=sorted(FEATURES), help="leave out all other features")
    parser.add_argument("--show", help="print the program of this seed and number, as 0:17, and end")
    parser.add_argument("--shrink", type=int, default=150, help="tries to shrink one program of each class of failures")
    parser.add_argument("--stop-at", type=int, default=0, help="end with this many failures")
    parser.add_argument("--stalls", action="store_true", help="stop ranks meanwhile, at random moments")
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args(argv)
    shape = SHAPES["1d" if args.mesh == "1d" else "2d"][args.ranks]
    without = frozenset(args.without) | (frozenset() if args.only is None else frozenset(FEATURES) - set(args.only))
    without |= LEFT_OUT if args.system == "fsdp2" else frozenset()
    if args.show:
        print(draw(args.show, shape, without))
        return 0
    content = {"command": " ".join(sys.argv[1:]), **header()}
    print(json.dumps(content), file=args.log, flush=True)
    start = time.monotonic()
    programs = [draw(f"{args.seed}:{n}", shape, without) for n in range(args.first, args.first + args.programs)]
    if args.device == emulator.NAME:
        emulator.build()
    with Pool(args.ranks, device=args.device) as pool, pool.stalling(args.seed) if args.stalls else nullcontext():
        tally = run_all(pool, programs, args.system, args.stop_at)
        tell(pool, tally, len(programs), start, args.log, system=args.system, tries=args.shrink)
    return tally.failures

"""A soak over random programs of persistence, on a sharded run and on its twin, with a table of what came of them.

    python -m tests.soak.persistence --programs 1000 --ranks 2 --seed 0 --log persistence.log
    python -m tests.soak.persistence --show 0:17 --ranks 4                               prints a program

Each class of failures is told with its count, its seeds, and a program of it that was shrunk. See `programs.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from tests.soak.actions.soak import Tally, run_all, tell
from tests.soak.persistence.play import run_programs
from tests.soak.persistence.programs import Program, draw, smaller
from tests.support.facts import header
from tests.support.rig import Pool

GROUP_TIMEOUT = 15.0
"""Seconds behind which a rank that was left waiting fails its program."""


def run(pool: Pool, programs: Sequence[Program], stop_at: int = 0) -> Tally:
    """Runs programs on the pool's ranks; goes on behind failures, up to `stop_at` of them if given."""
    return run_all(pool, programs, stop_at=stop_at, runner=(run_programs,), group_timeout=GROUP_TIMEOUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns how many programs failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--ranks", type=int, choices=[1, 2, 4], default=2)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--show", help="print the program of this seed and number, as 0:17, and end")
    parser.add_argument("--shrink", type=int, default=60, help="tries to shrink one program of each class of failures")
    parser.add_argument("--stop-at", type=int, default=0, help="end with this many failures")
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args(argv)
    if args.show:
        print(draw(args.show, args.ranks))
        return 0
    print(json.dumps({"command": " ".join(sys.argv[1:]), **header()}), file=args.log, flush=True)
    start = time.monotonic()
    programs = [draw(f"{args.seed}:{n}", args.ranks) for n in range(args.first, args.first + args.programs)]
    with Pool(args.ranks) as pool:
        tally = run(pool, programs, args.stop_at)
        how = {"smaller": smaller, "runner": (run_programs,), "group_timeout": GROUP_TIMEOUT}
        tell(pool, tally, len(programs), start, args.log, args.shrink, **how)
    return tally.failures

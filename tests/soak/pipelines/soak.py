"""A soak over random programs of pipelines, on sharded stages and on the plain model, with a table of what came of them.

    python -m tests.soak.pipelines --programs 1000 --ranks 4 --seed 0 --log pipelines.log
    python -m tests.soak.pipelines --programs 100 --device emul        with delays and a detector of races
    python -m tests.soak.pipelines --show 0:17 --ranks 4               prints a program

Each class of failures is told with its count, its seeds, and a program of it that was shrunk. See `programs.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from tests.soak.actions.soak import run_all, tell
from tests.soak.pipelines.play import run_programs
from tests.soak.pipelines.programs import draw, smaller
from tests.support import device as emulator
from tests.support.facts import header
from tests.support.rig import Pool


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns how many programs failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=4)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--device", default="cpu", help="of the sharded side: cpu, or emul, the emulated one")
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
    if args.device == emulator.NAME:
        emulator.build()
    with Pool(args.ranks, device=args.device) as pool:
        tally = run_all(pool, programs, stop_at=args.stop_at, runner=(run_programs,))
        tell(pool, tally, len(programs), start, args.log, args.shrink, smaller=smaller, runner=(run_programs,))
    return tally.failures

"""A soak over random programs of optimizers, on a sharded model and on its twin, with a table of what came of them.

    python -m tests.soak.optimizers --programs 5000 --ranks 2 --mesh 1d --seed 0 --log optimizers.log
    python -m tests.soak.optimizers --programs 500 --ranks 4 --mesh 2d --seed 0
    python -m tests.soak.optimizers --programs 500 --device emul       with delays and a detector of races; or cuda
    python -m tests.soak.optimizers --show 0:17 --ranks 4 --mesh 2d                      prints a program

Each class of failures is told with its count, its seeds, and a program of it that was shrunk. See `programs.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from tests.soak.actions.soak import Tally, run_all, tell
from tests.soak.optimizers.play import run_programs
from tests.soak.optimizers.programs import SHAPES, Program, draw, smaller
from tests.support import device as emulator
from tests.support.facts import header
from tests.support.rig import Pool


def run(pool: Pool, programs: Sequence[Program], stop_at: int = 0) -> Tally:
    """Runs programs on the pool's ranks; goes on behind failures, up to `stop_at` of them if given."""
    return run_all(pool, programs, stop_at=stop_at, runner=(run_programs,))


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns how many programs failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2)
    parser.add_argument("--mesh", choices=["1d", "2d"], default="1d")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--device", default="cpu", help="of the sharded side: cpu, cuda, or emul, the emulated one")
    parser.add_argument("--show", help="print the program of this seed and number, as 0:17, and end")
    parser.add_argument("--shrink", type=int, default=100, help="tries to shrink one program of each class of failures")
    parser.add_argument("--stop-at", type=int, default=0, help="end with this many failures")
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args(argv)
    shape = SHAPES[args.ranks][args.mesh]
    if args.show:
        print(draw(args.show, shape))
        return 0
    print(json.dumps({"command": " ".join(sys.argv[1:]), **header()}), file=args.log, flush=True)
    start = time.monotonic()
    programs = [draw(f"{args.seed}:{n}", shape) for n in range(args.first, args.first + args.programs)]
    if args.device == emulator.NAME:
        emulator.build()
    with Pool(args.ranks, device=args.device) as pool:
        tally = run(pool, programs, args.stop_at)
        tell(pool, tally, len(programs), start, args.log, args.shrink, smaller=smaller, runner=(run_programs,))
    return tally.failures

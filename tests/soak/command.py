"""The command of a soak over random programs: its options, and what it does with them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from tests.soak.actions.soak import GROUP_TIMEOUT, run_all, tell
from tests.support import device as emulator
from tests.support.facts import header
from tests.support.rig import Pool


def options(about: str | None, *, ranks: Sequence[int], default: int, programs: int, tries: int) -> argparse.ArgumentParser:
    """Options that the commands have in common; `about` describes one, `default` is its number of ranks."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=programs)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--ranks", type=int, choices=ranks, default=default)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--show", help="print the program of this seed and number, as 0:17, and end")
    parser.add_argument("--shrink", type=int, default=tries, help="tries to shrink one program of each class of failures")
    parser.add_argument("--stop-at", type=int, default=0, help="end with this many failures")
    parser.add_argument("--stalls", action="store_true", help="stop ranks meanwhile, at random moments")
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    return parser


def soak(
    args: argparse.Namespace,
    draw: Callable[[str], Any],
    runner: Any,
    smaller: Any,
    *,
    device: str = "cpu",
    group_timeout: float = GROUP_TIMEOUT,
) -> int:
    """Runs the programs that the options ask for, and tells what came of them; returns how many failed.

    Args:
        args: of `options`.
        draw: the program of a seed and number.
        runner: what plays programs on a rank, as `run_all` takes it; `smaller`: what `shrink` tries.
        device: of the sharded side.
        group_timeout: seconds behind which a rank that was left waiting fails its program.
    """
    if args.show:
        print(draw(args.show))
        return 0
    print(json.dumps({"command": " ".join(sys.argv[1:]), **header()}), file=args.log, flush=True)
    start = time.monotonic()
    programs = [draw(f"{args.seed}:{n}") for n in range(args.first, args.first + args.programs)]
    if device == emulator.NAME:
        emulator.build()
    how = {"runner": runner, "group_timeout": group_timeout}
    with Pool(args.ranks, device=device) as pool, pool.stalling(args.seed) if args.stalls else nullcontext():
        tally = run_all(pool, programs, stop_at=args.stop_at, **how)
        tell(pool, tally, len(programs), start, args.log, args.shrink, smaller=smaller, **how)
    return tally.failures

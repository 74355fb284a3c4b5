"""Bugs planted in what steps and keeps states; random programs of optimizers must find each.

python -m tests.mutants.states                       all of them, at most 60 programs each, and a table
python -m tests.mutants.states --programs 20 --only "norms of each rank alone"
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import hsdp.checkpoint.full
import hsdp.clip
import hsdp.optim.elementwise
import hsdp.optim.whole_matrix
import hsdp.schedule.optimizer_hooks
from hsdp.optim.elementwise import _Stepper
from hsdp.optim.replicas import ReplicaGathers, Share
from hsdp.optim.states import Entries
from hsdp.optim.targets import Target
from tests.mutants.planting import Plant, gives, replaced
from tests.soak.actions.soak import run_all
from tests.soak.optimizers.play import play
from tests.soak.optimizers.programs import SHAPES, Program, draw
from tests.soak.verdicts import Verdict, run_each
from tests.support.facts import header
from tests.support.rig import Pool, RankEnv

PLANTS: dict[str, tuple[Plant, str]] = {}
"""By name: the bug, and the kind of mesh whose programs look for it."""


def run_planted(env: RankEnv, name: str, programs: list[Program], system: str) -> list[Verdict]:
    """On a worker: plays programs with a bug planted."""
    with PLANTS[name][0]():
        return run_each(env, play, programs, system)


def _fits_for_good() -> Any:
    def change(fits: Callable[..., bool]) -> Callable[..., bool]:
        return lambda stepper, optimizer, used: bool(stepper._seen) or fits(stepper, optimizer, used)

    return replaced(_Stepper, "_fits", change)


PLANTS["entries that users assign not noticed"] = (gives(Entries, "are_those_of", True), "1d")
PLANTS["plans of a step never made anew"] = (_fits_for_good, "1d")
PLANTS["members of a flat tensor share their numbers"] = (
    gives(hsdp.optim.elementwise, "_with_own_numbers"),
    "1d",
)
PLANTS["parameters with other numbers step as one"] = (
    lambda: mock.patch.object(hsdp.optim.targets, "_numbers", lambda state: bool(state)),
    "1d",
)
PLANTS["norms of each rank alone"] = (gives(hsdp.clip, "all_reduce_now"), "1d")
PLANTS["reductions not joined before a step"] = (gives(hsdp.schedule.optimizer_hooks, "_make_ready"), "1d")
PLANTS["the first rows stepped on every replica"] = (
    lambda: mock.patch.object(Share, "of", lambda share, local: local.narrow(0, 0, share.rows)),
    "2d",
)
PLANTS["stepped shares not gathered"] = (gives(ReplicaGathers, "run"), "2d")
PLANTS["shares of gradients for optimizers that know of none"] = (
    gives(hsdp.schedule.optimizer_hooks, "gather_gradients"),
    "2d",
)
PLANTS["flat copies of shares not brought"] = (
    lambda: mock.patch.object(Target, "bring", lambda target: target.memory and target.memory.alloc()),
    "2d",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Looks for each bug; returns how many were not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=60, help="the most that look for one bug")
    parser.add_argument("--seed", default="ci", help="of programs that pass without a bug")
    parser.add_argument("--only", nargs="*", choices=sorted(PLANTS))
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args(argv)
    print(json.dumps({"command": " ".join(sys.argv[1:]), **header()}), file=args.log, flush=True)
    missed, start = 0, time.monotonic()
    with Pool(2) as pool:
        for name, (_, mesh) in PLANTS.items():
            if name not in (args.only or PLANTS):
                continue
            programs = [draw(f"{args.seed}:{n}", SHAPES[2][mesh]) for n in range(args.programs)]
            tally = run_all(pool, programs, stop_at=1, runner=(run_planted, name))
            missed += not tally.failures
            found = [f"no. {1 + programs.index(some[0][0])}  {failure}" for failure, some in tally.failed.items()]
            print(f"{name:55} {mesh:>3}  {found[0] if found else 'NONE'}", file=args.log, flush=True)
    print(f"{missed} missed; {time.monotonic() - start:.0f} s", file=args.log, flush=True)
    return missed


if __name__ == "__main__":
    from tests.mutants import states  # under its own name, where the workers find what is sent to them

    sys.exit(min(states.main(), 100))

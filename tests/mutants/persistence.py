"""Bugs planted in what keeps and moves the state of a training; random programs of persistence must find each.

python -m tests.mutants.persistence                  all of them, at most 60 programs each, and a table
python -m tests.mutants.persistence --programs 20 --only "keeps every checkpoint"
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from hsdp.checkpoint import loading, optimizers, reading, saving, store, whole_tensors
from tests.mutants.planting import Plant, replaced
from tests.soak.actions.soak import run_all
from tests.soak.persistence.play import play
from tests.soak.persistence.programs import Program, draw
from tests.soak.persistence.soak import GROUP_TIMEOUT
from tests.soak.verdicts import Verdict, run_each
from tests.support.facts import header
from tests.support.rig import Pool, RankEnv


def run_planted(env: RankEnv, name: str, programs: list[Program], system: str) -> list[Verdict]:
    """On a worker: plays programs with a bug planted."""
    with PLANTS[name]():
        return run_each(env, play, programs, system)


def _swaps_rows() -> Any:
    def change(rows: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def swapped(*args: Any) -> list[Any]:
            found = rows(*args)
            return found[::-1] if found[0].shape == found[-1].shape else found

        return swapped

    return replaced(whole_tensors, "_rows", change)


def _keeps_own_settings() -> Any:
    def own(optimizer: Any, *args: Any) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    return mock.patch.object(optimizers, "merge_groups", own)


def _keeps_all() -> Any:
    return replaced(store, "publish", lambda publish: lambda *args: publish(*args[:-1], None))


def _gives_the_first_ones_extra() -> Any:
    return replaced(loading, "unpack_extras", lambda unpack: lambda data, rank, size: unpack(data, 0, size))


PLANTS: dict[str, Plant] = {
    "gathers and deals rows in the wrong order": _swaps_rows,
    "keeps the optimizer's own settings": _keeps_own_settings,
    "writes what training goes on changing": lambda: mock.patch.object(saving._Planner, "stage", lambda *args: None),
    "keeps every checkpoint": _keeps_all,
    "gives every rank the first one's extra": _gives_the_first_ones_extra,
    "does not say what a load has changed": lambda: mock.patch.object(reading, "PARTLY", ""),
    "forgets errors that it withheld": lambda: mock.patch.object(whole_tensors.Withheld, "release", lambda self: None),
}


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
        for name in args.only or PLANTS:
            programs = [draw(f"{args.seed}:{n}", 2) for n in range(args.programs)]
            tally = run_all(pool, programs, stop_at=1, runner=(run_planted, name), group_timeout=GROUP_TIMEOUT)
            missed += not tally.failures
            found = [f"no. {1 + programs.index(some[0][0])}  {failure}" for failure, some in tally.failed.items()]
            print(f"{name:45}  {found[0] if found else 'NONE'}", file=args.log, flush=True)
    print(f"{missed} missed; {time.monotonic() - start:.0f} s", file=args.log, flush=True)
    return missed


if __name__ == "__main__":
    from tests.mutants import persistence  # under its own name, where the workers find what is sent to them

    sys.exit(min(persistence.main(), 100))

"""A soak over random programs of persistence, on a sharded run and on its twin, with a table of what came of them.

    python -m tests.soak.persistence --programs 1000 --ranks 2 --seed 0 --log persistence.log
    python -m tests.soak.persistence --show 0:17 --ranks 4                               prints a program

Each class of failures is told with its count, its seeds, and a program of it that was shrunk. See `programs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.soak import command
from tests.soak.actions.soak import Tally, run_all
from tests.soak.persistence.play import play
from tests.soak.persistence.programs import Program, draw, smaller
from tests.soak.verdicts import run_each
from tests.support.rig import Pool

GROUP_TIMEOUT = 15.0
"""Seconds behind which a rank that was left waiting fails its program."""


def run(pool: Pool, programs: Sequence[Program], stop_at: int = 0) -> Tally:
    """Runs programs on the pool's ranks; goes on behind failures, up to `stop_at` of them if given."""
    return run_all(pool, programs, stop_at=stop_at, runner=(run_each, play), group_timeout=GROUP_TIMEOUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns how many programs failed."""
    args = command.options(__doc__, ranks=[1, 2, 4], default=2, programs=500, tries=60).parse_args(argv)
    return command.soak(args, lambda seed: draw(seed, args.ranks), (run_each, play), smaller, group_timeout=GROUP_TIMEOUT)

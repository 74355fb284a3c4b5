"""Which random schedules there are, and two soaks over them.

    python -m tests.soak.schedules --examples 3000 --seed 0 --log schedules.log            every schedule must end well
    python -m tests.soak.schedules --mutants --examples 300 --seed 0 --log mutants.log     every planted bug must be found

The second one plants the bugs of `SCHEDULE_BUGS`, one after the other, and tells how many schedules it took to find each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tests.mutants.engine import MUTANTS
from tests.soak.random_schedules import FREEZABLE, NUM_BLOCKS, POLICIES, Action, run_schedule
from tests.support.facts import header
from tests.support.rig import Pool, RankEnv, RemoteError

LEVELS = st.sampled_from(["full", "running", "scatter", "local"])
BRANCHES = st.lists(st.sampled_from([0, 1, 2]), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS)
"""Which branches a rank takes inside each block."""


@st.composite
def micro_batches(draw: st.DrawFn) -> Action:
    """One micro-batch: ranks use different parameters, but run the same units."""
    uses = draw(st.lists(BRANCHES, min_size=1, max_size=2))
    for at in range(NUM_BLOCKS):
        if draw(st.integers(0, 9)) == 0:
            for choice in uses:
                choice[at] = 3  # the output of this block is dropped, on every rank
    forwards = draw(st.integers(1, 2))
    backwards = draw(st.sampled_from(["together", "reversed", "twice"]))
    return ("micro", draw(LEVELS), uses, forwards, backwards)


ACTIONS = st.one_of(
    micro_batches(),
    micro_batches(),
    micro_batches(),
    st.tuples(st.just("zero"), st.sampled_from(["module", "optimizer"]), st.booleans()),
    st.sampled_from([("flush",), ("eval",), ("step",)]),
    st.tuples(st.just("freeze"), st.integers(0, NUM_BLOCKS - 1), st.sampled_from(FREEZABLE), st.booleans()),
)
RESHARD = st.sampled_from([None, True, False])
FACTORS = st.tuples(st.sampled_from(["avg", "sum"]), st.sampled_from([1.0, 0.5]))
SHAPES: dict[int, list[tuple[int, ...]]] = {2: [(2,), (2, 1), (1, 2)], 4: [(4,), (2, 2)]}
"""Meshes, by number of ranks."""


def runs(ranks: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Arguments of `run_schedule`."""
    schedules = st.lists(ACTIONS, min_size=1, max_size=6)
    return st.tuples(st.sampled_from(SHAPES[ranks]), POLICIES, RESHARD, FACTORS, schedules)


SCHEDULE_BUGS = (
    "drops deferred sums",
    "adds deferred sums twice",
    "counts the stash again",
    "forgets the stash",
    "lands twice",
    "reduces twice",
    "does not heed zero grad",
    "lands what was zeroed meanwhile",
    "does not follow requires grad",
    "skips the divide",
    "forgets the scale",
    "lands early",
    "skips the final drain",
    "steps without joining",
    "does not sweep",
    "ignores used flags",
    "uses a stale gather",
)
"""Planted bugs that random schedules find, though each has a check of its own too."""


def run_planted(env: RankEnv, bug: str, *args: Any) -> None:
    """A schedule under a planted bug."""
    with MUTANTS[bug].plant():
        run_schedule(env, *args)


def search(pool: Pool, bug: str | None, examples: int, start: int) -> tuple[int, str]:
    """Runs random schedules until one fails; returns how many ran, and how the last one failed ("": it did not)."""
    count = 0

    @seed(start)
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
    )
    @given(runs(pool.world_size))
    def try_one(args: tuple[Any, ...]) -> None:
        nonlocal count
        count += 1
        pool.run(*([run_schedule] if bug is None else [run_planted, bug]), *args)

    try:
        try_one()
    except RemoteError as error:
        worst = next(one for one in error.outcomes if not one.ok)
        return count, f"{worst.error}: {worst.message}".splitlines()[0]
    return count, ""


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns how many searches ended otherwise than they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--examples", type=int, default=300, help="at most, of each search (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=argparse.FileType("w"), default=sys.stdout)
    args = parser.parse_args(argv)
    wrong = 0
    print(json.dumps({**header(), "seed": args.seed, "at most": args.examples}), file=args.log, flush=True)
    with Pool(2, group_timeout=3.0) as pool2, Pool(4, group_timeout=3.0) as pool4:
        for bug in SCHEDULE_BUGS if args.mutants else (None,):
            for pool in (pool2, pool4):
                ran, found = search(pool, bug, args.examples, args.seed)
                line = {"bug": bug, "ranks": pool.world_size, "schedules": ran, "found": found[:160]}
                print(json.dumps(line), file=args.log, flush=True)
                if bool(found) != (bug is not None):
                    wrong += bug is None or pool is pool4
                elif bug is not None:
                    break  # found on two ranks already
    print(json.dumps({"wrong": wrong}), file=args.log, flush=True)
    return wrong


if __name__ == "__main__":
    from tests.soak import schedules  # under its own name, where the workers find what is sent to them

    sys.exit(min(schedules.main(), 100))

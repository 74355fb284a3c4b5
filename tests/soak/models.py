"""A soak over random models: `python -m tests.soak.models --models 10000 --seed 0 --log models.log`.

The models are those of `tests.soak.random_models`, drawn by hypothesis from the seed. Each job of ten is one line of JSON
in the log; a job that fails is shrunk, and what is left of it is told. The last line sums up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tests.soak.random_models import ON_FOUR, ON_TWO, Subject, run
from tests.soak.test_models import BATCH, LARGE
from tests.support.facts import header
from tests.support.rig import Pool, RemoteError


def main() -> int:
    """Runs random models and logs them; returns how many jobs failed (hypothesis ends with the first on each world)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000, help="two thirds on two ranks, the others on four")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args()
    print(json.dumps({"command": " ".join(sys.argv[1:]), **header()}), file=args.log, flush=True)
    counts: Counter[str] = Counter()
    start = time.monotonic()
    with Pool(2) as pool2, Pool(4) as pool4:
        for pool, subjects, share in ((pool2, ON_TWO, 2), (pool4, ON_FOUR, 1)):
            phases = (Phase.generate, Phase.shrink)
            chosen = settings(
                max_examples=-(-args.models * share // (3 * BATCH)),
                database=None,
                deadline=None,
                phases=phases,
                suppress_health_check=LARGE,
            )

            @seed(args.seed)
            @chosen
            @given(st.lists(subjects, min_size=BATCH, max_size=BATCH))
            def soak(drawn: list[Subject]) -> None:
                began = time.monotonic()
                pool.run(run, drawn, timeout=120.0)
                counts["models"] += len(drawn)
                counts.update(part.kind for one in drawn for part in one.parts)
                line = {"world": pool.world_size, "models": len(drawn), "seconds": round(time.monotonic() - began, 2)}
                print(json.dumps(line), file=args.log, flush=True)

            try:
                soak()
            except RemoteError as error:
                counts["failed"] += 1
                print(json.dumps({"world": pool.world_size, "failed": str(error)}), file=args.log, flush=True)
    content = {"seed": args.seed, **counts, "failed": counts["failed"], "seconds": round(time.monotonic() - start)}
    print(json.dumps(content), file=args.log, flush=True)
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(min(main(), 100))

"""A soak of the device suite: cases x delay modes x seeds, each judged by its numbers and by the race detector.

    python -m tests.soak.device --runs 1000 --seed 0 --log device.log
    python -m tests.soak.device --runs 40 --only "offloaded"
    python -m tests.soak.device --device cuda          every case once, on the CUDA devices of this machine
    python -m tests.soak.device --device cuda --sanitizer          the same, with torch's detector of races

Where there are fewer CUDA devices than ranks, the ranks share them and communicate by gloo.

Exits with 1 if a run failed. The log has a line per run, and what failed in full.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from typing import Any

from tests.soak.device_cases import CASES, check_sanitizer, run_case
from tests.support import device as emulator
from tests.support.facts import header
from tests.support.rig import Pool
from tests.support.sharded import mesh_id


def main(argv: list[str] | None = None) -> int:
    """Runs the soak; returns the exit status."""
    parser = argparse.ArgumentParser(description="random delays on the emulated device")
    parser.add_argument("--runs", type=int, help="how many; default: every case and mesh once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--device", default=emulator.NAME, help="emul, or cuda")
    parser.add_argument("--sanitizer", action="store_true", help="with torch.cuda._sanitizer, on cuda")
    parser.add_argument("--log", help="a file to write to, too")
    options = parser.parse_args(argv)
    pairs = [(name, shape) for name, case in CASES.items() for shape in case.shapes if options.only in name]
    plan = [(*pairs[at % len(pairs)], at) for at in range(options.runs or len(pairs))]
    draw = random.Random(options.seed)
    draw.shuffle(plan)
    log = open(options.log, "w", buffering=1) if options.log else None  # noqa: SIM115  (open until the end)

    def tell(text: str) -> None:
        print(text, flush=True)
        if log is not None:
            print(text, file=log)

    tell(header())
    if options.device == emulator.NAME:
        emulator.build()
    pools: dict[int, Any] = {size: Pool(size, device=options.device, group_timeout=60.0) for size in (2, 4)}
    ends: Counter[str] = Counter()
    try:
        if options.sanitizer:
            pools[2].run(check_sanitizer)
        for name, shape, at in plan:
            mode, seed = draw.choice(list(emulator.MODES)), draw.randrange(10**6)
            if options.device != emulator.NAME:
                mode = "sanitizer" if options.sanitizer else "none"
            outcomes = pools[math.prod(shape)].run_raw(run_case, name, shape, mode, seed, timeout=180.0)
            bad = [one for one in outcomes if not one.ok]
            end = "ok" if not bad else f"{bad[0].error}: {bad[0].message}"
            ends["ok" if not bad else "failed"] += 1
            tell(f"{at:5d} {name:50s} {mesh_id(shape):6s} {mode:13s} seed {seed:6d}  {end}")
    finally:
        for pool in pools.values():
            pool.close()
    tell(f"{sum(ends.values())} runs: {ends['ok']} right and without races, {ends['failed']} failed")
    return int(ends["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())

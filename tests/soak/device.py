"""A soak of the device suite: cases x conditions x seeds, each judged by its numbers and by the race detector.

    python -m tests.soak.device --runs 1000 --seed 0 --log device.log
    python -m tests.soak.device --runs 40 --only "offloaded"
    python -m tests.soak.device --system both --log device_fsdp2.log          hsdp and FSDP2, with the same delays
    python -m tests.soak.device --device cuda          every case once, on the CUDA devices of this machine
    python -m tests.soak.device --device cuda --sanitizer          the same, with torch's detector of races

Where there are fewer CUDA devices than ranks, the ranks share them and communicate by gloo, or, with NCCL 2.30 or newer
and NCCL_MULTI_RANK_GPU_ENABLE=1, by NCCL.

Exits with 1 if a run failed; with both systems, if one of hsdp did. The log has a line per run, and what failed in full.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from typing import Any

from tests.soak.device_cases import CASES, Conditions, Shape, check_sanitizer, run_case
from tests.soak.device_fsdp2 import WHY_NOT, run_case_of_fsdp2
from tests.support import device as emulator
from tests.support.facts import header
from tests.support.rig import Pool, RemoteError
from tests.support.sharded import mesh_id


def main(argv: list[str] | None = None) -> int:
    """Runs the soak; returns the exit status."""
    parser = argparse.ArgumentParser(description="random delays on the emulated device")
    parser.add_argument("--runs", type=int, help="how many; default: every case and mesh once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--device", default=emulator.NAME, help="emul, or cuda")
    parser.add_argument("--sanitizer", action="store_true", help="with torch.cuda._sanitizer, on cuda")
    parser.add_argument("--system", choices=["hsdp", "fsdp2", "both"], default="hsdp", help="what runs the cases")
    parser.add_argument("--log", help="a file to write to, too")
    options = parser.parse_args(argv)
    systems = ["hsdp", "fsdp2"] if options.system == "both" else [options.system]
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
    # Each system has processes of its own: nothing that one leaves behind shows in the other.
    pools: dict[tuple[str, int], Any] = {
        (system, size): Pool(size, device=options.device, group_timeout=60.0) for system in systems for size in (2, 4)
    }
    ends: Counter[tuple[str, str]] = Counter()
    failures: list[str] = []
    try:
        if options.sanitizer:
            pools[systems[0], 2].run(check_sanitizer)
        for name, shape, at in plan:
            mode, seed = draw.choice(list(emulator.MODES)), draw.randrange(10**6)
            # Stricter than CUDA, and than FSDP2 is made for: hsdp alone.
            strict, away = (draw.random() < 0.5, draw.random() < 0.5) if systems == ["hsdp"] else (False, False)
            under = Conditions(mode, seed, strict, away)
            if options.device != emulator.NAME:
                under = Conditions("sanitizer" if options.sanitizer else "none")
            line = f"{at:5d} {name:50s} {mesh_id(shape):6s} {under}"
            for system in systems:
                end, told = _run(pools[system, math.prod(shape)], system, name, shape, under)
                ends[system, end] += 1
                if len(systems) == 1:
                    line += f"  {told}"
                    continue
                line += f"  {system} {told.splitlines()[0][:100]}"
                failures += [f"\n{system}, {name}, {mesh_id(shape)}: {told}"] * (end == "failed")
            tell(line)
    finally:
        for pool in pools.values():
            pool.close()
    for system in systems:
        of = {end: ends[system, end] for end in ("ok", "failed", "not run")}
        not_run = f", {of['not run']} that it cannot express" if of["not run"] else ""
        name = f"{system}: " if len(systems) > 1 else ""
        tell(f"{name}{sum(of.values())} runs: {of['ok']} right and without races, {of['failed']} failed{not_run}")
    for failure in failures:
        tell(failure)
    return int(ends[systems[0], "failed"] > 0)


def _run(pool: Pool, system: str, name: str, shape: Shape, under: Conditions) -> tuple[str, str]:
    """Runs a case with hsdp or FSDP2; returns "ok", "failed" or "not run", and what is to be told."""
    if system == "fsdp2" and name in WHY_NOT:
        return "not run", f"not run: {WHY_NOT[name]}"
    body = run_case if system == "hsdp" else run_case_of_fsdp2
    try:
        outcomes = pool.run_raw(body, name, shape, under, timeout=180.0)
    except RemoteError as error:  # it hung, or left the ranks out of step
        outcomes = [one for one in error.outcomes if not one.ok]
    bad = [one for one in outcomes if not one.ok]
    if not bad:
        return "ok", "ok"
    if system == "fsdp2":
        pool.close()  # what a failure left in the processes is not to show in another case
    return "failed", f"{bad[0].error}: {bad[0].message}"


if __name__ == "__main__":
    sys.exit(main())

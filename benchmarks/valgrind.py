"""Instruction counts: a function runs in a child process under callgrind, with a meter that counts.

A busy machine changes times, but hardly the number of instructions. The Python side uses the client requests that
PyTorch carries. The meter cannot read the counter while the child runs, so the child runs twice, alike: the first time
to count, the second time to be told the counts.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Meter = Callable[[Callable[[], object], int], float]
TIMEOUT = 3600.0


def count_in_child(function: Callable[..., T], *args: Any) -> T:
    """Returns `function(*args, meter)`, where `meter(run, times)` gives the instructions of one `run()`.

    Args:
        function: of a module, deterministic, with a picklable result; the meter may not decide what it runs.

    Raises:
        RuntimeError: valgrind or the function failed.
    """
    with tempfile.TemporaryDirectory(prefix="hsdp-bench-") as directory:
        Path(directory, "task").write_bytes(pickle.dumps((function, args)))
        python = [sys.executable, "-W", "ignore", "-m", "benchmarks.valgrind", directory]
        callgrind = ["valgrind", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={directory}/out"]
        _run([*callgrind, *python, "count"])
        dumps = sorted(Path(directory).glob("out.*"), key=lambda path: int(path.suffix[1:]))
        Path(directory, "counts").write_bytes(pickle.dumps([_total(path) for path in dumps]))
        _run([*python, "tell"])
        result: T = pickle.loads(Path(directory, "result").read_bytes())
        return result


def _run(command: list[str]) -> None:
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


def _total(path: Path) -> int:
    found = re.search(r"^(?:totals|summary): (\d+)", path.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{path.name} of callgrind has no total")
    return int(found[1])


def _count(run: Callable[[], object], times: int) -> float:
    torch._C._valgrind_toggle()
    for _ in range(times):
        run()
    torch._C._valgrind_toggle_and_dump_stats()
    return 1.0


def main(directory: str, role: str) -> None:
    """The child."""
    function, args = pickle.loads(Path(directory, "task").read_bytes())
    if role == "count":
        function(*args, _count)
        return
    counts = iter(pickle.loads(Path(directory, "counts").read_bytes()))
    Path(directory, "result").write_bytes(pickle.dumps(function(*args, lambda run, times: next(counts) / times)))


if __name__ == "__main__":
    main(*sys.argv[1:])

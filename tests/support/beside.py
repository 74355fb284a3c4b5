"""Long commands that run beside the tests, whose ranks leave a core idle for a fifth of the time.

A command begins when pytest has collected a test that waits for it, and gives way to the others' processes meanwhile.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_NICENESS = 10
"""Of the least, ranks may get no time while four others compute, and would be taken for lost."""

_running: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], IO[bytes]]] = {}


def begin(command: Sequence[str]) -> None:
    """Starts `python -m` with these arguments, unless it runs."""
    if tuple(command) not in _running:
        nice = ["nice", "-n", str(_NICENESS)] if shutil.which("nice") else []
        told = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the command runs)
        where = Path(__file__).parents[2]
        python = [*nice, sys.executable, "-m", *command]
        _running[tuple(command)] = subprocess.Popen(python, cwd=where, stdout=told, stderr=told), told


def end(command: Sequence[str], timeout: float) -> tuple[int, str]:
    """Waits for a command, which begins now if it has not; its exit status, and what it printed.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds from now.
    """
    begin(command)
    process, told = _running[tuple(command)]
    status = process.wait(timeout)
    del _running[tuple(command)]
    with told:
        told.seek(0)
        return status, told.read().decode()


def stop_all() -> None:
    """Stops what nobody waits for any more."""
    while _running:
        _, (process, told) = _running.popitem()
        process.terminate()
        process.wait()
        told.close()

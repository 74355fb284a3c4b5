"""Two machines, of which one is lost for good: the other goes on alone, from the last checkpoint, by torchrun's own doing.

    python -m tests.soak.checkpoint_elastic --log benchmarks/results/lost_machine.txt

A machine is an agent (torchrun) with its worker. When the first checkpoint is there, one agent and its worker get SIGKILL.
The remaining agent must end well, and its loss curve be that of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checkpoint.test_train_lm import ROOT, SIZES, curve
from tests.support.facts import header, in_words

STEPS = 300
JOB = f"-m hsdp.examples.train_lm {SIZES} --steps {STEPS} --corpus-bytes 200000 --log-every 1 --no-sample --device cpu"
ELASTIC = "-m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d"
QUICK = "--rdzv-conf last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"  # seconds; else half a minute
PORT = 29_611


def start(command: str, log: Path) -> subprocess.Popen[str]:
    """A Python process."""
    with log.open("w") as out:
        return subprocess.Popen([sys.executable, *command.split()], cwd=ROOT, stdout=out, stderr=out, text=True)


def elastic_run(directory: Path) -> list[str]:
    """Loses a machine; returns the lines of the log.

    Raises:
        AssertionError: the other did not go on, or not as if nothing had happened.
    """
    checkpoints, out = directory / "checkpoints", directory / "out"
    command = f"{ELASTIC} {QUICK} --rdzv-endpoint localhost:{PORT} --rdzv-id elastic {JOB} --out {out}"
    command += f" --checkpoint-dir {checkpoints} --save-every 20"
    stays = start(command, directory / "stays.txt")  # first: it holds the store
    time.sleep(2)
    leaves = start(command, directory / "leaves.txt")
    try:
        deadline = time.monotonic() + 120
        while not list(checkpoints.glob("step-*")):
            assert time.monotonic() < deadline, "there is no checkpoint"
            time.sleep(0.05)
        workers = subprocess.run(["pgrep", "-P", str(leaves.pid)], capture_output=True, text=True, check=True).stdout
        for process in (leaves.pid, *map(int, workers.split())):
            os.kill(process, signal.SIGKILL)
        killed = time.monotonic()
        code = stays.wait(120)
        ended = time.monotonic()
    finally:
        for agent in (stays, leaves):
            agent.terminate()  # an agent that lives ends its worker
    text = (directory / "stays.txt").read_text()
    assert code == 0, text[-3000:]
    lines = [line for line in text.splitlines() if "parameters" in line or line.startswith("going on from step")]
    assert len(lines) == 3 and "on 2 x cpu" in lines[0] and "on 1 x cpu" in lines[1], lines
    alone = start(f"{JOB} --out {directory / 'alone'}", directory / "alone.txt")
    assert alone.wait(300) == 0
    found, expected = curve(out), curve(directory / "alone")
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line, other in zip(found, expected, strict=True):
        assert line["train_loss"] == pytest.approx(other["train_loss"], rel=2e-3)  # float32, sums in another order
    most = max(abs(a["train_loss"] / b["train_loss"] - 1) for a, b in zip(found, expected, strict=True))
    lines = [line.split(", the last")[0] for line in lines]
    lines.append(f"the run ended well {ended - killed:.0f} s after the kill")
    return [*lines, f"{STEPS} losses are those of the undisturbed run; largest relative difference {most:.1e} (float32)"]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="write to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="hsdp-elastic-") as directory:
        lines = elastic_run(Path(directory))
    text = "\n".join(["python -m tests.soak.checkpoint_elastic", in_words(header()), *lines]) + "\n"
    print(text)
    if options.log is not None:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text(text)


if __name__ == "__main__":
    main()

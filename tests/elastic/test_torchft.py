"""Replicas over torchft itself: some are killed, the others go on, and all end with the same bits as a twin's steps."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.soak.elastic import soak

pytest.importorskip("torchft", reason="torchft is not installed: pip install 'hsdp[elastic]'")

ROOT = Path(__file__).parents[2]
SIZES = "--batch 4 --seq-len 16 --width 16 --layers 2 --heads 2 --hidden 24 --corpus-bytes 200000"
FLAGS = f"--steps 100000 {SIZES} --log-every 1 --no-sample --device cpu --timeout 100"


def test_two_replicas_survive_kills(tmp_path: Path) -> None:
    log = soak(tmp_path, replicas=2, kills=2, seed=0, accumulate=2, pause=0.02)
    # A rank that is to die while it is healed, or behind that, was killed once before.
    assert any(re.match(r"[23] kills in .* ended by themselves: none", line) for line in log)


class TrainLM:
    """A replica that runs the main job under torchrun."""

    def __init__(self, name: str, folder: Path, lighthouse: str) -> None:
        self.metrics = folder / f"replica_{name}" / "metrics.jsonl"
        self.metrics.unlink(missing_ok=True)
        self.log = folder / f"{name}.log"
        launch = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 0 --shutdown-timeout 3"
        flags = f"-m hsdp.examples.train_lm --elastic {name} --out {folder} {FLAGS}"
        command = [sys.executable, *launch.split(), *flags.split()]
        told = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=told, stdout=log, stderr=log)

    def ranks(self) -> list[int]:
        """Process ids of its ranks."""
        pid = self.process.pid
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def losses(self) -> dict[int, tuple[float, float]]:
        """By step: the loss on held-out text, which all replicas measure on the same, and the norm of gradients."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        content: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
        return {line["step"]: (line["held_out_loss"], line["grad_norm"]) for line in content}

    def end(self) -> None:
        """Kills what is left."""
        ranks = self.ranks()
        self.process.kill()
        self.process.wait()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


def until(condition: Callable[[], object], *replicas: TrainLM) -> None:
    """Waits for a condition, as long as the replicas run."""
    deadline = time.monotonic() + 120
    while not condition():
        for replica in replicas:
            assert replica.process.poll() is None, replica.log.read_text()[-4000:]
        assert time.monotonic() < deadline, "\n".join(replica.log.read_text()[-2000:] for replica in replicas)
        time.sleep(0.05)


def test_the_main_jobs_replica_joins_again_and_its_losses_are_those_of_the_others(tmp_path: Path) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30000, heartbeat_timeout_ms=1500)
    started = [TrainLM(name, tmp_path, lighthouse.address()) for name in ("a", "b")]
    a, b = started
    try:
        until(lambda: len(a.losses().keys() & b.losses().keys()) >= 5, a, b)
        os.kill(b.ranks()[1], signal.SIGKILL)
        until(lambda: b.process.poll() is not None, a)
        lost_at = max(a.losses())
        until(lambda: max(a.losses()) > lost_at + 5, a)
        b = TrainLM("b", tmp_path, lighthouse.address())
        started.append(b)
        until(lambda: len(b.losses()) >= 8, a, b)
        until(lambda: max(a.losses()) >= max(b.losses()), a, b)
    finally:
        for replica in started:
            replica.end()
        lighthouse.shutdown()
    ours, theirs = b.losses(), a.losses()
    assert min(ours) > lost_at, "it joined where the other was, not at the beginning"
    shared = ours.keys() & theirs.keys()
    assert len(shared) >= 8
    assert {step: ours[step] for step in shared} == {step: theirs[step] for step in shared}
    assert min(loss for loss, _ in ours.values()) < theirs[min(theirs)][0], "it learns"
    text = a.log.read_text()
    assert "1 replicas take part" in text and "2 replicas take part" in text

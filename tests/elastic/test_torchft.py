"""Replicas over torchft itself: some are killed, the others go on, and all end with the same bits as a twin's steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.elastic import soak

pytest.importorskip("torchft", reason="torchft is not installed: pip install 'hsdp[elastic]'")


def test_two_replicas_survive_kills(tmp_path: Path) -> None:
    log = soak(tmp_path, replicas=2, kills=2, seed=0, accumulate=2, pause=0.02)
    assert any(line.startswith("2 kills") for line in log)

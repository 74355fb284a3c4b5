"""Lightning and accelerate treat hsdp's models as FSDP2's: the same losses and parameters. With the extra `ecosystem`."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.support.torchrun import torchrun

PACKAGE = {"trainer": "lightning", "fabric": "lightning", "accelerate": "accelerate"}


def _run(run: str, library: str) -> dict[str, Any]:
    printed = torchrun("tests.api.ecosystem_run", run, library)
    line = next(line for line in printed.splitlines() if line.startswith("{"))
    told: dict[str, Any] = json.loads(line)
    return told


@pytest.mark.parametrize("run", PACKAGE)
def test_it_trains_as_with_fsdp2(run: str) -> None:
    if importlib.util.find_spec(PACKAGE[run]) is None:
        pytest.skip(f"{PACKAGE[run]} is not installed: pip install 'hsdp[ecosystem]'")
    ours, theirs = _run(run, "hsdp"), _run(run, "torch.distributed.fsdp")
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-11)
    assert len(set(ours["losses"])) == len(ours["losses"]) >= 6
    assert ours["params"] == pytest.approx(theirs["params"], rel=1e-11)

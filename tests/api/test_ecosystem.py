"""Lightning and accelerate treat hsdp's models as FSDP2's: losses and parameters of both and of one process are the same.

With the extra `ecosystem`.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import make_case
from tests.support.torchrun import torchrun

PACKAGE = {"trainer": "lightning", "fabric": "lightning", "accelerate": "accelerate"}


def _run(run: str, library: str) -> dict[str, Any]:
    printed = torchrun("tests.api.ecosystem_run", run, library)
    line = next(line for line in printed.splitlines() if line.startswith("{"))
    content: dict[str, Any] = json.loads(line)
    return content


def _twin(run: str, steps: int = 3, micro_batches: int = 2, ranks: int = 2) -> dict[str, Any]:
    """The losses of rank 0 and the parameters that a plain loop comes to."""
    case = make_case("mlp")
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    divided = 1 if run == "fabric" else micro_batches  # Fabric leaves dividing to the user
    losses = []
    for step in [*range(steps)] * (2 if run == "trainer" else 1):  # which goes on from its checkpoint for another epoch
        for rank in range(ranks):
            for micro in range(micro_batches):
                loss = case.loss(model, case.batch(step, rank, micro))
                (loss / divided / ranks).backward()
                losses += [float(loss.detach())] if rank == 0 else []
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "params": {name: float(p.detach().square().sum()) for name, p in model.named_parameters()}}


@pytest.mark.parametrize("run", PACKAGE)
def test_it_trains_as_with_fsdp2(run: str) -> None:
    if importlib.util.find_spec(PACKAGE[run]) is None:
        pytest.skip(f"{PACKAGE[run]} is not installed: pip install 'hsdp[ecosystem]'")
    ours, theirs = _run(run, "hsdp"), _run(run, "torch.distributed.fsdp")
    twin = _twin(run)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-11)
    assert ours["losses"] == pytest.approx(twin["losses"], rel=1e-9)
    assert len(set(ours["losses"])) == len(ours["losses"]) >= 6
    assert ours["params"] == pytest.approx(theirs["params"], rel=1e-11)
    assert {name.removeprefix("model."): value for name, value in ours["params"].items()} == pytest.approx(twin["params"])

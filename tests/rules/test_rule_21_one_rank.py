"""Rule 21: what is called on one rank only, while the others train on, is told by its name, at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import hsdp
from tests.support.deep import Deep, loss_of, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import shard

Call = Callable[[Any, torch.optim.Optimizer, str], object]


def _look(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(hsdp.full_params(model))


def _evaluate(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    with torch.no_grad():
        loss_of(model, 0, 0)


CALLS: dict[str, Call] = {
    "full_params": _look,
    "gathered_apply": lambda model, optimizer, folder: hsdp.gathered_apply(model, lambda module: None),
    "check_replicas": lambda model, optimizer, folder: hsdp.check_replicas(model, optimizer),
    "clip_grad_norm_": lambda model, optimizer, folder: hsdp.clip_grad_norm_(model, 1.0),
    "evaluation": _evaluate,
}

WORDS = {"evaluation": "rank(s) [0]: all-gather of unit 'Deep (root)', in "}
"""What the error says of the call, but for its name."""


def calls_on_one_rank(env: RankEnv, name: str, shape: tuple[int, ...], warm: int, folder: str) -> None:
    model = shard(seeded(Deep), env.mesh(shape))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for k in range(warm):
        optimizer.zero_grad()
        step(model, env.rank, k)
        optimizer.step()
    if env.rank == 0:
        CALLS[name](model, optimizer, folder)
    for k in range(2):
        step(model, env.rank, k)


@pytest.mark.parametrize("warm", [1, 4], ids=["early", "in a steady loop"])
@pytest.mark.parametrize("name", CALLS)
def test_rule_21_a_call_on_one_rank_is_told_by_its_name(pool2: Pool, tmp_path: Any, name: str, warm: int) -> None:
    for one in pool2.run_raw(calls_on_one_rank, name, (2,), warm, str(tmp_path), group_timeout=20.0, timeout=60.0):
        assert one.error == "DivergenceError", one
        assert one.seconds < 15.0, "it waited for the time-out"
        assert WORDS.get(name, name) in one.message
        assert "all-gather of unit 'Deep (root)'" in one.message
        assert "called on some ranks only" in one.message
        assert "variant" not in one.message
        assert "set-up" not in one.message

"""Rule 21: what is called on one rank only, while the others train on, is told by its name, at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

import hsdp
from hsdp import checkpoint
from hsdp.checkpoint import full
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
    "full_state_dict": lambda model, optimizer, folder: checkpoint.full_state_dict(model),
    "iter_full_state_dict": lambda model, optimizer, folder: list(checkpoint.iter_full_state_dict(model)),
    "full_optimizer_state_dict": lambda model, optimizer, folder: checkpoint.full_optimizer_state_dict(model, optimizer),
    "load_full_state_dict": lambda model, optimizer, folder: checkpoint.load_full_state_dict(model, {}),
    "load_full_optimizer_state_dict": lambda model, optimizer, folder: checkpoint.load_full_optimizer_state_dict(
        model, optimizer, {}
    ),
    "checkpoint.save": lambda model, optimizer, folder: checkpoint.save(folder, model, optimizer, step=1),
    "checkpoint.load": lambda model, optimizer, folder: checkpoint.load(folder, model, optimizer),
    "checkpoint.resume": lambda model, optimizer, folder: checkpoint.resume(folder, model, optimizer),
    "save_safetensors": lambda model, optimizer, folder: checkpoint.save_safetensors(folder, model),
    "load_safetensors": lambda model, optimizer, folder: checkpoint.load_safetensors(folder, model),
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


def _calls_alone(env: RankEnv, folder: str) -> None:
    model = shard(seeded(Deep), env.mesh((2,)))
    if env.rank == 0:
        checkpoint.save(folder, model, step=1)


def test_rule_21_ranks_that_never_come_are_told_with_the_call(pool2: Pool, tmp_path: Any) -> None:
    first, second = pool2.run_raw(_calls_alone, str(tmp_path), group_timeout=4.0, timeout=60.0)
    assert second.error is None
    assert first.error == "DivergenceError", first
    assert "about to start checkpoint.save, and rank(s) [1] did not come" in first.message


def _saves_what_is_left(env: RankEnv, folder: str, fails: str) -> None:
    """One rank fails in its backward, or comes to another unit: in the end all of them save."""
    model = shard(seeded(Deep), env.mesh((2,)))
    for k in range(4):
        step(model, env.rank, k)
    with pytest.raises((ArithmeticError, hsdp.DivergenceError)):
        if env.rank == 0 and fails == "a backward":
            model.last.register_full_backward_hook(_fail)
        elif env.rank == 0:
            model.blocks[1](torch.ones(2, 6).double())
        step(model, env.rank, 5)
    checkpoint.save(folder, model, step=1)
    checkpoint.load(folder, model)
    raise RuntimeError("saved and loaded")  # has the pool make new groups: these are of no use any more


def _fail(*args: Any) -> None:
    raise ArithmeticError("of one rank")


@pytest.mark.parametrize("fails", ["a backward", "an order"])
def test_rule_21_ranks_that_have_parted_may_still_save(pool2: Pool, tmp_path: Any, fails: str) -> None:
    for one in pool2.run_raw(_saves_what_is_left, str(tmp_path), fails, timeout=50.0):
        assert one.message == "saved and loaded", one


def _dies_in_a_gather(env: RankEnv) -> None:
    model = shard(seeded(Deep), env.mesh((2,)))
    if env.rank == 1:
        with mock.patch.object(full, "whole_value", lambda *args: os._exit(7)):
            checkpoint.full_state_dict(model)
    checkpoint.full_state_dict(model)


def test_rule_21_errors_of_the_backend_in_a_gather_are_named(pool2: Pool) -> None:
    first, _ = pool2.run_raw(_dies_in_a_gather, timeout=50.0)
    assert first.error == "CheckpointError", first
    assert "tensors did not go from rank to rank" in first.message
    assert "Another rank may have stopped" in first.message

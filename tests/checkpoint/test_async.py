"""Saving in the background: what is written is what was there when `save` returned; failures come out; progress is told."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError, SaveHandle
from hsdp.checkpoint.lock import LOCK
from hsdp.checkpoint.staging import staging_of
from hsdp.params.dtensors import full_tensor
from tests.checkpoint import models as cm
from tests.support.rig import Pool
from tests.support.worker import RankEnv


class Gate:
    """A progress callback that holds the writing up until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.told: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.told.append((done, total))
        self.reached.set()
        assert self.opened.wait(30), "nobody opened the gate"


def train_while_saving(env: RankEnv, directory: str) -> list[Any]:
    model = cm.build(env.mesh((1, 2)))
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, range(2), env.rank, 2)
    state = cm.whole_state(model, optimizer)
    gate = Gate()
    handle = checkpoint.save(directory, model, optimizer, step=2, async_=True, progress=gate)
    assert gate.reached.wait(30)
    cm.train(model, optimizer, range(2, 6), env.rank, 2)  # collectives of training, beside those of the save
    assert not handle.done()
    assert checkpoint.latest(directory) is None
    with pytest.raises(TimeoutError, match="is not done after 0 s"):
        handle.wait(0)
    gate.opened.set()
    assert handle.wait() == Path(directory, "step-000002")
    assert handle.done()
    assert all(total == gate.told[-1][1] for _, total in gate.told)
    assert gate.told[0][0] == 0
    assert gate.told[-1][0] == gate.told[-1][1] > 1000
    checkpoint.load(directory, model, optimizer)
    cm.assert_equal(cm.whole_state(model, optimizer), state)
    return gate.told


def test_training_goes_on_while_the_staged_copy_is_written(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(train_while_saving, str(tmp_path))


def test_the_next_save_and_a_load_wait_for_the_one_under_way(tmp_path: Path) -> None:
    model = cm.build(None)
    gate = Gate()
    first = checkpoint.save(tmp_path, model, step=1, async_=True, progress=gate)
    threading.Timer(0.2, gate.opened.set).start()
    second = checkpoint.save(tmp_path, model, step=2, async_=True)
    assert first.done()
    assert checkpoint.load(tmp_path, model).step == 2
    assert second.done()


def _exchange_while_saving(env: RankEnv, directory: str, call: str) -> None:
    model = cm.build(env.mesh((1, 2)))
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, range(1), env.rank, 2)
    state, of_optimizer = checkpoint.full_state_dict(model), checkpoint.full_optimizer_state_dict(model, optimizer)
    checkpoint.save_safetensors(Path(directory, "weights"), model)
    gate = Gate()
    handle = checkpoint.save(directory, model, optimizer, step=1, async_=True, progress=gate)
    assert gate.reached.wait(30)
    waits = handle._finished.wait

    def opened(timeout: float | None = None) -> bool:
        gate.opened.set()  # who waits for the save ends it; nobody else does
        return waits(timeout)

    with mock.patch.object(handle._finished, "wait", opened):
        _call(call, directory, model, optimizer, state, of_optimizer)
    assert handle.done(), f"{call} ran beside a save, whose ranks talk over the same group"
    assert handle.wait() == Path(directory, "step-000001")


def _call(
    call: str, directory: str, model: nn.Module, optimizer: torch.optim.Optimizer, state: Any, of_optimizer: Any
) -> None:
    {
        "load_full_state_dict": lambda: checkpoint.load_full_state_dict(model, state),
        "load_full_optimizer_state_dict": lambda: checkpoint.load_full_optimizer_state_dict(model, optimizer, of_optimizer),
        "save_safetensors": lambda: checkpoint.save_safetensors(Path(directory, "more"), model),
        "load_safetensors": lambda: checkpoint.load_safetensors(Path(directory, "weights"), model),
    }[call]()


@pytest.mark.parametrize(
    "call", ["load_full_state_dict", "load_full_optimizer_state_dict", "save_safetensors", "load_safetensors"]
)
def test_other_calls_wait_for_a_save_in_the_background(pool2: Pool, tmp_path: Path, call: str) -> None:
    pool2.run(_exchange_while_saving, str(tmp_path), call)


def test_a_save_for_which_there_is_no_thread_does_not_hold_up_the_next(tmp_path: Path) -> None:
    model = cm.build(None)
    none = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with none, pytest.raises(RuntimeError, match="new thread"):
        checkpoint.save(tmp_path, model, step=1, async_=True)
    with pytest.raises(RuntimeError, match="new thread"):
        checkpoint.save(tmp_path, model, step=2)  # as behind any save that failed in the background
    assert checkpoint.save(tmp_path, model, step=3).done()


def test_a_failure_in_the_background_comes_out_of_wait_or_of_the_next_save(tmp_path: Path) -> None:
    model = cm.build(None)

    def fail(done: int, total: int) -> None:
        raise OSError("disk full")

    handle = checkpoint.save(tmp_path, model, step=1, async_=True, progress=fail)
    with pytest.raises(CheckpointError, match=r"saving step 1 to .*: progress= raised OSError: disk full"):
        handle.wait()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    checkpoint.save(tmp_path, model, step=2, async_=True, progress=fail)
    with pytest.raises(CheckpointError, match=r"saving step 2 to .*disk full"):
        checkpoint.save(tmp_path, model, step=3)
    checkpoint.save(tmp_path, model, step=4)  # told once
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "step-000004"]


def fail_on_one(env: RankEnv, directory: str) -> str:
    model = cm.build(env.mesh((1, 2)))

    def fail(done: int, total: int) -> None:
        if env.rank == 1:
            raise OSError("disk full")

    handle = checkpoint.save(directory, model, step=1, async_=True, progress=fail)
    with pytest.raises(CheckpointError) as caught:
        handle.wait()
    return str(caught.value)


def test_a_failure_on_one_rank_is_told_on_all(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(fail_on_one, str(tmp_path))
    assert results[0] == results[1]
    assert "on rank 1: progress= raised OSError: disk full" in results[0]
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def fail_and_wait_on_one(env: RankEnv, directory: str, then: str) -> str:
    model = cm.build(env.mesh((1, 2)))

    def fail(done: int, total: int) -> None:
        raise OSError("disk full")

    handle = checkpoint.save(directory, model, step=1, async_=True, progress=fail)
    if env.rank == 0:
        with pytest.raises(CheckpointError, match="disk full"):
            handle.wait()
    with pytest.raises(CheckpointError) as caught:
        if then == "save":
            checkpoint.save(directory, model, step=2)
        else:
            checkpoint.resume(directory, model)
    full_tensor(next(model.parameters()))  # all go on together
    checkpoint.save(directory, model, step=3)
    return str(caught.value)


@pytest.mark.parametrize("then", ["save", "resume"])
def test_a_failure_that_was_waited_for_on_one_rank_is_told_on_all_by_the_next_call(
    pool2: Pool, tmp_path: Path, then: str
) -> None:
    """Only the others raised it: the rank that had been told went on into the call, and waited for them there."""
    results = pool2.run(fail_and_wait_on_one, str(tmp_path), then, group_timeout=10.0)
    assert "on rank 1: saving step 1 to" in results[0]
    assert results[1].startswith("saving step 1 to")
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "step-000003"]


def stage_only_what_is_written(env: RankEnv, directory: str) -> int:
    model = nn.Linear(100, 100)  # 40 kB, the same on both ranks: rank 0 writes
    seen: list[int] = []
    checkpoint.save(directory, model, step=1, async_=True, progress=lambda done, total: seen.append(total)).wait()
    return max(seen, default=0)


def test_a_rank_stages_only_what_it_writes(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(stage_only_what_is_written, str(tmp_path)) == [100 * 100 * 4 + 100 * 4, 0]


def test_progress_of_loading_and_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = cm.build(None)
    results: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, logger="hsdp.checkpoint"):
        handle: SaveHandle = checkpoint.save(tmp_path, model, step=1)
    assert f"saved {handle.path} in" in caplog.text
    checkpoint.load(tmp_path, model, progress=lambda done, total: results.append((done, total)))
    assert [done for done, _ in results] == sorted(done for done, _ in results)
    assert results[0][0] == 0
    assert results[-1][0] == results[-1][1]


def test_the_staged_copy_is_a_copy(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    gate = Gate()
    before = model.weight.detach().clone()
    handle = checkpoint.save(tmp_path, model, step=1, async_=True, progress=gate)
    with torch.no_grad():
        model.weight.zero_()
    gate.opened.set()
    handle.wait()
    checkpoint.load(tmp_path, model)
    assert torch.equal(model.weight, before)


def test_the_next_save_stages_in_the_same_memory(tmp_path: Path) -> None:
    model = cm.build(None)
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, [0])
    seen = []
    for step in (1, 2):
        checkpoint.save(tmp_path, model, optimizer, step=step, async_=True).wait()
        seen.append((staging_of(model)._block.data_ptr(), staging_of(model)._block.numel()))
        cm.train(model, optimizer, [step])
    assert seen[0] == seen[1]
    state = [*model.state_dict().values(), *(one for held in optimizer.state.values() for one in held.values())]
    assert seen[0][1] < 1.3 * sum(one.nbytes for one in state) + 64 * len(state)  # each is padded to 64 bytes


def test_a_failed_background_save_leaves_its_memory_to_the_next(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    def fail(done: int, total: int) -> None:
        raise OSError("gone")

    with pytest.raises(CheckpointError, match="gone"):
        checkpoint.save(tmp_path, model, step=1, async_=True, progress=fail).wait()
    weight = model.weight.detach().clone()
    handle = checkpoint.save(tmp_path, model, step=2, async_=True)
    with torch.no_grad():
        model.weight.zero_()
    handle.wait()
    checkpoint.load(tmp_path, model)
    assert torch.equal(model.weight, weight)


def test_ctrl_c_in_a_save_of_the_main_thread_stays_what_it_is(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, nn.Linear(4, 4), step=1, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert checkpoint.save(tmp_path, nn.Linear(4, 4), step=2).done()

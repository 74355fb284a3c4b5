"""The main job survives: stopped, killed, on fewer ranks or more, its loss curve is that of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hsdp
from hsdp.checkpoint.lock import LOCK, unlock
from hsdp.examples import train_lm
from hsdp.examples.launch import EXIT_INTERRUPTED, JobError
from hsdp.examples.options import parse_options
from hsdp.examples.rendezvous import meet
from hsdp.examples.report import Report
from tests.support.rig import Pool
from tests.support.sharded import pool_for
from tests.support.share import FULL
from tests.support.worker import RankEnv

ROOT = Path(__file__).parents[2]
STEPS = 24
SIZES = f"--steps {STEPS} --batch 8 --seq-len 16 --width 16 --layers 2 --heads 2 --hidden 24 --warmup 4"
FLAGS = f"{SIZES} --corpus-bytes 200000 --log-every 1 --save-every 4 --no-sample --device cpu"
NOT_COMPARED = {"tokens_per_second", "peak_memory_bytes"}


class StopAfter:
    """A signal that comes in a rank's `number`-th step; the loop asks once in each."""

    def __init__(self, number: int | None) -> None:
        self._left = number

    @property
    def requested(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left <= 0


def train(env: RankEnv, out: str, flags: str, stop_after: int | None = None) -> int:
    """The job as its processes run it; returns the exit code."""
    options = parse_options([*FLAGS.split(), "--out", out, *flags.split()], env.world_size)
    stop: Any = StopAfter(stop_after)
    try:
        return train_lm.run(options, torch.device("cpu"), stop)
    finally:
        if options.checkpoint_dir is not None:
            unlock(Path(options.checkpoint_dir))  # as the end of the process would


def curve(out: Path) -> list[dict[str, float]]:
    """What the run wrote about each step, but for time and memory."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in NOT_COMPARED} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(pool2: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The curve of a run on two ranks that nothing happens to, without checkpoints."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert pool2.run(train, str(out), "") == [0, 0]
    assert sorted(path.name for path in out.iterdir()) == ["loss.svg", "metrics.jsonl", "summary.json"]
    found = curve(out)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert found[-1]["train_loss"] < found[0]["train_loss"] - 0.5  # it learns, so a step lost or doubled would show
    return found


@pytest.mark.parametrize("in_background", ["", " --async-save"])
def test_a_run_that_was_stopped_goes_on_by_itself(
    pool2: Pool, tmp_path: Path, undisturbed: list[dict[str, float]], in_background: str
) -> None:
    flags = f"--checkpoint-dir {tmp_path / 'checkpoints'} --keep 2{in_background}"
    for stop_after, expected in [(10, EXIT_INTERRUPTED), (3, EXIT_INTERRUPTED), (None, 0), (None, 0)]:
        assert pool2.run(train, str(tmp_path), flags, stop_after) == [expected] * 2
    assert curve(tmp_path) == undisturbed
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [LOCK, "step-000020", "step-000024"]


def test_it_goes_on_with_fewer_ranks_and_with_more(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    for shape, stop_after, expected in [
        ((2, 2), 10, EXIT_INTERRUPTED),
        ((1, 2), 5, EXIT_INTERRUPTED),
        ((1, 4), None, 0),
    ]:
        flags = f"--checkpoint-dir {tmp_path / 'checkpoints'} --replicate {shape[0]}"
        codes = pool_for(request, shape).run(train, str(tmp_path), flags, stop_after)
        assert codes == [expected] * len(codes)
    found = curve(tmp_path)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line, other in zip(found, undisturbed, strict=True):
        assert line == pytest.approx(other, rel=1e-4)  # in float32, with sums in another order


def decays_of_steps(env: RankEnv, out: str, flags: str, stop_after: int) -> list[set[float]]:
    """The weight decays that the groups of the optimizer had in each step."""
    found = []
    train_step = train_lm.train_step

    def watch(model: Any, optimizer: Any, rows: torch.Tensor) -> Any:
        found.append({group["weight_decay"] for group in optimizer.param_groups})
        return train_step(model, optimizer, rows)

    with mock.patch.object(train_lm, "train_step", watch):
        train(env, out, flags, stop_after)
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_goes_on_with_the_weight_decay_that_it_is_given(pool2: Pool, tmp_path: Path, optimizer: str) -> None:
    """It was that of the checkpoint, silently."""
    flags = f"--checkpoint-dir {tmp_path / 'checkpoints'} --optimizer {optimizer}"
    for decay, steps in ((0.25, 2), (0.0, 1)):
        given = f"{flags} --weight-decay {decay}"
        assert pool2.run(decays_of_steps, str(tmp_path), given, steps) == [[{decay}] * steps] * 2


def refused(env: RankEnv, out: str, flags: str) -> str:
    with pytest.raises(JobError) as caught:
        train(env, out, flags)
    return str(caught.value)


def test_a_checkpoint_of_another_run_is_refused(pool2: Pool, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    flags = f"--checkpoint-dir {directory}"
    pool2.run(train, str(tmp_path), flags, 2)
    for other, told in [
        ("--seed 7 --batch 4", "step-000002 was made with --seed 0 --batch 8; use that, or another --checkpoint-dir"),
        ("--steps 1", "step-000002 is past --steps 1"),
        ("--width 32", "step-000002 was made with --width 16; use that, or another --checkpoint-dir"),
    ]:
        for text in pool2.run(refused, str(tmp_path), f"{flags} {other}"):
            assert told in text and "\n" not in text
    (directory / "step-000002" / "manifest.json").write_text("{")
    for text in pool2.run(refused, str(tmp_path), flags):
        assert "manifest.json is damaged" in text


def test_weights_that_are_lost_are_one_line_on_all_ranks(pool2: Pool, tmp_path: Path) -> None:
    """The loss of the step that loses them is finite; only the evaluation behind it is not."""
    for text in pool2.run(refused, str(tmp_path), "--lr 1e38 --warmup 0"):
        assert text == "the held-out loss is nan in step 1; try a lower --lr than 1e+38"
    assert not (tmp_path / "metrics.jsonl").read_text(), "NaN is no JSON"


def _stop_late(env: RankEnv, out: str, sampling: bool) -> list[str]:
    """What rank 0 says of a run on which a signal came behind its last step, in the evaluation or in the sample."""
    said: list[str] = []
    flags = [flag for flag in FLAGS.split() if not (sampling and flag == "--no-sample")]
    options = parse_options([*flags, "--steps", "2", "--out", out], env.world_size)
    evaluated = mock.patch.object(train_lm, "evaluate", lambda *args: 2.0) if sampling else nullcontext()
    with mock.patch.object(Report, "say", lambda self, text="": said.append(text)), evaluated:
        stop: Any = StopAfter(2 + 5 if sampling and env.rank == 0 else 2 + 2 if env.rank == 0 else None)
        assert train_lm.run(options, torch.device("cpu"), stop) == EXIT_INTERRUPTED
    return said


def test_a_signal_behind_the_last_step_is_answered(pool2: Pool, tmp_path: Path) -> None:
    evaluating, sampling = (pool2.run(_stop_late, str(tmp_path), where)[0] for where in (False, True))
    assert evaluating[-1] == "interrupted while evaluating, after step 2 of 2"
    assert sampling[-2] == "sample:" and 4 <= len(sampling[-1].encode(errors="replace")) <= 3 * 8, "some bytes, not 240"


def test_torchrun_restarts_it_after_sigkill(tmp_path: Path, undisturbed: list[dict[str, float]]) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 -m tests.checkpoint.dying_job"
    flags = f"{FLAGS} --out {tmp_path} --checkpoint-dir {tmp_path / 'checkpoints'}"
    command = [sys.executable, *torchrun.split(), *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    # Killed after step 7, and perhaps in the save of step 8: it goes on from the checkpoint of step 4.
    lives = 2 if FULL else 1
    resumed = [line for line in done.stdout.splitlines() if line.startswith("going on from step")]
    assert [line.split()[4] for line in resumed] == ["4,"] * lives, done.stdout
    assert done.stderr.count("exitcode: -9") == lives, done.stderr[-4000:]
    assert curve(tmp_path) == undisturbed
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [LOCK, "step-000020", "step-000024"]


def test_ranks_of_a_new_life_do_not_hear_the_dead() -> None:
    """torchrun keeps the store, and whatever ranks that died have written into it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=20)

    def life(rank: int) -> bool:
        """Whether this rank finds what the first one of its life wrote, and nothing from before."""
        store = meet(dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False), rank, 3, patience)
        fresh = not store.check(["address"]) if rank == 0 else True
        if rank == 0:
            store.set("address", "here")
        store.wait(["address"], patience)
        return fresh

    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            assert list(threads.map(life, range(3))) == [True] * 3
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come within 0\.1 s"):
        meet(server, 0, 3, timedelta(seconds=0.1))


EXTRAS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "by another program; use"),
    "another program's": ({"epoch": 3}, "by another program; use"),
    "an older run's": ({"step": 1, "rng": {}, "run": {"seed": 0}}, "by another program; use"),
    "an elastic run's": ("elastic", "with --elastic; use that, or"),
}


def _save_with(env: RankEnv, directory: str, extra: Any) -> None:
    options = parse_options([*FLAGS.split(), "--checkpoint-dir", directory], env.world_size)
    model, optimizer = train_lm.build(options, torch.device("cpu"))
    if extra == "elastic":
        identity = {name: getattr(options, name) for name in train_lm._IDENTITY}
        extra = {"elastic": {"step": 1}, "extra": {"step": 1, "run": identity, "rng": {}}}
    hsdp.checkpoint.save(directory, model, optimizer, extra, step=1)
    unlock(Path(directory))


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_checkpoint_of_the_same_model_that_others_saved_is_refused(pool2: Pool, tmp_path: Path, extra: str) -> None:
    directory = tmp_path / "checkpoints"
    saved, told = EXTRAS[extra]
    pool2.run(_save_with, str(directory), saved)
    for text in pool2.run(refused, str(tmp_path), f"--checkpoint-dir {directory}"):
        assert f"step-000001 was saved {told} another --checkpoint-dir" in text and "\n" not in text

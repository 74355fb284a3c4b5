"""Checkpoints at URLs, where nothing can be renamed: whole or not there, found, pruned and locked by the manifest alone."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError, RemotePath, manifests
from hsdp.checkpoint import lock as locks
from hsdp.checkpoint.commits import is_unfinished
from hsdp.checkpoint.lock import LOCK
from tests.checkpoint import models as cm
from tests.support.rig import Pool
from tests.support.share import share
from tests.support.worker import RankEnv

pytest.importorskip("fsspec", reason="fsspec, of the extra hsdp[remote], is not installed")

from tests.checkpoint.stores import Crash, Fragile, names, register

ROOT = Path(__file__).parents[2]
RUN = "fragile://run"


@pytest.fixture(autouse=True)
def _stores() -> Iterator[None]:
    register()
    Fragile.store.clear()
    Fragile.pseudo_dirs[:] = [""]
    Fragile.die(0)
    Fragile.failure = None
    locks._claimed.clear()
    yield
    Fragile.die(0)
    Fragile.failure = None


def valued(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def value_in(url: str) -> float:
    """The value of the checkpoint that is the last one, every file of which is verified."""
    model = valued(-1)
    checkpoint.verify(url)
    checkpoint.load(url, model)
    assert len(set(model.weight.flatten().tolist())) == 1
    return model.weight[0, 0].item()


# -- what a user does --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_", [False, True])
def test_a_run_saves_prunes_and_resumes_at_a_url(async_: bool) -> None:
    url = f"memory://here/{async_}"
    model = cm.build(None)
    optimizer = cm.two_groups(model)
    assert checkpoint.resume(url, model, optimizer) is None
    assert checkpoint.latest(url) is None
    for step in range(1, 4):
        cm.train(model, optimizer, [step])
        path = checkpoint.save(url, model, optimizer, {"at": step}, step=step, keep=2, async_=async_).wait()
        assert checkpoint.latest(url) == path
    assert [name.rpartition("-")[0] for name in names(url)] == ["", "step-000002", "step-000003"]

    other = cm.build(None, seed=5)
    its = cm.two_groups(other)
    results: list[tuple[int, int]] = []
    for source in (path, str(path)):
        assert checkpoint.load(source, other, its).step == 3
    loaded = checkpoint.resume(url, other, its, progress=lambda done, total: results.append((done, total)))
    assert loaded is not None and (loaded.step, loaded.extra, loaded.path) == (3, {"at": 3}, path)
    assert results[-1][0] == results[-1][1] > 0
    cm.assert_equal(cm.whole_state(other, its), cm.whole_state(model, optimizer))
    assert checkpoint.verify(url).step == 3


def test_a_step_that_is_saved_again_is_replaced_when_the_new_one_is_complete() -> None:
    first = checkpoint.save(RUN, valued(1), step=5).path
    second = checkpoint.save(RUN, valued(2), step=5).path
    assert first != second == checkpoint.latest(RUN)
    assert names(RUN) == [LOCK, second.name]
    assert value_in(RUN) == 2


def test_pytorch_reads_what_is_saved_at_a_url_and_what_it_saves_there_is_read() -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    path = checkpoint.save("memory://ours", valued(4), step=1).path
    state = {"model": nn.Linear(3, 2).state_dict()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, storage_reader=FsspecReader(str(path)))
    assert torch.equal(state["model"]["weight"], valued(4).weight)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": valued(6).state_dict()}, storage_writer=FsspecWriter("memory://theirs/one"))
    model = valued(0)
    assert checkpoint.load("memory://theirs/one", model).step is None
    assert torch.equal(model.weight, valued(6).weight)
    with pytest.raises(CheckpointError, match="memory://theirs has no complete checkpoint of hsdp, but one"):
        checkpoint.resume("memory://theirs", model)


def test_a_url_of_a_local_directory_is_that_directory(tmp_path: Path) -> None:
    assert checkpoint.save(f"file://{tmp_path}", valued(1), step=1).path == tmp_path / "step-000001"


def test_urls_that_make_no_sense_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = valued(0)
    with pytest.raises(ValueError, match=r"'s3:/bucket/run': if it is to be a URL, it lacks a slash"):
        checkpoint.save(Path("s3://bucket/run"), model, step=1)
    with pytest.raises(ValueError, match="names no directory"):
        checkpoint.save("memory://", model, step=1)
    with pytest.raises(ValueError, match="nosuch"):
        checkpoint.resume("nosuch://bucket", model)
    with pytest.raises(ValueError, match=r"safetensors\('memory://x'\): only local directories"):
        checkpoint.save_safetensors("memory://x", model)
    with pytest.raises(ValueError, match=r"safetensors\('memory://x'\): only local directories"):
        checkpoint.load_safetensors("memory://x", model)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"pip install 'hsdp\[remote\]'"):
        checkpoint.save("memory://run", valued(0), step=1)


# -- dying, at every operation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, 2], ids=["new-step", "same-step"])
def test_dying_at_any_operation_of_a_save_loses_nothing_and_half_of_one_is_never_taken(step: int) -> None:
    count, died, seen = 0, True, set()
    while died:
        count += 1
        Fragile.store.clear()
        locks._claimed.clear()
        for earlier in (1, 2):
            checkpoint.save(RUN, valued(earlier), step=earlier)
        Fragile.die(count)
        try:
            checkpoint.save(RUN, valued(9), step=step, keep=2)
            died = False
        except Crash:
            pass
        Fragile.die(0)
        locks._claimed.clear()  # another process: that one is dead
        assert value_in(RUN) in (2, 9)
        seen.add(value_in(RUN))
        assert all(
            checkpoint.verify(path) for path in RemotePath(RUN).iterdir() if path.name != LOCK and not is_unfinished(path)
        )
        # The run starts again from there: nothing of the one that died stays.
        checkpoint.save(RUN, valued(10), step=4, keep=2)
        assert value_in(RUN) == 10
        assert len(names(RUN)) == 3, names(RUN)
        assert all(checkpoint.verify(f"{RUN}/{name}") for name in names(RUN) if name != LOCK)
    assert count > 25
    assert seen == {2, 9}


def test_a_first_save_that_died_leaves_nothing_to_resume_from_and_no_error() -> None:
    for count in range(1, 200):
        Fragile.store.clear()
        Fragile.die(count)
        locks._claimed.clear()
        try:
            checkpoint.save(RUN, valued(1), step=1)
            break
        except Crash:
            Fragile.die(0)
            complete = checkpoint.latest(RUN) is not None
            assert (checkpoint.resume(RUN, valued(0)) is not None) == complete
    assert 10 < count < 199


def test_what_was_half_written_is_refused_also_by_its_own_path() -> None:
    path = checkpoint.save(RUN, valued(1), step=1).path
    assert isinstance(path, RemotePath)
    (path / manifests.MANIFEST).unlink()
    model = valued(0)
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        checkpoint.load(path, model)
    (path / manifests.INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        checkpoint.load(path, model)
    assert torch.equal(model.weight, valued(0).weight)


def test_a_manifest_that_the_store_cuts_short_is_an_error_of_the_save() -> None:
    """The save said that all was well, and `latest` found a damaged checkpoint."""
    checkpoint.save(RUN, valued(1), step=1)
    put = Fragile.pipe_file

    def cut(store: Fragile, path: str, value: bytes, **more: Any) -> None:
        put(store, path, value[: len(value) // 2] if path.endswith(manifests.MANIFEST) else value, **more)

    with (
        mock.patch.object(Fragile, "pipe_file", cut),
        pytest.raises(CheckpointError, match=r"manifest.json is not what was written: \d+ bytes came back instead of"),
    ):
        checkpoint.save(RUN, valued(2), step=2, keep=1)
    assert value_in(RUN) == 1
    checkpoint.save(RUN, valued(3), step=3, keep=1)
    assert value_in(RUN) == 3


def test_a_checkpoint_whose_retention_fails_stays() -> None:
    first = checkpoint.save(RUN, valued(1), step=1).path
    remove = Fragile.rm_file

    def keep_first(store: Fragile, path: str) -> None:
        if first.name in path:
            raise PermissionError("no deletion")
        remove(store, path)

    with (
        mock.patch.object(Fragile, "rm_file", keep_first),
        pytest.raises(CheckpointError, match=r"is complete, but an earlier checkpoint could not be removed.*no deletion"),
    ):
        checkpoint.save(RUN, valued(2), step=2, keep=1)
    assert value_in(RUN) == 2


def test_what_a_dead_run_left_and_cannot_be_removed_is_told_and_stops_no_save(caplog: pytest.LogCaptureFixture) -> None:
    left = RemotePath(RUN) / "step-000001-0123abcd"
    (left / "__0_0.distcp").write_bytes(b"half")
    with (
        mock.patch.object(Fragile, "rm_file", mock.Mock(side_effect=PermissionError("no deletion"))),
        caplog.at_level(logging.WARNING, "hsdp.checkpoint"),
    ):
        for step in (2, 3):
            checkpoint.save(RUN, valued(step), step=step)
    assert caplog.text.count(f"{left}, which a run that died has left, could not be removed: no deletion") == 2
    assert value_in(RUN) == 3 and left.name in names(RUN)
    checkpoint.save(RUN, valued(4), step=4)
    assert left.name not in names(RUN)


KILLED = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[2])
import torch
from torch import nn
from hsdp import checkpoint
from tests.checkpoint.stores import register

register()
torch.set_num_threads(1)
url, rng = "norename://" + sys.argv[1], random.Random(0)
model = nn.Linear(30, 30)

def fill(step):
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)

step = told = interrupted = 0
for _ in range(int(sys.argv[3])):
    loaded = checkpoint.resume(url, model)
    step = loaded.step if loaded is not None else 0
    assert step >= told, (step, told)
    assert loaded is None or all((param == step).all() for param in model.parameters()), step
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            fill(step)
            checkpoint.save(url, model, step=step, keep=2)
            os.write(writing, step.to_bytes(4, "big"))
    first = os.read(reading, 4)
    time.sleep(rng.random() * 0.05)  # a random moment is what this is about
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writing)
    while first:
        told, first = int.from_bytes(first, "big"), os.read(reading, 4)
    os.close(reading)
    left = [name for name in os.listdir(sys.argv[1]) if name.startswith("step-")]
    interrupted += any("manifest.json" not in os.listdir(os.path.join(sys.argv[1], name)) for name in left)
print("interrupted", interrupted, "told", told)
"""


def test_kill_9_at_random_moments_where_nothing_can_be_renamed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(ROOT), str(share(40))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[1]), "a save was under way at some of the kills"


# -- what cannot be read -----------------------------------------------------------------------------------------------


def test_a_store_that_cannot_be_asked_is_not_taken_for_an_empty_one() -> None:
    checkpoint.save(RUN, valued(1), step=1)
    model = valued(0)
    for failure in (PermissionError("Access Denied"), RuntimeError("cannot connect"), OSError("Please try again")):
        Fragile.failure = failure
        for call in (lambda: checkpoint.resume(RUN, model), lambda: checkpoint.latest(RUN), lambda: checkpoint.verify(RUN)):
            with pytest.raises(CheckpointError, match=f"cannot be read: .*{failure}"):
                call()
    assert torch.equal(model.weight, valued(0).weight)


def test_damage_is_found_and_named() -> None:
    path = checkpoint.save(RUN, valued(1), step=1).path
    assert isinstance(path, RemotePath)
    for name in (manifests.MANIFEST, manifests.INDEX, manifests.EXTRA, "__0_0.distcp"):
        good = (path / name).read_bytes()
        for bad in (good[:-1], good[: len(good) // 2] + b"?" + good[len(good) // 2 + 1 :]):
            (path / name).write_bytes(bad)
            for call in (checkpoint.verify, lambda one: checkpoint.load(one, valued(0))):
                with pytest.raises(CheckpointError, match=name):
                    call(RUN)
        (path / name).write_bytes(good)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing"):
        checkpoint.load(RUN, valued(0))


def test_a_reader_whose_checkpoint_is_pruned_takes_the_next() -> None:
    checkpoint.save(RUN, valued(1), step=1)
    seen, pruned = manifests.check_sizes, []

    def prune(path: Any, manifest: Any) -> None:
        seen(path, manifest)
        if not pruned:
            pruned.append(path)
            checkpoint.save(RUN, valued(2), step=2, keep=1)

    model = valued(0)
    with mock.patch.object(manifests, "check_sizes", prune):
        assert checkpoint.load(RUN, model).step == 2
    assert torch.equal(model.weight, valued(2).weight)


# -- two jobs ----------------------------------------------------------------------------------------------------------


def put_lock(**owner: Any) -> None:
    (RemotePath(RUN) / LOCK).write_bytes(json.dumps({"nonce": "another", **owner}).encode())


def test_a_second_job_on_this_host_is_told_of_the_first() -> None:
    put_lock(host=socket.gethostname(), pid=os.getppid(), started=locks._started(os.getppid()))
    with pytest.raises(CheckpointError, match=rf"process {os.getppid()} on host .* is saving checkpoints to {RUN}"):
        checkpoint.save(RUN, valued(1), step=1)
    put_lock(host=socket.gethostname(), pid=os.getppid(), started="long ago")  # another process has its number now
    checkpoint.save(RUN, valued(1), step=1)
    locks._claimed.clear()
    put_lock(host=socket.gethostname(), pid=os.getpid(), started="long ago")  # this one has the number of a dead one
    checkpoint.save(RUN, valued(1), step=2)


def test_a_directory_that_is_released_is_anybodys() -> None:
    checkpoint.save(RUN, valued(1), step=1)
    locks.release(RemotePath(RUN))
    assert LOCK not in names(RUN)
    checkpoint.save(RUN, valued(2), step=2)
    assert value_in(RUN) == 2


def test_a_job_that_was_moved_goes_on_and_the_one_before_is_told(caplog: pytest.LogCaptureFixture) -> None:
    put_lock(host="elsewhere", pid=7)
    with caplog.at_level(logging.WARNING, logger="hsdp.checkpoint"):
        checkpoint.save(RUN, valued(1), step=1)
        checkpoint.save(RUN, valued(2), step=2)
    assert caplog.text.count("process 7 on host elsewhere saved checkpoints to") == 1
    message = "process 8 on host elsewhere has begun to save checkpoints"

    def overtaken(done: int, total: int) -> None:
        put_lock(host="elsewhere", pid=8)

    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(RUN, valued(3), step=3, progress=overtaken)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(RUN, valued(3), step=3)
    assert value_in(RUN) == 2
    assert len(names(RUN)) == 3, "nothing is left of what was not completed"


# -- on several ranks --------------------------------------------------------------------------------------------------


def save_on(env: RankEnv, url: str) -> tuple[str, str, str]:
    register()
    model = cm.build(env.mesh((1, 2)))
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, range(1), env.rank, 2)
    state = cm.whole_state(model, optimizer)
    path = checkpoint.save(url, model, optimizer, {"rank": env.rank}, step=1, async_=True).wait()

    other = cm.build(env.mesh((2, 1)), seed=1)
    its = cm.two_groups(other)
    loaded = checkpoint.load(url, other, its)
    assert (loaded.path, loaded.extra) == (path, {"rank": env.rank})
    cm.assert_equal(cm.whole_state(other, its), state)

    def fail(done: int, total: int) -> None:
        if env.rank == 1:
            raise OSError("no route to host")

    with pytest.raises(CheckpointError) as failed:
        checkpoint.save(url, model, step=2, progress=fail)
    with pytest.raises(CheckpointError) as unshared:
        checkpoint.save("memory://of-each-process", model, step=1)
    return str(path), str(failed.value), str(unshared.value)


def test_ranks_share_a_store(pool2: Pool, tmp_path: Path) -> None:
    url = f"norename://{tmp_path}/run"
    results = pool2.run(save_on, url)
    assert results[0] == results[1]
    path, failed, unshared = results[0]
    assert "on rank 1: progress= raised OSError: no route to host" in failed
    assert "all ranks must share the directory" in unshared
    assert names(url) == [LOCK, Path(path).name]
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"} < {
        one.name for one in Path(tmp_path, "run", Path(path).name).iterdir()
    }

"""What goes wrong around a checkpoint is told at once, with its true cause, on all ranks; nothing is passed over."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from hsdp import checkpoint, fully_shard
from hsdp.checkpoint import CheckpointError, loading, manifests, reading, store
from hsdp.checkpoint.checksums import ChecksumStream
from hsdp.checkpoint.lock import LOCK, lock, unlock
from tests.checkpoint import models as cm
from tests.support.rig import Pool, run_procs
from tests.support.worker import RankEnv

ROOT = Path(__file__).parents[2]


def plain_dcp(directory: Path, model: nn.Module) -> Path:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=directory)
    return directory


# -- what resume and latest find ---------------------------------------------------------------------------------------


def test_resume_loads_whatever_is_a_checkpoint_and_begins_anew_only_where_nothing_is(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    path = checkpoint.save(tmp_path / "run", model, step=3).path
    for found in (path, tmp_path / "run"):
        loaded = checkpoint.resume(found, other)
        assert loaded is not None and loaded.step == 3
    assert checkpoint.resume(plain_dcp(tmp_path / "dcp", model), other) is not None
    assert torch.equal(other.weight, model.weight)

    assert checkpoint.resume(tmp_path / "nowhere", model) is None
    (tmp_path / "empty").mkdir()
    assert checkpoint.resume(tmp_path / "empty", model) is None
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is not a directory; a checkpoint is one"):
        checkpoint.resume(tmp_path / "file", model)
    with pytest.raises(CheckpointError, match="has no complete checkpoint of hsdp, but dcp;"):
        checkpoint.resume(tmp_path, model)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "an I/O error"), MemoryError("no memory")])
def test_what_fails_while_a_load_reads_is_told_with_what_it_has_changed(tmp_path: Path, error: Exception) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    path = checkpoint.save(tmp_path, model, step=3).path
    message = f"'model.(weight|bias)' in __0_0.distcp could not be read after all: .*{error.args[-1]}. The model.*partly"
    with (
        mock.patch.object(reading, "read_into", side_effect=error),
        pytest.raises(CheckpointError, match=message),
    ):
        checkpoint.load(path, other)
    checkpoint.load(path, other)
    assert torch.equal(other.weight, model.weight)


def test_the_directory_above_a_run_is_not_taken_for_it_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "runs" / "first", model, step=3)
    (tmp_path / "runs" / "logs" / "of-today").mkdir(parents=True)
    assert checkpoint.resume(tmp_path / "runs", model) is None
    assert "runs has no checkpoint of its own, so this run begins anew; there are some in first:" in caplog.text
    with pytest.raises(CheckpointError, match="a directory that has a complete one; those in it that do: first"):
        checkpoint.load(tmp_path / "runs", model)
    caplog.clear()
    assert checkpoint.resume(tmp_path / "runs" / "logs", model) is None
    assert not caplog.text


def test_a_foreign_directory_among_ours_neither_blocks_nor_is_touched(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    plain_dcp(tmp_path / "step-10", model)
    (tmp_path / "step-000020").mkdir()
    checkpoint.save(tmp_path, model, step=5, keep=1)
    checkpoint.save(tmp_path, model, step=6, keep=1)
    loaded = checkpoint.resume(tmp_path, model)
    assert loaded is not None and loaded.step == 6
    assert {"step-10", "step-000020"} <= {path.name for path in tmp_path.iterdir()}
    assert checkpoint.load(tmp_path / "step-10", model).step is None


def test_a_damaged_manifest_blocks_unless_a_later_checkpoint_is_good(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first = checkpoint.save(tmp_path, model, step=1).path
    second = checkpoint.save(tmp_path, model, step=2).path
    (first / manifests.MANIFEST).write_text("{")
    assert checkpoint.latest(tmp_path) == second
    (second / manifests.MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged.*move step-00000\d out"):
        checkpoint.latest(tmp_path)


def test_fields_of_a_manifest_have_their_types(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = checkpoint.save(tmp_path, model, step=1).path
    good = json.loads((path / manifests.MANIFEST).read_text())
    bad: list[dict[str, Any]] = [
        {"step": "1"},
        {"step": True},
        {"sequence": 1.5},
        {"sequence": None},
        {"world_size": 0},
        {"files": []},
        {"files": {"a": 3}},
        {"files": {"../a": {"bytes": 1, "crc32": 1}}},
        {"files": {"a": {"bytes": -1, "crc32": 1}}},
        {"files": {"a": {}}},
        {"version": None},
        {"version": "2"},
        {"earlier": 7},
        {"earlier": [7]},
    ]
    for change in bad:
        fields = {key: value for key, value in {**good, **change}.items() if key != "crc32"}
        (path / manifests.MANIFEST).write_text(json.dumps({**fields, "crc32": manifests._checksum(fields)}))
        for call in (checkpoint.verify, checkpoint.latest, lambda p: checkpoint.load(p, model)):
            with pytest.raises(CheckpointError, match=r"manifest.json (is damaged|has format version)"):
                call(tmp_path)


def test_what_may_not_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = checkpoint.save(tmp_path, model, step=1).path
    opened = Path.open
    for name in (manifests.MANIFEST, manifests.INDEX, manifests.EXTRA, "__0_0.distcp"):

        def refuse(file: Path, *args: Any, name: str = name, **kwargs: Any) -> Any:
            if file.name == name:
                raise PermissionError(errno.EACCES, "Permission denied", str(file))
            return opened(file, *args, **kwargs)

        with mock.patch.object(Path, "open", refuse):
            for call in (checkpoint.verify, lambda p: checkpoint.load(p, model)):
                with pytest.raises(CheckpointError, match=rf"{name} cannot be read: Permission denied") as caught:
                    call(path)
                assert "damaged" not in str(caught.value)


# -- saving ------------------------------------------------------------------------------------------------------------


def test_arguments_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"checkpoint.save\(keep=True\)"):
        checkpoint.save(tmp_path, model, step=1, keep=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    handle = checkpoint.save("~/runs", model, step=numpy.int64(7), keep=numpy.int32(2))
    assert handle.path == tmp_path / "runs" / "step-000007"
    assert checkpoint.latest("~/runs") == handle.path
    assert checkpoint.load("~/runs", model).step == checkpoint.verify("~/runs").step == 7


def test_what_cannot_fit_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    with mock.patch.object(store, "free_bytes", lambda directory: 1000):
        for async_ in (False, True):
            with pytest.raises(CheckpointError, match=r"no space left.*it needs 40,\d{3} bytes, and 1,000 are free"):
                checkpoint.save(tmp_path, model, step=1, async_=async_)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_disk_that_fills_up_is_told_as_such(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    written = ChecksumStream.write

    def full(stream: Any, data: Any, crc32: int | None = None) -> int:
        if stream.bytes > 10_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(stream, data, crc32)

    with mock.patch.object(ChecksumStream, "write", full):
        for async_ in (False, True):
            with pytest.raises(CheckpointError, match=r"__0_0.distcp could not .*: No space left on device \([\d,]+ bytes"):
                checkpoint.save(tmp_path, model, step=1, async_=async_).wait()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_failure_in_the_background_is_logged_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def leave(done: int, total: int) -> None:
        raise SystemExit(3)

    with caplog.at_level(logging.ERROR, logger="hsdp.checkpoint"):
        handle = checkpoint.save(tmp_path, nn.Linear(2, 2), step=1, async_=True, progress=leave)
        assert handle._finished.wait(30)
    assert "in the background failed" in caplog.text
    with pytest.raises(CheckpointError, match="SystemExit"):
        handle.wait()
    assert not handle.path.exists()


UNWAITED = """
import sys
from torch import nn
from hsdp import checkpoint

def fail(done, total):
    raise OSError("gone")

checkpoint.save(sys.argv[1], nn.Linear(2, 2), step=4, async_=True, progress=fail)
"""


def test_a_failure_that_nobody_waits_for_is_told_at_the_end_of_the_process(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", UNWAITED, str(tmp_path)], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert "the process ends without a checkpoint of step 4" in done.stderr


def _save_and_destroy(env: RankEnv, directory: str) -> int:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=env.rank, world_size=2)
    handle = checkpoint.save(f"{directory}/run", nn.Linear(300, 300), step=1, async_=True)
    dist.destroy_process_group()
    return checkpoint.verify(handle.wait()).step


def test_a_save_outlives_its_process_group(tmp_path: Path) -> None:
    assert run_procs(_save_and_destroy, 2, str(tmp_path), grouped=False) == [1, 1]


def differ(env: RankEnv, directory: str) -> list[str]:
    model = cm.build(env.mesh((1, 2)))
    first = env.rank == 0
    calls: list[dict[str, Any]] = [
        {"step": 1 + env.rank},
        {"step": 1, "keep": None if first else 2},
        {"step": 1, "async_": first},
        {"step": 1, "optimizer": cm.two_groups(model) if first else None},
        {"step": 1 if first else -1},
    ]
    messages = []
    for call in calls:
        with pytest.raises((CheckpointError, ValueError)) as caught:
            checkpoint.save(directory, model, **call)
        messages.append(str(caught.value))
    checkpoint.save(directory, model, step=1)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(directory, model, cm.two_groups(model) if first else None)
    return [*messages, str(caught.value)]


def test_ranks_that_were_called_otherwise_are_told_so(pool2: Pool, tmp_path: Path) -> None:
    first, second = pool2.run(differ, str(tmp_path))
    assert "step: 1 on rank 0, 2 on rank 1" in first[0]
    assert "keep: None on rank 0, 2 on rank 1" in first[1]
    assert "async_: True on rank 0, False on rank 1" in first[2]
    assert "an optimizer: True on rank 0, False on rank 1" in first[3]
    assert first[:4] + first[5:] == second[:4] + second[5:]
    assert "on rank 1: ValueError: checkpoint.save(step=-1)" in first[4]
    assert second[4].startswith("checkpoint.save(step=-1)")


# -- one job per directory ---------------------------------------------------------------------------------------------

HOLDING = """
import sys
from pathlib import Path
from hsdp.checkpoint.checksums import ChecksumStream
from hsdp.checkpoint.lock import lock

lock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_second_job_in_the_directory_is_told_of_the_first_and_the_lock_of_a_dead_one_counts_for_nothing(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "locked\n"
            with pytest.raises(CheckpointError, match=rf"process {other.pid} on host .* is saving checkpoints to"):
                checkpoint.save(tmp_path, model, step=1)
        finally:
            other.kill()
    checkpoint.save(tmp_path, model, step=1)
    checkpoint.save(tmp_path, model, step=2)  # our own


def test_the_lock_where_the_file_system_has_none(tmp_path: Path) -> None:
    with mock.patch("hsdp.checkpoint.lock.fcntl", None):
        lock(tmp_path)
        unlock(tmp_path)
        (tmp_path / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "0"}))
        with pytest.raises(CheckpointError, match="process 1 on host elsewhere"):
            lock(tmp_path)
        dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
        (tmp_path / LOCK).write_text(json.dumps({"host": socket.gethostname(), "pid": int(dead.stdout), "started": "0"}))
        lock(tmp_path)
        unlock(tmp_path)


def test_the_lock_of_a_dead_process_that_had_this_ones_number(tmp_path: Path) -> None:
    """A container that was killed starts again under its name, with the same process numbers."""
    (tmp_path / LOCK).touch()
    dead = {"host": socket.gethostname(), "pid": os.getpid(), "started": "0", "inode": (tmp_path / LOCK).stat().st_ino}
    (tmp_path / LOCK).write_text(json.dumps(dead))
    lock(tmp_path)
    unlock(tmp_path)


def test_a_reader_whose_checkpoint_is_pruned_takes_the_next(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save(tmp_path, model, step=1)
    seen = manifests.check_sizes
    pruned = []

    def prune(path: Path, manifest: Any) -> None:
        seen(path, manifest)
        if not pruned:
            pruned.append(path)
            checkpoint.save(tmp_path, model, step=2, keep=1)

    with mock.patch.object(manifests, "check_sizes", prune):
        assert checkpoint.load(tmp_path, other).step == 2
    assert pruned and not pruned[0].exists()


def load_while_it_is_replaced(env: RankEnv, directory: str, named: str) -> float:
    model = nn.Linear(64, 4, bias=False)
    fully_shard(model, mesh=env.mesh((2,)))
    prepare, replaced = loading._Load._prepare, Path(directory, "again")

    def late(load: Any, files: Any) -> None:
        dist.barrier()  # all have checked, and hold open, some of the files
        if env.rank == 0 and not (replaced / "earlier").exists():
            Path(directory, "step-000001").rename(replaced / "earlier")
            Path(replaced, "step-000001").rename(Path(directory, "step-000001"))
        dist.barrier()
        prepare(load, files)

    with mock.patch.object(loading._Load, "_prepare", late):
        checkpoint.load(Path(directory, named), model)
    shard = model.weight.to_local()
    assert shard.eq(shard[0, 0]).all()
    return float(shard[0, 0])


def save_twice(env: RankEnv, directory: str) -> None:
    for value, where, saves in ((1.0, directory, 1), (2.0, f"{directory}/again", 2)):
        model = nn.Linear(64, 4, bias=False)
        nn.init.constant_(model.weight, value)
        fully_shard(model, mesh=env.mesh((4,)))
        for _ in range(saves):
            checkpoint.save(where, model, step=1)


@pytest.mark.parametrize("named", ["", "step-000001"])
def test_a_reader_beside_whom_a_step_is_saved_again_takes_the_new_one_whole(
    pool4: Pool, pool2: Pool, tmp_path: Path, named: str
) -> None:
    """Of four ranks' files each of two had some open, and took the rest from what came into their place."""
    pool4.run(save_twice, str(tmp_path))
    assert pool2.run(load_while_it_is_replaced, str(tmp_path), named) == [2.0, 2.0]


def test_leftovers_of_an_interrupted_replacement_and_pruning_are_swept(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = checkpoint.save(tmp_path, model, step=1).path
    import shutil

    shutil.copytree(path, tmp_path / "step-000001.old")
    shutil.copytree(path, tmp_path / ".step-000000.0a1b.trash")
    shutil.copytree(path, tmp_path / ".step-000000-0a1b2c3d.0a1b.trash")  # of one that was brought from an object store
    checkpoint.save(tmp_path, model, step=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [LOCK, "step-000001", "step-000002"]


def test_what_cannot_be_deleted_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    left = tmp_path / ".step-000000.0a1b.trash"
    left.mkdir()
    with mock.patch("hsdp.checkpoint.commits.shutil.rmtree"), caplog.at_level(logging.WARNING, "hsdp.checkpoint"):
        for step in range(2):
            checkpoint.save(tmp_path, model, step=step)
    assert caplog.text.count(f"{left} could not be deleted") == 1 and left.owner() in caplog.text


def test_a_directory_of_another_user_is_named(tmp_path: Path) -> None:
    """Not with real permissions: tests may run as root, who may write everywhere."""
    file = tmp_path / LOCK
    refused = PermissionError(errno.EACCES, "Permission denied", str(file))
    message = (
        f"cannot save in {tmp_path}: {tmp_path} belongs to user '{tmp_path.owner()}'.*Permission denied.*another directory"
    )
    with mock.patch("hsdp.checkpoint.commits.lock", side_effect=refused), pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)

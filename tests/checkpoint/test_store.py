"""Directories: complete or not there, the last one, retention; whatever the moment at which a save dies."""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError, crc, manifests, store
from hsdp.checkpoint.checksums import write_file
from hsdp.checkpoint.commits import commits_in
from hsdp.checkpoint.lock import LOCK
from hsdp.checkpoint.open_files import OpenFiles, opener


class Crash(BaseException):
    """The process is gone: no cleanup may count on running after it."""


def save(directory: Path, step: int, content: bytes = b"tensors", keep: int | None = None) -> Path:
    """What a save does to a directory, with a file in the place of tensors."""
    written = commits_in(directory).begin(step)
    files = {"data": write_file(directory / written / "data", content)}
    return store.publish(directory, written, step, 1, files, keep)  # type: ignore[return-value]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != LOCK)


def test_latest_is_the_one_saved_last_not_the_highest_step(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.latest(tmp_path) is None
    for step in (10, 300, 20):  # a run that was begun anew in the same directory
        assert save(tmp_path, step) == tmp_path / f"step-{step:06d}"
        assert checkpoint.latest(tmp_path) == tmp_path / f"step-{step:06d}"


def test_retention_keeps_those_saved_last(tmp_path: Path) -> None:
    for step in (10, 300, 20, 30):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000020", "step-000030"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    first, second = (manifests.read_manifest(save(tmp_path, 5, content)) for content in (b"first", b"second"))
    assert names(tmp_path) == ["step-000005"]
    assert (tmp_path / "step-000005" / "data").read_bytes() == b"second"
    assert first.sequence < second.sequence


def test_what_a_dead_run_left_is_swept_by_the_next_save(tmp_path: Path) -> None:
    dead = tmp_path / commits_in(tmp_path).begin(7)
    (dead / "half").write_bytes(b"...")
    assert checkpoint.latest(tmp_path) is None
    other = tmp_path / ".step-notes"
    other.mkdir()
    save(tmp_path, 7)
    assert names(tmp_path) == [".step-notes", "step-000007"]


def test_a_directory_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    foreign = tmp_path / "step-000005"
    foreign.mkdir()
    (foreign / "precious").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-000005 exists and was not saved by hsdp"):
        save(tmp_path, 5)
    assert (foreign / "precious").exists()


def test_a_damaged_manifest_is_named_by_latest_but_does_not_stop_saving(tmp_path: Path) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    (damaged / manifests.MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"step-000002/manifest.json is damaged.*move step-000002 out"):
        checkpoint.latest(tmp_path)
    save(tmp_path, 3)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000003"


@pytest.mark.parametrize("saves", [1, 4])
@pytest.mark.parametrize("gone", ["unreadable", "moved-away"])
def test_what_was_saved_beside_one_that_could_not_be_read_stays_the_last_when_it_can(
    tmp_path: Path, saves: int, gone: str
) -> None:
    """The earlier one had the same number in the order, or, saved again and again, a higher one: it was taken, and the new
    one pruned.
    """
    save(tmp_path / "run", 10)
    for _ in range(saves):
        unread = save(tmp_path / "run", 20)
    content = (unread / manifests.MANIFEST).read_text()
    if gone == "unreadable":
        (unread / manifests.MANIFEST).write_text("")
    else:
        unread.rename(tmp_path / "away")
    new = save(tmp_path / "run", 15)
    if gone == "unreadable":
        (unread / manifests.MANIFEST).write_text(content)
    else:
        (tmp_path / "away").rename(unread)
    assert checkpoint.latest(tmp_path / "run") == new
    save(tmp_path / "run", 30, keep=2)
    assert names(tmp_path / "run") == ["step-000015", "step-000030"]


@pytest.mark.parametrize("now", [1, 50], ids=["is-behind", "stands-still"])
def test_saves_are_in_order_though_the_clock_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: int) -> None:
    """The clock of another host may be behind, or that of this one be set back; earlier versions counted saves."""
    monkeypatch.setattr(store, "time", types.SimpleNamespace(time_ns=iter([50, *[now] * 3]).__next__))
    for step in (40, 10, 30, 20):
        save(tmp_path, step)
        assert checkpoint.latest(tmp_path) == tmp_path / f"step-{step:06d}"
    sequences = {step: manifests.read_manifest(tmp_path / f"step-{step:06d}").sequence for step in (40, 10, 30, 20)}
    assert sequences == {40: 50, 10: 51, 30: 52, 20: 53}


def test_publishing_notices_files_that_are_not_there(tmp_path: Path) -> None:
    partial = tmp_path / commits_in(tmp_path).begin(1)
    files = {"data": manifests.FileRecord(3, 0), "more": write_file(partial / "more", b"abcd")}
    (partial / "more").write_bytes(b"ab")
    with pytest.raises(CheckpointError, match=r"data is missing; more is truncated: 2 bytes instead of 4.*shared by all"):
        store.publish(tmp_path, partial.name, 1, 1, files, None)
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("field", ["step", "sequence", "files", "format", "crc32", "version"])
def test_a_manifest_that_was_edited_is_refused(tmp_path: Path, field: str) -> None:
    file = save(tmp_path, 1) / manifests.MANIFEST
    fields = json.loads(file.read_text())
    fields[field] = {"step": 2, "sequence": 9, "files": {}, "format": "x", "crc32": 0, "version": 9}[field]
    file.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        checkpoint.latest(tmp_path)


def crash_at(count: int, body: Callable[[], Any]) -> bool:
    """Runs `body`, raising at the `count`-th line of what writes to the directory; returns whether it got that far."""
    left = count

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("store.py", "commits.py", "checksums.py")):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Crash
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        body()
    except Crash:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("again", [False, True], ids=["new-step", "same-step"])
def test_dying_at_any_line_of_a_save_loses_nothing(tmp_path: Path, again: bool) -> None:
    count = 0
    while True:
        count += 1
        directory = tmp_path / str(count)
        directory.mkdir()
        for step in (1, 2):
            save(directory, step, f"content {step}".encode())
        crashed = crash_at(count, lambda directory=directory: save(directory, 2 if again else 3, b"new content", keep=2))
        last = checkpoint.latest(directory)
        assert last is not None
        manifest = manifests.read_manifest(last)
        manifests.check_sizes(last, manifest)
        manifests.check_content(last, OpenFiles(opener(last)), manifest, manifest.files)
        assert (last / "data").read_bytes() in (b"content 2", b"new content")
        # The run starts again from there: nothing of the crash stays.
        save(directory, 4, keep=2)
        assert len(names(directory)) == 2
        assert checkpoint.latest(directory) == directory / "step-000004"
        if not crashed:
            break
    assert count > 60  # it did go through the lines one by one
    assert (last / "data").read_bytes() == b"new content"


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for bad in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match=r"checkpoint.save\(step="):
            checkpoint.save(tmp_path, model, step=bad)  # type: ignore[arg-type]
    for bad in (0, -3, 1.5):
        with pytest.raises(ValueError, match=r"checkpoint.save\(keep="):
            checkpoint.save(tmp_path, model, step=1, keep=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torch.distributed is not initialised"):
        checkpoint.save(tmp_path, model, step=1, process_group=object())  # type: ignore[arg-type]
    assert names(tmp_path) == []


def test_extra_takes_plain_data_only_and_says_so_when_saving(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    extra = {"loader": {"epoch": 3, "order": torch.arange(4), "name": "train"}, "raw": b"ab", "pair": (1.5, None, True)}
    checkpoint.save(tmp_path, model, extra=extra, step=1)
    loaded = checkpoint.load(tmp_path, model).extra
    assert torch.equal(loaded["loader"].pop("order"), extra["loader"].pop("order"))  # type: ignore[attr-defined]
    assert loaded == extra
    with pytest.raises(CheckpointError, match=r"\"extra\['model'\]\" is a .*Linear, which cannot be saved"):
        checkpoint.save(tmp_path, model, extra={"model": model}, step=2)
    assert names(tmp_path) == ["step-000001"]  # nothing of the failed one


def test_rng_state_comes_back(tmp_path: Path) -> None:
    import random

    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, model, extra=checkpoint.rng_state(), step=1)
    before = random.random(), torch.rand(3)
    checkpoint.set_rng_state(checkpoint.load(tmp_path, model).extra)
    after = random.random(), torch.rand(3)
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])


def test_checksums_are_by_isa_l_or_numpy_and_zlibs(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = types.ModuleType("isal_zlib")
    quick.crc32 = lambda data, before=0: zlib.crc32(data, before)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "isal", types.ModuleType("isal"))
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", quick)
    assert crc._fastest() is quick.crc32
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    by_rows = crc._fastest()
    data, least, row = random.Random(0).randbytes(3 << 20), crc._LEAST, crc._ROW
    for size in (0, 1, 63, 4097, least - 1, least, least + 1, 9 * row - 1, 9 * row, 9 * row + 1, len(data)):
        for function in (by_rows, crc.crc32_of):
            assert function(memoryview(data)[:size], 0xDEADBEEF) == zlib.crc32(data[:size], 0xDEADBEEF)
            assert function(data[:size]) == zlib.crc32(data[:size])
    with monkeypatch.context() as patch:  # it does go by rows
        patch.setattr(crc.zlib, "crc32", lambda data, before=0: len(data) + before)
        assert by_rows(memoryview(data)[: 9 * row + 7], 0) == 0xFFFFFFFF + row + 7
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert crc._fastest() is zlib.crc32


@pytest.mark.parametrize("size", [0, 1, crc._BLOCK - 1, crc._BLOCK, crc._BLOCK + 1, 3 * crc._BLOCK + 5])
@pytest.mark.parametrize("populate", [crc._POPULATE_READ, 9999], ids=["mapped", "read"])
def test_the_checksum_of_a_file_is_that_of_its_bytes(
    size: int, populate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux before 5.14, which does not know the advice, and in file systems that cannot be mapped, it is read."""
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    kinds: list[type] = []
    monkeypatch.setattr(crc, "_POPULATE_READ", populate)
    monkeypatch.setattr(crc, "crc32_of", lambda block, before: kinds.append(type(block)) or zlib.crc32(block, before))
    with (tmp_path / "file").open("rb", buffering=0) as stream:
        stream.seek(size // 2)
        assert crc.crc32_of_file(stream) == zlib.crc32(data)
    assert set(kinds) == ({mmap.mmap if populate != 9999 else memoryview} if size else set())


def test_a_file_that_shrinks_while_it_is_mapped_does_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same happens where a disk fails: looking at the page raises SIGBUS, bringing it in beforehand an error."""
    file = tmp_path / "file"
    file.write_bytes(bytes(2 * crc._BLOCK))

    class Shrinking(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            os.truncate(file, 10)
            super().madvise(*arguments)

    monkeypatch.setattr(crc.mmap, "mmap", Shrinking)
    with file.open("rb", buffering=0) as stream:
        assert crc.crc32_of_file(stream) == zlib.crc32(bytes(10))

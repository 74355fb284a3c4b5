"""Checkpoints as directories: names that appear only when complete, the manifest, `latest`, retention.

    directory/
        step-000300/                    complete, because it has this name
            *.distcp, .metadata         tensors, as torch.distributed.checkpoint writes and reads them
            index.json                  where in which file each tensor is: what hsdp reads instead of .metadata
            extra.bin                   what the user saved beside them, and all values that are no tensors
            manifest.json               size and checksum of every other file, and of itself
        .step-000400.3f2a.partial/      being written, or left by a run that died; swept by the next save
        .lock                           which process saves here

A checkpoint gets its name by one rename, when everything in it is on disk, and loses it by one rename before anything
in it is deleted. Of a step that is saved again there is never none: the earlier one waits as `step-000300.old` until the
new one has the name. All of this runs on one rank.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from hsdp.checkpoint.archives import combine_crc32
from hsdp.checkpoint.lock import lock
from hsdp.checkpoint.manifests import INDEX, MANIFEST, METADATA, FileRecord, Manifest, check_sizes, has, read_manifest
from hsdp.errors import CheckpointError

logger = logging.getLogger("hsdp.checkpoint")

Progress = Callable[[int, int], object]
"""Called with the bytes that this rank has written or read so far, and those in all."""

_NAME = re.compile(r"step-(\d+)(?:\.old)?")
_LEFTOVER = re.compile(r"\.step-\d+(\.old)?\.[0-9a-f]+\.(partial|trash)")
_FOREIGN = re.compile(
    r"(step|checkpoint|epoch|global_step|iter)[-_=]?\d.*|.*\.(ckpt|pt|pth|bin|safetensors|distcp)", re.IGNORECASE
)
"""Names by which others call checkpoints."""
_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""Errors that say that data did not reach the disk; others say that a system has no way to wait for directories."""


class ChecksumStream:
    """A file opened for writing that keeps count and checksum of what goes through, so that nothing is read back."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self.bytes = 0
        self.crc32 = 0

    def write(self, data: bytes | memoryview, crc32: int | None = None) -> int:
        """Writes all of `data`; `crc32` is its checksum, where it is known."""
        left = memoryview(data)
        while left:
            left = left[self._raw.write(left) or 0 :]  # Linux writes 2 GiB at a time, and what still fits on a full disk
        self.crc32 = zlib.crc32(data, self.crc32) if crc32 is None else combine_crc32(self.crc32, crc32, len(data))
        self.bytes += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes written so far."""
        return self.bytes

    def sync(self) -> None:
        """Waits until everything is on disk."""
        os.fsync(self._raw.fileno())

    @property
    def record(self) -> FileRecord:
        """The file as written."""
        return FileRecord(self.bytes, self.crc32)


def write_file(path: Path, data: bytes) -> FileRecord:
    """Writes a small file and waits until it is on disk."""
    with path.open("wb", buffering=0) as raw:
        stream = ChecksumStream(raw)
        stream.write(data)
        stream.sync()
    return stream.record


# -- finding -------------------------------------------------------------------------------------------------------


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `directory` that was saved last, which need not be the one of the highest step; None without any.

    Only complete checkpoints count, and only those of hsdp. It reads the file system of this process alone, and other ranks
    may see another one for a while: `resume(directory)` and `load(directory)` make all ranks take the one that rank 0 sees.

    Raises:
        CheckpointError: the directory cannot be read, or a checkpoint's manifest is damaged or missing, so that it is not
            known which is the last. (One that was there before the last good one was saved does not matter.)
    """
    directory = expanded(directory)
    found, damaged = _scan(directory)
    last = found[-1] if found else None
    for path, error in damaged:
        if last is not None and path.name in last[0].earlier and _modified(path) <= _modified(last[1]):
            logger.warning("%s; %s, which was saved later, is taken", error, last[1].name)
        else:
            raise CheckpointError(
                f"{error}; move {path.name} out of {directory} to go on from another checkpoint"
            ) from error
    return last[1] if last else None


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with `~` replaced by the home directory it stands for.

    Raises:
        CheckpointError: there is no such home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _modified(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _scan(directory: Path) -> tuple[list[tuple[Manifest, Path]], list[tuple[Path, CheckpointError]]]:
    """The complete checkpoints in a directory, in the order in which they were saved; and those that are damaged."""
    found: list[tuple[Manifest, Path]] = []
    damaged: list[tuple[Path, CheckpointError]] = []
    try:
        names = sorted(directory.iterdir()) if directory.exists() else []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    for path in names:
        if _NAME.fullmatch(path.name) and path.is_dir():
            try:
                found.append((read_manifest(path), path))
            except CheckpointError as error:
                # Gone: a save replaced or retired it while we looked. Without an index: somebody else's.
                if path.exists() and (has(path, MANIFEST) or has(path, INDEX)):
                    damaged.append((path, error))
    return sorted(found, key=lambda one: one[0].sequence), damaged


def holds_something(directory: Path) -> list[str]:
    """The names in a directory that look like checkpoints of any kind, hsdp's or others'; none if there is no directory.

    Raises:
        CheckpointError: it is no directory, or cannot be read.
    """
    try:
        entries = sorted(directory.iterdir()) if directory.exists() else []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    return [
        path.name
        for path in entries
        if not _LEFTOVER.fullmatch(path.name)
        and (_FOREIGN.fullmatch(path.name) or (path.is_dir() and (has(path, METADATA) or has(path, MANIFEST))))
    ]


# -- writing -------------------------------------------------------------------------------------------------------


def begin(directory: Path, step: int) -> Path:
    """Makes the place to write a checkpoint to, and removes what runs that died have left. One job writes at a time.

    Raises:
        CheckpointError: another job saves there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock(directory)
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(".old") and _NAME.fullmatch(path.name) and (path.with_suffix("") / MANIFEST).is_file():
            _retire(path)  # its successor has the name
    # The nonce keeps a run that lost its place (a zombie of a restarted job) from writing among our files.
    partial = directory / f".step-{step:06d}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    return partial


def check_space(directory: Path, needed: int) -> None:
    """Raises CheckpointError, which tells both sizes, if `needed` bytes cannot fit on the file system of `directory`."""
    free = free_bytes(directory)
    if free is not None and needed > free:
        raise CheckpointError(
            f"no space left for it in {directory}: it needs {needed:,} bytes, and {free:,} are free; remove something, or "
            "save to another file system"
        )


def free_bytes(directory: Path) -> int | None:
    """How many bytes can be written there; None where that is not known."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free
    return None


def discard(partial: Path) -> None:
    """Removes a checkpoint that could not be finished."""
    shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, step: int, world_size: int, files: Mapping[str, FileRecord], keep: int | None) -> Path:
    """Makes a written checkpoint complete: manifest, name, retention.

    Args:
        partial: what `begin` returned, with all `files` in it.
        step, world_size, files: what the manifest says.
        keep: how many complete checkpoints remain, the new one included; None: all.

    Returns:
        Its final path.

    Raises:
        CheckpointError: a file is not there, or not of the size it was written with; or the checkpoint is complete, and
            those that it replaces could not be removed.
    """
    directory = partial.parent
    final = directory / f"step-{step:06d}"
    if final.exists() and not (final / MANIFEST).is_file():
        raise CheckpointError(f"{final} exists and was not saved by hsdp; move it away, or save to another directory")
    earlier, damaged = _scan(directory)
    sequence = earlier[-1][0].sequence + 1 if earlier else 1
    names = tuple(sorted({path.name for _, path in earlier} | {path.name for path, _ in damaged}))
    manifest = Manifest(step, sequence, world_size, dict(sorted(files.items())), names)
    try:
        check_sizes(partial, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; is the directory shared by all ranks, and written by this run only?") from error
    write_file(partial / MANIFEST, manifest.text().encode())
    _sync(partial)

    old = final.with_name(final.name + ".old")
    if final.exists():
        _retire(old)
        final.rename(old)
    partial.rename(final)
    _sync(directory)
    try:
        _retire(old)
        if keep is not None:
            for _, path in _scan(directory)[0][:-keep]:
                _retire(path)
    except OSError as error:
        raise CheckpointError(
            f"{final} is complete, but an earlier checkpoint could not be removed from {directory}: {error.strerror}"
        ) from error
    return final


def _retire(path: Path) -> None:
    """Deletes a complete checkpoint: first its name, at once, then its files."""
    trash = path.with_name(f".{path.name}.{secrets.token_hex(4)}.trash")
    with contextlib.suppress(FileNotFoundError):
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Waits until the names in a directory are on disk, where the system can do that.

    Raises:
        OSError: it can, and failed.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _LOST:
            raise

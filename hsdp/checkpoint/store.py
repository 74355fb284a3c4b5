"""Directories of checkpoints: `latest`, what else lies there, what is written and kept.

    directory/
        step-000300/                    complete, because it has this name
            *.distcp, .metadata         tensors, as torch.distributed.checkpoint writes and reads them
            index.json                  where in which file each tensor is: what hsdp reads instead of .metadata
            extra.bin                   what the user saved beside them, and all values that are no tensors
            manifest.json               size and checksum of every other file, and of itself
        .step-000400.3f2a.partial/      being written, or left by a run that died; swept by the next save
        .lock                           which process saves here

In an object store names differ, and what makes a checkpoint complete (`commits.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hsdp.checkpoint.commits import NAME, commits_in, is_unfinished
from hsdp.checkpoint.manifests import INDEX, MANIFEST, METADATA, FileRecord, Manifest, check_sizes, has, read_manifest
from hsdp.checkpoint.remote import AnyPath, RemotePath
from hsdp.errors import CheckpointError

logger = logging.getLogger("hsdp.checkpoint")

Progress = Callable[[int, int], object]
"""Called with the bytes that this rank has written or read so far, and those in all."""

_FOREIGN = re.compile(
    r"(step|checkpoint|epoch|global_step|iter)[-_=]?\d.*|.*\.(ckpt|pt|pth|bin|safetensors|distcp)", re.IGNORECASE
)
"""Names by which others call checkpoints."""
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


# -- finding -------------------------------------------------------------------------------------------------------


def latest(directory: str | os.PathLike[str]) -> AnyPath | None:
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


def expanded(path: str | os.PathLike[str]) -> AnyPath:
    """A path as it is meant: in a file system of fsspec if it is a URL, else absolute, with the home directory in the place
    of `~`. A save in the background goes on where it began when the working directory changes.

    Raises:
        CheckpointError: there is no such home directory, or no working directory.
        ImportError: what the URL needs is not installed.
        TypeError: it is no path.
        ValueError: it is empty; there are no such URLs, or it was one before pathlib took a slash out of it.
    """
    if isinstance(path, RemotePath):
        return path
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"the path of checkpoints is to be a string or a Path, and is of type {type(path).__name__}")
    text = os.fsdecode(path)
    if not text:
        raise ValueError("the path of checkpoints is empty; for the working directory give '.'")
    if _ONE_SLASH.match(text):
        raise ValueError(
            f"{text!r}: if it is to be a URL, it lacks a slash, which pathlib takes out: give it as a string with '://'; "
            f"a local directory of this name is './{text}'"
        )
    kind, mark, rest = text.partition("://")
    if mark and kind not in ("file", "local"):
        return RemotePath(text)
    try:
        return Path(rest if mark else text).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _modified(path: AnyPath) -> int:
    """When a name came to be, in nanoseconds; 0 where names are given once, or that is not known."""
    with contextlib.suppress(OSError):
        return 0 if isinstance(path, RemotePath) else path.stat().st_mtime_ns
    return 0


def _scan(directory: AnyPath) -> tuple[list[tuple[Manifest, AnyPath]], list[tuple[AnyPath, CheckpointError]]]:
    """The complete checkpoints in a directory, in the order in which they were saved; and those that are damaged."""
    found: list[tuple[Manifest, AnyPath]] = []
    damaged: list[tuple[AnyPath, CheckpointError]] = []
    try:
        paths = _entries(directory)
        named = [path for path in paths if NAME.fullmatch(path.name) and path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    for path in named:
        try:
            found.append((read_manifest(path), path))
        except CheckpointError as error:
            # Gone: a save replaced or retired it while we looked. Without an index: somebody else's.
            if not is_unfinished(path) and has(path.parent, path.name) and (has(path, MANIFEST) or has(path, INDEX)):
                damaged.append((path, error))
    return sorted(found, key=lambda one: one[0].sequence), damaged


def _entries(directory: AnyPath) -> list[AnyPath]:
    """What is in a directory, by name; nothing if it is not there.

    Raises:
        OSError: it is none, or cannot be read.
    """
    paths: list[AnyPath] = list(directory.iterdir()) if directory.exists() else []
    return sorted(paths, key=lambda path: path.name)


def holds_something(directory: AnyPath) -> list[str]:
    """The names in a directory that look like checkpoints of any kind, hsdp's or others'; none if there is no directory.

    Raises:
        CheckpointError: it is no directory, or cannot be read.
    """
    try:
        entries = _entries(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    return [
        path.name
        for path in entries
        if not is_unfinished(path)
        and (_FOREIGN.fullmatch(path.name) or (path.is_dir() and (has(path, METADATA) or has(path, MANIFEST))))
    ]


def directories_below(directory: AnyPath) -> list[str]:
    """The names of directories in `directory` that have checkpoints of hsdp in them: those of runs, perhaps."""
    with contextlib.suppress(OSError):
        return [
            inner.name
            for inner in _entries(directory)
            if inner.is_dir() and any(has(path, MANIFEST) for path in inner.iterdir() if NAME.fullmatch(path.name))
        ]
    return []


# -- writing -------------------------------------------------------------------------------------------------------


def check_space(directory: AnyPath, needed: int) -> None:
    """Raises CheckpointError, which tells both sizes, if `needed` bytes cannot fit on the file system of `directory`."""
    free = free_bytes(directory)
    if free is not None and needed > free:
        raise CheckpointError(
            f"no space left for it in {directory}: it needs {needed:,} bytes, and {free:,} are free; remove something, or "
            "save to another file system"
        )


def free_bytes(directory: AnyPath) -> int | None:
    """How many bytes can be written there; None where that is not known."""
    with contextlib.suppress(OSError):
        return None if isinstance(directory, RemotePath) else shutil.disk_usage(directory).free
    return None


def publish(
    directory: AnyPath, written: str, step: int, world_size: int, files: Mapping[str, FileRecord], keep: int | None
) -> AnyPath:
    """Makes a written checkpoint complete: manifest, name, retention.

    Args:
        directory: where checkpoints are.
        written: what `Commits.begin` returned: where in it all `files` are.
        step, world_size, files: what the manifest says.
        keep: how many complete checkpoints remain, the new one included; None: all.

    Returns:
        Its final path.

    Raises:
        CheckpointError: a file is not there, or not of the size it was written with; or the checkpoint is complete, and
            those that it replaces could not be removed.
    """
    earlier, damaged = _scan(directory)
    # Only the clock is known to be past what cannot be read now, or was moved away, and perhaps comes back. Where it lags
    # behind that of another host, what can be read counts.
    sequence = max(time.time_ns(), earlier[-1][0].sequence + 1 if earlier else 1)
    names = tuple(sorted({path.name for _, path in earlier} | {path.name for path, _ in damaged}))
    manifest = Manifest(step, sequence, world_size, dict(sorted(files.items())), names)
    try:
        check_sizes(directory / written, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; is the directory shared by all ranks, and written by this run only?") from error
    commits = commits_in(directory)
    replaced = commits.commit(written, manifest, [path.name for found, path in earlier if found.step == step])
    final = directory / commits.name_of(written, step)
    try:
        for name in replaced:
            commits.retire(name)
        if keep is not None:
            for _, path in _scan(directory)[0][:-keep]:
                commits.retire(path.name)
    except OSError as error:
        raise CheckpointError(
            f"{final} is complete, but an earlier checkpoint could not be removed from {directory}: {error.strerror}"
        ) from error
    return final

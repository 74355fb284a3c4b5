"""How a checkpoint becomes complete, all of it at once, and stops being one, in the two kinds of places there are.

    file system     written to .step-000300.3f2a91bc.partial/, which is renamed to step-000300/
    object store    written to step-000300-3f2a91bc/, of which manifest.json is written last and removed first

There is no rename in an object store, but a small object appears at once. A name that ends in a nonce is given once, so
nothing is ever written over: a step that is saved again has another name, and a run that lost its place (a zombie of a
restarted job) writes among nobody's files. A name of this kind without a manifest is no checkpoint, wherever it is found.
All of this runs on one rank.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hsdp.checkpoint.checksums import write_file
from hsdp.checkpoint.lock import LOCK, claim, lock, owner_of
from hsdp.checkpoint.manifests import MANIFEST, Manifest, has, read_file
from hsdp.checkpoint.remote import AnyPath, RemotePath
from hsdp.errors import CheckpointError

logger = logging.getLogger("hsdp.checkpoint")

NAME = re.compile(r"step-(\d+)(?:\.old|-[0-9a-f]{8})?")
"""What a complete checkpoint may be called."""
_UPLOAD = re.compile(r"step-\d+-[0-9a-f]{8}")
_LEFTOVER = re.compile(r"\.step-\d+(\.old|-[0-9a-f]{8})?\.[0-9a-f]+\.(partial|trash)")
_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""Errors that say that data did not reach the disk; others say that a system has no way to wait for directories."""


def is_unfinished(path: AnyPath) -> bool:
    """Whether a run is writing or removing it, or died while it did.

    A manifest without content counts as none. No object store has such a thing, but a file system that is reached through
    fsspec has one for a moment, or for good if the process that writes it dies at that moment.

    Raises:
        CheckpointError: that cannot be found out, as it may not be read.
    """
    if _LEFTOVER.fullmatch(path.name):
        return True
    return bool(_UPLOAD.fullmatch(path.name)) and not (has(path, MANIFEST) and read_file(path / MANIFEST))


class Commits(Protocol):
    """How checkpoints come and go in a directory; `name` is that of one in it."""

    def begin(self, step: int) -> str:
        """Makes a place to write a checkpoint to, returns its name, and removes what runs that died have left.

        Raises:
            CheckpointError: another job saves there.
        """

    def name_of(self, written: str, step: int) -> str:
        """What the checkpoint will be called, or is."""

    def is_seen(self, written: str) -> bool:
        """Whether this process sees what `begin` did on another rank."""

    def commit(self, written: str, manifest: Manifest, earlier: Sequence[str]) -> list[str]:
        """Makes it complete.

        Args:
            written: what `begin` returned; every file but the manifest is in it.
            manifest: the manifest.
            earlier: the complete checkpoints of the same step.

        Returns:
            The names of those that it replaces, which are still to be retired.

        Raises:
            CheckpointError: its name is taken by something that hsdp did not save, or another job saves there by now; or
                the store did not keep the manifest as it was written.
        """

    def retire(self, name: str) -> None:
        """Deletes a complete checkpoint: at once it is none, then its files go."""

    def discard(self, written: str) -> None:
        """Removes what could not be finished."""


def commits_in(directory: AnyPath) -> Commits:
    """How checkpoints come and go there."""
    return _ByManifest(directory) if isinstance(directory, RemotePath) else _ByRename(directory)


class _ByRename:
    """A checkpoint gets its name by one rename, when everything in it is on disk, and loses it by one rename before
    anything in it is deleted. Of a step that is saved again there is never none: the earlier one waits as
    `step-000300.old` until the new one has the name.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, step: int) -> str:
        try:
            return self._begin(step)
        except PermissionError as error:
            raise _not_ours(self._directory, error) from error

    def _begin(self, step: int) -> str:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise CheckpointError(
                f"{self._directory} cannot be made: {error.filename} is no directory, but a file, or a link to what is not "
                "there; remove it, or save to another directory"
            ) from error
        lock(self._directory)
        for path in self._directory.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                _delete(path)
            elif path.name.endswith(".old") and NAME.fullmatch(path.name) and (path.with_suffix("") / MANIFEST).is_file():
                self.retire(path.name)  # its successor has the name
        # The nonce keeps a run that lost its place (a zombie of a restarted job) from writing among our files.
        partial = self._directory / f".step-{step:06d}.{secrets.token_hex(4)}.partial"
        partial.mkdir()
        return partial.name

    def name_of(self, written: str, step: int) -> str:
        return f"step-{step:06d}"

    def is_seen(self, written: str) -> bool:
        return (self._directory / written).is_dir()

    def commit(self, written: str, manifest: Manifest, earlier: Sequence[str]) -> list[str]:
        partial, final = self._directory / written, self._directory / self.name_of(written, manifest.step)
        if os.path.lexists(final) and not (final / MANIFEST).is_file():
            raise CheckpointError(f"{final} exists and was not saved by hsdp; move it away, or save to another directory")
        write_file(partial / MANIFEST, manifest.text().encode())
        sync_names(partial)
        old = final.with_name(final.name + ".old")
        if final.exists():
            self.retire(old.name)
            final.rename(old)
        partial.rename(final)
        sync_names(self._directory)
        return [old.name]

    def retire(self, name: str) -> None:
        trash = self._directory / f".{name}.{secrets.token_hex(4)}.trash"
        with contextlib.suppress(FileNotFoundError):
            (self._directory / name).rename(trash)
            _delete(trash)

    def discard(self, written: str) -> None:
        _delete(self._directory / written)


class _ByManifest:
    """A checkpoint has its name from the beginning, and is complete as long as it has a manifest."""

    def __init__(self, directory: RemotePath) -> None:
        self._directory = directory

    def begin(self, step: int) -> str:
        self._directory.mkdir()
        claim(self._directory)
        for path in self._directory.iterdir():
            if is_unfinished(path):
                try:
                    path.remove_below()
                except OSError as error:
                    # What has no manifest is in nobody's way, and the next save tries again.
                    logger.warning("%s, which a run that died has left, could not be removed: %s", path, error.strerror)
        path = self._directory / f"step-{step:06d}-{secrets.token_hex(4)}"
        path.mkdir()
        return path.name

    def name_of(self, written: str, step: int) -> str:
        return written

    def is_seen(self, written: str) -> bool:
        return (self._directory / LOCK).exists()  # the checkpoint has no object yet that could be seen

    def commit(self, written: str, manifest: Manifest, earlier: Sequence[str]) -> list[str]:
        claim(self._directory)
        file, text = self._directory / written / MANIFEST, manifest.text().encode()
        write_file(file, text)
        if (found := read_file(file)) != text:
            # Left there, it would be that of a damaged checkpoint, the last one.
            with contextlib.suppress(OSError):
                file.unlink()
            raise CheckpointError(
                f"{file} is not what was written: {len(found)} bytes came back instead of {len(text)}; the store cut it "
                "short, or another program writes there: save again, or to another directory"
            )
        return list(earlier)

    def retire(self, name: str) -> None:
        path = self._directory / name
        with contextlib.suppress(FileNotFoundError):
            (path / MANIFEST).unlink()
        path.remove_below()

    def discard(self, written: str) -> None:
        path = self._directory / written
        with contextlib.suppress(OSError, CheckpointError):
            if is_unfinished(path):  # it is complete if only what came behind the manifest has failed
                path.remove_below()


def _not_ours(directory: Path, error: PermissionError) -> CheckpointError:
    """What a save says where this user may not write."""
    path = Path(error.filename or directory)
    found = next(one for one in (path, *path.parents) if os.path.lexists(one))
    return CheckpointError(
        f"cannot save in {directory}: {found} belongs to {owner_of(found)}, and this process may not write there "
        f"({error.strerror}); save to another directory, or have its owner let this user write to the directory and to all "
        "that is in it"
    )


_kept_trash: set[Path] = set()
"""What could not be deleted, and was told of: each save tries again."""


def _delete(path: Path) -> None:
    """Deletes a directory with everything in it; of a link to one the link alone. What cannot be deleted is told once."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path) and path not in _kept_trash:
        _kept_trash.add(path)
        logger.warning(
            "%s could not be deleted, or not all of it, and still takes its space; it belongs to %s: delete it by hand, "
            "as a user who may",
            path,
            owner_of(path),
        )


def sync_names(directory: Path) -> None:
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

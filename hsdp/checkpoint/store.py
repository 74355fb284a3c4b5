"""Checkpoints as directories: names that appear only when complete, the manifest, `latest`, retention.

    directory/
        step-000300/                    complete, because it has this name
            .metadata, *.distcp         tensors, as torch.distributed.checkpoint writes them
            extra.pt                    what the user saved beside them
            manifest.json               size and checksum of every other file, and of itself
        .step-000400.3f2a.partial/      being written, or left by a run that died; swept by the next save

A checkpoint gets its name by one rename, when everything in it is on disk, and loses it by one rename before anything
in it is deleted. Of a step that is saved again there is never none: the earlier one waits as `step-000300.old` until the
new one has the name. All of this runs on one rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from hsdp.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = ".metadata"
EXTRA = "extra.pt"

Progress = Callable[[int, int], object]
"""Called with the bytes that this rank has written or read so far, and those it will in all."""

_FORMAT = "hsdp-checkpoint"
_VERSION = 1
_NAME = re.compile(r"step-(\d+)(?:\.old)?")
_LEFTOVER = re.compile(r"\.step-\d+(\.old)?\.[0-9a-f]+\.(partial|trash)")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written: its size in bytes and the CRC-32 of its content."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: the step it was saved at.
        sequence: 1 for the first save into its directory, one more for each later one, whatever their steps.
        world_size: number of ranks that saved it.
        files: every file but the manifest, by name.
    """

    step: int
    sequence: int
    world_size: int
    files: Mapping[str, FileRecord]

    def text(self) -> str:
        """As JSON, with a checksum of its own."""
        body = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return json.dumps({**body, "crc32": _checksum(body)}, indent=1)  # no newline: the last byte counts


class ChecksumStream:
    """A file opened for writing that keeps count and checksum of what goes through, so that nothing is read back."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """Writes all of `data`, any buffer of bytes."""
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        self._raw.write(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self.bytes

    def flush(self) -> None:
        """Hands everything to the system."""
        self._raw.flush()

    def fileno(self) -> int:
        """The file's descriptor, for fsync; everything written so far is behind it."""
        self._raw.flush()
        return self._raw.fileno()

    def close(self) -> None:
        """Closes the file."""
        self._raw.close()

    @property
    def record(self) -> FileRecord:
        """The file as written."""
        return FileRecord(self.bytes, self.crc32)


def write_file(path: Path, data: bytes) -> FileRecord:
    """Writes a small file and waits until it is on disk."""
    with path.open("wb") as raw:
        stream = ChecksumStream(raw)
        stream.write(data)
        os.fsync(stream.fileno())
    return stream.record


# -- finding -------------------------------------------------------------------------------------------------------


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `directory` that was saved last, which need not be the one of the highest step; None without any.

    Only complete checkpoints count. It reads the file system of this process alone, and other ranks may see another
    one for a while: `resume(directory)` and `load(directory)` make all ranks take the one that rank 0 sees.

    Raises:
        CheckpointError: a checkpoint's manifest is damaged or missing, so that it is not known which is the last.
    """
    found, damaged = _scan(Path(directory))
    if damaged:
        path, error = damaged[0]
        raise CheckpointError(f"{error}; move {path.name} out of {directory} to go on from another checkpoint") from error
    return found[-1][1] if found else None


def _scan(directory: Path) -> tuple[list[tuple[Manifest, Path]], list[tuple[Path, CheckpointError]]]:
    """The complete checkpoints in a directory, in the order in which they were saved; and those that are damaged."""
    found: list[tuple[Manifest, Path]] = []
    damaged: list[tuple[Path, CheckpointError]] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if _NAME.fullmatch(path.name) and path.is_dir():
            try:
                found.append((read_manifest(path), path))
            except CheckpointError as error:
                if path.exists():  # else a save replaced or retired it while we looked
                    damaged.append((path, error))
    return sorted(found, key=lambda one: one[0].sequence), damaged


def read_manifest(path: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of a newer format.
    """
    file = path / MANIFEST
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: this is no hsdp checkpoint, or a part of it was removed") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it is not JSON ({error})") from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise CheckpointError(f"{file} is damaged or foreign: it does not say format={_FORMAT!r}")
    claimed = fields.pop("crc32", None)
    if claimed != _checksum(fields):
        raise CheckpointError(f"{file} is damaged: its checksum does not fit its content")
    if fields["version"] > _VERSION:
        raise CheckpointError(f"{file} has format version {fields['version']}; this hsdp reads up to {_VERSION}: update it")
    files = {name: FileRecord(**record) for name, record in fields["files"].items()}
    return Manifest(fields["step"], fields["sequence"], fields["world_size"], files)


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Compares the sizes of all files with the manifest, reading none.

    Raises:
        CheckpointError: files are missing, truncated or too long; names each.
    """
    wrong = []
    for name, record in sorted(manifest.files.items()):
        file = path / name
        if Path(name).name != name:
            wrong.append(f"{MANIFEST} lists {name!r}, which is not a plain file name")
        elif not file.is_file():
            wrong.append(f"{name} is missing")
        elif (size := file.stat().st_size) != record.bytes:
            how = "truncated" if size < record.bytes else "longer than it was written"
            wrong.append(f"{name} is {how}: {size} bytes instead of {record.bytes}")
    if wrong:
        raise CheckpointError(f"checkpoint {path}: " + "; ".join(wrong))


def check_content(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Reads files whole and compares their checksums with the manifest.

    Raises:
        CheckpointError: files are damaged, or another's; names each.
    """
    wrong = []
    for name in names:
        crc32 = 0
        with (path / name).open("rb") as stream:
            while block := stream.read(_BLOCK):
                crc32 = zlib.crc32(block, crc32)
        if crc32 != manifest.files[name].crc32:
            wrong.append(name)
    if wrong:
        raise CheckpointError(
            f"checkpoint {path}: {', '.join(wrong)}: damaged, or from another checkpoint (the checksum does not fit)"
        )


def check_bytes(path: Path, manifest: Manifest, name: str, data: bytes) -> None:
    """Compares the content of a file, already read, with the manifest.

    Raises:
        CheckpointError: it is not what was written.
    """
    if manifest.files.get(name) != FileRecord(len(data), zlib.crc32(data)):
        raise CheckpointError(f"checkpoint {path}: {name} is damaged, or from another checkpoint")


# -- writing -------------------------------------------------------------------------------------------------------


def begin(directory: Path, step: int) -> Path:
    """Makes the place to write a checkpoint to, and removes what runs that died have left. One run writes at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    # The nonce keeps a run that lost its place (a zombie of a restarted job) from writing among our files.
    partial = directory / f".step-{step:06d}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    return partial


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
        CheckpointError: a file is not there, or not of the size it was written with.
    """
    directory = partial.parent
    final = directory / f"step-{step:06d}"
    if final.exists() and not (final / MANIFEST).is_file():
        raise CheckpointError(f"{final} exists and was not saved by hsdp; move it away, or save to another directory")
    earlier, _ = _scan(directory)
    sequence = earlier[-1][0].sequence + 1 if earlier else 1
    manifest = Manifest(step, sequence, world_size, dict(sorted(files.items())))
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
    _retire(old)
    if keep is not None:
        for _, path in _scan(directory)[0][:-keep]:
            _retire(path)
    return final


def _retire(path: Path) -> None:
    """Deletes a complete checkpoint: first its name, at once, then its files."""
    trash = path.with_name(f".{path.name}.{secrets.token_hex(4)}.trash")
    with contextlib.suppress(FileNotFoundError):
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Waits until the names in a directory are on disk, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

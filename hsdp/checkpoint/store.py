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
import io
import json
import logging
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsdp.checkpoint.archives import combine_crc32
from hsdp.checkpoint.files import Files
from hsdp.checkpoint.index import is_plain_name
from hsdp.checkpoint.lock import lock
from hsdp.errors import CheckpointError

logger = logging.getLogger("hsdp.checkpoint")

MANIFEST = "manifest.json"
METADATA = ".metadata"
INDEX = "index.json"
EXTRA = "extra.bin"

Progress = Callable[[int, int], object]
"""Called with the bytes that this rank has written or read so far, and those in all."""

_FORMAT = "hsdp-checkpoint"
_VERSION = 2
_NAME = re.compile(r"step-(\d+)(?:\.old)?")
_LEFTOVER = re.compile(r"\.step-\d+(\.old)?\.[0-9a-f]+\.(partial|trash)")
_FOREIGN = re.compile(
    r"(step|checkpoint|epoch|global_step|iter)[-_=]?\d.*|.*\.(ckpt|pt|pth|bin|safetensors|distcp)", re.IGNORECASE
)
"""Names by which others call checkpoints."""
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
        earlier: the names of the checkpoints that were in the directory when it was saved.
    """

    step: int
    sequence: int
    world_size: int
    files: Mapping[str, FileRecord]
    earlier: tuple[str, ...] = ()

    def text(self) -> str:
        """As JSON, with a checksum of its own."""
        body = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return json.dumps({**body, "crc32": _checksum(body)}, indent=1)  # no newline: the last byte counts


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


def has(path: Path, name: str) -> bool:
    """Whether a directory has an entry of that name.

    Raises:
        CheckpointError: that cannot be found out, as it may not be read.
    """
    try:
        return (path / name).exists()
    except OSError as error:
        raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error


def read_file(path: Path) -> bytes:
    """The content of a small file.

    Raises:
        CheckpointError: it cannot be read, which is not to say that it is damaged.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: this is no hsdp checkpoint, or a part of it was removed") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


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


def read_manifest(path: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, of another format, or may not be read.
    """
    file = path / MANIFEST
    try:
        fields = json.loads(read_file(file).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it is not JSON ({str(error)[:200]})") from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise CheckpointError(f"{file} is damaged or foreign: it does not say format={_FORMAT!r}")
    claimed = fields.pop("crc32", None)
    if claimed != _checksum(fields):
        raise CheckpointError(f"{file} is damaged: its checksum does not fit its content")
    if fields.get("version") != _VERSION:
        raise CheckpointError(f"{file} has format version {fields.get('version')!r}; this hsdp reads version {_VERSION}")
    try:
        return _manifest(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {str(error)[:200]}") from None


def _manifest(fields: Mapping[str, Any]) -> Manifest:
    def number(value: object, least: int) -> int:
        if type(value) is not int or value < least:
            raise ValueError(f"expected a whole number of at least {least}, not {str(value)[:50]}")
        return value

    files = {}
    for name, record in fields["files"].items():
        if not is_plain_name(name):
            raise ValueError(f"it lists {name[:200]!r}, which is not a plain file name")
        files[name] = FileRecord(number(record["bytes"], 0), number(record["crc32"], 0))
    earlier = fields["earlier"]
    if not isinstance(earlier, list) or not all(isinstance(name, str) for name in earlier):
        raise ValueError("earlier is no list of names")
    numbers = number(fields["step"], 0), number(fields["sequence"], 1), number(fields["world_size"], 1)
    return Manifest(*numbers, files, tuple(earlier))


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Compares the sizes of all files with the manifest, reading none.

    Raises:
        CheckpointError: files are missing, truncated or too long; names each.
    """
    wrong = []
    for name, record in sorted(manifest.files.items()):
        try:
            status = (path / name).stat()
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode):
            wrong.append(f"{name} is not a file")
        elif status.st_size != record.bytes:
            how = "truncated" if status.st_size < record.bytes else "longer than it was written"
            wrong.append(f"{name} is {how}: {status.st_size} bytes instead of {record.bytes}")
    if wrong:
        raise CheckpointError(f"checkpoint {path}: " + "; ".join(wrong))


def check_content(path: Path, files: Files, manifest: Manifest, names: Iterable[str]) -> None:
    """Reads files whole and compares their checksums with the manifest.

    Raises:
        CheckpointError: files are damaged, or another's, or cannot be read; names each.
    """
    wrong, unread = [], []
    block = memoryview(bytearray(_BLOCK))
    for name in names:
        try:
            stream, crc32 = files.open(name), 0
            stream.seek(0)
            while count := stream.readinto(block):  # type: ignore[attr-defined]
                crc32 = zlib.crc32(block[:count], crc32)
        except OSError as error:
            unread.append(f"{name} cannot be read: {error.strerror}")
        else:
            if crc32 != manifest.files[name].crc32:
                wrong.append(name)
    if wrong:
        unread.append(f"{', '.join(wrong)}: damaged, or from another checkpoint (the checksum does not fit)")
    if unread:
        raise CheckpointError(f"checkpoint {path}: " + "; ".join(unread))


def check_bytes(path: Path, manifest: Manifest, name: str, data: bytes) -> None:
    """Compares the content of a file, already read, with the manifest.

    Raises:
        CheckpointError: it is not what was written.
    """
    if manifest.files.get(name) != FileRecord(len(data), zlib.crc32(data)):
        raise CheckpointError(f"checkpoint {path}: {name} is damaged, or from another checkpoint")


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
        CheckpointError: a file is not there, or not of the size it was written with.
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

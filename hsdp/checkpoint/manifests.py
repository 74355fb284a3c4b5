"""The manifest of a checkpoint, and the proof that the files beside it are those that it lists.

{"format": ..., "version": ..., "step": 300, "sequence": 1795920000000000000, "world_size": 8, "earlier": [...],
 "files": {name: {"bytes": ..., "crc32": ...}}, "crc32": that of all of this}
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hsdp.checkpoint.crc import crc32_of, crc32_of_file
from hsdp.checkpoint.index import is_plain_name
from hsdp.checkpoint.open_files import OpenFiles, check_kind
from hsdp.checkpoint.remote import AnyPath, RemotePath
from hsdp.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = ".metadata"
INDEX = "index.json"
EXTRA = "extra.bin"

_FORMAT = "hsdp-checkpoint"
_VERSION = 2


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
        sequence: higher than that of any checkpoint saved before, whatever their steps: nanoseconds since 1970, or one more
            than the save before it if the clock is behind that. Earlier versions counted from 1.
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


# -- reading -------------------------------------------------------------------------------------------------------


def has(path: AnyPath, name: str) -> bool:
    """Whether a directory has an entry of that name.

    Raises:
        CheckpointError: that cannot be found out, as it may not be read.
    """
    try:
        return (path / name).exists()
    except OSError as error:
        raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error


def read_file(path: AnyPath) -> bytes:
    """The content of a small file.

    Raises:
        CheckpointError: it cannot be read, which is not to say that it is damaged.
    """
    try:
        check_kind(path)
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: this is no hsdp checkpoint, or a part of it was removed") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_manifest(path: AnyPath) -> Manifest:
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
    return crc32_of(json.dumps(body, sort_keys=True).encode())


def check_sizes(path: AnyPath, manifest: Manifest) -> None:
    """Compares the sizes of all files with the manifest, reading none.

    Raises:
        CheckpointError: files are missing, truncated or too long; names each.
    """
    wrong = []
    for name, size in _sizes(path, sorted(manifest.files)):
        expected = manifest.files[name].bytes
        if isinstance(size, str):
            wrong.append(f"{name} {size}")
        elif size != expected:
            how = "truncated" if size < expected else "longer than it was written"
            wrong.append(f"{name} is {how}: {size} bytes instead of {expected}")
    if wrong:
        raise CheckpointError(f"checkpoint {path}: " + "; ".join(wrong))


def _sizes(path: AnyPath, names: Iterable[str]) -> Iterator[tuple[str, int | str]]:
    """The size of each of these files in bytes, or what is wrong with it."""
    if isinstance(path, RemotePath):
        try:
            listed = path.sizes()
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from error
        yield from ((name, listed.get(name, "is missing")) for name in names)
        return
    for name in names:
        try:
            status = (path / name).stat()
        except FileNotFoundError:
            yield name, "is missing"
        except OSError as error:
            yield name, f"cannot be read: {error.strerror}"
        else:
            yield name, status.st_size if stat.S_ISREG(status.st_mode) else "is not a file"


def check_content(path: AnyPath, files: OpenFiles, manifest: Manifest, names: Iterable[str]) -> None:
    """Reads files whole and compares their checksums with the manifest.

    Raises:
        CheckpointError: files are damaged, or another's, or cannot be read; names each.
    """
    wrong, unread = [], []
    for name in names:
        try:
            crc32 = crc32_of_file(files.open(name))
        except OSError as error:
            unread.append(f"{name} cannot be read: {error.strerror}")
        else:
            if crc32 != manifest.files[name].crc32:
                wrong.append(name)
    if wrong:
        unread.append(f"{', '.join(wrong)}: damaged, or from another checkpoint (the checksum does not fit)")
    if unread:
        raise CheckpointError(f"checkpoint {path}: " + "; ".join(unread))


def check_bytes(path: AnyPath, manifest: Manifest, name: str, data: bytes) -> None:
    """Compares the content of a file, already read, with the manifest.

    Raises:
        CheckpointError: it is not what was written.
    """
    if manifest.files.get(name) != FileRecord(len(data), crc32_of(data)):
        raise CheckpointError(f"checkpoint {path}: {name} is damaged, or from another checkpoint")

"""Writing files so that their sizes and checksums are known without reading anything back."""

from __future__ import annotations

import io
import os

from hsdp.checkpoint.crc import combine_crc32, crc32_of
from hsdp.checkpoint.manifests import FileRecord
from hsdp.checkpoint.remote import AnyPath, RemotePath


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
        self.crc32 = crc32_of(data, self.crc32) if crc32 is None else combine_crc32(self.crc32, crc32, len(data))
        self.bytes += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes written so far."""
        return self.bytes

    def sync(self) -> None:
        """Waits until everything is on disk; a remote store has it when the file is closed."""
        if isinstance(self._raw, io.FileIO):
            os.fsync(self._raw.fileno())

    @property
    def record(self) -> FileRecord:
        """The file as written."""
        return FileRecord(self.bytes, self.crc32)


def write_file(path: AnyPath, data: bytes) -> FileRecord:
    """Writes a small file and waits until it is on disk; in an object store it appears whole or not at all."""
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return FileRecord(len(data), crc32_of(data))
    with path.open("wb", buffering=0) as raw:
        stream = ChecksumStream(raw)
        stream.write(data)
        stream.sync()
    return stream.record

"""Tensors written as `torch.save` writes them, one zip file each, whose bytes are read once for one checksum.

`torch.save` would compute a checksum of its own, and turns a full disk into a sentence about positions; here an error of
the file system comes out as it is, and the checksum in the zip file is the one from which that of the whole file is put
together.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from hsdp.checkpoint.archive_reader import STORAGES
from hsdp.checkpoint.checksums import ChecksumStream
from hsdp.checkpoint.crc import crc32_of
from hsdp.checkpoint.memory import buffer_of

_ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF
_NAMES = {dtype: name for name, dtype in STORAGES.items()}


def write_tensor(stream: ChecksumStream, tensor: Tensor) -> None:
    """Writes a contiguous tensor on the CPU so that `torch.load` reads it.

    Args:
        stream: takes the bytes.
        tensor: of any dtype.

    Raises:
        OSError: the file system's own.
    """
    archive = _Archive(stream)
    archive.add("data.pkl", memoryview(_pickle_of(tensor)))
    archive.add("byteorder", memoryview(b"little"))
    archive.add("data/0", buffer_of(tensor))
    archive.add("version", memoryview(b"3\n"))
    archive.end()


class _Archive:
    """A zip file of entries that are not packed, with 64-bit sizes where they need them."""

    def __init__(self, stream: ChecksumStream) -> None:
        self._stream = stream
        self._origin = stream.tell()
        self._directory: list[bytes] = []

    def add(self, name: str, content: memoryview) -> None:
        """Writes an entry; its content begins at a multiple of 64 bytes."""
        crc32, size, start = crc32_of(content), len(content), self._at()
        path = f"archive/{name}".encode()
        big = size >= _LIMIT
        wide = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
        sizes = (_LIMIT, _LIMIT) if big else (size, size)
        padding = -(start + 30 + len(path) + len(wide) + 4) % _ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        common = struct.pack("<HHHHHIIIH", 45 if big else 20, 0x800, 0, 0, 0, crc32, *sizes, len(path))
        self._stream.write(b"PK\x03\x04" + common + struct.pack("<H", len(extra)) + path + extra)
        if size:
            self._stream.write(content, crc32)

        far = start >= _LIMIT
        fields = ([size, size] if big else []) + ([start] if far else [])
        wide = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
        tail = struct.pack("<HHHHII", len(wide), 0, 0, 0, 0, _LIMIT if far else start)
        self._directory.append(b"PK\x01\x02" + struct.pack("<H", 45) + common + tail + path + wide)

    def end(self) -> None:
        """Writes the directory of the entries."""
        start, directory, count = self._at(), b"".join(self._directory), len(self._directory)
        if start >= _LIMIT:
            directory_end = start + len(directory)
            directory += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
            directory += struct.pack("<4sIQI", b"PK\x06\x07", 0, directory_end, 1)
            size = directory_end - start
        else:
            size = len(directory)
        end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size, min(start, _LIMIT), 0)
        self._stream.write(directory + end)

    def _at(self) -> int:
        return self._stream.tell() - self._origin


def _pickle_of(tensor: Tensor) -> bytes:
    """What `torch.save` puts into data.pkl: a call of torch._utils._rebuild_tensor_v2, or v3 for the newer dtypes."""
    known = tensor.dtype in _NAMES
    kind = _global("torch", _NAMES[tensor.dtype]) if known else _global("torch.storage", "UntypedStorage")
    count = tensor.numel() if known else tensor.nbytes
    storage = b"(" + _text("storage") + kind + _text("0") + _text("cpu") + _number(count) + b"tQ"
    parts = [storage, _number(0), _numbers(tensor.shape), _numbers(tensor.stride()), b"\x89"]
    parts.append(_global("collections", "OrderedDict") + b")R")
    if not known:
        parts.append(_global("torch", str(tensor.dtype).removeprefix("torch.")))
    rebuild = _global("torch._utils", "_rebuild_tensor_v2" if known else "_rebuild_tensor_v3")
    return b"\x80\x02" + rebuild + b"(" + b"".join(parts) + b"tR."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _numbers(values: torch.Size | tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"

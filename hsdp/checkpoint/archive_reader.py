"""Pieces as `torch.save` writes them, zip files inside of a file, read without it: where bytes are, what a value is.

    piece = zip( archive/data.pkl    how the tensor lies in its storage: dtype, offset, shape, strides
                 archive/data/0      the storage, neither packed nor ciphered )

A tensor's bytes are only found here, and later read straight to where they belong.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hsdp.checkpoint.index import FileRange, dtype_named
from hsdp.checkpoint.memory import buffer_of
from hsdp.checkpoint.pickles import ORDERED_DICT, Call, Name, Reference, read_pickle
from hsdp.errors import CheckpointError

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
"""The names by which `torch.save` calls storages; those of other dtypes are untyped."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its bytes begin at `start`, its elements lie in them by `strides`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after the other."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return math.prod(self.shape) == 0
            expected *= size
        return True

    @property
    def span(self) -> int:
        """How many elements of the storage lie between its first and its last one, these included."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) if math.prod(self.shape) else 0


class OpenPiece:
    """One piece, opened.

    Args:
        stream: the file.
        place: where in it the piece is.

    Raises:
        CheckpointError: it is not what `torch.save` writes.
    """

    def __init__(self, stream: BinaryIO, place: FileRange) -> None:
        self._stream = stream
        self._place = place
        size = stream.seek(0, os.SEEK_END)
        if place.start + place.length > size:
            end = place.start + place.length
            raise CheckpointError(f"it should reach to byte {end}, but the file ends at {size}: it is truncated")
        self._zip = self._open()
        self._entries = {entry.filename.partition("/")[2]: entry for entry in self._zip.infolist()}
        if "data.pkl" not in self._entries:
            raise CheckpointError("it has no data.pkl")
        order = self._content("byteorder").decode("ascii", "replace") if "byteorder" in self._entries else "little"
        if order != sys.byteorder:
            raise CheckpointError(f"its bytes are in {order[:20]!r} order, and this machine's in {sys.byteorder} order")
        pickle = self._content("data.pkl")
        self._described, self._budget = read_pickle(pickle), 100 + len(pickle)

    def _open(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(io.BufferedReader(_Part(self._stream, self._place), 1 << 13))
        except OSError:
            raise
        except Exception as error:  # a damaged zip file raises what the damage leads to
            raise CheckpointError(f"it is no zip file: {str(error)[:200]}") from None

    def check(self) -> None:
        """Reads all of it and compares the checksums that `torch.save` left.

        Raises:
            CheckpointError: one does not fit.
        """
        for name, entry in self._entries.items():
            self._start(entry)
            if not name.startswith(".data/"):  # an id, not data
                self._content(name)

    def tensor(self) -> Stored:
        """The tensor that it is.

        Raises:
            CheckpointError: it is none, or its bytes are not all there.
        """
        return self._stored(self._described)

    def value(self) -> Any:
        """The value that it is, with tensors in it.

        Raises:
            CheckpointError: it has objects that hsdp does not make; names them.
        """
        return _Values(self._read, self._budget, self._place.length).value(self._described)

    # -- zip --

    def _start(self, entry: zipfile.ZipInfo) -> int:
        """Where in the file the content of an entry begins."""
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise CheckpointError(f"{entry.filename[:100]!r} in it is packed or ciphered")
        part = _Part(self._stream, self._place)
        part.seek(entry.header_offset)
        header = part.read(30)
        if len(header) != 30 or header[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{entry.filename[:100]!r} is not where it should be in it")
        names: tuple[int, int] = struct.unpack_from("<HH", header, 26)
        start = entry.header_offset + 30 + sum(names)
        if not 0 <= start <= start + entry.file_size <= self._place.length:
            raise CheckpointError(f"{entry.filename[:100]!r} reaches out of it")
        return self._place.start + start

    def _content(self, name: str) -> bytes:
        entry = self._entries[name]
        self._start(entry)
        try:
            return self._zip.read(entry)
        except OSError:
            raise
        except Exception as error:  # as in _open
            raise CheckpointError(f"{name[:100]!r} in it is damaged: {str(error)[:200]}") from None

    # -- tensors --

    def _stored(self, value: Any) -> Stored:
        if isinstance(value, Call) and value.callee == Name("torch._utils", "_rebuild_parameter"):
            value = value.arguments[0] if value.arguments else None
        if not (isinstance(value, Call) and value.callee.module == "torch._utils" and value.callee.name in _REBUILDS):
            raise CheckpointError("it is no plain tensor")
        try:
            reference, offset, shape, strides, *rest = value.arguments
            kind, storage, key, _, count = reference.content
            dtype = STORAGES[storage.name] if value.callee.name == "_rebuild_tensor_v2" else dtype_named(rest[2].name)
            if kind != "storage" or not isinstance(reference, Reference):
                raise ValueError("its storage is none")
            numbers = (*shape, *strides, offset, count)
            if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers) or len(shape) != len(strides):
                raise ValueError("its sizes are none")
            entry = self._entries[f"data/{key}"]
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(f"its tensor is damaged: {type(error).__name__}: {error}") from None
        found = Stored(dtype, tuple(shape), tuple(strides), self._start(entry) + offset * dtype.itemsize)
        if (offset + found.span) * dtype.itemsize > entry.file_size or math.prod(shape) > entry.file_size:
            raise CheckpointError("its tensor reaches out of its bytes")
        return found

    def _read(self, value: Any, bytes_left: int) -> Tensor:
        stored = self._stored(value)
        if stored.span * stored.dtype.itemsize > bytes_left:
            raise CheckpointError("it has more tensors than bytes")
        return read_tensor(self._stream, stored)


_REBUILDS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")


def read_tensor(stream: BinaryIO, stored: Stored) -> Tensor:
    """A stored tensor, in new memory."""
    flat = torch.empty(stored.span, dtype=stored.dtype, device="cpu")
    read_into(stream, stored.start, flat)
    return flat.as_strided(stored.shape, stored.strides)


def read_into(stream: BinaryIO, start: int, target: Tensor) -> None:
    """Fills a contiguous tensor on the CPU with the bytes from `start` on.

    Raises:
        CheckpointError: the file ends too early.
    """
    view = buffer_of(target)
    stream.seek(start)
    while len(view):
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"it ends {len(view)} bytes too early")
        view = view[count:]


class _Part(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, stream: BinaryIO, place: FileRange) -> None:
        self._stream = stream
        self._start = place.start
        self._length = place.length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases: dict[int, int] = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}
        self._at = max(0, offset + bases[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(view[: max(0, self._length - self._at)])  # type: ignore[attr-defined]
        self._at += count
        return int(count)


class _Values:
    """Makes values of what a pickle says.

    Args:
        read: makes a tensor of no more bytes than it is told.
        budget: how many values it may make: one takes at least a byte of its pickle, unless parts refer to each other so
            that they would grow without bound.
        bytes_left: how many bytes of tensors it may read, for the same reason.
    """

    def __init__(self, read: Callable[[Any, int], Tensor], budget: int, bytes_left: int) -> None:
        self._read = read
        self._budget = budget
        self._bytes_left = bytes_left
        self._tensors: dict[int, Tensor] = {}

    def value(self, described: Any) -> Any:
        """The value; `described` is known not to be nested too deep, nor within itself."""
        self._budget -= 1
        if self._budget < 0:
            raise CheckpointError("a value in it refers to its own parts so often that it has no end")
        if isinstance(described, Name):
            return self._named(described)
        if isinstance(described, (tuple, list)):
            return type(described)(self.value(item) for item in described)
        if isinstance(described, dict):
            return {_key(self.value(key)): self.value(value) for key, value in described.items()}
        if isinstance(described, Reference):
            raise CheckpointError("it has a storage without a tensor")
        return self._called(described) if isinstance(described, Call) else described

    def _called(self, call: Call) -> Any:
        callee = Name(call.callee.module.replace("__builtin__", "builtins"), call.callee.name)
        if callee.module == "torch._utils":
            return self._tensor(call)
        arguments = [self.value(one) for one in call.arguments]
        try:
            if callee == ORDERED_DICT and len(arguments) <= 1:
                pairs = arguments[0] if arguments else self.value(call.state or {}).items()
                return OrderedDict((_key(key), value) for key, value in pairs)
            if callee == Name("_codecs", "encode") and arguments[1:] == ["latin1"]:
                return arguments[0].encode("latin1")  # how bytes are written in protocol 2
            if callee in (Name("builtins", "set"), Name("builtins", "frozenset")) and len(arguments) <= 1:
                kind = set if callee.name == "set" else frozenset
                return kind(_key(item) for item in (arguments[0] if arguments else ()))
            if callee in _CALLABLE and call.state is None:
                return _CALLABLE[callee](*arguments)
        except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"its {callee} is damaged: {str(error)[:200]}") from None
        raise CheckpointError(f"it asks for {str(callee)[:200]}, which could only be loaded by running code")

    def _tensor(self, call: Call) -> Tensor:
        if id(call) not in self._tensors:
            tensor = self._read(call, self._bytes_left)
            self._bytes_left -= tensor.untyped_storage().nbytes()
            self._tensors[id(call)] = tensor
        return self._tensors[id(call)]

    def _named(self, name: Name) -> Any:
        with contextlib.suppress(ValueError):
            return dtype_named(name.name if name.module == "torch" else None)
        raise CheckpointError(f"it asks for {str(name)[:200]}, which could only be loaded by running code")


def _key(value: Any) -> Any:
    """A value that is to be hashed: nothing whose hash could take long."""
    for part in value if isinstance(value, tuple) else (value,):
        if not (part is None or isinstance(part, (str, int, float, bytes, torch.dtype))):
            raise TypeError("a key that is no plain value")
    return value


_CALLABLE: dict[Name, Callable[..., Any]] = {
    Name("builtins", "complex"): complex,
    Name("torch", "Size"): torch.Size,
    Name("torch", "device"): torch.device,
}
"""What a value may be made by: constructors that only hold what they are given."""

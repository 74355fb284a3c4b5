"""The files of a safetensors export while they are written: what goes where, and the bytes on their way there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hsdp.checkpoint.commits import sync_names
from hsdp.checkpoint.memory import buffer_of
from hsdp.checkpoint.whole_tensors import Withheld
from hsdp.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.partial)?")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by the names that the format has for them."""
CODES = {dtype: code for code, dtype in DTYPES.items()}


class File:
    """One file to be written: its name, and the place of each tensor in it."""

    def __init__(self) -> None:
        self.name = SINGLE
        self.tensors: dict[str, dict[str, Any]] = {}
        self.bytes = 0

    def add(self, name: str, code: str, shape: Iterable[int], size: int) -> None:
        """Puts a tensor of `size` bytes behind the others."""
        self.tensors[name] = {"dtype": code, "shape": list(shape), "data_offsets": [self.bytes, self.bytes + size]}
        self.bytes += size


def lay_out(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, max_file_bytes: int) -> list[File]:
    """Deals tensors out to files, in their order; arguments as `save_safetensors` has them.

    Raises:
        CheckpointError: a tensor has a dtype that the format does not know.
    """
    files = [File()]
    for name, tensor in tensors.items():
        kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if kept not in CODES:
            raise CheckpointError(f"{name!r} has dtype {kept}, which safetensors does not know")
        size = tensor.numel() * kept.itemsize
        if files[-1].tensors and files[-1].bytes + size > max_file_bytes:
            files.append(File())
        files[-1].add(name, CODES[kept], tensor.shape, size)
    if len(files) > 1:
        for number, file in enumerate(files, 1):
            file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
    return files


class Writer:
    """The files being written, on the rank that writes.

    An error must not leave the other ranks in the middle of a gather: it stops the writing, and is withheld.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, str], withheld: Withheld) -> None:
        self._directory = directory
        self._metadata = dict(metadata)
        self._stream: IO[bytes] | None = None
        self._withheld = withheld

    def begin(self, file: File) -> None:
        """Ends the file before, and begins the next."""
        header = json.dumps({"__metadata__": self._metadata, **file.tensors}).encode()
        header += b" " * (-len(header) % 8)  # so that tensors start aligned

        def body() -> None:
            self._end()
            self._stream = self._partial(file.name).open("wb")
            self._stream.write(struct.pack("<Q", len(header)) + header)

        self._guard(body)

    def write(self, tensor: Tensor | None) -> None:
        """Writes the next tensor; None if an error is withheld."""

        def body() -> None:
            assert self._stream is not None and tensor is not None, "a file was begun, and the tensor gathered"
            plain = tensor.resolve_neg().contiguous()
            self._stream.write(buffer_of(plain))

        self._guard(body)

    def complete(self, files: list[File]) -> None:
        """Writes what is left: the end of the last file, and the index of several."""
        self._guard(self._end)
        if len(files) > 1:
            self._guard(lambda: self._write_index(files))

    def discard(self, files: list[File]) -> None:
        """Removes what was written."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
        for name in (*[file.name for file in files], INDEX):
            with contextlib.suppress(OSError):
                self._partial(name).unlink(missing_ok=True)

    def publish(self, files: list[File]) -> None:
        """Gives the complete files their names, the index last, and removes those of an earlier export.

        Whoever comes while that is under way, or after the process was killed there, finds an export whole or no index,
        never the index of one and files of another: that of an earlier export goes first.
        """
        current = [file.name for file in files]
        if len(files) > 1:
            current.append(INDEX)
        (self._directory / INDEX).unlink(missing_ok=True)
        for name in current:
            if name in (current[0], INDEX):
                sync_names(self._directory)
            self._partial(name).replace(self._directory / name)
        sync_names(self._directory)
        for path in self._directory.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in current:
                path.unlink()

    def _write_index(self, files: list[File]) -> None:
        weights = {name: file.name for file in files for name in file.tensors}
        index = {"metadata": {"total_size": sum(file.bytes for file in files)}, "weight_map": weights}
        self._stream = self._partial(INDEX).open("wb")
        self._stream.write(json.dumps(index, indent=2).encode() + b"\n")
        self._end()

    def _partial(self, name: str) -> Path:
        return self._directory / f"{name}.partial"

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def _guard(self, body: Callable[[], None]) -> None:
        if self._withheld.error is None:
            self._withheld.attempt(body)

"""Reading DCP files: the metadata without running what is in it, and the pieces that a rank needs, each counted.

DCP's metadata is a pickle, and its own reader unpickles whatever it says, also for values that are no tensors. Here only
the few classes that a metadata file consists of can come out of it, and values are read with `weights_only=True`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hsdp.checkpoint.contents import listing, local_box, reason_of
from hsdp.checkpoint.store import METADATA, Progress
from hsdp.errors import CheckpointError
from hsdp.inner import block_of

_ALLOWED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,
    # Where it was once written to. A path of any system, which nothing is done with.
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(
            f"it asks for {module}.{name}, which is not part of any checkpoint metadata: damaged, or made to run code"
        )


def parse_metadata(data: bytes, path: Path) -> Metadata:
    """Decodes the content of a DCP metadata file and checks that it is consistent in itself.

    Raises:
        CheckpointError: it is damaged or foreign, or does not describe each element of each tensor exactly once.
    """
    where = path / METADATA
    try:
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    try:
        _check(found)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:  # attributes of other types than the classes declare
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error
    return found  # type: ignore[no-any-return]


def _check(found: Any) -> None:
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError("it is not the metadata of a checkpoint")
    for index, info in found.storage_data.items():
        if not (isinstance(index, MetadataIndex) and isinstance(info, filesystem._StorageInfo)):
            raise CheckpointError("it does not say where its data is")
        if info.transform_descriptors:
            raise CheckpointError(f"{index.fqn!r} was written through {info.transform_descriptors}, which hsdp cannot undo")
        if Path(info.relative_path).name != info.relative_path or min(info.offset, info.length) < 0:
            raise CheckpointError(f"{index.fqn!r} is said to be at {info.relative_path!r}, byte {info.offset}")
    for key, described in found.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            check_tiling(key, tuple(described.size), [(tuple(c.offsets), tuple(c.sizes)) for c in described.chunks])
            missing = [c for c in described.chunks if MetadataIndex(key, c.offsets) not in found.storage_data]
            if missing or not isinstance(described.properties.dtype, torch.dtype):
                raise CheckpointError(f"it does not say where {len(missing)} pieces of {key!r} are")
        elif not isinstance(described, BytesStorageMetadata):
            raise CheckpointError(f"{key!r} is described as {type(described).__name__}, neither as a tensor nor as a value")
        elif MetadataIndex(key) not in found.storage_data:
            raise CheckpointError(f"it does not say where {key!r} is")


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: offsets and sizes, one each per dim."""


def check_tiling(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> None:
    """Proves that `boxes` cover a tensor of this shape: each element once, none outside.

    Raises:
        CheckpointError: they do not; says what is missing or doubled.
    """
    full = []
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            min(o, s) >= 0 and o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"a piece of {name!r} at {offsets} of shape {sizes} is not inside its shape {shape}")
        if math.prod(sizes):
            full.append((offsets, sizes))
    covered = sum(math.prod(sizes) for _, sizes in full)
    if covered != math.prod(shape):
        how = "were never written" if covered < math.prod(shape) else "were written twice"
        raise CheckpointError(f"{abs(math.prod(shape) - covered)} elements of {name!r} of shape {shape} {how}")
    # The volumes agree, so without an overlap nothing is missing. Swept along the dim that tells most pieces apart.
    dim = max(range(len(shape)), key=lambda d: len({offsets[d] for offsets, _ in full}), default=0)
    full.sort(key=lambda box: box[0][dim : dim + 1])
    active: list[Box] = []
    for box in full:
        active = [other for other in active if not shape or other[0][dim] + other[1][dim] > box[0][dim]]
        for other in active:
            if all(a < b + m and b < a + n for a, n, b, m in zip(*box, *other, strict=True)):
                raise CheckpointError(f"pieces of {name!r} at {other[0]} and {box[0]} overlap")
        active.append(box)


# -- pieces --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """One piece of one file, and what is to be done with what is in it."""

    key: str
    offset: int
    length: int
    use: Callable[[Any], int]


class Reader:
    """Reads values and parts of tensors out of the files of one checkpoint; grouped by file, in the order of the file.

    Args:
        path: the checkpoint.
        described: its metadata.
        check_zip: check the CRC-32 that torch.save put beside each tensor. For checkpoints without a manifest.
        progress: called with the bytes read and to be read.
    """

    def __init__(self, path: Path, described: Metadata, check_zip: bool, progress: Progress | None) -> None:
        self._path = path
        self._metadata = described
        self._check_zip = check_zip
        self._progress = progress
        self._reads: dict[str, list[_Read]] = {}
        self.values: dict[str, Any] = {}
        self._expected: dict[str, int] = {}
        self._counted: dict[str, int] = {}

    def value(self, key: str) -> None:
        """Asks for a value that is no tensor; after `run` it is in `values`."""

        def use(value: Any) -> int:
            self.values[key] = value
            return 0

        self._add(MetadataIndex(key), use)

    def tensor(self, key: str, tensor: Tensor) -> Tensor:
        """Asks for a tensor, of a DTensor for this rank's part, to be read into `tensor`, which it returns."""
        described = self._metadata.state_dict_metadata[key]
        assert isinstance(described, TensorStorageMetadata), "the caller has checked what the checkpoint has"
        (offsets, _), local = local_box(tensor), block_of(tensor)
        wanted = ChunkStorageMetadata(torch.Size(offsets), local.shape)
        self._expected[key] = local.numel()
        for item in create_read_items_for_chunk_list(key, described, [wanted]):
            if not math.prod(item.lengths):
                continue
            assert item.storage_index.index is not None, "made from the list of chunks"
            chunk = described.chunks[item.storage_index.index]
            source = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
            place = tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))
            use = _copier(local, place, chunk, described.properties.dtype, source)
            self._add(MetadataIndex(key, chunk.offsets), use)
        return tensor

    def _add(self, index: MetadataIndex, use: Callable[[Any], int]) -> None:
        info = self._metadata.storage_data[index]
        self._reads.setdefault(info.relative_path, []).append(_Read(index.fqn, info.offset, info.length, use))

    def run(self) -> None:
        """Reads everything that was asked for.

        Raises:
            CheckpointError: a file or a piece of it cannot be read, is not what the metadata says, or an element that
                was asked for was not there; names the file and the tensor.
        """
        done, total = 0, sum(read.length for reads in self._reads.values() for read in reads)
        for name, reads in sorted(self._reads.items()):
            try:
                with (self._path / name).open("rb") as stream:
                    for read in sorted(reads, key=lambda one: one.offset):
                        self._tell(done, total)
                        self._counted[read.key] = self._counted.get(read.key, 0) + self._read(stream, name, read)
                        done += read.length
            except OSError as error:
                raise CheckpointError(f"checkpoint {self._path}: {name} cannot be read: {error}") from error
        self._tell(total, total)
        short = [key for key, numel in self._expected.items() if self._counted.get(key, 0) != numel]
        if short:
            raise CheckpointError(f"checkpoint {self._path}: not every element of {listing(short)} was there to be read")

    def _read(self, stream: io.BufferedReader, name: str, read: _Read) -> int:
        where = f"checkpoint {self._path}: {read.key!r} in {name}"
        size = os.fstat(stream.fileno()).st_size
        if read.offset + read.length > size:
            raise CheckpointError(
                f"{where} should reach to byte {read.offset + read.length}, but the file ends at {size}: it is truncated"
            )
        piece = _Slice(stream, read.offset, read.length)
        try:
            if self._check_zip and (bad := zipfile.ZipFile(piece).testzip()) is not None:
                raise CheckpointError(f"the checksum of {bad} does not fit")
            piece.seek(0)
            return read.use(torch.load(cast(IO[bytes], piece), weights_only=True, map_location="cpu"))
        except Exception as error:  # torch.load raises whatever the damage leads to
            raise CheckpointError(f"{where} is damaged or foreign: {reason_of(error, 500)}") from error

    def _tell(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)


def _copier(
    local: Tensor,
    place: tuple[slice, ...],
    chunk: ChunkStorageMetadata,
    dtype: torch.dtype,
    source: tuple[slice, ...],
) -> Callable[[Any], int]:
    """Puts what was read, `source` of a saved chunk, to its `place` in `local`; returns the number of elements."""

    def use(saved: Any) -> int:
        if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (chunk.sizes, dtype):
            found = f"a {saved.dtype} tensor of shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else type(saved)
            raise CheckpointError(f"the metadata promises {dtype} of shape {tuple(chunk.sizes)}, the file has {found}")
        part = saved[source]
        if part.shape == saved.shape == local.shape and saved.is_contiguous():
            local.set_(saved)  # type: ignore[call-overload]  # all of both: no copy
            return saved.numel()
        return local[place].copy_(part).numel()

    return use


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, stream: io.BufferedReader, start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(view[: max(0, self._length - self._at)])
        self._at += count
        return count


def keys_below(described: Metadata, prefix: str) -> Mapping[str, Any]:
    """The entries whose names begin with `prefix`, without it."""
    return {key[len(prefix) :]: value for key, value in described.state_dict_metadata.items() if key.startswith(prefix)}

"""The index of a checkpoint: which tensors it has, of which pieces they consist, and where in which file each piece is.

    index.json   hsdp's own, JSON: what hsdp reads of its own checkpoints
    .metadata    DCP's, a pickle, read as data (`pickles.py`): what hsdp reads of others' checkpoints

Whatever the source says is checked before it is used: each element of each tensor is there exactly once, no two pieces
share bytes, and no piece claims more elements than it has bytes. So a file cannot make its reader allocate more than its
own size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import torch

from hsdp.checkpoint.pickles import Call, Name, read_pickle
from hsdp.errors import CheckpointError
from hsdp.params.shard_geometry import Box

PLAIN_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
}
"""Every dtype by its name in torch, but for quantized ones, whose tensors are more than bytes. Looked up here: to ask torch
for a hostile name may import what it names."""

_LARGEST = 2**62
_MOST_DIMS = 64


@dataclass(frozen=True)
class FileRange:
    """Where in the checkpoint something is: bytes `start` to `start + length` of a file."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class PieceRecord:
    """A part of a tensor, and where it is."""

    box: Box
    place: FileRange


@dataclass(frozen=True)
class TensorRecord:
    """A tensor: its whole shape, its dtype, and its pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[PieceRecord, ...]


@dataclass(frozen=True)
class ValueRecord:
    """A value that is no tensor, and where DCP's readers find it; hsdp's own checkpoints have it in `extra.bin` too."""

    place: FileRange


Record = TensorRecord | ValueRecord


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        records: tensors and values by key.
        paths: of keys that DCP made by taking a value apart, the dict keys and list indices on the way to them.
        saved_by: how DCP's metadata names the save; None in hsdp's own index.
    """

    records: Mapping[str, Record]
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    saved_by: str | None = None

    @property
    def by_hsdp(self) -> bool:
        """Whether DCP's metadata says that hsdp wrote it."""
        return (self.saved_by or "").startswith("hsdp")

    def below(self, prefix: str) -> dict[str, Record]:
        """The records whose keys begin with `prefix`, without it."""
        return {key[len(prefix) :]: record for key, record in self.records.items() if key.startswith(prefix)}

    def files(self) -> set[str]:
        """The names of the files that have pieces."""
        return {place.file for place in self.places()}

    def places(self) -> list[FileRange]:
        """Where everything is."""
        found = []
        for record in self.records.values():
            found += [piece.place for piece in record.pieces] if isinstance(record, TensorRecord) else [record.place]
        return found

    def to_json(self) -> bytes:
        """As `from_json` reads it."""
        numbers = {name: number for number, name in enumerate(sorted(self.files()))}

        def packed(place: FileRange) -> list[int]:
            return [numbers[place.file], place.start, place.length]

        tensors = {
            key: [
                str(record.dtype).removeprefix("torch."),
                record.shape,
                [[*packed(piece.place), piece.box.offsets, piece.box.sizes] for piece in record.pieces],
            ]
            for key, record in self.records.items()
            if isinstance(record, TensorRecord)
        }
        values = {key: packed(record.place) for key, record in self.records.items() if isinstance(record, ValueRecord)}
        body = {"files": list(numbers), "tensors": tensors, "values": values, "paths": self.paths}
        return json.dumps(body, separators=(",", ":")).encode()


# -- reading -------------------------------------------------------------------------------------------------------


def from_json(data: bytes) -> Index:
    """Reads hsdp's own index.

    Raises:
        CheckpointError: it is damaged, or contradicts itself.
    """
    try:
        body = json.loads(data.decode())  # json itself would guess an encoding
        files = [_file_name(name) for name in body["files"]]

        def place(packed: Any) -> FileRange:
            number, start, length = packed
            return FileRange(files[_count(number)], _count(start), _count(length))

        records: dict[str, Record] = {key: ValueRecord(place(packed)) for key, packed in body["values"].items()}
        for key, (dtype, shape, pieces) in body["tensors"].items():
            found = [
                PieceRecord(Box(_numbers(offsets), _numbers(sizes)), place(packed)) for *packed, offsets, sizes in pieces
            ]
            records[key] = TensorRecord(_numbers(shape), dtype_named(dtype), tuple(found))
        paths = {key: _path(path) for key, path in body["paths"].items()}
        return _checked(Index(records, paths))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"it is damaged: {type(error).__name__}: {error}") from None


def from_dcp(data: bytes) -> Index:
    """Reads DCP's metadata.

    Raises:
        CheckpointError: it is damaged, asks for anything but the classes of metadata, or contradicts itself.
    """
    try:
        body = _state(read_pickle(data), "Metadata")
        places, by_key = {}, {}
        for key, info in _dict(body["storage_data"]).items():
            at, found = _state(key, "MetadataIndex"), _state(info, "_StorageInfo")
            fqn, offset = _text(at["fqn"]), at.get("offset")
            if found.get("transform_descriptors"):
                raise CheckpointError(f"{fqn!r} was written through a transform, which hsdp cannot undo")
            place = FileRange(_file_name(found["relative_path"]), _count(found["offset"]), _count(found["length"]))
            if offset is None:
                by_key[fqn] = place
            else:
                places[fqn, _size(offset)] = place
        records: dict[str, Record] = {}
        for key, kind in _dict(body["state_dict_metadata"]).items():
            if _is(kind, "BytesStorageMetadata"):
                if key not in by_key:
                    raise CheckpointError(f"it does not say where {key!r} is")
                records[_text(key)] = ValueRecord(by_key[key])
            else:
                records[_text(key)] = _tensor(key, _state(kind, "TensorStorageMetadata"), places)
        paths = {_text(key): _path(path) for key, path in _dict(body.get("planner_data") or {}).items()}
        meta = body.get("storage_meta")
        saved_by = _state(meta, "StorageMeta").get("save_id") if meta is not None else None
        return _checked(Index(records, paths, saved_by if isinstance(saved_by, str) else None))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"it is damaged: {type(error).__name__}: {error}") from None


def _tensor(key: str, state: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...]], FileRange]) -> TensorRecord:
    properties = _state(state["properties"], "TensorProperties", (tuple, dict))
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    pieces = []
    for chunk in state["chunks"]:
        described = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(described["offsets"]), _size(described["sizes"])
        if (key, offsets) not in places:
            raise CheckpointError(f"it does not say where the piece of {key!r} at {offsets} is")
        pieces.append(PieceRecord(Box(offsets, sizes), places[key, offsets]))
    if not (isinstance(dtype, Name) and dtype.module == "torch"):
        raise CheckpointError(f"{key!r} has a dtype that is none")
    return TensorRecord(_size(state["size"]), dtype_named(dtype.name), tuple(pieces))


_MODULES = {
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
}
"""Where the classes of DCP's metadata are; those not listed are in the first module."""


def _is(value: Any, name: str) -> bool:
    module = _MODULES.get(name, "torch.distributed.checkpoint.metadata")
    return isinstance(value, Call) and value.callee == Name(module, name)


def _state(value: Any, name: str, kinds: type | tuple[type, ...] = dict) -> Any:
    """What a pickle says of an object of the class called `name`."""
    if _is(value, name):
        state = {} if value.state is None else value.state
        if not value.arguments and isinstance(state, kinds):
            return state
        raise CheckpointError(f"it has a {name} that is damaged")
    asked = value.callee if isinstance(value, Call) else value if isinstance(value, Name) else type(value).__name__
    raise CheckpointError(
        f"it asks for {asked} in the place of {name}, which is not part of any checkpoint metadata: "
        "damaged, or made to run code"
    )


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size as a tuple."""
    if not _is(value, "Size"):
        raise TypeError("a size that is none")
    (numbers,) = value.arguments
    return _numbers(numbers)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MOST_DIMS:
        raise TypeError("sizes that are no list of numbers")
    return tuple(_count(value) for value in values)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError("a number of elements or bytes that is none")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name that is no text")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError("a table that is none")
    return value


def _path(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > 100 or not all(isinstance(p, (str, int)) for p in value):
        raise TypeError("a path of dict keys that is none")
    return tuple(value)


def dtype_named(name: Any) -> torch.dtype:
    """The dtype called `name` in torch.

    Raises:
        ValueError: this PyTorch has none of that name.
    """
    if not isinstance(name, str) or name not in PLAIN_DTYPES:
        raise ValueError("a dtype that this PyTorch does not have")
    return PLAIN_DTYPES[name]


def is_plain_name(name: object) -> bool:
    """Whether it is the name of a file in a directory, on any system, and nothing that leads out of it."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "\0" not in name
        and PurePosixPath(name).name == name == PureWindowsPath(name).name
    )


def _file_name(name: Any) -> str:
    if not is_plain_name(name):
        raise CheckpointError(f"it says that data is at {str(name)[:200]!r}, which is no plain file name")
    return str(name)


# -- what must hold ------------------------------------------------------------------------------------------------


def _checked(index: Index) -> Index:
    """The index, if each tensor is there once and whole, and no piece shares bytes or is too short for its elements."""
    for key, record in index.records.items():
        if isinstance(record, TensorRecord):
            check_tiling(key, record.shape, [piece.box for piece in record.pieces])
            for piece in record.pieces:
                if piece.place.length < math.prod(piece.box.sizes) * record.dtype.itemsize:
                    raise CheckpointError(f"the piece of {key!r} at {piece.box.offsets} is said to have too few bytes")
    ends: dict[str, int] = {}
    for place in sorted(index.places(), key=lambda one: (one.file, one.start, one.length)):
        if place.start < ends.get(place.file, 0):
            raise CheckpointError(f"two pieces are said to be at byte {place.start} of {place.file}")
        ends[place.file] = place.start + place.length
    return index


def check_tiling(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> None:
    """Proves that `boxes` cover a tensor of this shape: each element once, none outside.

    Raises:
        CheckpointError: they do not; says what is missing or doubled.
    """
    full: list[Box] = []
    for box in boxes:
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            min(o, s) >= 0 and o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"a piece of {name!r} at {box.offsets} of shape {box.sizes} is not inside its shape {shape}"
            )
        if math.prod(box.sizes):
            full.append(box)
    covered = sum(math.prod(box.sizes) for box in full)
    if covered != math.prod(shape):
        how = "were never written" if covered < math.prod(shape) else "were written twice"
        raise CheckpointError(f"{abs(math.prod(shape) - covered)} elements of {name!r} of shape {shape} {how}")
    # The volumes agree, so without an overlap nothing is missing. Swept along the dim that tells most pieces apart.
    dim = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in full}), default=0)
    full.sort(key=lambda box: box.offsets[dim : dim + 1])
    active: list[Box] = []
    for box in full:
        active = [other for other in active if not shape or other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in active:
            pairs = zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in pairs):
                raise CheckpointError(f"pieces of {name!r} at {other.offsets} and {box.offsets} overlap")
        active.append(box)

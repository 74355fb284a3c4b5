"""Values that are no tensors of the model, as bytes: JSON with a tag for each type, and raw bytes behind it. No pickle.

    8 bytes   length of the JSON, little-endian
    JSON      None, bool, int, float, str and list as JSON has them; everything else {"type": what it consists of}
    blobs     the content of bytes, tensors and arrays, found by (start, length)

Reading makes objects of the types in the table below and of no others, whatever the bytes say.
"""

from __future__ import annotations

import collections
import datetime
import json
import math
import pathlib
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hsdp.checkpoint.contents import refuse_without_memory
from hsdp.checkpoint.index import PLAIN_DTYPES
from hsdp.checkpoint.memory import buffer_of
from hsdp.errors import CheckpointError

_MAX_DEPTH = 100
_MOST_EMPTY = 1 << 20
_DTYPES = {f"torch.{name}": dtype for name, dtype in PLAIN_DTYPES.items()}
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)}
"""What a defaultdict may make."""

_LISTS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "torch.Size": torch.Size,
}
_ISO = {
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}
_PATHS = {
    kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def pack(value: Any, name: str) -> bytes:
    """A value as bytes.

    Args:
        value: None, numbers, strings, bytes, tensors, torch's sizes, dtypes and devices, NumPy's scalars and arrays, paths,
            ranges, dates and times, and tuples, lists, dicts, sets, deques, defaultdicts and OrderedDicts of them.
        name: what the value is called in errors.

    Raises:
        CheckpointError: something in it is of another type; names its place and the type.
    """
    blobs: list[bytes] = []
    tree = _Packer(blobs).pack(value, name, 0)
    header = json.dumps(tree, separators=(",", ":")).encode()
    return b"".join([struct.pack("<Q", len(header)), header, *blobs])


def unpack(data: bytes | memoryview) -> Any:
    """The value that `pack` made into bytes.

    Raises:
        CheckpointError: the bytes are damaged.
    """
    try:
        view = memoryview(data)
        (size,) = struct.unpack_from("<Q", view)
        if size > len(view) - 8:
            raise ValueError("it ends early")
        return _Unpacker(view[8 + size :]).unpack(json.loads(bytes(view[8 : 8 + size]).decode()), 0)
    except CheckpointError:
        raise
    except Exception as error:  # constructors of dates, arrays and the like raise what they like
        raise CheckpointError(f"a value in it is damaged: {type(error).__name__}: {str(error)[:200]}") from None


class _Packer:
    def __init__(self, blobs: list[bytes]) -> None:
        self._blobs = blobs
        self._size = 0

    def pack(self, value: Any, name: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{name[:200]!r} is nested more than {_MAX_DEPTH} deep, or within itself")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return self._items(value, name, depth)
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if type(value).__module__ == "numpy":
            return self._array(value, name)
        tagged = self._container(value, name, depth) or self._small(value)
        if tagged is None:
            whole = f"{kind.__module__}.{kind.__qualname__}"
            raise CheckpointError(
                f"{name!r} is a {whole}, which cannot be saved: give tensors, numbers, strings, bytes, arrays, paths, "
                "dates, and tuples, lists, dicts, sets and deques of them; of an object its state_dict() or its fields"
            )
        return dict([tagged])

    def _items(self, values: Any, name: str, depth: int) -> list[Any]:
        return [self.pack(item, f"{name}[{place}]", depth + 1) for place, item in enumerate(values)]

    def _container(self, value: Any, name: str, depth: int) -> tuple[str, Any] | None:
        kind = type(value)
        if kind in (tuple, torch.Size, set, frozenset):
            ordered = value if kind in (tuple, torch.Size) else _in_order(value)  # equal sets have equal bytes
            return "torch.Size" if kind is torch.Size else kind.__name__, self._items(ordered, name, depth)
        if kind is collections.deque:
            return "deque", [self._items(value, name, depth), value.maxlen]
        if kind in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
            items: list[Any] = [
                [self.pack(key, f"a key of {name}", depth + 1), self.pack(item, f"{name}[{key!r}]", depth + 1)]
                for key, item in value.items()
            ]
            if kind is not collections.defaultdict:
                return kind.__name__, items
            factory = None if value.default_factory is None else getattr(value.default_factory, "__name__", "")
            if factory is None or _FACTORIES.get(factory) is value.default_factory:
                return "defaultdict", [factory, items]
        return None

    def _small(self, value: Any) -> tuple[str, Any] | None:
        kind = type(value)
        if kind in (bytes, bytearray):
            return kind.__name__, self._blob(bytes(value))
        if kind is complex:
            return "complex", [repr(value.real), repr(value.imag)]
        if kind in (range, slice):
            parts = [value.start, value.stop, value.step]
            return (kind.__name__, parts) if all(part is None or type(part) is int for part in parts) else None
        if kind in (torch.dtype, torch.device):
            return f"torch.{kind.__name__}", str(value)
        if kind.__name__ in _PATHS and kind is _PATHS[kind.__name__]:
            return kind.__name__, str(value)
        if kind.__module__ == "datetime" and kind.__name__ in _ISO:
            return kind.__name__, value.isoformat()
        if kind is datetime.timedelta:
            return "timedelta", [value.days, value.seconds, value.microseconds]
        return None

    def _blob(self, data: bytes) -> list[int]:
        self._blobs.append(data)
        self._size += len(data)
        return [self._size - len(data), len(data)]

    def _tensor(self, value: Tensor, name: str) -> Any:
        if (
            type(value) not in (Tensor, nn.Parameter, nn.Buffer)
            or value.layout is not torch.strided
            or value.is_meta
            or value.is_quantized
        ):
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__} ({value.layout}, {value.dtype}, {value.device}), which cannot be "
                "saved: convert it to a plain dense tensor first"
            )
        refuse_without_memory(value, name)
        held = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        trained = value.requires_grad if isinstance(value, nn.Parameter) else None
        return {"tensor": [str(value.dtype), list(value.shape), self._blob(bytes(buffer_of(held))), trained]}

    def _array(self, value: Any, name: str) -> Any:
        numpy = sys.modules["numpy"]
        scalar = isinstance(value, numpy.generic)
        dtype = value.dtype if scalar or type(value) is numpy.ndarray else None
        if dtype is None or dtype.kind not in "biufcSUmM":
            raise CheckpointError(
                f"{name!r} is a numpy.{type(value).__name__}{f' of dtype {dtype}' if dtype is not None else ''}, "
                "which cannot be saved: a checkpoint takes NumPy's arrays and scalars of numbers, strings and dates"
            )
        held = numpy.asarray(value)  # of an empty string, which as a scalar has no bytes, with room for one
        return {"numpy scalar" if scalar else "numpy array": [held.dtype.str, list(held.shape), self._blob(held.tobytes())]}


def _in_order(values: Any) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=repr)


class _Unpacker:
    def __init__(self, blobs: memoryview) -> None:
        self._blobs = blobs

    def unpack(self, tree: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deep")
        if isinstance(tree, list):
            return [self.unpack(item, depth + 1) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((tag, content),) = tree.items()
        return self._tagged(tag, content, depth)

    def _tagged(self, tag: str, content: Any, depth: int) -> Any:
        if tag in _LISTS:
            return _LISTS[tag](self.unpack(item, depth + 1) for item in content)
        if tag == "deque":
            return collections.deque([self.unpack(item, depth + 1) for item in content[0]], content[1])
        if tag == "dict":
            return self._pairs(content, depth)
        if tag == "OrderedDict":
            return collections.OrderedDict(self._pairs(content, depth))
        if tag == "Counter":
            return collections.Counter(self._pairs(content, depth))
        if tag == "defaultdict":
            factory = None if content[0] is None else _FACTORIES[content[0]]
            return collections.defaultdict(factory, self._pairs(content[1], depth))
        return self._small(tag, content)

    def _pairs(self, content: Any, depth: int) -> dict[Any, Any]:
        return {self.unpack(key, depth + 1): self.unpack(value, depth + 1) for key, value in content}

    def _small(self, tag: str, content: Any) -> Any:
        if tag in ("bytes", "bytearray"):
            return bytes(self._blob(content)) if tag == "bytes" else bytearray(self._blob(content))
        if tag == "float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if tag == "complex":
            return complex(float(content[0]), float(content[1]))
        if tag in ("range", "slice"):
            return (range if tag == "range" else slice)(*content)
        if tag == "timedelta":
            return datetime.timedelta(*content)
        if tag in _ISO:
            return _ISO[tag](content)
        if tag in _PATHS:
            kind: Any = _PATHS[tag]
            ours: Any = type(pathlib.Path())
            # A path of another system's kind comes back as text that can be looked at, not opened.
            return kind(content) if kind is ours or tag.startswith("Pure") else getattr(pathlib, f"Pure{tag}")(content)
        if tag == "torch.dtype":
            return _DTYPES[content]
        if tag == "torch.device":
            return torch.device(content)
        if tag == "tensor":
            return self._tensor(*content)
        if tag in ("numpy scalar", "numpy array"):
            return self._array(tag == "numpy scalar", *content)
        raise ValueError(f"no value is of type {tag[:100]!r}")

    def _blob(self, place: Any) -> memoryview:
        start, length = place
        if type(start) is not int or type(length) is not int or not 0 <= start <= start + length <= len(self._blobs):
            raise ValueError("a blob is not inside the file")
        return self._blobs[start : start + length]

    def _tensor(self, dtype: str, shape: list[int], place: Any, trained: bool | None) -> Tensor:
        raw = self._blob(place)
        if len(raw) != math.prod(shape) * _DTYPES[dtype].itemsize or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError("a tensor has another number of bytes than of elements")
        kind = _DTYPES[dtype]
        flat = torch.frombuffer(bytearray(raw), dtype=kind) if len(raw) else torch.empty(0, dtype=kind, device="cpu")
        tensor = flat.view(shape)
        return tensor if trained is None else nn.Parameter(tensor, requires_grad=trained)

    def _array(self, scalar: bool, dtype: str, shape: list[int], place: Any) -> Any:
        import numpy

        kind = numpy.dtype(dtype) if isinstance(dtype, str) else None
        if kind is None or kind.kind not in "biufcSUmM":
            raise ValueError("an array of a dtype that is never saved")
        if not kind.itemsize and math.prod(shape) > _MOST_EMPTY:
            raise ValueError("an array whose elements have no bytes, and which would take memory for each")
        held = numpy.frombuffer(self._blob(place), dtype=kind) if kind.itemsize else numpy.zeros(shape, kind)
        array = held.reshape(shape).copy()
        return array[()] if scalar else array


# -- extra.bin -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """What `extra.bin` holds for one rank.

    Attributes:
        extra: the rank's `extra`.
        values: packed values of the model's and the optimizer's state, by key.
        optimizer: the class of the optimizer that was saved; None if there was none.
        structures: packed skeletons (see `structure.py`) of what was taken apart, by key.
    """

    extra: Any = None
    values: Mapping[str, bytes] = field(default_factory=dict)
    optimizer: str | None = None
    structures: Mapping[str, bytes] = field(default_factory=dict)


def pack_extras(
    extras: list[bytes], values: Mapping[str, bytes], optimizer: str | None, structures: Mapping[str, bytes]
) -> bytes:
    """The content of `extra.bin`: every rank's packed `extra`, equal ones once, and the rest of `Packed`."""
    number: dict[bytes, int] = {}
    of_rank = [number.setdefault(one, len(number)) for one in extras]
    content = {"extras": list(number), "of_rank": of_rank, "values": dict(values), "optimizer": optimizer}
    return pack({**content, "structures": dict(structures)}, "extra")


def unpack_extras(data: bytes, rank: int, world_size: int) -> Packed:
    """What there is for `rank`; for rank 0 if it was saved by another number of ranks.

    Raises:
        CheckpointError: it is damaged.
    """
    held = unpack(data)
    try:
        of_rank, values, optimizer = held["of_rank"], held["values"], held["optimizer"]
        packed = held["extras"][of_rank[rank if len(of_rank) == world_size else 0]]
        structures = held.get("structures", {})  # not there in checkpoints of earlier versions
        for packs in (values, structures):
            if not all(isinstance(key, str) and isinstance(value, bytes) for key, value in packs.items()):
                raise TypeError("its values are none")
        if not isinstance(optimizer, (str, type(None))):
            raise TypeError("its optimizer is none")
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"it is damaged: {type(error).__name__}: {error}") from None
    return Packed(unpack(packed), values, optimizer, structures)

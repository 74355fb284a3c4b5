"""safetensors: weights as everyone reads them, written by streaming, read straight into shards.

    directory/
        model.safetensors                       one file, or
        model-00001-of-00003.safetensors ...    several, with
        model.safetensors.index.json            {"metadata": {"total_size": bytes}, "weight_map": {name: file}}

    file = header length (8 bytes, little-endian) | header (JSON: name -> dtype, shape, [start, end]) | tensors

The format says where everything lies before the first tensor, so one tensor at a time is gathered and written; the
library's own writer would want a whole file's tensors at once. Reading goes through the library, which checks headers
and maps files, so that a rank touches the bytes of its own rows only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hsdp.checkpoint.choice import Choice, Rename, Report
from hsdp.checkpoint.commits import sync_names
from hsdp.checkpoint.contents import listing, local_box, model_entries
from hsdp.checkpoint.full import first_names, first_rank, tell_units, whole_value
from hsdp.checkpoint.handles import when_settled
from hsdp.checkpoint.models import Handover
from hsdp.checkpoint.ranks import Ranks
from hsdp.checkpoint.store import expanded
from hsdp.errors import CheckpointError
from hsdp.params.local import local_of

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.partial)?")
_TIES = "hsdp_tied"
"""Metadata entry: names that were not written because they stand for a parameter that was, as JSON."""

_DTYPES = {
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
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@when_settled
def save_safetensors(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
    process_group: ProcessGroup | None = None,
) -> list[Path]:
    """Writes a model's parameters and persistent buffers as Hugging Face reads them. Every rank calls it.

    Rank 0 gathers and writes one tensor at a time. An earlier export in the directory is replaced when the new one is on
    disk; other files (`config.json`, ...) stay. Tied weights are written once, under their first name.

    Args:
        directory: where to; it is made if need be.
        model: any module, sharded or not.
        dtype: floating-point tensors are converted to it; None: as they are.
        max_file_bytes: when the next tensor would not fit, another file is begun.
        metadata: strings to put into each file's header.
        process_group: the ranks that hold the model; None: all.

    Returns:
        The files with tensors, on every rank.

    Raises:
        ValueError: an argument makes no sense, or the directory is a URL.
        CheckpointError: on all ranks: a tensor's dtype is none that the format knows, or writing failed.
    """
    if dtype is not None and not (dtype in _CODES and dtype.is_floating_point):
        raise ValueError(f"save_safetensors(dtype={dtype!r}): expected one of {[t for t in _CODES if t.is_floating_point]}")
    if max_file_bytes < 1:
        raise ValueError(f"save_safetensors(max_file_bytes={max_file_bytes!r}): expected at least 1")
    if not all(isinstance(text, str) for item in (metadata or {}).items() for text in item):
        raise ValueError(
            f"save_safetensors(metadata={metadata!r}): expected strings only; no reader takes a header of others"
        )
    directory = _local("save_safetensors", directory)
    ranks = Ranks(process_group)
    what = f"save_safetensors to {directory}"
    entries = model_entries(model)
    firsts = first_names(model, entries)
    tensors = {name: e.value for name, e in entries.items() if firsts[name] == name and isinstance(e.value, Tensor)}
    ties = {name: first for name, first in firsts.items() if name != first}
    header = {**(metadata or {}), "format": "pt", **({_TIES: json.dumps(ties)} if ties else {})}
    dst = first_rank(tensors.values())
    source = ranks.rank_of(dst)
    files = _lay_out(tensors, dtype, max_file_bytes)
    ranks.one(what, lambda: directory.mkdir(parents=True, exist_ok=True), source)
    writer = _Writer(directory, header) if ranks.rank == source else None
    for file in files:
        if writer is not None:
            writer.begin(file)
        for name, place in file.tensors.items():
            # Converted before it is gathered: fewer bytes travel.
            whole = whole_value(tensors[name].to(_DTYPES[place["dtype"]]), dst, cpu=True)
            if writer is not None:
                writer.write(whole)
            del whole
    ranks.one(what, lambda: None if writer is None else writer.publish(files), source)
    return [directory / file.name for file in files]


@when_settled
def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
    process_group: ProcessGroup | None = None,
) -> Report:
    """Loads weights into a model, in place, each rank reading only its rows. Needs `pip install safetensors`.

    Hooks and methods of the model that change, or look at, what is loaded are run as by `model.load_state_dict`.

    Args:
        path: a `.safetensors` file, or a directory with one, or with several and their index.
        model: any module, sharded or not; its names must be those of the files. A name that is tied to one that is
            there may be missing.
        strict, include, exclude, rename: as `load` has them: which names go where.
        cast: convert floating-point tensors to the model's dtypes; else other dtypes are errors.
        process_group: the ranks that hold the model; None: all.

    Returns:
        What became of each name.

    Raises:
        ImportError: the safetensors library is not installed.
        TypeError: `include`, `exclude` or `rename` make no sense.
        ValueError: the path is a URL.
        CheckpointError: on all ranks, before anything is changed: files are missing, truncated or damaged; names, shapes
            or dtypes differ.
    """
    safe_open, path = _library(), _local("load_safetensors", path)
    choice = Choice(strict, include, exclude, rename, cast)
    ranks = Ranks(process_group)
    what = f"loading {path}"
    entries = model_entries(model)
    own = {name: entry.value for name, entry in entries.items() if isinstance(entry.value, Tensor)}
    firsts = first_names(model, entries)
    with contextlib.ExitStack() as stack:
        places: dict[str, _Place] = {}
        reports: list[Report] = []

        def prepare() -> None:
            files = _open(path, safe_open, stack)
            places.update({name: _Place(files[old], old) for name, old in choice.sources(list(files)).items()})
            reports.append(_check(places, own, firsts, choice, sorted(files), path))

        ranks.each(what, prepare)
        read: dict[str, Tensor] = {}
        with torch.no_grad():
            for name in set(reports[0].loaded) & places.keys():
                local_of(own[name]).copy_(_read(places[name], own[name]))
                read[firsts[name]] = own[name]
    handover = Handover(model)
    hand = [name for name in reports[0].loaded if handover.is_watched or not handover.writes_to(own[name])]
    if hand:
        model.load_state_dict({entries[name].raw_name: read[firsts[name]] for name in hand}, strict=False)
    tell_units(model)
    return reports[0]


def _local(function: str, path: str | os.PathLike[str]) -> Path:
    found = expanded(path)
    if not isinstance(found, Path):
        raise ValueError(f"{function}({str(path)!r}): only local directories will do; copy the files from or to there")
    return found


def _library() -> Any:
    try:
        return importlib.import_module("safetensors").safe_open
    except ImportError as error:
        raise ImportError(
            "load_safetensors needs the safetensors library, an optional extra of hsdp: pip install 'hsdp[safetensors]'"
        ) from error


# -- writing -------------------------------------------------------------------------------------------------------


class _File:
    """One file to be written: its name, and the place of each tensor in it."""

    def __init__(self) -> None:
        self.name = _SINGLE
        self.tensors: dict[str, dict[str, Any]] = {}
        self.bytes = 0

    def add(self, name: str, code: str, shape: Iterable[int], size: int) -> None:
        self.tensors[name] = {"dtype": code, "shape": list(shape), "data_offsets": [self.bytes, self.bytes + size]}
        self.bytes += size


def _lay_out(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, max_file_bytes: int) -> list[_File]:
    files = [_File()]
    for name, tensor in tensors.items():
        kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if kept not in _CODES:
            raise CheckpointError(f"{name!r} has dtype {kept}, which safetensors does not know")
        size = tensor.numel() * kept.itemsize
        if files[-1].tensors and files[-1].bytes + size > max_file_bytes:
            files.append(_File())
        files[-1].add(name, _CODES[kept], tensor.shape, size)
    if len(files) > 1:
        for number, file in enumerate(files, 1):
            file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
    return files


class _Writer:
    """The files being written, on the rank that writes.

    An error must not leave the other ranks in the middle of a gather: it stops the writing, and comes out in `publish`.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, str]) -> None:
        self._directory = directory
        self._metadata = dict(metadata)
        self._stream: IO[bytes] | None = None
        self._error: OSError | None = None

    def begin(self, file: _File) -> None:
        """Ends the file before, and begins the next."""
        header = json.dumps({"__metadata__": self._metadata, **file.tensors}).encode()
        header += b" " * (-len(header) % 8)  # so that tensors start aligned

        def body() -> None:
            self._end()
            self._stream = self._partial(file.name).open("wb")
            self._stream.write(struct.pack("<Q", len(header)) + header)

        self._guard(body)

    def write(self, tensor: Tensor) -> None:
        """Writes the next tensor."""
        tensor = tensor.resolve_neg().contiguous()
        size = tensor.numel() * tensor.itemsize

        def body() -> None:
            assert self._stream is not None, "a file was begun"
            # The tensor's own memory as a buffer, which torch offers by way of numpy only.
            self._stream.write((ctypes.c_char * size).from_address(tensor.data_ptr()))

        if size:
            self._guard(body)

    def publish(self, files: list[_File]) -> None:
        """Gives the files their names, the index last, and removes those of an earlier export.

        Whoever comes while that is under way, or after the process was killed there, finds an export whole or no index,
        never the index of one and files of another: that of an earlier export goes first.
        """
        self._guard(self._end)
        current = [file.name for file in files]
        if len(files) > 1:
            current.append(_INDEX)
            self._guard(lambda: self._write_index(files))
        if self._error is not None:
            for name in current:
                self._partial(name).unlink(missing_ok=True)
            raise self._error
        (self._directory / _INDEX).unlink(missing_ok=True)
        for name in current:
            if name in (current[0], _INDEX):
                sync_names(self._directory)
            self._partial(name).replace(self._directory / name)
        sync_names(self._directory)
        for path in self._directory.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in current:
                path.unlink()

    def _write_index(self, files: list[_File]) -> None:
        weights = {name: file.name for file in files for name in file.tensors}
        index = {"metadata": {"total_size": sum(file.bytes for file in files)}, "weight_map": weights}
        self._stream = self._partial(_INDEX).open("wb")
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
        if self._error is None:
            try:
                body()
            except OSError as error:
                self._error = error


# -- reading -------------------------------------------------------------------------------------------------------


def _open(path: Path, safe_open: Any, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Opens the files behind `path`; returns by tensor name the file that has it."""
    weights: dict[str, str] | None = None
    if path.is_dir():
        if (path / _INDEX).is_file():
            weights = _read_index(path / _INDEX)
            files = sorted(path / name for name in set(weights.values()))
        else:
            files = [path / _SINGLE] if (path / _SINGLE).is_file() else sorted(path.glob("*.safetensors"))
            if len(files) != 1:
                raise CheckpointError(f"{path} has {len(files)} .safetensors files and no {_INDEX}")
    else:
        files = [path]
    places: dict[str, Any] = {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except Exception as error:  # SafetensorError is no subclass of anything more telling
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        for name in opened.keys():  # noqa: SIM118  (no mapping)
            if weights is None or weights.get(name) == file.name:
                places[name] = opened
    if weights is not None and (missing := [name for name in weights if name not in places]):
        raise CheckpointError(f"{path / _INDEX} lists {listing(missing)}, which are not in the files that it names")
    return places


def _read_index(file: Path) -> dict[str, str]:
    try:
        weights = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(value, str) and Path(value).name == value for value in weights.values()):
            raise ValueError("weight_map has values that are not plain file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    return dict(weights)


class _Place(NamedTuple):
    """A tensor in a file, under its name there."""

    file: Any
    name: str


def _check(
    places: Mapping[str, _Place],
    own: Mapping[str, Tensor],
    firsts: Mapping[str, str],
    choice: Choice,
    saved: Sequence[str],
    path: Path,
) -> Report:
    """Compares names, shapes and dtypes; of tied names also this rank's values."""
    problems, converted = [], []
    wanted = {name: value for name, value in own.items() if choice.wants(name)}
    have = {firsts[name] for name in wanted if name in places}
    missing = [name for name in wanted if firsts[name] not in have]
    unexpected = [place.name for name, place in places.items() if name not in own and choice.wants(name)]
    if missing and choice.strict:
        problems.append(f"the model has {listing(missing)}, which the files do not have")
    if unexpected and choice.strict:
        problems.append(f"the files have {listing(unexpected)}, which the model does not have")
    for name, value in wanted.items():
        if name not in places:
            continue
        found, first = places[name].file.get_slice(places[name].name), firsts[name]
        shape, dtype = tuple(found.get_shape()), _DTYPES.get(found.get_dtype())
        floating = dtype is not None and dtype.is_floating_point and value.is_floating_point()
        if shape != tuple(value.shape):
            problems.append(f"{name!r} has shape {shape} in the files and {tuple(value.shape)} in the model")
        elif dtype != value.dtype and not (choice.cast and floating):
            problems.append(
                f"{name!r} has dtype {found.get_dtype()} in the files and {value.dtype} in the model (cast=True converts "
                "between floating-point dtypes)"
            )
        elif (
            first != name
            and first in places.keys() & wanted.keys()
            and not torch.equal(_read(places[first], value), _read(places[name], value))
        ):
            problems.append(f"{first!r} and {name!r} are one parameter in the model, but differ in the files")
        if dtype != value.dtype:
            converted.append(name)
    loaded = tuple(name for name in wanted if name not in missing)
    if not loaded and choice.partial and own:
        problems.append(f"they have nothing of what is to be loaded: the files have {listing(saved, 3)}")
    if problems:
        raise CheckpointError(f"{path} does not fit the model: " + "; ".join(problems[:12]))
    skipped = tuple(name for name in own if name not in wanted)
    used = {places[name].name for name in loaded if name in places}
    left = tuple(name for name in saved if name not in used)
    return Report(loaded, tuple(missing), skipped, left, tuple(converted))


def _read(place: _Place, like: Tensor) -> Tensor:
    """This rank's part of a tensor, as it is in the file."""
    file, name = place
    offsets, sizes = local_box(like)
    with torch.device("cpu"):  # the library makes tensors on the default device
        if not sizes:
            return file.get_tensor(name)  # type: ignore[no-any-return]
        if 0 in sizes:
            return torch.empty(sizes, dtype=_DTYPES[file.get_slice(name).get_dtype()])
        return file.get_slice(name)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]  # type: ignore[no-any-return]

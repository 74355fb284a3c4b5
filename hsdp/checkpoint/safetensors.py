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
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hsdp.checkpoint.contents import Entry, local_box, model_entries
from hsdp.checkpoint.export import CODES, DTYPES, INDEX, SINGLE, File, Writer, lay_out
from hsdp.checkpoint.full import first_names, tell_units
from hsdp.checkpoint.handles import when_settled
from hsdp.checkpoint.load_options import LoadOptions, Rename, Report
from hsdp.checkpoint.models import Handover, unwritable
from hsdp.checkpoint.name_conflicts import agree_on_one_model, agree_on_sizes
from hsdp.checkpoint.ranks import Ranks, meet_all
from hsdp.checkpoint.reading import handing_over
from hsdp.checkpoint.store import expanded
from hsdp.checkpoint.whole_tensors import Withheld, first_rank, largest_mesh, whole_tensor
from hsdp.errors import CheckpointError
from hsdp.format import listing
from hsdp.params.local import local_of

_TIES = "hsdp_tied"
"""Metadata entry: names that were not written because they stand for a parameter that was, as JSON."""


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
        DivergenceError: on these ranks and those that wait for them: only some ranks of the model's meshes call this.
        CheckpointError: on all ranks: a tensor's dtype is none that the format knows, ranks were called with another
            `dtype`, `max_file_bytes` or model, or writing failed.
    """
    meet_all("save_safetensors", model, process_group)
    ranks = Ranks(process_group)
    what = f"save_safetensors to {directory}"
    given = {"dtype": dtype, "max_file_bytes": max_file_bytes}

    def begun() -> tuple[Path, dict[str, str], dict[str, Tensor], list[File], DeviceMesh | None, int]:
        where, entries = _checked(directory, dtype, max_file_bytes, metadata), model_entries(model)
        firsts = first_names(model, entries)
        tensors = {name: e.value for name, e in entries.items() if firsts[name] == name and isinstance(e.value, Tensor)}
        mesh = largest_mesh(tensors.values())
        return where, firsts, tensors, lay_out(tensors, dtype, max_file_bytes), mesh, first_rank(mesh)

    where, firsts, tensors, files, mesh, dst = ranks.agree(what, begun, given)
    agree_on_sizes(ranks, what, {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)})
    agree_on_one_model(what, tensors, mesh)
    ties = {name: first for name, first in firsts.items() if name != first}
    header = {**(metadata or {}), "format": "pt", **({_TIES: json.dumps(ties)} if ties else {})}
    source = ranks.rank_of(dst)
    ranks.one(what, lambda: where.mkdir(parents=True, exist_ok=True), source)
    withheld = Withheld()
    writer = Writer(where, header, withheld) if ranks.rank == source else None
    for file in files:
        if writer is not None:
            writer.begin(file)
        for name, place in file.tensors.items():
            # Converted before it is gathered: fewer bytes travel.
            tensor, kept = tensors[name], DTYPES[place["dtype"]]
            converted = withheld.attempt(partial(tensor.to, kept))
            scrap = torch.empty_like(tensor, dtype=kept) if converted is None else converted
            whole = whole_tensor(scrap, dst, True, withheld)
            if writer is not None:
                writer.write(whole)
            del whole, converted, scrap

    def complete() -> None:
        if writer is not None:
            writer.complete(files)
        withheld.release()

    try:
        ranks.each(what, complete)
    except CheckpointError:
        if writer is not None:
            writer.discard(files)
        raise
    ranks.one(what, lambda: None if writer is None else writer.publish(files), source)
    return [where / file.name for file in files]


def _checked(directory: str | os.PathLike[str], dtype: Any, max_file_bytes: int, metadata: Any) -> Path:
    """The directory that `save_safetensors` was called with.

    Raises:
        ValueError: an argument makes no sense.
    """
    if dtype is not None and not (dtype in CODES and dtype.is_floating_point):
        raise ValueError(f"save_safetensors(dtype={dtype!r}): expected one of {[t for t in CODES if t.is_floating_point]}")
    if max_file_bytes < 1:
        raise ValueError(f"save_safetensors(max_file_bytes={max_file_bytes!r}): expected at least 1")
    if not all(isinstance(text, str) for item in (metadata or {}).items() for text in item):
        raise ValueError(
            f"save_safetensors(metadata={metadata!r}): expected strings only; no reader takes a header of others"
        )
    return _local("save_safetensors", directory)


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
        DivergenceError: on these ranks and those that wait for them: only some ranks of the model's meshes call this.
        CheckpointError: on all ranks, before anything is changed: files are missing, truncated or damaged; names, shapes
            or dtypes differ. Only if a tensor cannot be read a moment later, or a hook of the model's raises, the error
            says that the model is partly changed.
    """
    meet_all("load_safetensors", model, process_group)
    ranks = Ranks(process_group)
    what = f"loading {path}"

    def begun() -> tuple[Any, Path, LoadOptions, dict[str, Entry]]:
        where = _local("load_safetensors", path)
        return _library(), where, LoadOptions(strict, include, exclude, rename, cast), model_entries(model)

    safe_open, where, options, entries = ranks.agree(what, begun, {})
    own = {name: entry.value for name, entry in entries.items() if isinstance(entry.value, Tensor)}
    firsts = first_names(model, entries)
    with contextlib.ExitStack() as stack:
        places: dict[str, _Place] = {}
        reports: list[Report] = []

        def prepare() -> None:
            files = _open(where, safe_open, stack)
            places.update({name: _Place(files[old], old) for name, old in options.sources(list(files)).items()})
            reports.append(_check(places, own, firsts, options, sorted(files), where))

        def take() -> None:
            read: dict[str, Tensor] = {}
            with handing_over("the files"):
                with torch.no_grad():
                    for name in set(reports[0].loaded) & places.keys():
                        local_of(own[name]).copy_(_read(places[name], own[name]))
                        read[firsts[name]] = own[name]
                handover = Handover(model)
                hand = [name for name in reports[0].loaded if handover.is_watched or not handover.writes_to(own[name])]
                if hand:
                    model.load_state_dict({entries[name].raw_name: read[firsts[name]] for name in hand}, strict=False)

        ranks.each(what, prepare)
        ranks.each(what, take)
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


# -- reading -------------------------------------------------------------------------------------------------------


def _open(path: Path, safe_open: Any, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Opens the files behind `path`; returns by tensor name the file that has it."""
    weights: dict[str, str] | None = None
    if path.is_dir():
        if (path / INDEX).is_file():
            weights = _read_index(path / INDEX)
            files = sorted(path / name for name in set(weights.values()))
        else:
            files = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
            if len(files) != 1:
                raise CheckpointError(f"{path} has {len(files)} .safetensors files and no {INDEX}")
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
        raise CheckpointError(f"{path / INDEX} lists {listing(missing)}, which are not in the files that it names")
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
    options: LoadOptions,
    saved: Sequence[str],
    path: Path,
) -> Report:
    """Compares names, shapes and dtypes; of tied names also this rank's values."""
    problems, converted = [], []
    wanted = {name: value for name, value in own.items() if options.wants(name)}
    have = {firsts[name] for name in wanted if name in places}
    missing = [name for name in wanted if firsts[name] not in have]
    unexpected = [place.name for name, place in places.items() if name not in own and options.wants(name)]
    if missing and options.strict:
        problems.append(f"the model has {listing(missing)}, which the files do not have")
    if unexpected and options.strict:
        problems.append(f"the files have {listing(unexpected)}, which the model does not have")
    for name, value in wanted.items():
        if name not in places:
            continue
        found, first = places[name].file.get_slice(places[name].name), firsts[name]
        shape, dtype = tuple(found.get_shape()), DTYPES.get(found.get_dtype())
        floating = dtype is not None and dtype.is_floating_point and value.is_floating_point()
        if shape != tuple(value.shape):
            problems.append(f"{name!r} has shape {shape} in the files and {tuple(value.shape)} in the model")
        elif dtype != value.dtype and not (options.cast and floating):
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
        elif (problem := unwritable(value)) is not None:
            problems.append(f"{name!r} cannot be loaded: {problem}")
        if dtype != value.dtype:
            converted.append(name)
    loaded = tuple(name for name in wanted if name not in missing)
    if not loaded and options.partial and own:
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
    box = local_box(like)
    with torch.device("cpu"):  # the library makes tensors on the default device
        if not box.sizes:
            return file.get_tensor(name)  # type: ignore[no-any-return]
        if 0 in box.sizes:
            return torch.empty(box.sizes, dtype=DTYPES[file.get_slice(name).get_dtype()])
        return file.get_slice(name)[box.slices]  # type: ignore[no-any-return]

"""Loading: find it, prove that it is whole, compare it with the model, and only then read into the model's own memory.

    rank 0           which checkpoint, its manifest                         --> all ranks
    all ranks        check a share of the files' checksums                  --> all agree, or all raise
    each rank        names, shapes, dtypes, optimizer's settings and states of checkpoint and model; open each piece
                                                                            --> all agree, or all raise
    each rank        read its own rows to where they belong, hand the state to the optimizer

Up to the last line the model and the optimizer are as they were, whatever is wrong. What the optimizer's state looks like
is read from the checkpoint, so a fresh optimizer needs no step to have one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from hsdp.checkpoint import manifests, store
from hsdp.checkpoint.handles import raise_untold, settled
from hsdp.checkpoint.index import Index
from hsdp.checkpoint.layouts import KeyLayout, find_layout, part_directories, read_foreign
from hsdp.checkpoint.load_options import LoadOptions, Rename, Report
from hsdp.checkpoint.models import ModelReading
from hsdp.checkpoint.native_reader import read_own
from hsdp.checkpoint.objects import Packed, unpack_extras
from hsdp.checkpoint.open_files import OpenFiles, opener
from hsdp.checkpoint.optimizers import OptimizerReading
from hsdp.checkpoint.ranks import Ranks, meet_all
from hsdp.checkpoint.reading import Reader, handing_over
from hsdp.checkpoint.remote import AnyPath
from hsdp.checkpoint.store import Progress
from hsdp.errors import CheckpointError

_TRIES = 5
"""How often a load looks for the last checkpoint anew if the one it reads is pruned by the run that saves."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: the checkpoint.
        step: the step it was saved at; None for one that hsdp did not write.
        extra: what this rank saved as `extra`; what rank 0 did, if it was saved by another number of ranks.
        world_size: how many ranks saved it; None for one that hsdp did not write.
        report: what became of each name of the model.
    """

    path: AnyPath
    step: int | None
    extra: Any
    world_size: int | None
    report: Report = field(default_factory=Report)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
    prefix: str | None = None,
    optimizer_prefix: str | None = None,
    validate: bool = True,
    process_group: ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Loads a checkpoint into a model and its optimizer, in place. Every rank calls it, between steps.

    The mesh may be another than that which saved it, in shape and size, or none at all; each rank reads what its shards
    overlap. Checkpoints that torch.distributed.checkpoint wrote for PyTorch's FSDP2 (or any DTensors) load as well, also as
    torchtitan, Lightning and accelerate lay them out. The optimizer may be fresh or stepped, takes no step, and keeps its
    own `foreach`, `fused` and `capturable`.

    Args:
        path: a checkpoint, or a directory of them, of which the one saved last is taken; a URL of fsspec will do.
        model: the module; its parameters and persistent buffers must be those of the checkpoint, by name, shape, dtype.
        optimizer: an optimizer of its parameters; None: the checkpoint's optimizer state is left alone.
        strict: False: names that only the checkpoint or only the model has are left as they are, and reported.
        include: globs of names of the model; the others are left as they are. None: all. In these a `*` stands for any
            characters, dots too, as in fnmatch; that of `shard_units` stops at a dot.
        exclude: globs of names of the model that are left as they are.
        rename: from the checkpoint's names to the model's: a mapping, or a function that returns None for what is not
            wanted.
        cast: convert floating-point tensors to the model's dtypes; else other dtypes are errors.
        prefix: what the model's names begin with in a checkpoint of another library, "state_dict.model." say; None: found.
        optimizer_prefix: the same for the optimizer's, "optimizer." say.
        validate: check every file's checksum first. Without it damage may go unnoticed; names, shapes, dtypes, sizes of
            files, and that every element is there, are checked regardless.
        process_group: the ranks that hold the model; None: all.
        progress: called on each rank with the bytes that it has read so far, and those it will in all.

    Returns:
        The step, what was saved beside the tensors, and what became of each name.

    Raises:
        ValueError, TypeError: arguments make no sense, alone or together.
        DivergenceError: on these ranks and those that wait for them: only some ranks of the model's meshes call this.
        CheckpointError: on all ranks, before anything is changed: there is no checkpoint; a file is missing, truncated,
            damaged or foreign; names, shapes or dtypes differ; the optimizer is another; a parameter is on the meta device;
            ranks were called with different arguments; or an earlier asynchronous save had failed. Only if a file that was
            good cannot be read a moment later, or `progress` or a hook of the model's raises, the error says that the model
            is partly changed.
    """

    def job() -> _Job:
        options = LoadOptions(strict, include, exclude, rename, cast)
        if optimizer is not None and options.partial:
            raise ValueError(
                "load(optimizer=...): an optimizer is loaded with all of its model or not at all; leave out strict=, "
                "include=, exclude= and rename=, or the optimizer (into a model that has grown: load both without what is "
                "new, then hand the state over with full_optimizer_state_dict and load_full_optimizer_state_dict, and give "
                "the optimizer what is new with add_param_group)"
            )
        return _Job(store.expanded(path), model, optimizer, options, prefix, optimizer_prefix, validate, progress)

    with settled():
        meet_all("checkpoint.load", model, process_group)
        loaded = _load(path, job, optimizer is not None, validate, process_group, must_be=True)
    assert loaded is not None, "nothing to load would have been an error"
    return loaded


def resume(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    validate: bool = True,
    process_group: ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Loaded | None:
    """Loads the checkpoint saved last, if there is one: what a run that may have been interrupted begins with.

    Every rank calls it. Rank 0 looks into the directory, so that all ranks load the same one, or none. Arguments and errors
    are those of `load`: a checkpoint itself is loaded too, and a damaged one is an error, never passed over for an older
    one.

    Returns:
        As `load`; None, on every rank, if `directory` does not exist, or has nothing in it that could be a checkpoint. If
        directories in it have some, one of which may have been meant, rank 0 logs a warning.
    """

    def job() -> _Job:
        return _Job(store.expanded(directory), model, optimizer, LoadOptions(), None, None, validate, progress)

    with settled():
        meet_all("checkpoint.resume", model, process_group)
        return _load(directory, job, optimizer is not None, validate, process_group, must_be=False)


def verify(path: str | os.PathLike[str]) -> Loaded:
    """Checks a checkpoint of hsdp without a model, in this process alone: every file, and that each element is there.

    Args:
        path: a checkpoint, or a directory of them, of which the one saved last is taken.

    Returns:
        What it says of itself; `extra` is that of rank 0.

    Raises:
        CheckpointError: there is none, or it is not whole; names the files or tensors.
    """
    found, manifest = _found(_find(store.expanded(path)), path)
    if manifest is None:
        raise CheckpointError(f"{found} was not written by hsdp: it has no {manifests.MANIFEST} to check it against")
    with _opened(found) as files:
        manifests.check_content(found, files, manifest, manifest.files)
    _, held = read_own(found, manifest)
    return Loaded(found, manifest.step, _unpacked(found, held, 0, 1).extra, manifest.world_size)


# -- finding and checking ------------------------------------------------------------------------------------------

_Found = tuple[AnyPath, manifests.Manifest | None]


def _find(path: AnyPath) -> _Found | None:
    """The checkpoint that `path` means, and its manifest (None for one that hsdp did not write); None if there is none.

    Raises:
        CheckpointError: there is something that could be a checkpoint, and is none that can be loaded.
    """
    if not manifests.has(path.parent, path.name):
        _check_links(path)
        return None
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; a checkpoint is one (for .safetensors files: load_safetensors)")
    marks = (manifests.MANIFEST, manifests.INDEX, manifests.METADATA)
    if not any(manifests.has(path, name) for name in marks) and not part_directories(path):
        last = store.latest(path)
        if last is None:
            if names := store.holds_something(path):
                raise CheckpointError(
                    f"{path} has no complete checkpoint of hsdp, but {', '.join(names[:5])}; load one of these by its own "
                    "path, or give another directory"
                )
            return None
        path = last
    if not manifests.has(path, manifests.MANIFEST):
        if manifests.has(path, manifests.INDEX) or (not part_directories(path) and read_foreign(path).by_hsdp):
            raise CheckpointError(
                f"{path / manifests.MANIFEST} is missing, which hsdp wrote with the rest of the checkpoint"
            )
        return path, None
    manifest = manifests.read_manifest(path)
    manifests.check_sizes(path, manifest)
    return path, manifest


def _check_links(path: AnyPath) -> None:
    """Of a path that does not exist: whether that is because a link on the way leads to nothing.

    Raises:
        CheckpointError: so it is: the disk is not mounted, perhaps, and a run must not begin anew for that.
    """
    for one in (path, *path.parents) if isinstance(path, Path) else ():
        if one.is_symlink() and not one.exists():
            raise CheckpointError(f"{one} is a link to {os.readlink(one)}, which is not there (is its disk mounted?)")


def _found(found: _Found | None, path: object) -> _Found:
    if found is None:
        where = store.expanded(path)  # type: ignore[arg-type]
        what = "is neither a checkpoint nor a directory that has a complete one" if where.is_dir() else "is not a directory"
        names = store.directories_below(where) if where.is_dir() else []
        below = f"; those in it that do: {', '.join(names[:5])}" if names else ""
        raise CheckpointError(f"{path} {what}{below}")
    return found


def _found_if_any(found: _Found | None, path: AnyPath) -> _Found | None:
    """For a run that begins anew if nothing is found: it is told of what it may have meant, one level further down."""
    if found is None and (names := store.directories_below(path)):
        store.logger.warning(
            "%s has no checkpoint of its own, so this run begins anew; there are some in %s: to go on from one, give that "
            "directory",
            path,
            ", ".join(names[:5]),
        )
    return found


def _named(path: AnyPath, found: _Found | None) -> tuple[str, manifests.Manifest | None] | None:
    """What was found as other ranks can be told of it: a checkpoint by its name in `path`, "" for `path` itself."""
    return None if found is None else ("" if found[0] == path else found[0].name, found[1])


def _shares(manifest: manifests.Manifest, count: int) -> list[list[str]]:
    """The files, dealt out so that each rank checks about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0])):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += record.bytes
    return shares


@contextlib.contextmanager
def _opened(path: AnyPath) -> Iterator[OpenFiles]:
    files = OpenFiles(opener(path))
    try:
        yield files
    finally:
        files.close()


def _unpacked(path: AnyPath, held: bytes, rank: int, size: int) -> Packed:
    try:
        return unpack_extras(held, rank, size)
    except CheckpointError as error:
        raise CheckpointError(f"{path / manifests.EXTRA}: {error}") from None


# -- loading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What is to be loaded into what."""

    path: AnyPath
    model: nn.Module
    optimizer: Optimizer | None
    options: LoadOptions
    prefix: str | None
    optimizer_prefix: str | None
    validate: bool
    progress: Progress | None


def _load(
    path: object,
    make: Callable[[], _Job],
    with_optimizer: bool,
    validate: bool,
    process_group: ProcessGroup | None,
    must_be: bool,
) -> Loaded | None:
    ranks = Ranks(process_group)
    what = f"loading {path}"

    def begun() -> _Job:
        raise_untold()
        return make()

    job = ranks.agree(what, begun, {"an optimizer": with_optimizer, "validate": validate})
    demand = _found if must_be else _found_if_any
    for left in reversed(range(_TRIES)):
        found = ranks.one(what, lambda: _named(job.path, demand(_find(job.path), job.path)))
        if found is None:
            return None
        name, manifest = found
        try:
            return _Load(ranks, what, job, job.path / name if name else job.path, manifest).run()
        except CheckpointError:
            if ranks.lost_contact:
                raise
            # The run that saves here may have pruned it meanwhile, or saved its step again; then there is a later one.
            if not left or not ranks.one(what, lambda: _is_superseded(job.path, name, manifest)):
                raise
    raise AssertionError("the last try returns or raises")


def _is_superseded(path: AnyPath, name: str, manifest: manifests.Manifest | None) -> bool:
    """Whether what was found under `name` in `path` has been removed since, or another checkpoint is in its place."""
    place = path / name if name else path
    if manifest is None or not manifests.has(place, manifests.MANIFEST):
        return bool(name)
    with contextlib.suppress(CheckpointError):  # damaged, which was told already
        return manifests.read_manifest(place) != manifest
    return False


class _Load:
    """One checkpoint on its way into a model and its optimizer."""

    def __init__(self, ranks: Ranks, what: str, job: _Job, path: AnyPath, manifest: manifests.Manifest | None) -> None:
        self._ranks = ranks
        self._what = what
        self._job = job
        self._path = path
        self._manifest = manifest
        self._state: OptimizerReading | None = None
        self._extra: Any = None

    def run(self) -> Loaded:
        manifest, ranks, job = self._manifest, self._ranks, self._job
        with _opened(self._path) as files:
            if manifest is not None and job.validate:
                shares = _shares(manifest, ranks.size)
                ranks.each(self._what, lambda: manifests.check_content(self._path, files, manifest, shares[ranks.rank]))
            ranks.each(self._what, lambda: self._prepare(files))
            ranks.one(self._what, self._check_place)
            ranks.each(self._what, self._commit)
        known = (None, None) if manifest is None else (manifest.step, manifest.world_size)
        return Loaded(self._path, known[0], self._extra, known[1], self._weights.report)

    def _prepare(self, files: OpenFiles) -> None:
        """Everything that can be found wrong without changing anything."""
        index, layout, packed = self._read_index()
        job, self._extra = self._job, packed.extra
        check_zip = job.validate and self._manifest is None
        self._reader = Reader(self._path, files, index, check_zip, job.progress, packed.values)
        saved = layout.model_records(index)
        self._weights = ModelReading(
            self._reader, index, saved, layout.prefix, job.model, job.options, packed.structures, self._path
        )
        if job.optimizer is not None:
            records = layout.optimizer_records(index)
            place = (layout.optimizer_prefix, layout.inner, job.model, job.optimizer, packed, index.paths, self._path)
            self._state = OptimizerReading(self._reader, records, *place)
        self._reader.prepare()
        self._weights.check()
        if self._state is not None:
            self._state.check()

    def _check_place(self) -> None:
        """By now each rank has opened what it reads, some of it long before the rest. If no other manifest has taken the
        place of the one that they began with, all of that is of one checkpoint; what was removed is read to its end.

        Raises:
            CheckpointError: another has.
        """
        manifest, path = self._manifest, self._path
        if manifest and manifests.has(path, manifests.MANIFEST) and manifests.read_manifest(path) != manifest:
            raise CheckpointError(f"checkpoint {path} was saved again while it was read; load it once more")

    def _read_index(self) -> tuple[Index, KeyLayout, Packed]:
        job = self._job
        if self._manifest is None:
            index, given = read_foreign(self._path), (job.prefix, job.optimizer_prefix)
            return (
                index,
                find_layout(index, self._path, job.model, job.options, *given, job.optimizer is not None),
                Packed(),
            )
        index, held = read_own(self._path, self._manifest)
        packed = _unpacked(self._path, held, self._ranks.rank, self._ranks.size)
        return index, KeyLayout(job.prefix or "model.", job.optimizer_prefix or "optimizer."), packed

    def _commit(self) -> None:
        """Changes the model and the optimizer. Nothing here can fail for what the checkpoint holds."""
        self._reader.run()
        with handing_over(f"checkpoint {self._path}"):
            self._weights.finish()
            if self._state is not None:
                self._state.finish(self._weights.report.converted)

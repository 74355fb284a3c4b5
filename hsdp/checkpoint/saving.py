"""Saving: who writes what, the staged copy, the writing, and the handle that follows it.

    all ranks        the same arguments?  what do I hold? --> rank 0: who writes what (`write_assignment.py`), room?
    async only       copy my part to host memory; the caller goes on from here, the rest runs in a thread (`handles.py`)
    writing ranks    one file each, checksummed on its way to disk
    rank 0           what all wrote --> .metadata, index.json, extra.bin --> complete (`commits.py`) --> retention

torch.distributed.checkpoint's own planner decides, and what is left is an ordinary DCP checkpoint. Only the writing itself
is done here: DCP's writer keeps a copy of every piece until the last one is written, this one lets go of each.
"""

from __future__ import annotations

import io
import logging
import operator
import os
import pickle
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.optim import Optimizer

from hsdp.checkpoint import manifests, store
from hsdp.checkpoint.archive_writer import write_tensor
from hsdp.checkpoint.checksums import ChecksumStream, write_file
from hsdp.checkpoint.commits import commits_in
from hsdp.checkpoint.contents import EXTRA_STATE, refuse_unsized, with_scalars
from hsdp.checkpoint.handles import SaveHandle, raise_untold, settled
from hsdp.checkpoint.index import FileRange, Index, PieceRecord, Record, TensorRecord, ValueRecord
from hsdp.checkpoint.name_conflicts import agree_on, claims_of, contested, prints_of
from hsdp.checkpoint.objects import pack, pack_extras
from hsdp.checkpoint.optimizer_extras import pack_added
from hsdp.checkpoint.optimizer_schema import kind_of
from hsdp.checkpoint.optimizers import optimizer_state
from hsdp.checkpoint.ranks import Ranks, meet_all
from hsdp.checkpoint.remote import AnyPath
from hsdp.checkpoint.staging import Staging, staging_of
from hsdp.checkpoint.store import Progress
from hsdp.checkpoint.structure import agreed, listed
from hsdp.checkpoint.write_assignment import pack_parts, packed, shared_out, size_of, unpack_all, unpacked
from hsdp.errors import CheckpointError
from hsdp.params.shard_geometry import Box
from hsdp.policies import check_flag

logger = logging.getLogger("hsdp.checkpoint")

_DCP_VERSION = "1.0.0"
"""The format that is written, as DCP numbers it."""

SAVE_ID = "hsdp"
"""Marks a DCP metadata file as one of hsdp's, which is not to be without its manifest."""


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    step: int,
    keep: int | None = None,
    async_: bool = False,
    process_group: ProcessGroup | None = None,
    progress: Progress | None = None,
) -> SaveHandle:
    """Saves a checkpoint as `directory/step-NNNNNN`. Every rank calls it, between steps.

    It appears under its name when all of it is on disk. A run that dies before leaves the earlier checkpoints as they
    were, and nothing that looks like one. Each element is written once; replicas share the writing of what is large.
    Buffers and other plain tensors are those of rank 0. Only one save is under way at a time: the next one, and a load,
    wait for it.

    Args:
        directory: where the checkpoints of this run are: a file system that all ranks share, and no other run writes to; or
            a URL of fsspec ("s3://bucket/run"), where a checkpoint's name ends in eight more characters.
        model: any module; the parameters of a sharded one are saved as the shards they are.
        optimizer: its state is saved as it is: nothing is initialised, no step is taken.
        extra: whatever else the run needs: data loader, generators (see `rng_state`), scheduler. Each rank's own is
            saved: numbers, strings, bytes, tensors, arrays, paths, dates, and tuples, lists, dicts, sets of them.
        step: number of steps done. Saving a step again replaces it.
        keep: how many checkpoints remain in `directory`, this one included; the one saved first goes first. None: all.
        async_: return as soon as a copy in host memory is made (of what this rank writes) and write from a thread. The
            memory, pinned for a model on a device, is kept for the next save as long as the model lives. A failure is
            logged at once, and raised by `wait()` of the handle, or by the next save or load.
        process_group: the ranks that hold the model; None: all.
        progress: called on each rank with the bytes of tensors that it has written so far, and those it will in all.

    Returns:
        A handle: finished, or under way if `async_`.

    Raises:
        TypeError, ValueError: an argument makes no sense.
        ImportError: what the URL needs is not installed.
        DivergenceError: on these ranks and those that wait for them: only some ranks of the model's meshes call this.
        CheckpointError: on all ranks: ranks were called with different arguments, any rank could not do its part, the disk
            has no room, another job saves to the directory; or an earlier asynchronous save had failed.
    """
    with settled():
        started = time.perf_counter()
        meet_all("checkpoint.save", model, process_group)
        ranks = Ranks(process_group)
        where, num = ranks.agree(
            f"checkpoint.save to {directory}",
            lambda: _arguments(directory, optimizer, step, keep, async_),
            {"step": step, "keep": keep, "async_": async_, "an optimizer": optimizer is not None},
        )
        what = f"saving step {num} to {directory}"
        target = _Target(where, ranks.one(what, lambda: commits_in(where).begin(num)), num, keep)
        with _discarding(target, ranks):
            planner = _Planner(progress)
            plan, extras = _plan(what, ranks, target, planner, model, optimizer, extra)
            if async_:
                ranks.each(what, lambda: planner.stage(staging_of(model)))
        handle = SaveHandle(where / commits_in(where).name_of(target.name, num), num)

        def finish() -> AnyPath:
            with _discarding(target, ranks):
                path = _write(what, ranks, planner, plan, extras, target)
            if ranks.rank == 0:
                logger.info("saved %s in %.2f s", path, time.perf_counter() - started)
            return path

        handle.run(finish, in_background=async_)
        if not async_:
            handle.wait()
        return handle


def _arguments(directory: str | os.PathLike[str], optimizer: Any, step: Any, keep: Any, async_: Any) -> tuple[AnyPath, int]:
    """The directory and the step that `save` was called with.

    Raises:
        TypeError, ValueError: an argument makes no sense.
        CheckpointError: an earlier save in the background had failed.
    """
    raise_untold()
    check_flag("checkpoint.save", async_, "async_=")
    if optimizer is not None and not hasattr(optimizer, "state"):
        raise TypeError(f"checkpoint.save(optimizer=...): expected one optimizer, not {type(optimizer).__name__}")
    if not _is_count(step, 0):
        raise ValueError(f"checkpoint.save(step={step!r}): expected the number of steps done, an int of at least 0")
    if keep is not None and not _is_count(keep, 1):
        raise ValueError(f"checkpoint.save(keep={keep!r}): expected the number of checkpoints to keep, at least 1, or None")
    return store.expanded(directory), int(step)


def _is_count(value: Any, least: int) -> bool:
    """Whether it is a whole number, NumPy's included, of at least `least`."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= least and not isinstance(value, Tensor)
    except TypeError:
        return False


@dataclass(frozen=True)
class _Target:
    """Where a checkpoint is written: `name` in a directory, as `Commits.begin` gave it; and what becomes of it there."""

    directory: AnyPath
    name: str
    step: int
    keep: int | None

    @property
    def path(self) -> AnyPath:
        return self.directory / self.name


@contextmanager
def _discarding(target: _Target, ranks: Ranks) -> Iterator[None]:
    """Removes the unfinished checkpoint if the body raises."""
    try:
        yield
    except BaseException:
        if ranks.rank == 0:
            commits_in(target.directory).discard(target.name)
        raise


# -- planning and writing ------------------------------------------------------------------------------------------


def _plan(
    what: str,
    ranks: Ranks,
    target: _Target,
    planner: _Planner,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
) -> tuple[SavePlan, list[bytes]]:
    """Decides who writes what; returns this rank's part and, on rank 0, the packed `extra` of each rank."""

    def mine() -> tuple[bytes, bytes, bytes, bytes]:
        if not commits_in(target.directory).is_seen(target.name):
            raise CheckpointError(f"{target.path}, which rank 0 made, is not there: all ranks must share the directory")
        state: dict[str, Any] = {"model": {name: entry.value for name, entry in with_scalars(model).items()}}
        if optimizer is not None:
            state["optimizer"] = optimizer_state(model, optimizer)
            pack_added(state["optimizer"])
            planner.optimizer = kind_of(optimizer)
        structures = listed(state)
        planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
        refuse_unsized(planner.state_dict)
        with torch.device("cpu"):  # torch counts with tensors on the default device
            plan = planner.create_local_plan()
        claims = claims_of(planner.state_dict, state.get("optimizer"), ranks.size)
        return packed(plan), pack(extra, "extra"), packed(structures), packed(claims)

    blobs: list[bytes] = []

    def everyones(held: list[tuple[bytes, bytes, bytes, bytes]]) -> list[tuple[bytes, list[str]]]:
        given, blobs[:], structures, claims = map(list, zip(*held, strict=True))
        disputed = contested(unpack_all(claims))
        planner.structures = agreed([unpacked(one) for one in dict.fromkeys(structures)])
        try:
            plans, planner.metadata = planner.create_global_plan(shared_out(unpack_all(given)))
        except ValueError as error:
            raise CheckpointError(
                "what the ranks hold does not make up whole tensors; is a rank's model another, or its optimizer without "
                f"state, because it was stepped or loaded on other ranks only? {str(error)[:300]}"
            ) from error
        store.check_space(target.path, sum(size_of(item) for one in plans for item in one.items) + sum(map(len, blobs)))
        return [(part, disputed) for part in pack_parts(plans)]

    part, disputed = ranks.meet(what, mine, everyones)
    if disputed:
        ranks.meet(what, lambda: prints_of(planner.state_dict, disputed), agree_on)
    return planner.finish_plan(unpacked(part)), blobs


def _write(
    what: str,
    ranks: Ranks,
    planner: _Planner,
    plan: SavePlan,
    extras: list[bytes],
    target: _Target,
) -> AnyPath:
    """Writes this rank's part; rank 0 then writes what describes all parts, and gives the checkpoint its name."""

    def complete(answers: list[bytes]) -> list[str]:
        written: list[_Written] = [unpacked(one) for one in answers]
        files = {name: record for one in written for name, record in one.files.items()}
        values = {key: value for one in written for key, value in one.values.items()}
        metadata = planner.metadata
        metadata.storage_data = _shared(metadata, written)
        metadata.storage_meta = StorageMeta(save_id=f"{SAVE_ID}-{secrets.token_hex(8)}")
        metadata.version = _DCP_VERSION
        for name, content in {
            manifests.METADATA: pickle.dumps(metadata),
            manifests.INDEX: _index(metadata).to_json(),
            manifests.EXTRA: pack_extras(extras, values, planner.optimizer, planner.structures),
        }.items():
            files[name] = write_file(target.path / name, content)
        final = store.publish(target.directory, target.name, target.step, ranks.size, files, target.keep)
        return [final.name] * ranks.size

    # Ranks of other replicas may have nothing to write: not even an empty file.
    name = f"__{ranks.rank}_0.distcp"
    return target.directory / ranks.meet(what, lambda: packed(_write_file(target.path / name, plan, planner)), complete)


@dataclass(frozen=True)
class _Written:
    """What one rank wrote: its file, where in it each item is, and its values once more, packed."""

    files: dict[str, manifests.FileRecord]
    places: dict[MetadataIndex, _StorageInfo]
    values: dict[str, bytes]


def _write_file(path: AnyPath, plan: SavePlan, planner: _Planner) -> _Written:
    """Writes the items of a plan one after the other, as DCP does, each as `torch.save` has it."""
    if not plan.items:
        planner.report(0)
        return _Written({}, {}, {})
    places: dict[MetadataIndex, _StorageInfo] = {}
    done = 0
    with _telling(path), path.open("wb", buffering=0) as raw:
        stream = ChecksumStream(raw)
        for item in plan.items:
            planner.report(done)
            start, data = stream.tell(), planner.resolve_data(item)
            if isinstance(data, Tensor):
                write_tensor(stream, data.detach().cpu().resolve_conj().resolve_neg().contiguous())
            else:
                stream.write(data.getbuffer())
            places[item.index] = _StorageInfo(path.name, start, stream.tell() - start)
            done += size_of(item)
            del data
        stream.sync()
    planner.report(done)
    return _Written({path.name: stream.record}, places, planner.values)


def _shared(metadata: Metadata, written: Sequence[_Written]) -> dict[MetadataIndex, _StorageInfo]:
    """Where everything was written. Equal names, offsets and sizes, of which each rank has sent its own, become one object
    each, there and in `metadata`: a pickle has an object once.
    """
    names = {name: name for name in metadata.state_dict_metadata}
    sizes: dict[torch.Size, torch.Size] = {}
    for kind in metadata.state_dict_metadata.values():
        for chunk in kind.chunks if isinstance(kind, TensorStorageMetadata) else ():
            chunk.offsets = sizes.setdefault(chunk.offsets, chunk.offsets)
            chunk.sizes = sizes.setdefault(chunk.sizes, chunk.sizes)
    found = {}
    for one in written:
        for index, info in one.places.items():
            offset = None if index.offset is None else sizes.get(index.offset, index.offset)
            found[MetadataIndex(names[index.fqn], offset, index.index)] = info
    return found


@contextmanager
def _telling(path: AnyPath) -> Iterator[None]:
    """Says of an error of the file system how much room there is: it is the usual reason."""
    try:
        yield
    except OSError as error:
        free = store.free_bytes(path.parent)
        room = "" if free is None else f" ({free:,} bytes are free)"
        raise CheckpointError(
            f"{path.name} could not be written to {path.parent}: {error.strerror or error}{room}"
        ) from error


def _index(metadata: Metadata) -> Index:
    """hsdp's index of what DCP's metadata describes."""

    def place(key: MetadataIndex) -> FileRange:
        info = metadata.storage_data[key]
        return FileRange(info.relative_path, info.offset, info.length)

    records: dict[str, Record] = {}
    for key, kind in metadata.state_dict_metadata.items():
        if isinstance(kind, TensorStorageMetadata):
            pieces = [
                PieceRecord(Box(tuple(c.offsets), tuple(c.sizes)), place(MetadataIndex(key, c.offsets)))
                for c in kind.chunks
            ]
            records[key] = TensorRecord(tuple(kind.size), kind.properties.dtype, tuple(pieces))
        else:
            records[key] = ValueRecord(place(MetadataIndex(key)))
    paths = {key: tuple(path) for key, path in (metadata.planner_data or {}).items() if EXTRA_STATE in key}
    return Index(records, paths)


class _Planner(DefaultSavePlanner):
    """DCP's planner; what no rank has to itself is rank 0's to write, and what this rank writes can be copied first."""

    metadata: Metadata

    def __init__(self, progress: Progress | None) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._staged: dict[MetadataIndex, Tensor | io.BytesIO] | None = None
        self.values: dict[str, bytes] = {}
        self.optimizer: str | None = None
        self.structures: dict[str, bytes] = {}
        self._progress = progress

    def stage(self, staging: Staging) -> None:
        """Copies what this rank will write to host memory, and lets go of the model."""
        held = {item.index: super(_Planner, self).resolve_data(item) for item in self.plan.items}
        tensors = {index: data for index, data in held.items() if isinstance(data, Tensor)}
        self._staged = {**held, **staging.copies(tensors)}
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What to write for an item: the staged copy, which is then let go, or the model's own."""
        return super().resolve_data(write_item) if self._staged is None else self._staged.pop(write_item.index)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Takes this rank's part of the plan."""
        self._total = sum(map(size_of, new_plan.items))
        return super().finish_plan(new_plan)

    def report(self, done: int) -> None:
        """Tells how many bytes of tensors are written."""
        if self._progress is not None:
            try:
                self._progress(done, self._total)
            except OSError as error:  # the callback's own, not that of the file
                raise CheckpointError(f"progress= raised OSError: {error}") from error

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Serialises what is no tensor: for DCP's readers as `torch.save` does, for hsdp as plain data."""
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        self.values[write_item.index.fqn] = pack(object, write_item.index.fqn)
        stream = io.BytesIO()
        torch.save(object, stream)
        return stream

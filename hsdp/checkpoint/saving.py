"""Saving: who writes what, the staged copy, the writing, and the handle that follows it.

    all ranks        what do I hold?  --> rank 0: who writes it (replica 0)  --> all ranks: my part of the plan
    async only       copy my part to host memory; the caller goes on from here, the rest runs in a thread
    writing ranks    one file each, checksummed on its way to disk
    rank 0           sizes and checksums of all --> .metadata, extra.pt, manifest.json --> rename --> retention

torch.distributed.checkpoint's own planner decides, and what is left is an ordinary DCP checkpoint. Only the writing itself
is done here: DCP's writer keeps a copy of every piece until the last one is written, this one lets go of each.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.optim import Optimizer

from hsdp.checkpoint import store
from hsdp.checkpoint.contents import model_entries, reason_of
from hsdp.checkpoint.optimizers import optimizer_state
from hsdp.checkpoint.ranks import Ranks
from hsdp.checkpoint.store import Progress
from hsdp.errors import CheckpointError

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
    were, and nothing that looks like one. Each element is written once, by the first replica that holds it; buffers and
    other plain tensors are those of rank 0. Only one save is under way at a time: the next one, and a load, wait for it.

    Args:
        directory: where the checkpoints of this run are: a file system that all ranks share, and no other run writes to.
        model: any module; the parameters of a sharded one are saved as the shards they are.
        optimizer: its state is saved as it is: nothing is initialised, no step is taken.
        extra: whatever else the run needs: data loader, generators (see `rng_state`), scheduler. Each rank's own is
            saved. Tensors, numbers, strings, bytes, and tuples, lists and dicts of them.
        step: number of steps done. Saving a step again replaces it.
        keep: how many checkpoints remain in `directory`, this one included; the one saved first goes first. None: all.
        async_: return as soon as a copy in host memory is made (of what this rank writes) and write from a thread.
            Call `wait()` on the last handle before the process group is destroyed.
        process_group: the ranks that hold the model; None: all.
        progress: called on each rank with the bytes of tensors that it has written so far, and those it will in all.

    Returns:
        A handle: finished, or under way if `async_`.

    Raises:
        ValueError, TypeError: an argument makes no sense.
        CheckpointError: on all ranks, if any rank could not do its part; or an earlier asynchronous save had failed.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"checkpoint.save(step={step!r}): expected the number of steps done, an int of at least 0")
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"checkpoint.save(keep={keep!r}): expected the number of checkpoints to keep, at least 1, or None")
    settle()
    started = time.perf_counter()
    ranks = Ranks(process_group)
    what = f"saving step {step} to {directory}"
    partial = ranks.one(what, lambda: store.begin(Path(directory), step))
    with _discarding(partial, ranks):
        planner = _Planner(progress)
        plan, extras = _plan(what, ranks, partial, planner, model, optimizer, extra)
        if async_:
            ranks.each(what, planner.stage)
    handle = SaveHandle(Path(directory) / f"step-{step:06d}", step)

    def finish() -> Path:
        with _discarding(partial, ranks):
            path = _write(what, ranks, planner, plan, extras, partial, step, keep)
        if ranks.rank == 0:
            logger.info("saved %s in %.2f s", path, time.perf_counter() - started)
        return path

    handle._run(finish, in_background=async_)
    if not async_:
        handle.wait()
    return handle


class SaveHandle:
    """A save under way, or done.

    Attributes:
        path: where the checkpoint is, once it is complete.
        step: the step it is of.
    """

    _in_flight: SaveHandle | None = None

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        self._finished = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Waits until the checkpoint is complete.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            Its path.

        Raises:
            CheckpointError: it could not be saved; the directory has nothing of it.
            TimeoutError: it is not done yet.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"saving {self.path} is not done after {timeout:g} s")
        if SaveHandle._in_flight is self:
            SaveHandle._in_flight = None
        if self._error is not None:
            raise self._error
        return self.path

    def _run(self, finish: Callable[[], Path], *, in_background: bool) -> None:
        """Does the rest of a save, here or in a thread."""

        def body() -> None:
            try:
                self.path = finish()
            except Exception as error:
                self._error = error
            finally:
                self._finished.set()

        if in_background:
            SaveHandle._in_flight = self
            # Not a daemon: a process that ends normally first completes its checkpoint.
            threading.Thread(target=body, name=f"hsdp-save-{self.step}").start()
        else:
            body()


def settle() -> None:
    """Waits for the asynchronous save under way, if there is one; raises what it raised."""
    handle = SaveHandle._in_flight
    if handle is not None:
        handle.wait()


@contextmanager
def _discarding(partial: Path, ranks: Ranks) -> Iterator[None]:
    """Removes the unfinished checkpoint if the body raises."""
    try:
        yield
    except BaseException:
        if ranks.rank == 0:
            store.discard(partial)
        raise


# -- planning and writing ------------------------------------------------------------------------------------------


def _plan(
    what: str,
    ranks: Ranks,
    partial: Path,
    planner: _Planner,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
) -> tuple[SavePlan, bytes]:
    """Decides who writes what; returns this rank's part and, on rank 0, the content of the file with all `extra`s."""

    def mine() -> tuple[SavePlan, bytes]:
        if not partial.is_dir():
            raise CheckpointError(f"{partial}, which rank 0 made, is not there: all ranks must share the directory")
        state: dict[str, Any] = {"model": {name: entry.value for name, entry in model_entries(model).items()}}
        if optimizer is not None:
            state["optimizer"] = optimizer_state(model, optimizer)
        planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
        return planner.create_local_plan(), _to_bytes(extra, "extra")

    blobs: list[bytes] = []

    def everyones(held: list[tuple[SavePlan, bytes]]) -> list[SavePlan]:
        blobs[:] = [blob for _, blob in held]
        plans, planner.metadata = planner.create_global_plan([plan for plan, _ in held])
        return plans

    plan = planner.finish_plan(ranks.meet(what, mine, everyones))
    return plan, _pack_extras(blobs) if ranks.rank == 0 else b""


def _write(
    what: str,
    ranks: Ranks,
    planner: _Planner,
    plan: SavePlan,
    extras: bytes,
    partial: Path,
    step: int,
    keep: int | None,
) -> Path:
    """Writes this rank's part; rank 0 then writes what describes all parts, and gives the checkpoint its name."""

    def complete(written: list[_Written]) -> list[Path]:
        files = {name: record for one in written for name, record in one.files.items()}
        metadata = planner.metadata
        metadata.storage_data = {index: info for one in written for index, info in one.places.items()}
        metadata.storage_meta = StorageMeta(save_id=f"{SAVE_ID}-{secrets.token_hex(8)}")
        metadata.version = _DCP_VERSION
        files[store.METADATA] = store.write_file(partial / store.METADATA, pickle.dumps(metadata))
        files[store.EXTRA] = store.write_file(partial / store.EXTRA, extras)
        return [store.publish(partial, step, ranks.size, files, keep)] * ranks.size

    # Ranks of other replicas have nothing to write: not even an empty file.
    name = f"__{ranks.rank}_0.distcp"
    return ranks.meet(what, lambda: _write_file(partial / name, plan, planner), complete)


@dataclass(frozen=True)
class _Written:
    """What one rank wrote: its file, and where in it each item is."""

    files: dict[str, store.FileRecord]
    places: dict[MetadataIndex, _StorageInfo]


def _write_file(path: Path, plan: SavePlan, planner: _Planner) -> _Written:
    """Writes the items of a plan one after the other, as DCP does, each as `torch.save` has it."""
    if not plan.items:
        planner.report(0)
        return _Written({}, {})
    places: dict[MetadataIndex, _StorageInfo] = {}
    done = 0
    with path.open("wb") as raw:
        stream = store.ChecksumStream(raw)
        for item in plan.items:
            planner.report(done)
            start, data = stream.tell(), planner.resolve_data(item)
            if isinstance(data, Tensor):
                torch.save(_compact(data), cast(IO[bytes], stream))
            else:
                stream.write(data.getbuffer())
            places[item.index] = _StorageInfo(path.name, start, stream.tell() - start)
            done += _size(item)
            del data
        os.fsync(stream.fileno())
    planner.report(done)
    return _Written({path.name: stream.record}, places)


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, with no more storage than it needs: torch.save writes storages whole."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class _Planner(DefaultSavePlanner):
    """DCP's planner; replica 0 writes, and what this rank writes can be copied first."""

    metadata: Metadata

    def __init__(self, progress: Progress | None) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._staged: dict[MetadataIndex, Tensor | io.BytesIO] | None = None
        self._progress = progress

    def stage(self) -> None:
        """Copies what this rank will write to host memory, and lets go of the model."""
        self._staged = {}
        for item in self.plan.items:
            data = super().resolve_data(item)
            if isinstance(data, Tensor):
                data = data.detach().to("cpu", copy=True)
            self._staged[item.index] = data
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What to write for an item: the staged copy, which is then let go, or the model's own."""
        return super().resolve_data(write_item) if self._staged is None else self._staged.pop(write_item.index)

    def report(self, done: int) -> None:
        """Tells how many bytes of tensors are written."""
        if self._progress is not None:
            self._progress(done, sum(_size(item) for item in self.plan.items))

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Serialises what is no tensor, after checking that it can be read back without unpickling code."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(_to_bytes(object, write_item.index.fqn))
        return object


def _size(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None or data.chunk is None:
        return 0
    return int(data.chunk.sizes.numel()) * int(data.properties.dtype.itemsize)


# -- what is no tensor ---------------------------------------------------------------------------------------------


def _to_bytes(value: Any, name: str) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    data = stream.getvalue()
    if _is_plain(value):
        return data
    try:
        _from_bytes(data)
    except Exception as error:
        reason = " ".join(reason_of(error, 300).splitlines())
        raise CheckpointError(
            f"{name!r} has objects in it that could only be loaded by unpickling code; save tensors, numbers, strings, "
            f"bytes, and tuples, lists and dicts of them ({reason})"
        ) from error
    return data


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _is_plain(value: Any) -> bool:
    """Whether it is of types that are surely read back: what most hyperparameters are."""
    if type(value) in (tuple, list):
        return all(_is_plain(item) for item in value)
    return type(value) in (int, float, bool, str, type(None))


def _pack_extras(blobs: list[bytes]) -> bytes:
    """Every rank's `extra` in one file, equal ones once."""
    distinct = list(dict.fromkeys(blobs))
    held = [_from_bytes(blob) for blob in distinct]
    return _to_bytes({"extras": held, "of_rank": [distinct.index(blob) for blob in blobs]}, "extra")


def unpack_extra(data: bytes, rank: int, world_size: int) -> Any:
    """The `extra` of `rank`, or that of rank 0 if the checkpoint was saved by another number of ranks."""
    held = _from_bytes(data)
    of_rank: list[int] = held["of_rank"]
    return held["extras"][of_rank[rank if len(of_rank) == world_size else 0]]

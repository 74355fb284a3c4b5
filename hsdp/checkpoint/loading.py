"""Loading: find it, prove that it is whole, compare it with the model, stage all of it, and only then change anything.

    rank 0           which checkpoint, its manifest                         --> all ranks
    all ranks        check a share of the files' checksums                  --> all agree, or all raise
    each rank        names, shapes and dtypes of checkpoint and model; read its own parts into host memory
                                                                            --> all agree, or all raise
    each rank        copy into the model, hand the state to the optimizer

Up to the last line the model and the optimizer are as they were, whatever goes wrong. What the optimizer's state looks
like is read from the checkpoint, so a fresh optimizer needs no step to have one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from hsdp.checkpoint import store
from hsdp.checkpoint.contents import listing, model_entries
from hsdp.checkpoint.models import ModelReading, is_extra_state
from hsdp.checkpoint.optimizers import OptimizerReading, commit_optimizer
from hsdp.checkpoint.ranks import Ranks
from hsdp.checkpoint.reading import Reader, keys_below, parse_metadata
from hsdp.checkpoint.saving import SAVE_ID, settle, unpack_extra
from hsdp.checkpoint.store import Progress
from hsdp.errors import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: the checkpoint.
        step: the step it was saved at; None for one that hsdp did not write.
        extra: what this rank saved as `extra`; what rank 0 did, if it was saved by another number of ranks.
        world_size: how many ranks saved it; None for one that hsdp did not write.
    """

    path: Path
    step: int | None
    extra: Any
    world_size: int | None


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    validate: bool = True,
    process_group: ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Loads a checkpoint into a model and its optimizer, in place. Every rank calls it, between steps.

    The mesh may be another than that which saved it, in shape and size, or none at all; each rank reads what its shards
    overlap. Checkpoints that torch.distributed.checkpoint wrote for PyTorch's FSDP2 (or any DTensors) load as well. The
    optimizer may be fresh or stepped, takes no step, and keeps its own `foreach`, `fused` and `capturable`.

    Args:
        path: a checkpoint, or a directory of them, of which the one saved last is taken.
        model: the module; its parameters and persistent buffers must be those of the checkpoint, by name, shape, dtype.
        optimizer: an optimizer of its parameters; None: the checkpoint's optimizer state is left alone.
        validate: check every file's checksum first. Without it damage may go unnoticed; names, shapes, dtypes, sizes of
            files, and that every element is there, are checked regardless.
        process_group: the ranks that hold the model; None: all.
        progress: called on each rank with the bytes that it has read so far, and those it will in all.

    Returns:
        The step, and what was saved beside the tensors.

    Raises:
        CheckpointError: on all ranks, before anything is changed: there is no checkpoint; a file is missing, truncated,
            damaged or foreign; names, shapes or dtypes differ; a parameter is on the meta device; or an earlier
            asynchronous save had failed.
    """
    settle()
    ranks = Ranks(process_group)
    what = f"loading {path}"
    found, manifest = ranks.one(what, lambda: _find(Path(path)))
    if manifest is not None and validate:
        shares = _shares(manifest, ranks.size)
        ranks.each(what, lambda: store.check_content(found, manifest, shares[ranks.rank]))
    staged: list[_Staged] = []
    ranks.each(what, lambda: staged.append(_stage(found, manifest, model, optimizer, validate, progress, ranks)))
    staged[0].commit(model, optimizer)
    if manifest is None:
        return Loaded(found, None, staged[0].extra, None)
    return Loaded(found, manifest.step, staged[0].extra, manifest.world_size)


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

    Every rank calls it. Rank 0 looks into the directory, so that all ranks load the same one, or none. A directory that
    does not exist yet has none. Arguments and errors are those of `load`; a damaged checkpoint is an error here too, and
    never passed over for an older one.

    Returns:
        As `load`; None, on every rank, if `directory` has no complete checkpoint.
    """
    settle()
    ranks = Ranks(process_group)
    last = ranks.one(f"resuming from {directory}", lambda: store.latest(directory))
    if last is None:
        return None
    return load(last, model, optimizer, validate=validate, process_group=process_group, progress=progress)


def verify(path: str | os.PathLike[str]) -> Loaded:
    """Checks a checkpoint of hsdp without a model, in this process alone: every file, and that each element is there.

    Args:
        path: a checkpoint, or a directory of them, of which the one saved last is taken.

    Returns:
        What it says of itself; `extra` is that of rank 0.

    Raises:
        CheckpointError: there is none, or it is not whole; names the files or tensors.
    """
    found, manifest = _find(Path(path))
    if manifest is None:
        raise CheckpointError(f"{found} was not written by hsdp: it has no {store.MANIFEST} to check it against")
    store.check_content(found, manifest, manifest.files)
    _read_metadata(found, manifest)
    return Loaded(found, manifest.step, _read_extra(found, 0, 1), manifest.world_size)


# -- finding and checking ------------------------------------------------------------------------------------------


def _find(path: Path) -> tuple[Path, store.Manifest | None]:
    """The checkpoint that `path` means, and its manifest; None for one of plain DCP."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    if not ((path / store.MANIFEST).exists() or (path / store.METADATA).exists()):
        last = store.latest(path)
        if last is None:
            raise CheckpointError(f"{path} is neither a checkpoint nor a directory that has a complete one")
        path = last
    if not (path / store.MANIFEST).exists():
        saved_by = parse_metadata((path / store.METADATA).read_bytes(), path).storage_meta
        if str(getattr(saved_by, "save_id", None)).startswith(SAVE_ID):
            raise CheckpointError(f"{path / store.MANIFEST} is missing, which hsdp wrote with the rest of the checkpoint")
        return path, None
    manifest = store.read_manifest(path)
    store.check_sizes(path, manifest)
    return path, manifest


def _shares(manifest: store.Manifest, count: int) -> list[list[str]]:
    """The files, dealt out so that each rank checks about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0])):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += record.bytes
    return shares


def _read_metadata(path: Path, manifest: store.Manifest | None) -> Metadata:
    """The metadata, decoded from the very bytes whose checksum was compared."""
    try:
        data = (path / store.METADATA).read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {store.METADATA} cannot be read: {error}") from error
    if manifest is not None:
        store.check_bytes(path, manifest, store.METADATA, data)
    described = parse_metadata(data, path)
    for name in {info.relative_path for info in described.storage_data.values()}:
        if manifest is not None and name not in manifest.files:
            raise CheckpointError(f"checkpoint {path}: {store.METADATA} says there are tensors in {name}, no file of it")
        if not (path / name).is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing")
    return described


def _read_extra(path: Path, rank: int, size: int) -> Any:
    try:
        return unpack_extra((path / store.EXTRA).read_bytes(), rank, size)
    except Exception as error:
        raise CheckpointError(f"{path / store.EXTRA} is damaged: {error}") from error


# -- staging -------------------------------------------------------------------------------------------------------


@dataclass
class _Staged:
    """Everything that was read, ready to be put in place."""

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    extra: Any

    def commit(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Changes the model and the optimizer. Nothing here can fail for what the checkpoint holds."""
        # Through load_state_dict, so that hooks run: a sharded model learns there that its parameters changed.
        model.load_state_dict(self.model)
        if optimizer is not None and self.optimizer is not None:
            commit_optimizer(optimizer, self.optimizer)


def _stage(
    path: Path,
    manifest: store.Manifest | None,
    model: nn.Module,
    optimizer: Optimizer | None,
    validate: bool,
    progress: Progress | None,
    ranks: Ranks,
) -> _Staged:
    described = _read_metadata(path, manifest)
    prefix, optimizer_prefix = "model.", "optimizer."
    if manifest is None:
        prefix, optimizer_prefix = _find_prefixes(described, path, model, optimizer is not None)
    reader = Reader(path, described, check_zip=validate and manifest is None, progress=progress)
    saved = keys_below(described, prefix)
    if manifest is None and prefix == optimizer_prefix:  # both at the top
        saved = {name: kind for name, kind in saved.items() if not name.startswith(("state.", "param_groups."))}
    weights = ModelReading(reader, described, saved, prefix, model, path)
    state = None
    if optimizer is not None:
        saved = keys_below(described, optimizer_prefix)
        state = OptimizerReading(reader, saved, optimizer_prefix, model, optimizer, path)
    reader.run()
    extra = None if manifest is None else _read_extra(path, ranks.rank, ranks.size)
    return _Staged(weights.finish(), None if state is None else state.finish(), extra)


def _find_prefixes(described: Metadata, path: Path, model: nn.Module, need_optimizer: bool) -> tuple[str, str]:
    """Under which keys a user of plain DCP put the model and the optimizer."""
    keys = described.state_dict_metadata
    names = sorted(name for name in model_entries(model) if not is_extra_state(name))
    prefixes = {key[: -len(names[0])] for key in keys if key.endswith(names[0])} if names else {""}
    fitting = [p for p in prefixes if (not p or p.endswith(".")) and all(p + name in keys for name in names)]
    # "model.", "app.model." or nothing at all are likelier than "ema." or "optim.state.".
    fitting.sort(key=lambda p: (not p.endswith("model."), len(p), p))
    states = {key.partition("param_groups.")[0] for key in keys if "param_groups." in key}
    optimizers = sorted(p for p in states if not p or p.endswith("."))
    if not fitting:
        found = [key for key in keys if ".state." not in key and "param_groups." not in key]
        raise CheckpointError(
            f"checkpoint {path} was not written by hsdp, and under no prefix does it have all of the model's names "
            f"{listing(names, 3)}; it has {listing(found, 3)}"
        )
    if need_optimizer and len(optimizers) != 1:
        raise CheckpointError(f"checkpoint {path} has {len(optimizers)} optimizers, at {optimizers}; expected one")
    return fitting[0], optimizers[0] if optimizers else ""

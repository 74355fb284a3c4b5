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

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hsdp.checkpoint import store
from hsdp.checkpoint.contents import (
    Entry,
    clean_name,
    group_names,
    listing,
    local_box,
    local_of,
    merge_groups,
    model_entries,
    parameter_names,
    staging_like,
    state_staging,
)
from hsdp.checkpoint.ranks import CheckpointError, Ranks
from hsdp.checkpoint.reading import Reader, Target, keys_below, parse_metadata
from hsdp.checkpoint.saving import SAVE_ID, Progress, settle, unpack_extra


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
        progress: called on each rank as it reads its parts.

    Returns:
        The step, and what was saved beside the tensors.

    Raises:
        CheckpointError: on all ranks, before anything is changed: there is no checkpoint; a file is missing, truncated,
            damaged or foreign; names, shapes or dtypes differ; a parameter is on the meta device.
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
    for index, info in described.storage_data.items():
        if manifest is not None and info.relative_path not in manifest.files:
            raise CheckpointError(f"checkpoint {path}: {index.fqn!r} is in {info.relative_path}, which is no file of it")
        if not (path / info.relative_path).is_file():
            raise CheckpointError(f"checkpoint {path}: {info.relative_path}, with {index.fqn!r} in it, is missing")
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
    entries = model_entries(model)
    prefix, optimizer_prefix = "model.", "optimizer."
    if manifest is None:
        prefix, optimizer_prefix = _find_prefixes(described, path, entries, optimizer is not None)
    reader = Reader(path, described, check_zip=validate and manifest is None, progress=progress)
    values = _ask_for_model(reader, keys_below(described, prefix), prefix, entries, path)
    state = None
    if optimizer is not None:
        state = _OptimizerReading(reader, keys_below(described, optimizer_prefix), optimizer_prefix, model, optimizer, path)
    reader.run()
    for key, raw_name in [(prefix + name, entry.raw_name) for name, entry in entries.items()]:
        values.setdefault(raw_name, reader.values.get(key))
    _check_ties(model, values, path)
    extra = None if manifest is None else _read_extra(path, ranks.rank, ranks.size)
    return _Staged(values, None if state is None else state.finish(), extra)


def _find_prefixes(described: Metadata, path: Path, entries: dict[str, Entry], need_optimizer: bool) -> tuple[str, str]:
    """Under which keys a user of plain DCP put the model and the optimizer."""
    keys = described.state_dict_metadata
    names = sorted(entries)
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


def _ask_for_model(
    reader: Reader, saved: Any, prefix: str, entries: dict[str, Entry], path: Path
) -> dict[str, Any]:
    """Compares names, shapes and dtypes, and asks for this rank's parts; returns the staged tensors by raw name."""
    problems = []
    if missing := [name for name in entries if name not in saved]:
        problems.append(f"the model has {listing(missing)}, which the checkpoint has not")
    if unexpected := [name for name in saved if name not in entries]:
        problems.append(f"the checkpoint has {listing(unexpected)}, which the model has not")
    values: dict[str, Any] = {}
    for name, entry in entries.items():
        found = saved.get(name)
        if found is None:
            continue
        if isinstance(found, BytesStorageMetadata) == isinstance(entry.value, Tensor):
            problems.append(f"{name!r} is a tensor in the {'model' if isinstance(entry.value, Tensor) else 'checkpoint'} only")
        elif isinstance(found, BytesStorageMetadata):
            reader.value(prefix + name)
        elif (told := difference(found, entry.value)) is not None:
            problems.append(f"{name!r} {told}")
        elif not problems:
            values[entry.raw_name] = _ask_for_tensor(reader, prefix + name, staging_like(entry.value))
    if problems:
        raise CheckpointError(f"checkpoint {path} does not fit the model: " + "; ".join(problems[:12]))
    return values


def difference(found: TensorStorageMetadata, own: Tensor) -> str | None:
    """In what a saved tensor differs from the model's; None if in nothing."""
    if found.size != own.shape:
        return f"has shape {tuple(found.size)} in the checkpoint and {tuple(own.shape)} in the model"
    if found.properties.dtype != own.dtype:
        return f"has dtype {found.properties.dtype} in the checkpoint and {own.dtype} in the model (convert one of them)"
    return None


def _ask_for_tensor(reader: Reader, key: str, staged: Tensor) -> Tensor:
    offsets, _ = local_box(staged)
    reader.tensor(Target(key, offsets, local_of(staged)))
    return staged


def _check_ties(model: nn.Module, values: dict[str, Any], path: Path) -> None:
    """Names that stand for one parameter must have been saved with one value."""
    first: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name not in values:
            continue
        other = first.setdefault(param, name)
        if other != name and not torch.equal(_bits(values[other]), _bits(values[name])):
            raise CheckpointError(
                f"checkpoint {path} has different values for {clean_name(other)!r} and {clean_name(name)!r}, which are "
                "one parameter in the model; untie them, or load into the model that it was saved from"
            )


def _bits(tensor: Tensor) -> Tensor:
    return local_of(tensor).reshape(-1).view(torch.uint8)  # so that NaN equals NaN


class _OptimizerReading:
    """The optimizer's part of a load: what the checkpoint has for each of its parameters."""

    def __init__(
        self, reader: Reader, saved: Any, prefix: str, model: nn.Module, optimizer: Optimizer, path: Path
    ) -> None:
        if not any(key.startswith("param_groups.") for key in saved):
            raise CheckpointError(f"checkpoint {path} has no optimizer state; load it with optimizer=None")
        self._reader = reader
        self._prefix = prefix
        self._optimizer = optimizer
        names = parameter_names(model)
        self._members = [group_names(names, group, i) for i, group in enumerate(optimizer.param_groups)]
        self._params = {
            name: param
            for group, members in zip(optimizer.param_groups, self._members, strict=True)
            for name, param in zip(members, group["params"], strict=True)
        }
        self._state: dict[str, dict[str, Any]] = {}
        self._values: list[tuple[str, str]] = []
        self._ask_for_state(saved, path)
        self._hyper = [key for key in saved if key.startswith("param_groups.")]
        self._staged_hyper: dict[str, Tensor] = {}
        for key in self._hyper:
            if isinstance(saved[key], TensorStorageMetadata):  # a learning rate held in a tensor
                staged = torch.empty(saved[key].size, dtype=saved[key].properties.dtype)
                self._staged_hyper[key] = _ask_for_tensor(reader, prefix + key, staged)
            else:
                reader.value(prefix + key)

    def _ask_for_state(self, saved: Any, path: Path) -> None:
        found = {key: split for key in saved if (split := self._split(key)) is not None}
        unexpected = [key for key in saved if key.startswith("state.") and key not in found]
        if unexpected:
            raise CheckpointError(
                f"checkpoint {path} has optimizer state {listing(unexpected)}, of parameters that the optimizer has not"
            )
        # Of a scalar parameter, `step` and `exp_avg` have the same shape: other parameters tell which is a plain number.
        scalars = {"step"} | {
            entry
            for key, (name, entry) in found.items()
            if isinstance(saved[key], TensorStorageMetadata) and not saved[key].size and self._params[name].ndim
        }
        for key, (name, entry) in found.items():
            state = self._state.setdefault(name, {})
            kind = saved[key]
            if isinstance(kind, TensorStorageMetadata):
                held = self._optimizer.state.get(self._params[name], {}).get(entry)
                staged = state_staging(
                    self._params[name], tuple(kind.size), kind.properties.dtype, held, scalar=entry in scalars
                )
                state[entry] = _ask_for_tensor(self._reader, self._prefix + key, staged)
            else:
                self._reader.value(self._prefix + key)
                self._values.append((name, entry))

    def _split(self, key: str) -> tuple[str, str] | None:
        """`state.<parameter>.<entry>` as (parameter, entry); None if it is of no parameter of the optimizer."""
        rest = key.removeprefix("state.")
        if rest == key:
            return None
        name, _, entry = rest.rpartition(".")
        while name and name not in self._params:
            name, _, more = name.rpartition(".")
            entry = f"{more}.{entry}"
        return (name, entry) if name else None

    def finish(self) -> dict[str, Any]:
        """The optimizer's state dict, with parameters numbered as the optimizer does."""
        for name, entry in self._values:
            self._state[name][entry] = self._reader.values[f"{self._prefix}state.{name}.{entry}"]
        groups = merge_groups(self._optimizer, self._members, self._hyperparameters())
        number = {name: i for i, name in enumerate(name for members in self._members for name in members)}
        for group, members in zip(groups, self._members, strict=True):
            group["params"] = [number[name] for name in members]
        state = {number[name]: _nested(entries) for name, entries in self._state.items()}
        return {"state": state, "param_groups": groups}

    def _hyperparameters(self) -> dict[str, dict[str, Any]]:
        """The saved hyperparameters of each parameter, from groups by index or from DCP's flattened form."""
        found = {
            key.removeprefix("param_groups."): self._staged_hyper.get(key, self._reader.values.get(self._prefix + key))
            for key in self._hyper
        }
        hyper: dict[str, dict[str, Any]] = {}
        groups = [key.removesuffix(".params") for key in found if key.endswith(".params") and key.count(".") == 1]
        if not groups:
            for key, value in found.items():
                name, _, entry = key.rpartition(".")
                hyper.setdefault(name, {})[entry] = value
        for index in groups:
            values = {k.removeprefix(f"{index}."): v for k, v in found.items() if k.startswith(f"{index}.")}
            for name in values.pop("params"):
                hyper[name] = values
        return hyper


def _nested(entries: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": x}` as `{"a": {"b": x}}`: some optimizers nest their state."""
    nested: dict[str, Any] = {}
    for key, value in entries.items():
        *above, last = key.split(".")
        place = nested
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def commit_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Gives an optimizer its loaded state dict; tensors keep the dtype they were saved in."""
    optimizer.load_state_dict(state)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entries in state["state"].items():
        _restore_dtypes(optimizer.state[params[number]], entries, params[number].device)


def _restore_dtypes(held: dict[str, Any], loaded: dict[str, Any], device: torch.device) -> None:
    # torch casts floating-point state to the parameter's dtype, which would round fp32 moments of bf16 parameters.
    for name, value in loaded.items():
        if isinstance(value, dict):
            _restore_dtypes(held[name], value, device)
        elif isinstance(value, Tensor) and name != "step" and held[name].dtype != value.dtype:
            held[name] = _moved(value, device)


def _moved(value: Tensor, device: torch.device) -> Tensor:
    if isinstance(value, DTensor):
        return DTensor(value.to_local().to(device), value._spec, requires_grad=False)
    return value.to(device)


"""The model's part of a load: what the checkpoint has for each name of its state dict, compared and asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from hsdp.checkpoint.contents import Entry, clean_name, listing, model_entries, staging_like
from hsdp.checkpoint.reading import Reader
from hsdp.errors import CheckpointError
from hsdp.inner import block_of

_EXTRA_STATE = "_extra_state"


class ModelReading:
    """Asks for a model's tensors and extra states, and puts them together once they are read."""

    def __init__(
        self,
        reader: Reader,
        described: Metadata,
        saved: Mapping[str, Any],
        prefix: str,
        model: nn.Module,
        path: Path,
    ) -> None:
        """Compares names, shapes and dtypes.

        Args:
            reader: takes the requests.
            described: the checkpoint's metadata.
            saved: its entries for the model, by name below `prefix`.
            prefix: what their keys begin with.
            model: the module that loads.
            path: the checkpoint.

        Raises:
            CheckpointError: something differs; names it.
        """
        self._model = model
        self._path = path
        self._tensors: dict[str, Tensor] = {}
        self._extras = {
            name: _ExtraState(entry, name, described, saved, prefix)
            for name, entry in model_entries(model).items()
            if is_extra_state(name)
        }
        entries = {name: entry for name, entry in model_entries(model).items() if name not in self._extras}
        _compare(entries, saved, self._extras, path)
        for name, entry in entries.items():
            self._tensors[entry.raw_name] = reader.tensor(prefix + name, staging_like(entry.value))
        for extra in self._extras.values():
            extra.ask(reader)

    def finish(self) -> dict[str, Any]:
        """What was read, as a state dict of the model's own."""
        self._check_ties()
        return {**self._tensors, **{extra.entry.raw_name: extra.finish() for extra in self._extras.values()}}

    def _check_ties(self) -> None:
        """Names that stand for one parameter must have been saved with one value."""
        first: dict[nn.Parameter, str] = {}
        for name, param in self._model.named_parameters(remove_duplicate=False):
            other = first.setdefault(param, name)
            if other != name and not torch.equal(_bits(self._tensors[other]), _bits(self._tensors[name])):
                raise CheckpointError(
                    f"checkpoint {self._path} has different values for {clean_name(other)!r} and {clean_name(name)!r}, "
                    "which are one parameter in the model; untie them, or load into the model that it was saved from"
                )


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is a module's extra state: any object, and no parameter."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def _compare(entries: Mapping[str, Entry], saved: Mapping[str, Any], extras: Mapping[str, _ExtraState], path: Path) -> None:
    problems = []
    known = set(entries).union(*(extra.names for extra in extras.values()))
    missing = [name for name in entries if name not in saved]
    if missing := missing + [name for name, extra in extras.items() if extra.missing]:
        problems.append(f"the model has {listing(missing)}, which the checkpoint does not have")
    if unexpected := [name for name in saved if name not in known]:
        problems.append(f"the checkpoint has {listing(unexpected)}, which the model does not have")
    for name, entry in entries.items():
        if name in saved and (told := _difference(saved[name], entry.value)) is not None:
            problems.append(f"{name!r} {told}")
    if problems:
        raise CheckpointError(f"checkpoint {path} does not fit the model: " + "; ".join(problems[:12]))


def _difference(found: Any, own: Any) -> str | None:
    if not isinstance(own, Tensor) or isinstance(found, BytesStorageMetadata):
        return f"is a tensor in the {'model' if isinstance(own, Tensor) else 'checkpoint'} only"
    if found.size != own.shape:
        return f"has shape {tuple(found.size)} in the checkpoint and {tuple(own.shape)} in the model"
    if found.properties.dtype != own.dtype:
        return f"has dtype {found.properties.dtype} in the checkpoint and {own.dtype} in the model (convert one of them)"
    return None


def _bits(tensor: Tensor) -> Tensor:
    return block_of(tensor).reshape(-1).view(torch.uint8)  # so that NaN equals NaN


class _ExtraState:
    """A module's extra state, which DCP takes apart into entries of its own where it is a dict or a list."""

    def __init__(self, entry: Entry, name: str, described: Metadata, saved: Mapping[str, Any], prefix: str) -> None:
        self.entry = entry
        self.names = [key for key in saved if key == name or key.startswith(name + ".")]
        self._prefix = prefix
        # An empty dict or list leaves no entry behind.
        self.missing = not self.names and entry.value not in ({}, [])
        self._parts: list[tuple[tuple[str | int, ...], str, Tensor | None]] = []
        for key in self.names:
            kind = saved[key]
            is_tensor = isinstance(kind, TensorStorageMetadata)
            place = torch.empty(kind.size, dtype=kind.properties.dtype) if is_tensor else None
            self._parts.append((_path_below(described, prefix + key, prefix + name), key, place))

    def ask(self, reader: Reader) -> None:
        """Asks for every part."""
        self._reader = reader
        for _, key, place in self._parts:
            if place is None:
                reader.value(self._prefix + key)
            else:
                reader.tensor(self._prefix + key, place)

    def finish(self) -> Any:
        """The state, put together again."""
        if not self._parts:
            return self.entry.value
        return _assemble([(p, self._reader.values[self._prefix + key] if t is None else t) for p, key, t in self._parts])


def _path_below(described: Metadata, key: str, top: str) -> tuple[str | int, ...]:
    """Where in the object saved as `top` the entry `key` was: dict keys (DCP makes them strings) and list indices."""
    path = tuple((described.planner_data or {}).get(key, ()))
    for depth in range(len(path)):
        if ".".join(map(str, path[: depth + 1])) == top:
            return path[depth + 1 :]
    if key == top:
        return ()
    raise CheckpointError(f"the checkpoint does not say what {key!r} was part of")


def _assemble(parts: list[tuple[tuple[str | int, ...], Any]]) -> Any:
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    children: dict[str | int, list[tuple[tuple[str | int, ...], Any]]] = {}
    for path, value in parts:
        children.setdefault(path[0], []).append((path[1:], value))
    if all(isinstance(key, int) for key in children):
        return [_assemble(children[key]) for key in sorted(children)]
    return {key: _assemble(below) for key, below in children.items()}

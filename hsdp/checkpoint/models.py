"""The model's part of a load: what the checkpoint has for each name of its state dict, compared and asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp.checkpoint.contents import (
    EXTRA_STATE,
    Entry,
    clean_name,
    is_extra_state,
    staging_like,
    state_staging,
    with_scalars,
)
from hsdp.checkpoint.index import Index, Record, TensorRecord, ValueRecord
from hsdp.checkpoint.load_options import LoadOptions, Report
from hsdp.checkpoint.objects import unpack
from hsdp.checkpoint.reading import Reader
from hsdp.checkpoint.structure import assembled, leaves_of, put_together
from hsdp.errors import CheckpointError
from hsdp.format import listing
from hsdp.params.local import is_expanded, local_of
from hsdp.torch_private import storage_key
from hsdp.unit.lookup import units_below


class ModelReading:
    """Asks for a model's tensors and extra states, to be read into the model itself where that can be done.

    Attributes:
        report: what becomes of each name.
    """

    def __init__(
        self,
        reader: Reader,
        index: Index,
        saved: Mapping[str, Record],
        prefix: str,
        model: nn.Module,
        options: LoadOptions,
        structures: Mapping[str, bytes],
        where: object,
    ) -> None:
        """Compares names, shapes and dtypes.

        Args:
            reader: takes the requests.
            index: what the checkpoint holds.
            saved: its records for the model, by name below `prefix`.
            prefix: what their keys begin with.
            model: the module that loads.
            options: which names go where.
            structures: packed skeletons of extra states, by key.
            where: what the checkpoint is called in errors.

        Raises:
            CheckpointError: something differs; names it.
        """
        self._reader = reader
        self._model = model
        self._where = where
        self._options = options
        everything = with_scalars(model)
        sources = options.sources(list(saved))
        below = {key[len(prefix) :]: data for key, data in structures.items() if key.startswith(prefix)}
        renamed = options.sources(list(below))
        values = {name for name, entry in everything.items() if is_extra_state(name) or not isinstance(entry.value, Tensor)}
        parts = {new: old for new, old in sources.items() if new in values or new not in everything}
        self._extras = {
            name: _ExtraState(entry, name, index, parts, saved, prefix, below.get(renamed.get(name, "")))
            for name, entry in everything.items()
            if name in values and options.wants(name)
        }
        entries = {name: entry for name, entry in everything.items() if name not in values and self._wants(name, entry)}
        self.report = self._compare(everything, entries, sources, saved)
        self._keys = {name: prefix + sources[name] for name in entries if name in sources}
        self._staged: dict[str, Tensor] = {}
        self._handed = Handover(model)
        self._ask({name: entries[name] for name in self._keys})
        for extra in self._extras.values():
            extra.ask(reader)

    def _compare(
        self,
        everything: Mapping[str, Entry],
        entries: Mapping[str, Entry],
        sources: Mapping[str, str],
        saved: Mapping[str, Record],
    ) -> Report:
        problems = []
        known = set(entries).union(*(extra.names for extra in self._extras.values()))
        missing = [name for name in entries if name not in sources]
        missing += [name for name, extra in self._extras.items() if extra.missing]
        left = [source for name, source in sources.items() if name not in known]
        unwanted = [name for name, entry in everything.items() if not self._wants(name, entry)]
        unexpected = [
            source
            for name, source in sources.items()
            # The model says by which kind of tensor it computes: a plain one has nothing to keep a scale in.
            if name not in known and self._options.wants(_whole_name(name)) and name.rpartition(".")[0] not in entries
        ]
        if missing and self._options.strict:
            problems.append(f"the model has {listing(missing)}, which the checkpoint does not have")
        if unexpected and self._options.strict:
            problems.append(f"the checkpoint has {listing(unexpected)}, which the model does not have")
        converted = []
        for name, entry in entries.items():
            if name in sources:
                difference = _difference(saved[sources[name]], entry.value, self._options.cast)
                if difference == "":
                    converted.append(name)
                elif difference is not None:
                    problems.append(f"{name!r} {difference}")
        if problems:
            raise CheckpointError(f"checkpoint {self._where} does not fit the model: " + "; ".join(problems[:12]))
        left += sorted(saved.keys() - set(sources.values()))  # renamed to None
        loaded = [name for name in everything if (name in entries or name in self._extras) and name not in missing]
        if not loaded and self._options.partial and everything:
            raise CheckpointError(
                f"checkpoint {self._where} has nothing of what is to be loaded: the model has {listing(everything, 3)}, "
                f"the checkpoint {listing(saved, 3)}"
            )
        return Report(tuple(loaded), tuple(missing), tuple(unwanted), tuple(left), tuple(converted))

    def _wants(self, name: str, entry: Entry) -> bool:
        return self._options.wants(entry.beside or name)  # data without its scale would be other numbers

    def _ask(self, entries: Mapping[str, Entry]) -> None:
        """Asks for tensors: into the model's own memory, unless a hook of the model wants to see them first."""
        for name, entry in entries.items():
            target = entry.value
            if (problem := unwritable(target)) is not None:
                raise CheckpointError(f"{name!r} cannot be loaded: {problem}")
            if entry.beside is not None:
                pass  # it is in no state dict: it is read into where it is
            elif not self._handed.writes_to(target):
                target = self._staged[entry.raw_name] = staging_like(target)
            elif self._handed.is_watched:
                self._staged[entry.raw_name] = target
            self._reader.tensor(self._keys[name], target)

    def check(self) -> None:
        """Compares values: names that stand for one parameter must have one, parts of extra states must fit together.

        Raises:
            CheckpointError: they do not; names them.
        """
        # Tensors in them are read later, into the very tensors that are put in place here.
        present = [extra for extra in self._extras.values() if not extra.missing]
        self._states = {extra.entry.raw_name: extra.assembled() for extra in present}
        first: dict[nn.Parameter, str] = {}
        for raw_name, param in self._model.named_parameters(remove_duplicate=False):
            name = clean_name(raw_name)
            if name not in self._keys:
                continue
            other = first.setdefault(param, name)
            if other != name and not self._reader.same(self._keys[other], self._keys[name], param):
                raise CheckpointError(
                    f"checkpoint {self._where} has different values for {other!r} and {name!r}, which are one parameter in "
                    "the model; untie them, or load into the model that it was saved from"
                )

    def finish(self) -> None:
        """Gives the model what was not read into it, and runs its hooks: a sharded model learns of new parameters there."""
        self._model.load_state_dict({**self._staged, **self._states}, strict=False)


def _whole_name(name: str) -> str:
    """The name itself; of a part of an extra state the extra state's."""
    above, found, _ = name.partition(f"{EXTRA_STATE}.")
    return above + EXTRA_STATE if found else name


def unwritable(target: Tensor) -> str | None:
    """Why nothing can be loaded into the memory of a tensor; None: it can."""
    if is_expanded(local_of(target)):
        return (
            "in the model several of its elements are one place in memory, as expand() makes them; give the model a copy "
            "of it (.contiguous())"
        )
    return None


class Handover:
    """What of a model is written where it lies, and what its `load_state_dict` is to be given.

    Attributes:
        is_watched: hooks look behind a load whether something was missing. What was written where it lies is given too,
            as it is: it is copied to itself.
    """

    def __init__(self, model: nn.Module) -> None:
        hooks = [hook for module in model.modules() for hook in module._load_state_dict_post_hooks.values()]
        self.is_watched = not all(_is_ours(hook) for hook in hooks)
        self._own = _own_memory(model)
        for unit in units_below(model):
            unit.join_gather()

    def writes_to(self, value: Tensor) -> bool:
        """Whether an entry of the state dict is to be written itself: it is the model's, and no hook wants to see it."""
        return storage_key(local_of(value).untyped_storage()) in self._own


def _own_memory(model: nn.Module) -> set[int]:
    """The storages of the model's parameters and buffers; none if hooks or methods of the model change what is loaded."""
    for module in model.modules():
        changes = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        # torch wraps hooks; ours change nothing of what is loaded.
        hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
        hooked = any([not _is_ours(hook) for hook in hooks])
        if hooked or (changes and not type(module).__module__.startswith("torch.nn.")):
            return set()
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return set()
    held = [*model.parameters(), *model.buffers()]
    return {storage_key(local_of(tensor).untyped_storage()) for tensor in held}


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("hsdp.")


def _difference(found: Record, own: Tensor, cast: bool) -> str | None:
    """How a saved tensor differs from the model's; "" if it can be converted, None if not at all."""
    if isinstance(found, ValueRecord):
        return "is a tensor in the model only"
    if found.shape != tuple(own.shape):
        return f"has shape {found.shape} in the checkpoint and {tuple(own.shape)} in the model"
    if found.dtype != own.dtype:
        if cast and found.dtype.is_floating_point and own.dtype.is_floating_point:
            return ""
        return f"has dtype {found.dtype} in the checkpoint and {own.dtype} in the model (cast=True converts floating point)"
    return None


class _ExtraState:
    """A module's extra state, or another value that a hook or method of the model put into its state dict, which DCP takes
    apart into entries of its own where it is a dict or a list.

    What it consisted of is known from its skeleton, and without one (of another library, or of an earlier version) from the
    names of the entries.
    """

    def __init__(
        self,
        entry: Entry,
        name: str,
        index: Index,
        sources: Mapping[str, str],
        saved: Mapping[str, Record],
        prefix: str,
        structure: bytes | None,
    ) -> None:
        self.entry = entry
        self._skeleton = None if structure is None else unpack(structure)
        self._name = name
        self.names = [key for key in sources if key == name or key.startswith(name + ".")]
        self._prefix = prefix
        # An empty dict or list leaves no entry behind.
        self.missing = not self.names and structure is None and entry.value not in ({}, [])
        own = {} if structure is None else leaves_of(entry.value)
        self._parts: list[tuple[tuple[str | int, ...], str, Tensor | None]] = []
        for new in self.names:
            key = sources[new]
            top = key[: len(key) - len(new) + len(name)]
            record = saved[key]
            place = None
            if isinstance(record, TensorRecord):
                place = _place_like(own.get(new[len(name) + 1 :]), record)
            path = () if structure is not None else _path_below(index, prefix + key, prefix + top)
            self._parts.append((path, key, place))

    def ask(self, reader: Reader) -> None:
        """Asks for every part."""
        self._reader = reader
        for _, key, place in self._parts:
            if place is None:
                reader.value(self._prefix + key)
            else:
                reader.tensor(self._prefix + key, place)

    def assembled(self) -> Any:
        """The state, put together again; the values are there by now."""
        parts = [(p, self._reader.values[self._prefix + key] if t is None else t) for p, key, t in self._parts]
        if self._skeleton is not None:
            leaves = {new[len(self._name) + 1 :]: part for new, (_, part) in zip(self.names, parts, strict=True)}
            try:
                return put_together(self._skeleton, leaves)
            except (KeyError, TypeError) as error:
                message = f"the structure of {self._name!r} is damaged: {type(error).__name__}: {error}"
                raise CheckpointError(message) from None
        return assembled(parts) if parts else self.entry.value


def _place_like(own: Any, record: TensorRecord) -> Tensor:
    """Where a tensor of an extra state is read to: sharded as the one that the module has there, if it has one."""
    if isinstance(own, DTensor) and tuple(own.shape) == record.shape:
        return state_staging(own, record.shape, record.dtype, own, False, local_of(own).device)
    return torch.empty(record.shape, dtype=record.dtype, device="cpu")


def _path_below(index: Index, key: str, top: str) -> tuple[str | int, ...]:
    """Where in the object saved as `top` the entry `key` was: dict keys (DCP makes them strings) and list indices."""
    path = index.paths.get(key, ())
    for depth in range(len(path)):
        if ".".join(map(str, path[: depth + 1])) == top:
            return path[depth + 1 :]
    if key == top:
        return ()
    raise CheckpointError(f"the checkpoint does not say what {key!r} was part of")

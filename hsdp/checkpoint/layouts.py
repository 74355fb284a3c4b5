"""Checkpoints of other libraries: under which names they put the model and the optimizer.

    torch's own    {"model": ..., "optimizer": ...}, at the top or deeper    model.weight
                                                                             optimizer.state.weight.exp_avg
    torchtitan     {**model, "optimizer": ..., "train_state": ...}           weight
                                                                             optimizer.state.weight.exp_avg
    Lightning      {"state_dict": ..., "optimizer_0": ...}                   state_dict.model.weight
                                                                             optimizer_0.state.model.weight.exp_avg
    accelerate     a directory for the model (pytorch_model_fsdp_0/) and one for the optimizer (optimizer_0/)

What none of these is, `prefix=` and `optimizer_prefix=` of `load` tell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from hsdp.checkpoint import manifests
from hsdp.checkpoint.contents import is_extra_state, model_entries
from hsdp.checkpoint.index import FileRange, Index, Record, TensorRecord, from_dcp
from hsdp.checkpoint.load_options import LoadOptions
from hsdp.checkpoint.remote import AnyPath
from hsdp.errors import CheckpointError
from hsdp.format import listing

_PART = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")


@dataclass(frozen=True)
class KeyLayout:
    """Where in a checkpoint the model and the optimizer are.

    Attributes:
        prefix: what the names of the model's tensors begin with.
        optimizer_prefix: what those of the optimizer's state begin with.
        inner: what the names of parameters begin with inside of the optimizer's state, and in the model do not.
        tops: first parts of the model's names, where others may stand beside them; None: all names are the model's.
    """

    prefix: str
    optimizer_prefix: str
    inner: str = ""
    tops: frozenset[str] | None = None

    def model_records(self, index: Index) -> dict[str, Record]:
        """The model's records, by name."""
        found = index.below(self.prefix)
        if self.optimizer_prefix.startswith(self.prefix):
            below = self.optimizer_prefix[len(self.prefix) :]
            taken = (f"{below}state.", f"{below}param_groups.")
            found = {name: record for name, record in found.items() if not name.startswith(taken)}
        if self.tops is not None:
            found = {name: record for name, record in found.items() if name.partition(".")[0] in self.tops}
        return found

    def optimizer_records(self, index: Index) -> dict[str, Record]:
        """The optimizer's records, by name."""
        return index.below(self.optimizer_prefix)


def part_directories(path: AnyPath) -> dict[str, AnyPath]:
    """The directories of which a checkpoint consists that has one for each object (accelerate's), by name; else none.

    Raises:
        CheckpointError: the checkpoint's own cannot be read.
    """
    try:
        found: dict[str, AnyPath] = {one.name: one for one in path.iterdir() if _PART.fullmatch(one.name)}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return {name: child for name, child in sorted(found.items()) if manifests.has(child, manifests.METADATA)}


def read_foreign(path: AnyPath) -> Index:
    """The index of a checkpoint that `torch.distributed.checkpoint` wrote, or of the several that make one.

    Raises:
        CheckpointError: it is damaged, or files are missing.
    """
    parts = {} if manifests.has(path, manifests.METADATA) else part_directories(path)
    if not parts:
        return _read_part(path)
    records: dict[str, Record] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, part in parts.items():
        index = _read_part(part)
        if both := sorted(records.keys() & index.records.keys()):
            raise CheckpointError(f"{path}: {listing(both, 3)} are in several of its directories")
        records.update({key: _moved(record, name) for key, record in index.records.items()})
        paths.update(index.paths)
    return Index(records, paths)


def _read_part(path: AnyPath) -> Index:
    file = path / manifests.METADATA
    try:
        index = from_dcp(manifests.read_file(file))
    except CheckpointError as error:
        raise CheckpointError(f"{file} cannot be read: {error}" if str(file) not in str(error) else str(error)) from None
    for name in sorted(index.files()):
        try:
            is_file = (path / name).is_file()
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if not is_file:
            raise CheckpointError(f"checkpoint {path}: {name} is missing")
    return index


def _moved(record: Record, directory: str) -> Record:
    def moved(place: FileRange) -> FileRange:
        return replace(place, file=f"{directory}/{place.file}")

    if isinstance(record, TensorRecord):
        return replace(record, pieces=tuple(replace(piece, place=moved(piece.place)) for piece in record.pieces))
    return replace(record, place=moved(record.place))


def find_layout(
    index: Index,
    path: AnyPath,
    model: nn.Module,
    options: LoadOptions,
    prefix: str | None,
    optimizer_prefix: str | None,
    need_optimizer: bool,
) -> KeyLayout:
    """Under which names a user of plain DCP put the model and the optimizer.

    Args:
        index: what the checkpoint holds.
        path: the checkpoint.
        model: the module that loads.
        options: which of its names are wanted.
        prefix, optimizer_prefix: what the user says; None: found.
        need_optimizer: whether the optimizer is loaded.

    Raises:
        CheckpointError: the model's names are nowhere, or it is not clear which optimizer is meant.
    """
    names = sorted(name for name in model_entries(model) if not is_extra_state(name))
    if prefix is None:
        prefix = _find_prefix(index.records, path, [name for name in names if options.wants(name)], options)
    if optimizer_prefix is None:
        states = {key.partition("param_groups.")[0] for key in index.records if "param_groups." in key}
        optimizers = sorted(one for one in states if not one or one.endswith("."))
        if need_optimizer and len(optimizers) != 1:
            raise CheckpointError(
                f"checkpoint {path} has {len(optimizers)} optimizers{': ' * bool(optimizers)}{listing(optimizers)}; "
                + ("tell which by optimizer_prefix=" if optimizers else "load it with optimizer=None")
            )
        optimizer_prefix = optimizers[0] if len(optimizers) == 1 else "optimizer."
    tops = frozenset(name.partition(".")[0] for name in model_entries(model)) if prefix == "" else None
    inner = _find_inner(index.below(optimizer_prefix), prefix, names)
    return KeyLayout(prefix, optimizer_prefix, inner, None if options.rename is not None else tops)


def _find_prefix(records: Mapping[str, Record], path: AnyPath, names: list[str], options: LoadOptions) -> str:
    if not names:
        return ""
    if options.rename is not None:
        common = ("model.", "state_dict.", "module.")
        return next((one for one in common if any(key.startswith(one) for key in records)), "")
    known, counts = set(names), Counter[str]()
    for key in records:
        start = 0
        while start >= 0:
            if key[start:] in known:
                counts[key[:start]] += 1
            start = key.find(".", start) + 1 or -1
    fitting = [one for one, count in counts.items() if count == len(known) or not options.strict]
    # "model.", "app.model." or nothing at all are likelier than "ema." or "optim.state.".
    fitting.sort(key=lambda one: (-counts[one], not one.endswith("model."), len(one), one))
    if not fitting:
        found = [key for key in records if ".state." not in key and "param_groups." not in key]
        nearest = max(counts, key=lambda one: counts[one], default="")
        missing = [name for name in names if nearest + name not in records]
        raise CheckpointError(
            f"checkpoint {path} was not written by hsdp, and under no prefix does it have all of the model's names "
            f"{listing(names, 3)}; it has {listing(found, 3)}; under {nearest!r} it lacks {listing(missing, 3)}"
        )
    return fitting[0]


def _find_inner(records: Mapping[str, Record], prefix: str, names: list[str]) -> str:
    """Lightning calls parameters by their names in its own module, which has the user's model inside."""
    parts = prefix.split(".")[:-1]
    for depth in reversed(range(len(parts) + 1)):
        inner = "".join(f"{part}." for part in parts[depth:])
        heads = {f"{kind}.{inner}{name}" for kind in ("state", "param_groups") for name in names}
        if any(key.rpartition(".")[0] in heads for key in records):
            return inner
    return ""

"""The settings of an optimizer's groups: those of a checkpoint brought to groups that may be cut otherwise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hsdp.errors import CheckpointError
from hsdp.format import listing

_NOT_TRAINING = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "algorithm", "matrices", "split_sizes"}
)
"""Entries of an optimizer's groups that say how it computes here, not what, or how hsdp.optim.Muon reads parameters: the
loading optimizer keeps its own."""

_BY_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""Entries that learning rate schedulers add to groups, `SWALR` of `torch.optim.swa_utils` included."""

_BY_VERSION = frozenset({"decoupled_weight_decay", "maximize"})
"""Entries that PyTorch's versions added to groups of one kind of optimizer."""


SavedGroups = Sequence[tuple[Sequence[str], dict[str, Any]]]
"""The groups of a checkpoint, in their order: the names of each one's parameters, and its hyperparameters."""


def saved_groups(groups: Iterable[Mapping[str, Any]]) -> SavedGroups:
    """The groups of a state dict in which parameters have names."""
    return [(group["params"], {key: value for key, value in group.items() if key != "params"}) for group in groups]


def merge_groups(optimizer: Optimizer, members: list[list[str]], groups: SavedGroups) -> list[dict[str, Any]]:
    """The optimizer's groups with the hyperparameters of a checkpoint.

    A group without parameters gets those of the saved group in its place, if that has no parameters either.

    Args:
        optimizer: the optimizer that loads; its groups may be cut otherwise than those that were saved.
        members: the names of the parameters of each of its groups.
        groups: those that were saved.

    Raises:
        CheckpointError: a parameter has none, or those of one group's parameters differ.
    """
    merged = []
    saved = {name: values for names, values in groups for name in names}
    for index, (group, names) in enumerate(zip(optimizer.param_groups, members, strict=True)):
        if missing := [name for name in names if name not in saved]:
            raise CheckpointError(
                f"the checkpoint's optimizer does not know {listing(missing)} of the optimizer's group {index}"
            )
        alike = groups[index : index + 1]  # in the same place
        found = [saved[name] for name in names] if names else [values for others, values in alike if not others]
        values = [{k: v for k, v in one.items() if k not in _NOT_TRAINING} for one in found]
        for name, value in zip(names, values, strict=False):
            same = {key for key in value.keys() & values[0].keys() if _same(value[key], values[0][key])}
            if differing := sorted((value.keys() | values[0].keys()) - same):
                raise CheckpointError(
                    f"group {index} of the optimizer has {names[0]!r} and {name!r} together, but the checkpoint has them "
                    f"in groups that differ in {listing(differing)}; group the parameters as they were when it was saved"
                )
        hyper = {key: value for key, value in group.items() if key != "params"}
        if values:
            _check_kind(optimizer, hyper.keys() - _NOT_TRAINING, values[0].keys())
            hyper.update(values[0])
        merged.append({key: _like(hyper[key], group.get(key)) for key in hyper})
    return merged


def _same(one: Any, other: Any) -> bool:
    """Whether settings are equal, tensors at any depth in them by their values."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other) or not isinstance(one, (dict, list, tuple)):
        return bool(one == other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(_same, one, other))


def _check_kind(optimizer: Optimizer, own: Set[str], saved: Set[str]) -> None:
    """Refuses the settings of another kind of optimizer. What users put into groups is no sign of one, and taken over."""
    known = _BY_SCHEDULERS | _BY_VERSION
    only_own = (own & getattr(optimizer, "defaults", {}).keys()) - saved - known
    only_saved = (saved & _settings_of_torch()) - own - known
    if only_own or only_saved:
        has = " and ".join(
            f"{who} {listing(sorted(names))}"
            for who, names in (("it has", only_saved), (f"{type(optimizer).__name__} has", only_own))
            if names
        )
        raise CheckpointError(f"the checkpoint's optimizer is of another kind: only {has}")


@functools.cache
def _settings_of_torch() -> Set[str]:
    """The settings that any of PyTorch's optimizers takes."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    return {name for kind in kinds for name in inspect.signature(kind).parameters}


@torch.inference_mode(False)  # the optimizer is to step with it later
def _like(saved: Any, own: Any) -> Any:
    """A saved setting as the optimizer keeps it: `capturable` ones have tensors, on their device; others have numbers."""
    if isinstance(saved, Tensor) and isinstance(own, Tensor):
        return saved.to(own.device)
    if isinstance(saved, Tensor) and isinstance(own, float):
        return float(saved)
    if isinstance(own, Tensor) and isinstance(saved, (int, float)):
        return torch.full_like(own, saved)
    if type(saved) in (list, tuple) and isinstance(own, (list, tuple)) and len(saved) == len(own):
        return type(saved)(map(_like, saved, own))
    return saved

"""An optimizer's state under its parameters' names: taken as it is, found again in a checkpoint, handed back.

A fresh optimizer has no state, and PyTorch's own functions give it one by taking a step with learning rate zero. Here
nothing steps: what the state looks like is read from the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hsdp.checkpoint.contents import clean_name, plain, savable, state_staging
from hsdp.checkpoint.index import Record, TensorRecord
from hsdp.checkpoint.local_state import refuse_local_state, refuse_unnamed_state
from hsdp.checkpoint.objects import Packed
from hsdp.checkpoint.optimizer_extras import ADDED, added_by, added_in, unpacked_added
from hsdp.checkpoint.optimizer_loading import commit_optimizer
from hsdp.checkpoint.optimizer_schema import Probe, is_known, is_of_kind, kind_of
from hsdp.checkpoint.reading import Reader
from hsdp.checkpoint.settings import SavedGroups, merge_groups, saved_groups
from hsdp.checkpoint.structure import (
    Path,
    hides_shards,
    leaves_of,
    mapped,
    owned,
    put_together,
    skeleton_by_paths,
    skeleton_of,
    take_apart,
)
from hsdp.errors import CheckpointError
from hsdp.format import listing
from hsdp.optim.targets import NUMBERS, counts_in
from hsdp.params.local import local_of
from hsdp.unit.lookup import name_of, unit_of
from hsdp.unit.state import IDLE, training_state


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name; nothing is initialised for it, and no step is taken.

    Returns:
        `{"state": {parameter: {name: value}}, "param_groups": [{..., "params": [parameter, ...]}]}`, and beside it what
        else the optimizer's `state_dict()` has; of a parameter that was never stepped there is no state. Containers in the
        state are new ones of the same kinds.

    Raises:
        CheckpointError: a parameter is not one of the model's, state is no parameter's or this rank's alone, or there are
            sharded tensors where nobody finds them.
    """
    refuse_unnamed_state(optimizer)
    added = added_by(optimizer)
    names = parameter_names(model)
    counts = counts_in({param: leaves_of(held) for param, held in optimizer.state.items()})
    state: dict[str, Any] = {}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = group_names(names, group, index)
        for name, param in zip(members, group["params"], strict=True):
            if optimizer.state.get(param):
                refuse_local_state(name, param, held := optimizer.state[param], counts)
                state[name] = {}
                for entry, value in held.items():
                    description = f"{entry!r} of the optimizer's state of {name!r}"
                    state[name][entry] = mapped(value, partial(savable, description=description), description)
        for key, value in group.items():
            if key != "params" and hides_shards(value, objects=False):
                raise CheckpointError(
                    f"{key!r} of the optimizer's group {index} has a sharded tensor, which no checkpoint can hold among "
                    "the settings of groups: keep it in the optimizer's state of a parameter"
                )
        groups.append({**{key: owned(value) for key, value in group.items() if key != "params"}, "params": members})
    return {"state": state, "param_groups": groups, **added}


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The clean name of each parameter: the first one, where weights are tied."""
    return {param: clean_name(name) for name, param in model.named_parameters()}


def _ties(model: nn.Module, known: Iterable[str]) -> dict[str, str]:
    """Of each other name of these parameters, the one that they are known by."""
    named = [(clean_name(name), id(param)) for name, param in model.named_parameters(remove_duplicate=False)]
    first = {param: name for name, param in named if name in set(known)}
    return {name: first[param] for name, param in named if first.get(param, name) != name}


def group_names(names: Mapping[nn.Parameter, str], group: Mapping[str, Any], index: int) -> list[str]:
    """The names of an optimizer group's parameters.

    Raises:
        CheckpointError: a parameter is not one of the model's, or not at this moment.
    """
    found = []
    for place, param in enumerate(group["params"]):
        if param not in names:
            unit = unit_of(param)
            if unit is not None and (state := training_state(unit)) is not IDLE:
                raise CheckpointError(
                    f"parameter {place} of the optimizer's group {index}, {name_of(param)}, is not among the model's at "
                    f"this moment: the unit is {state.name} ({state.value}), and shows whole parameters in the place of "
                    "the optimizer's; save and load between iterations"
                )
            raise CheckpointError(
                f"parameter {place} of the optimizer's group {index}, of shape {tuple(param.shape)}, is not one of the "
                "model's; make the optimizer from model.parameters() after fully_shard"
            )
        found.append(names[param])
    return found


@dataclass(frozen=True)
class Described:
    """A state tensor that is yet to come: its whole shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


State = Mapping[str, Mapping[str, Any]]
"""By parameter and entry (of nested state the name of a leaf, see `structure.py`): a `Described` tensor, or a value."""

Skeletons = Mapping[str, Any]
"""By parameter: the containers of its state, where it has any."""


class OptimizerStaging:
    """Makes places for a state that is on its way to an optimizer, and puts it together."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        names = parameter_names(model)
        self._members = [group_names(names, group, i) for i, group in enumerate(optimizer.param_groups)]
        self.params: dict[str, nn.Parameter] = {
            name: param
            for group, members in zip(optimizer.param_groups, self._members, strict=True)
            for name, param in zip(members, group["params"], strict=True)
        }

    def allocate(self, state: State, reuse: bool = False) -> dict[str, dict[str, Any]]:
        """Tensors that are sharded as the optimizer would have them, in the place of descriptions.

        Args:
            state: what is to come.
            reuse: the optimizer's own tensors are taken where they fit; the others, and without it all, are new.

        Raises:
            CheckpointError: the state is of parameters that the optimizer does not have.
        """
        if unknown := [name for name in state if name not in self.params]:
            if any(isinstance(name, int) for name in unknown):
                message = (
                    "the state has numbers in the place of parameters' names, as torch's optimizer.state_dict() has them"
                )
                raise CheckpointError(f"{message}; pass what full_optimizer_state_dict returned")
            ties = _ties(self._model, self.params)
            if tied := [name for name in unknown if name in ties]:
                raise CheckpointError(
                    f"there is optimizer state of {tied[0]!r}, which in this model is tied to {ties[tied[0]]!r}: in the "
                    "saved one they were two parameters. Untie them before fully_shard, by a copy under one name, and "
                    "make the optimizer from both; or load the model without the optimizer, which begins with new states"
                )
            raise CheckpointError(
                f"there is optimizer state of {listing(unknown)}, which the optimizer does not have; make it from all "
                "parameters that the saved one had, load, and then drop from its groups what is frozen by now: parameters "
                "without gradients are not stepped anyway"
            )
        # Of a scalar parameter, `step` and `exp_avg` have the same shape: other parameters tell which is a plain number.
        scalars = set(NUMBERS) if is_known(self._optimizer) else {"step"}
        scalars |= _numbers_among([(self.params[name].ndim, entries) for name, entries in state.items()])
        staged: dict[str, dict[str, Any]] = {}
        for name, entries in state.items():
            param, own = self.params[name], self._optimizer.state.get(self.params[name], {})
            held = leaves_of(own)
            staged[name] = {
                entry: self._place(param, value, held.get(entry), entry in scalars, reuse and entry in own)
                if isinstance(value, Described)
                else value
                for entry, value in entries.items()
            }
        return staged

    def _place(self, param: Tensor, value: Described, held: Any, scalar: bool, reuse: bool) -> Tensor:
        ours = reuse and type(self._optimizer).__module__.startswith("torch.optim")  # others may share or copy theirs
        fits = isinstance(held, Tensor) and (tuple(held.shape), held.dtype) == (value.shape, value.dtype)
        if ours and fits and local_of(held).is_contiguous():
            return plain(held)  # type: ignore[no-any-return]
        scalar &= math.prod(value.shape) == 1  # another optimizer calls a moment as PyTorch's one a number
        return state_staging(param, value.shape, value.dtype, held, scalar, local_of(param).device)

    def check(self, state: State, groups: list[dict[str, Any]]) -> None:
        """Compares a state with what the optimizer makes for each parameter under these settings.

        Raises:
            CheckpointError: entries, shapes or kinds of dtypes differ; names the parameter.
        """
        for group, members in zip(groups, self._members, strict=True):
            probe = Probe(self._optimizer, group)
            for name in members:
                if name in state and (misfit := probe.misfit(self.params[name], state[name])):
                    raise CheckpointError(f"the checkpoint's optimizer state of {name!r} {misfit}")

    def groups(self, saved: SavedGroups) -> list[dict[str, Any]]:
        """The optimizer's groups with the hyperparameters of groups that were saved (see `merge_groups`)."""
        return merge_groups(self._optimizer, self._members, saved)

    def numbers(self) -> dict[str, int]:
        """The numbers that parameters have in the optimizer's state dict, by name."""
        return {name: i for i, name in enumerate(name for members in self._members for name in members)}

    def state_dict(self, state: State, groups: list[dict[str, Any]], skeletons: Skeletons) -> dict[str, Any]:
        """A state dict as the optimizer's own, with parameters numbered, and state nested as it was."""
        number = self.numbers()
        numbered = [
            {**group, "params": [number[name] for name in members]}
            for group, members in zip(groups, self._members, strict=True)
        ]
        whole = {
            number[name]: put_together(skeletons[name], entries) if name in skeletons else _nested(entries)
            for name, entries in state.items()
        }
        return {"state": whole, "param_groups": numbered}


def _numbers_among(states: Iterable[tuple[int, Mapping[str, Any]]]) -> set[str]:
    """Entries that are numbers in tensors, from the dims of each parameter and its described state.

    Of shape (1,) they are that beside matrices, unless there are rows of them: then it is the row of a matrix that has one.
    """
    shapes = [(dims, entry, v.shape) for dims, held in states for entry, v in held.items() if isinstance(v, Described)]
    several = {entry for _, entry, shape in shapes if math.prod(shape) != 1}
    return {e for n, e, shape in shapes if (n and shape == ()) or (n > 1 and shape == (1,) and e not in several)}


def describe_state(
    state: Mapping[str, Any],
) -> tuple[dict[str, dict[str, Any]], SavedGroups, dict[str, Any], dict[str, Any]]:
    """A whole optimizer state without its tensors, its groups, its skeletons, and what the optimizer had added."""
    if not {"state", "param_groups"} <= state.keys():
        raise CheckpointError("the optimizer's state has no 'state' and 'param_groups'")
    apart = {name: take_apart(entries, f"the state of {name!r}") for name, entries in state["state"].items()}
    described: dict[str, dict[str, Any]] = {}
    for name, one in apart.items():
        described[name] = {}
        for entry, value in one.leaves.items():
            if isinstance(value, DTensor):
                raise CheckpointError(f"{entry!r} of the optimizer's state of {name!r} is a DTensor, not a whole tensor")
            is_tensor = isinstance(value, Tensor)
            described[name][entry] = Described(tuple(value.shape), value.dtype) if is_tensor else value
    skeletons = {name: one.skeleton for name, one in apart.items()}
    return described, saved_groups(state["param_groups"]), skeletons, added_in(state)


class OptimizerReading:
    """The optimizer's part of a load: finds its state among a checkpoint's keys, and asks for it.

    Args:
        reader: takes the requests.
        saved: the checkpoint's records for the optimizer, by name below `prefix`.
        prefix: what their keys begin with.
        inner: what the names of parameters begin with there, and in `model` do not.
        model, optimizer: what loads.
        packed: what there is beside the records: the class of the optimizer that was saved, if that is known, and how its
            state was nested.
        paths: of keys that another library wrote, the dict keys and list indices on the way to them.
        where: what the checkpoint is called in errors.
    """

    def __init__(
        self,
        reader: Reader,
        saved: Mapping[str, Record],
        prefix: str,
        inner: str,
        model: nn.Module,
        optimizer: Optimizer,
        packed: Packed,
        paths: Mapping[str, Path],
        where: object,
    ) -> None:
        if not any(key.startswith("param_groups.") for key in saved):
            raise CheckpointError(f"checkpoint {where} has no optimizer state; load it with optimizer=None")
        self._reader = reader
        self._prefix = prefix
        self._inner = inner
        self._optimizer = optimizer
        self._kind = packed.optimizer
        self._paths = paths
        self._structures = {key[len(prefix) :]: data for key, data in packed.structures.items() if key.startswith(prefix)}
        self._staging = OptimizerStaging(model, optimizer)
        self._keys: dict[tuple[str, str], str] = {}
        state: dict[str, dict[str, Any]] = {}
        for key, record in saved.items():
            if key.startswith("state."):
                name, entry = self._split(key)
                self._keys[name, entry] = key
                described = Described(record.shape, record.dtype) if isinstance(record, TensorRecord) else None
                state.setdefault(name, {})[entry] = described
        self._skeletons = self._find_skeletons(state)
        self._state = self._staging.allocate(state, reuse=True)
        for (name, entry), key in self._keys.items():
            self._ask(key, self._state[name][entry])
        self._added = ADDED in saved and prefix + ADDED in packed.values  # another library's is another thing
        if self._added:
            reader.value(prefix + ADDED)
        self._hyper: dict[str, Tensor | None] = {}
        for key, record in saved.items():
            if key.startswith("param_groups."):
                self._hyper[key] = None
                if isinstance(record, TensorRecord):  # a learning rate held in a tensor
                    place = torch.empty(record.shape, dtype=record.dtype, device="cpu")
                    self._hyper[key] = reader.early(prefix + key, place)
                else:
                    reader.value(prefix + key)

    def _find_skeletons(self, state: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """How the state of each parameter is nested; to `state` are added those that consist of empty containers."""
        found: dict[str, Any] = {}
        for key, data in self._structures.items():
            if key.startswith("state."):
                name = key.removeprefix("state.").removeprefix(self._inner)
                found[name] = skeleton_of(data, state.setdefault(name, {}), self._prefix + key)
        for name, entries in state.items():
            if name not in found and any(["." in entry for entry in entries]):
                paths = {entry: self._paths.get(self._prefix + self._keys[name, entry], ()) for entry in entries}
                if (skeleton := skeleton_by_paths(paths)) is not None:
                    found[name] = skeleton
        return found

    def _ask(self, key: str, place: Tensor | None) -> None:
        if place is None:
            self._reader.value(self._prefix + key)
        else:
            self._reader.tensor(self._prefix + key, place)

    def _split(self, key: str) -> tuple[str, str]:
        """`state.<parameter>.<entry>` as (parameter, entry); entries of nested state may have dots."""
        whole = key.removeprefix("state.").removeprefix(self._inner)
        name, _, entry = whole.rpartition(".")
        above = name
        while above and above not in self._staging.params:
            above = above.rpartition(".")[0]
        return (above, whole.removeprefix(above + ".")) if above else (name, entry)

    def check(self) -> None:
        """Compares the kind of optimizer, the groups' settings and each parameter's state; the values are there by now.

        Raises:
            CheckpointError: they are another optimizer's; tells what differs.
        """
        if self._kind is not None and not is_of_kind(self._optimizer, self._kind):
            difference = f"it is {self._kind}, not {kind_of(self._optimizer)}"
            raise CheckpointError(f"the checkpoint's optimizer is of another kind: {difference}")
        for (name, entry), key in self._keys.items():
            if self._state[name][entry] is None:
                self._state[name][entry] = self._reader.values[self._prefix + key]
        groups = self._staging.groups(self._hyperparameters())
        self._staging.check(self._state, groups)
        added = unpacked_added(self._reader.values[self._prefix + ADDED]) if self._added else {}
        self._whole = {**added, **self._staging.state_dict(self._state, groups, self._skeletons)}

    def finish(self, converted: Iterable[str]) -> None:
        """Hands the optimizer its state, which has been read by now; `converted`: weights that have another dtype now."""
        numbers = self._staging.numbers()
        commit_optimizer(self._optimizer, self._whole, {numbers[name] for name in converted if name in numbers})

    def _hyperparameters(self) -> SavedGroups:
        """The groups that were saved, by index, or of DCP's flattened form one for each parameter."""
        found: dict[str, Any] = {
            key.removeprefix("param_groups."): self._reader.values[self._prefix + key] if value is None else value
            for key, value in self._hyper.items()
        }
        inner = self._inner
        indices = [key.removesuffix(".params") for key in found if key.endswith(".params") and key.count(".") == 1]
        if not indices:
            hyper: dict[str, dict[str, Any]] = {}
            for key, value in found.items():
                name, _, entry = key.rpartition(".")
                hyper.setdefault(name.removeprefix(inner), {})[entry] = value
            return [([name], values) for name, values in hyper.items()]
        groups = []
        for index in sorted(indices, key=lambda index: (len(index), index)):  # 10 comes behind 9
            values = {k.removeprefix(f"{index}."): v for k, v in found.items() if k.startswith(f"{index}.")}
            members = values.pop("params")
            if not isinstance(members, (list, tuple)) or not all(isinstance(name, str) for name in members):
                raise CheckpointError(f"the checkpoint's optimizer group {index!r} does not name its parameters")
            if (key := f"param_groups.{index}") in self._structures:
                values = put_together(skeleton_of(self._structures[key], values, self._prefix + key), values)
            elif any(["." in name for name in values]):
                above = f"{self._prefix}param_groups.{index}."
                skeleton = skeleton_by_paths({name: self._paths.get(above + name, ()) for name in values})
                values = values if skeleton is None else put_together(skeleton, values)
            groups.append(([name.removeprefix(inner) for name in members], values))
        return groups


def _nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": x}` as `{"a": {"b": x}}`: some optimizers nest their state."""
    nested: dict[str, Any] = {}
    for key, value in entries.items():
        *above, last = key.split(".")
        place = nested
        for part in above:
            place = place.setdefault(part, {}) if isinstance(place, dict) else place
        if not isinstance(place, dict) or last in place:
            raise CheckpointError(f"the checkpoint has a part of the optimizer's {key!r} twice")
        place[last] = value
    return nested

"""What a replica that joins is given: each of its ranks the state of its counterpart, the rank of the same number.

    a rank that is up to date   take(): its own shards, as they lie in memory; the manager's transport sends them
    a rank that joins           give(): copies them into its own shards, in place

No rank ever holds more than its shards. Nothing is communicated here, so a rank may be asked for its state while its
model runs: it is asked from another thread, between the beginning of a step and its all-reduces, when nobody writes to
parameters and optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hsdp.buffers.fingerprints import fingerprints
from hsdp.checkpoint.contents import clean_name, plain
from hsdp.checkpoint.local_state import refuse_unnamed_state
from hsdp.checkpoint.optimizer_extras import added_by
from hsdp.checkpoint.optimizer_loading import commit_optimizer
from hsdp.checkpoint.optimizers import Described, OptimizerStaging, group_names, parameter_names
from hsdp.checkpoint.settings import saved_groups
from hsdp.checkpoint.structure import take_apart
from hsdp.errors import StateError
from hsdp.format import dotted, listing
from hsdp.params.local import is_expanded, local_of, parts_beside
from hsdp.params.subclass import is_composite

Shards = dict[str, Any]
"""What one rank sends: its shards of parameters and its buffers by name, and the optimizer's states and settings."""

_Place = tuple[nn.Module, str]
"""Where a buffer is: its module, and its name there."""


class HealedState:
    """The state of a model and its optimizer on this rank, as one replica gives it to another.

    Args:
        model: the sharded model.
        optimizer: the optimizer of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._params: dict[str, Tensor] = {}
        self._buffers: dict[str, _Place] = {}
        self._members: list[list[str]] = []
        self._settings: list[dict[str, Any]] = []

    def note(self) -> None:
        """Notes what there is to give. Between steps: in a forward, modules have unsharded parameters for a while."""
        named = self._model.named_parameters()
        self._params = {clean_name(name): param for name, param in named if not _is_fixed(param)}
        self._buffers = buffer_places(self._model)
        names = parameter_names(self._model)
        self._members = [group_names(names, group, i) for i, group in enumerate(self._optimizer.param_groups)]
        self._settings = settings_of(self._optimizer)

    def check_settings(self) -> None:
        """Checks that the optimizer's settings are those at the beginning of the step, which a replica that joins gets.

        Raises:
            StateError: they are not, so that replicas might step with different ones.
        """
        now = settings_of(self._optimizer)
        if len(now) != len(self._settings):
            raise StateError("ElasticOptimizer.step: the optimizer got a group within the step; add it before zero_grad()")
        for index, (before, after) in enumerate(zip(self._settings, now, strict=True)):
            for key in after:
                if key not in before or (before[key] is not after[key] and not _equal(before[key], after[key])):
                    raise StateError(
                        f"ElasticOptimizer.step: {key!r} of the optimizer's group {index} changed within the step; set it "
                        "before zero_grad(), or a replica that joins in this step would use another value"
                    )

    def _shards(self) -> Shards:
        """What this rank has of the parameters, the scalars that subclasses keep beside their data too."""
        shards = {name: local_of(param.detach()) for name, param in self._params.items()}
        for name, param in self._params.items():
            shards.update((f"{name}.{inner}", part) for inner, part in parts_beside(param))
        return shards

    def take(self) -> Shards:
        """This rank's part of the state: local tensors that share memory with the model and the optimizer.

        Raises:
            CheckpointError, TypeError: the optimizer keeps state that could not be given.
        """
        refuse_unnamed_state(self._optimizer)
        model = self._shards()
        # Those that modules hold now: a forward may assign new ones.
        held = {name: module._buffers.get(leaf) for name, (module, leaf) in self._buffers.items()}
        buffers = {name: None if buffer is None else local_of(buffer.detach()) for name, buffer in held.items()}
        states: dict[str, Any] = {}
        skeletons: dict[str, Any] = {}
        for group, names in zip(self._optimizer.param_groups, self._members, strict=True):
            for param, name in zip(group["params"], names, strict=True):
                if state := self._optimizer.state.get(param):
                    apart = take_apart(state, f"the optimizer's state of {name!r}")
                    states[name] = {entry: _sent(value, f"{entry} of {name}") for entry, value in apart.leaves.items()}
                    skeletons[name] = apart.skeleton
        groups = [{**settings, "params": names} for settings, names in zip(self._settings, self._members, strict=True)]
        optimizer = {"states": states, "skeletons": skeletons, "groups": groups, "added": added_by(self._optimizer)}
        return {"model": model, "buffers": buffers, **optimizer}

    def digest(self) -> int:
        """Of this rank's shards of the parameters."""
        return hash(tuple(fingerprints(list(self._shards().values()))))

    @torch.no_grad()
    def give(self, shards: Shards) -> None:
        """Takes over the state of another rank; all of it is checked before anything is changed.

        Raises:
            StateError: it is the state of another model, or of another part of it.
            CheckpointError: it is the state of another optimizer.
        """
        own = self._shards()
        buffers = buffer_places(self._model)  # with those that the forward of this step has registered
        _check(own, shards["model"])
        _check_names(buffers, shards["buffers"])
        staging = OptimizerStaging(self._model, self._optimizer)
        described = {
            name: {
                entry: Described(tuple(value["shape"]), value["local"].dtype) if _is_tensor(value) else value
                for entry, value in entries.items()
            }
            for name, entries in shards["states"].items()
        }
        placed = staging.allocate(described, reuse=True)
        sent, places = {}, {}
        for name, entries in shards["states"].items():
            for entry, value in entries.items():
                if _is_tensor(value):
                    if not value["sharded"] and isinstance(placed[name][entry], DTensor):
                        # The optimizer steps on local tensors: what it keeps is this rank's alone.
                        placed[name][entry] = torch.empty_like(value["local"], device=local_of(placed[name][entry]).device)
                    sent[f"{entry} of {name}"] = value["local"]
                    places[f"{entry} of {name}"] = local_of(placed[name][entry])
        _check(places, sent)
        whole = staging.state_dict(placed, staging.groups(saved_groups(shards["groups"])), shards["skeletons"])
        for name, tensor in own.items():
            tensor.copy_(shards["model"][name])
        for key, tensor in places.items():
            tensor.copy_(sent[key])
        for name, place in buffers.items():
            _put(place, shards["buffers"][name])
        groups = self._optimizer.param_groups
        commit_optimizer(self._optimizer, {**shards["added"], **whole})
        _keep_groups(groups, self._optimizer)
        self._settings = settings_of(self._optimizer)


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups; of tensors (a learning rate, say) copies."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _keep_groups(groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """Has an optimizer keep the groups that it had, with the settings that it was given.

    torch's `load_state_dict` makes new ones. This comes in the middle of a run: a loop may hold groups, or a learning rate
    in a tensor, and would from now on change what nobody steps with, on this replica alone.
    """
    for held, given in zip(groups, optimizer.param_groups, strict=True):
        settings = dict(given)
        for key, value in given.items():
            own = held.get(key)
            if isinstance(own, Tensor) and isinstance(value, Tensor) and _kind(own) == _kind(value):
                settings[key] = own.copy_(value)
        held.clear()
        held.update(settings)
    optimizer.param_groups = groups


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def _is_fixed(tensor: Tensor) -> bool:
    """Whether a tensor is a frozen one around several: each replica has it from where it came, and nobody changes it."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return is_composite(local)


def _sent(value: Any, name: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = plain(value, name)
    return {"local": local_of(value.detach()), "shape": list(value.shape), "sharded": isinstance(value, DTensor)}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"local", "shape", "sharded"}


def buffer_places(model: nn.Module) -> dict[str, _Place]:
    """Where buffers are, by name; one that was declared, and that some forward is to make, is None there."""
    return {
        clean_name(dotted(path, leaf)): (module, leaf)
        for path, module in model.named_modules()
        for leaf, held in module._buffers.items()
        if held is None or not _is_fixed(held)
    }


def _put(place: _Place, sent: Tensor | None) -> None:
    """Has a module hold what another replica's holds: in place, or, where forwards have made buffers of their own, anew."""
    module, leaf = place
    held = module._buffers[leaf]
    if held is not None and sent is not None and _kind(local_of(held)) == _kind(sent) and not is_expanded(local_of(held)):
        local_of(held).copy_(sent)
    else:
        module._buffers[leaf] = None if sent is None else sent.to(sent.device if held is None else held.device, copy=True)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _check_names(own: Iterable[str], sent: Iterable[str]) -> None:
    if names := sorted(set(own) ^ set(sent)):
        raise StateError(
            f"a replica that joins got the state of another model: only one of them has {listing(names, 3)}; start all "
            "replicas with the same model, optimizer and number of ranks"
        )


def _check(own: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    """Checks that tensors fit, name by name."""
    _check_names(own, sent)
    for name, tensor in own.items():
        there = sent[name]
        if _kind(tensor) != _kind(there):
            raise StateError(
                f"a replica that joins has {name!r} as {tuple(tensor.shape)} of {tensor.dtype} on this rank, but its "
                f"counterpart as {tuple(there.shape)} of {there.dtype}; start all replicas with the same model and mesh"
            )

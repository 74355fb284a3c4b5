"""What a checkpoint holds, under which names: the state of a model and of its optimizer as flat or nested dicts.

    model.<parameter or buffer>                             as `model.state_dict()` has it
    optimizer.state.<parameter>.<name>                      as torch's `get_optimizer_state_dict` has it
    optimizer.param_groups.<index>.<hyperparameter>

These are the names that PyTorch's own functions write for `{"model": ..., "optimizer": ...}`, so checkpoints go both
ways between them, FSDP2 and hsdp. Parameters are called as in the module that the user wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.optim import Optimizer

from hsdp.checkpoint.ranks import CheckpointError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""

_NOT_TRAINING = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Entries of an optimizer's groups that say how it computes here, not what: the loading optimizer keeps its own."""


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True)
class Entry:
    """One item of a model's state dict: its name there, and its value (a detached tensor, or a module's extra state)."""

    raw_name: str
    value: Any


def model_entries(model: nn.Module) -> dict[str, Entry]:
    """The model's state dict by clean name; tensors share memory with the model.

    Raises:
        CheckpointError: a parameter is on the meta device.
    """
    entries: dict[str, Entry] = {}
    for raw_name, value in model.state_dict().items():
        if isinstance(value, Tensor) and local_of(value).is_meta:
            raise CheckpointError(
                f"{raw_name!r} of the model is on the meta device; call model.to_empty(device=...) first"
            )
        entries[clean_name(raw_name)] = Entry(raw_name, value)
    return entries


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name; nothing is initialised for it, and no step is taken.

    Returns:
        `{"state": {parameter: {name: value}}, "param_groups": [{..., "params": [parameter, ...]}]}`; of a parameter
        that was never stepped there is no state.
    """
    names = parameter_names(model)
    state: dict[str, Any] = {}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = group_names(names, group, index)
        for name, param in zip(members, group["params"], strict=True):
            if optimizer.state.get(param):
                state[name] = dict(optimizer.state[param])
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": members})
    return {"state": state, "param_groups": groups}


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The clean name of each parameter: the first one, where weights are tied."""
    return {param: clean_name(name) for name, param in model.named_parameters()}


def group_names(names: Mapping[nn.Parameter, str], group: Mapping[str, Any], index: int) -> list[str]:
    """The names of an optimizer group's parameters.

    Raises:
        CheckpointError: a parameter is not one of the model's.
    """
    found = []
    for place, param in enumerate(group["params"]):
        if param not in names:
            raise CheckpointError(
                f"parameter {place} of the optimizer's group {index}, of shape {tuple(param.shape)}, is not one of the "
                "model's; make the optimizer from model.parameters() after fully_shard"
            )
        found.append(names[param])
    return found


def merge_groups(optimizer: Optimizer, members: list[list[str]], saved: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups with the hyperparameters of a checkpoint.

    Args:
        optimizer: the optimizer that loads; its groups may be cut otherwise than those that were saved.
        members: the names of the parameters of each of its groups.
        saved: the saved hyperparameters, by parameter.

    Raises:
        CheckpointError: a parameter has none, or those of one group's parameters differ.
    """
    merged = []
    for index, (group, names) in enumerate(zip(optimizer.param_groups, members, strict=True)):
        if missing := [name for name in names if name not in saved]:
            raise CheckpointError(
                f"the checkpoint's optimizer does not know {listing(missing)} of the optimizer's group {index}"
            )
        values = [{k: v for k, v in saved[name].items() if k not in _NOT_TRAINING} for name in names]
        for name, value in zip(names, values, strict=True):
            if differing := [key for key in value if key not in values[0] or value[key] != values[0][key]]:
                raise CheckpointError(
                    f"group {index} of the optimizer has {names[0]!r} and {name!r} together, but the checkpoint has them "
                    f"in groups that differ in {listing(differing)}; group the parameters as they were when it was saved"
                )
        hyper = {key: value for key, value in group.items() if key != "params"}
        hyper.update(values[0] if values else {})
        merged.append({key: _like(hyper[key], group.get(key)) for key in hyper})
    return merged


def _like(saved: Any, own: Any) -> Any:
    # `capturable` optimizers keep the learning rate in a tensor.
    if isinstance(saved, Tensor) and isinstance(own, float):
        return float(saved)
    if isinstance(own, Tensor) and isinstance(saved, (int, float)):
        return torch.full_like(own, saved)
    return saved


# -- tensors and their shards ---------------------------------------------------------------------------------------


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory: the local tensor of a DTensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part lies in the whole tensor: (offsets, sizes), one each per dim."""
    if isinstance(tensor, DTensor):
        chunk = tensor.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]
        return tuple(chunk.offsets), tuple(chunk.sizes)
    return (0,) * tensor.ndim, tuple(tensor.shape)


def staging_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor of the same kind, shape and dtype, whose part of this rank is on the CPU."""
    local = torch.empty(local_of(tensor).shape, dtype=tensor.dtype)
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


def state_staging(param: Tensor, shape: tuple[int, ...], dtype: torch.dtype, held: Any, scalar: bool) -> Tensor:
    """An uninitialised optimizer state tensor for a parameter, on the CPU.

    Args:
        param: the parameter.
        shape: whole shape of the state.
        dtype: its dtype.
        held: what the optimizer holds under that name at present, if anything.
        scalar: it is a number like Adam's `step`, which belongs to no dim of the parameter.
    """
    if not isinstance(param, DTensor) or scalar:
        return torch.empty(shape, dtype=dtype)
    if isinstance(held, Tensor) and tuple(held.shape) == shape:
        if not isinstance(held, DTensor):
            return torch.empty(shape, dtype=dtype)
        placements = held.placements
    else:
        # Shaped as the parameter where it is sharded: sharded likewise (factored states have 1 elsewhere); else whole.
        placements = tuple(_state_placement(p, tuple(param.shape), shape) for p in param.placements)
    mesh = param.device_mesh
    meta = torch.empty(shape, dtype=dtype, device="meta")
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(meta.shape, meta.stride(), dtype))
    probe = DTensor(meta, spec, requires_grad=False)
    return DTensor(torch.empty(local_box(probe)[1], dtype=dtype), spec, requires_grad=False)


def _state_placement(placement: Placement, param_shape: tuple[int, ...], shape: tuple[int, ...]) -> Placement:
    if isinstance(placement, Shard):
        dim = placement.dim
        if len(shape) != len(param_shape) or shape[dim] != param_shape[dim]:
            return Replicate()
    return placement


def listing(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message, cut after `limit`."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")

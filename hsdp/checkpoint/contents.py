"""What a checkpoint holds, under which names: the state of a model and of its optimizer as flat or nested dicts.

    model.<parameter or buffer>                             as `model.state_dict()` has it
    optimizer.state.<parameter>.<name>                      as torch's `get_optimizer_state_dict` has it
    optimizer.param_groups.<index>.<hyperparameter>
    optimizer.added                                         what else the optimizer's `state_dict()` has

These are the names that PyTorch's own functions write for `{"model": ..., "optimizer": ...}`, so checkpoints go both
ways between them, FSDP2 and hsdp. Parameters are called as in the module that the user wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hsdp.errors import CheckpointError
from hsdp.params.dtensors import as_dtensor, spec_of
from hsdp.params.local import beside_local, local_of
from hsdp.params.shard_geometry import Box
from hsdp.params.subclass import data_of, is_composite
from hsdp.torch_private import stands_for_zeros

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What torch.compile and activation checkpointing put between the modules of a name."""


EXTRA_STATE = "_extra_state"
"""What torch calls a module's extra state in state dicts."""


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is a module's extra state: any object, and no parameter."""
    return name.rpartition(".")[2] == EXTRA_STATE


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    *modules, last = name.split(".")
    return ".".join([*(one for one in modules if one not in _WRAPPERS), last])


_UNSIZED = re.compile(r"torch\.(u?int[1-7]|bits\w+)")


@dataclass(frozen=True)
class Entry:
    """One item of a model's state dict: its name there, and its value (a detached tensor, or a module's extra state).

    Attributes:
        beside: the parameter of which it is a scalar beside the data, that no state dict has; None of all others.
    """

    raw_name: str
    value: Any
    beside: str | None = None


def model_entries(model: nn.Module) -> dict[str, Entry]:
    """The model's state dict by clean name; tensors share memory with the model.

    Raises:
        CheckpointError: a parameter is on the meta device, a tensor is of a kind that cannot be saved, or two have one name
            but for what wrappers put into names.
    """
    entries: dict[str, Entry] = {}
    with torch.inference_mode(False):  # there DTensors cannot be detached
        state = model.state_dict()
    for raw_name, value in state.items():
        if isinstance(value, Tensor) and local_of(value).is_meta:
            raise CheckpointError(f"{raw_name!r} of the model is on the meta device; call model.to_empty(device=...) first")
        if isinstance(value, Tensor) and (problem := _unfit(value)) is not None:
            raise CheckpointError(f"{raw_name!r} of the model {problem}")
        name = clean_name(raw_name)
        if name in entries:
            raise CheckpointError(
                f"{entries[name].raw_name!r} and {raw_name!r} of the model would both be {name!r} in a checkpoint, which "
                "leaves out what torch.compile and activation checkpointing put into names; rename one of the modules"
            )
        entries[name] = Entry(raw_name, plain(value, raw_name))
    return entries


def with_scalars(model: nn.Module) -> dict[str, Entry]:
    """The same, and the scalars that parameters keep beside their data, a scale say: `<parameter>.<name>`.

    A parameter has no modules below it, so that nothing else has such a name.

    Raises:
        CheckpointError: as above.
    """
    entries = model_entries(model)
    for raw_name, param in model.named_parameters(remove_duplicate=False):
        if clean_name(raw_name) in entries:
            for name, scalar in beside_local(param).items():
                inner = f"{raw_name}.{name}"
                entries[clean_name(inner)] = Entry(inner, plain(scalar.detach(), inner), clean_name(raw_name))
    return entries


def _unfit(tensor: Tensor) -> str | None:
    """Why a tensor of a model cannot be saved or loaded; None if it can."""
    if is_lazy(tensor):
        return "has no shape yet; run the model once, and shard it then"
    if tensor.is_quantized:
        return "is quantized, which no checkpoint can hold: keep it as integers"
    if tensor.layout is not torch.strided:
        return f"is a tensor of layout {tensor.layout}, which no checkpoint can hold: keep its parts as dense tensors"
    return None


def refuse_unsized(state: Mapping[str, Any]) -> None:
    """Refuses tensors of dtypes of which torch does not tell how large an element is.

    Raises:
        CheckpointError: names one.
    """
    for name, value in state.items():
        if isinstance(value, Tensor) and _UNSIZED.fullmatch(str(value.dtype)):
            raise CheckpointError(
                f"{name!r} has dtype {value.dtype}, which no checkpoint can hold: keep it as a view of dtype torch.uint8"
            )


# -- tensors and their shards ---------------------------------------------------------------------------------------


def plain(value: Any, name: str = "a value") -> Any:
    """A value as it is saved: in the place of a tensor subclass with a gather extension its data, sharing its memory."""
    if not isinstance(value, Tensor):
        return value
    local = value._local_tensor if isinstance(value, DTensor) else value
    if is_composite(local):
        raise TypeError(
            f"{name!r} is a {type(local).__name__} around several tensors, which no checkpoint and no full state dict "
            "can hold; save a module that holds what you train (an nn.ModuleList of the adapters, say), and make the rest "
            "anew from where it came"
        )
    data = data_of(local)
    if is_traceable_wrapper_subclass(data):  # it has no memory of its own that could be written
        raise TypeError(
            f"{name!r} is a {type(data).__name__} without a gather extension (fsdp_pre_all_gather), around tensors that "
            "checkpoints do not know; keep plain tensors, or save what is inside by get_extra_state"
        )
    refuse_without_memory(data, name)
    if not isinstance(value, DTensor):
        return data
    return value if data is local else as_dtensor(data, value._spec)


def refuse_without_memory(tensor: Tensor, name: str) -> None:
    """Refuses a plain tensor that has elements and no memory: what lies at address 0 would be taken for them.

    Raises:
        CheckpointError: names it.
    """
    if tensor.numel() and not tensor.is_meta and (stands_for_zeros(tensor) or not tensor.untyped_storage().nbytes()):
        raise CheckpointError(
            f"{name!r} has {tensor.numel()} elements and no memory: its storage was freed (resize_(0)), or it stands for "
            "zeros, as forward-mode autograd makes such; keep a tensor with memory, torch.zeros_like(tensor) say"
        )


def savable(value: Any, description: str) -> Any:
    """A leaf of an optimizer's state as it is saved; of a sum that is still in parts on the ranks the sum."""
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        with torch.no_grad():
            value = value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
    return plain(value, description)


def local_box(tensor: Tensor) -> Box:
    """Where this rank's part lies in the whole tensor."""
    if isinstance(tensor, DTensor):
        with torch.device("cpu"):  # torch counts with tensors on the default device
            chunk = tensor.__create_chunk_list__()[0]
        return Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return Box((0,) * tensor.ndim, tuple(tensor.shape))


def staging_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor of the same kind, shape and dtype, whose part of this rank is on the CPU."""
    local = torch.empty(local_of(tensor).shape, dtype=tensor.dtype, device="cpu")
    return as_dtensor(local, tensor._spec) if isinstance(tensor, DTensor) else local


@torch.inference_mode(False)  # the optimizer is to step with it later
def state_staging(
    param: Tensor, shape: tuple[int, ...], dtype: torch.dtype, held: Any, scalar: bool, device: torch.device
) -> Tensor:
    """An uninitialised optimizer state tensor for a parameter.

    Args:
        param: the parameter.
        shape: whole shape of the state.
        dtype: its dtype.
        held: what the optimizer holds under that name at present, if anything.
        scalar: it is a number like Adam's `step`, which belongs to no dim of the parameter.
        device: where it is made.
    """
    if scalar:
        return torch.empty(shape, dtype=dtype, device="cpu")  # optimizers move it if they want it elsewhere
    if not isinstance(param, DTensor):
        return torch.empty(shape, dtype=dtype, device=device)
    if isinstance(held, Tensor) and tuple(held.shape) == shape:
        if not isinstance(held, DTensor):
            return torch.empty(shape, dtype=dtype, device=device)
        placements = tuple(Replicate() if p.is_partial() else p for p in held.placements)
    else:
        # Shaped as the parameter where it is sharded: sharded likewise (factored states have 1 elsewhere); else whole.
        placements = tuple(_state_placement(p, tuple(param.shape), shape) for p in param.placements)
    spec = spec_of(param.device_mesh, placements, shape, dtype)
    probe = as_dtensor(torch.empty(shape, dtype=dtype, device="meta"), spec)
    return as_dtensor(torch.empty(local_box(probe).sizes, dtype=dtype, device=device), spec)


def _state_placement(placement: Placement, param_shape: tuple[int, ...], shape: tuple[int, ...]) -> Placement:
    if isinstance(placement, (Shard, _StridedShard)):
        dim = placement.dim
        if len(shape) != len(param_shape) or shape[dim] != param_shape[dim]:
            return Replicate()
    return placement

"""An optimizer gets its loaded state dict: as torch loads it, but for what torch would round, or fail to copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hsdp.checkpoint.optimizer_schema import is_known, is_of_weights
from hsdp.checkpoint.structure import SEQUENCES, dict_like, mapped, sequence_like
from hsdp.params.dtensors import as_dtensor


def commit_optimizer(optimizer: Optimizer, state: dict[str, Any], converted: Collection[int] = ()) -> None:
    """Gives an optimizer its loaded state dict; tensors keep the dtype they were saved in.

    Of parameters (by number) that were `converted` to another dtype, the state of PyTorch's and hsdp's optimizers, which
    step in the parameter's dtype, gets it too.
    """
    follow = converted if is_known(optimizer) else ()
    with torch.inference_mode(False), torch.no_grad():  # it is to step with what it makes here
        held = {number: mapped(entries, _kept, "the state") for number, entries in state["state"].items()}
        optimizer.load_state_dict({**state, "state": held})
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for number, entries in state["state"].items():
            _restore_dtypes(optimizer.state[params[number]], entries, params[number], number in follow)


@dataclass(frozen=True)
class _Kept:
    """A value that torch's `load_state_dict` would try to copy item by item, and fail: a range, an array, a named tuple."""

    value: Any


def _kept(value: Any) -> Any:
    copied = (bytes, bytearray, tuple, torch.Size, set, frozenset)
    as_it_is = isinstance(value, (Tensor, str)) or type(value) in copied or not isinstance(value, Iterable)
    return value if as_it_is else _Kept(value)


def _restore_dtypes(held: dict[str, Any], loaded: dict[str, Any], param: Tensor, follows: bool) -> None:
    # torch casts floating-point state to the parameter's dtype, which would round fp32 moments of bf16 parameters.
    for name, value in loaded.items():
        held[name] = _restored(held[name], value, param, follows, name)


def _restored(held: Any, loaded: Any, param: Tensor, follows: bool, name: object = None) -> Any:
    """What the optimizer is to hold in the place of what torch made of `loaded`."""
    if isinstance(loaded, Tensor):
        if name == "step" or not isinstance(held, Tensor) or held.dtype == loaded.dtype:
            return held
        return held if follows and is_of_weights(name, loaded, param) else _moved(loaded, param.device)
    if isinstance(loaded, dict) and isinstance(held, dict) and held.keys() == loaded.keys():
        # torch makes plain dicts of all, but an optimizer may have made what it wants.
        items = {key: _restored(held[key], value, param, follows, key) for key, value in loaded.items()}
        return dict_like(loaded if type(held) is dict else held, items)
    if type(loaded) in SEQUENCES and type(held) is type(loaded) and len(held) == len(loaded):
        return sequence_like(loaded, [_restored(a, b, param, follows) for a, b in zip(held, loaded, strict=True)])
    if isinstance(held, _Kept):
        return held.value
    # torch calls str with a generator.
    return loaded if isinstance(loaded, str) and isinstance(held, str) else held


def _moved(value: Tensor, device: torch.device) -> Tensor:
    if isinstance(value, DTensor):
        return as_dtensor(value.to_local().to(device), value._spec)
    return value.to(device)

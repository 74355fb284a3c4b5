"""What an optimizer's `state_dict()` has beside the state of parameters and groups, by an override or by hooks.

It goes through a checkpoint as one value, and to `load_state_dict()` as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hsdp.checkpoint.structure import mapped
from hsdp.errors import CheckpointError

ADDED = "added"
"""The key in a checkpoint, below the optimizer's prefix."""

_TORCHS = frozenset({"state", "param_groups"})


def added_by(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer adds to its state dict now; tensors are copies.

    Raises:
        CheckpointError: there are sharded tensors in it.
    """
    where = "{!r} of the optimizer's state_dict()"
    return {
        key: mapped(value, partial(_copied, where=where.format(key)), where.format(key))
        for key, value in added_in(optimizer.state_dict()).items()
    }


def _copied(leaf: Any, where: str) -> Any:
    if isinstance(leaf, DTensor):
        raise CheckpointError(
            f"{where} has a sharded tensor, which no checkpoint can hold there: keep it in the optimizer's state of a "
            "parameter"
        )
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def added_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state dict has beside what torch's has."""
    return {key: value for key, value in state.items() if key not in _TORCHS}


def pack_added(state: dict[str, Any]) -> None:
    """Has a state dict keep what was added under one key, in place. DCP takes dicts apart, and leaves tuples alone."""
    if added := added_in(state):
        for key in added:
            del state[key]
        state[ADDED] = (added,)


def unpacked_added(value: Any) -> dict[str, Any]:
    """What was added, from what a checkpoint has under its key.

    Raises:
        CheckpointError: it is something else.
    """
    if type(value) is not tuple or len(value) != 1 or type(value[0]) is not dict:
        raise CheckpointError(f"what is saved as {ADDED!r} of the optimizer is damaged: it is a {type(value).__name__}")
    return value[0]

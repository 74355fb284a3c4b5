"""How the sharded side keeps weights and states, and gets them back, on the same mesh or on another one."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from hsdp import checkpoint
from tests.soak.verdicts import from_bytes, to_bytes

Optimizers = Sequence[torch.optim.Optimizer]


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the host; a DTensor is gathered for it, so every rank must call."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().cpu()


def keep(kind: str, model: Any, optimizers: Optimizers, at: int) -> Any:
    """Keeps a model's weights and the states of its optimizers; `kind`: one of `SAVES`, `at`: a number of this save."""
    if kind in ("memory", "torch"):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        kept = [weights, [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]]
        return kept if kind == "memory" else to_bytes(kept)
    if kind == "files":
        handles = [checkpoint.save(own_folder(), model, one, step=100 * at + k) for k, one in enumerate(optimizers)]
        return [handle.wait() for handle in handles]
    if kind == "full":
        states = [checkpoint.full_optimizer_state_dict(model, optimizer) for optimizer in optimizers]
        return to_bytes([checkpoint.full_state_dict(model), states])
    full = StateDictOptions(full_state_dict=True, cpu_offload=True) if kind == "dcp full" else None
    both = get_state_dict(model, list(optimizers), options=full)
    if kind == "dcp full":
        return to_bytes(both)
    path = os.path.join(own_folder(), f"dcp-{at}")
    dcp.save({"model": both[0], "optimizer": both[1]}, checkpoint_id=path)
    return path


def restore(kind: str, kept: Any, model: Any, optimizers: Optimizers) -> None:
    """Puts what `keep` has kept into a model and its optimizers."""
    if kind in ("memory", "torch"):
        weights, states = copy.deepcopy(kept) if kind == "memory" else from_bytes(kept)
        model.load_state_dict(weights)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    elif kind == "files":
        for path, optimizer in zip(kept, optimizers, strict=True):
            checkpoint.load(path, model, optimizer)
    elif kind == "full":
        weights, states = from_bytes(kept)
        checkpoint.load_full_state_dict(model, weights)
        for optimizer, state in zip(optimizers, states, strict=True):
            checkpoint.load_full_optimizer_state_dict(model, optimizer, state)
    elif kind == "dcp full":
        weights, states = from_bytes(kept)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=options)  # `set_state_dict` takes an empty one for none to set
        set_optimizer_state_dict(model, list(optimizers), states, options=options)
    else:
        weights, states = get_state_dict(model, list(optimizers))
        loaded = {"model": weights, "optimizer": states}
        dcp.load(loaded, checkpoint_id=kept)
        set_state_dict(model, list(optimizers), model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


@functools.cache
def _process_folder() -> tempfile.TemporaryDirectory[str]:
    """One for all programs that the process plays: a directory that it saves to stays its own."""
    return tempfile.TemporaryDirectory(prefix="hsdp-optimizers-")


def own_folder() -> str:
    """Where checkpoints go: rank 0's folder, on all ranks."""
    told = [_process_folder().name if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told)
    return told[0]

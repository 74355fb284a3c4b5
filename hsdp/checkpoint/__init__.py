"""Checkpoints: save and load on any mesh, whole state dicts, safetensors, and what survives a crash.

    from hsdp import checkpoint

    checkpoint.save("runs/checkpoints", model, optimizer, extra={"loader": loader.state_dict()}, step=step, keep=3)
    ...
    loaded = checkpoint.resume("runs/checkpoints", model, optimizer)  # None in a run that begins
    if loaded is not None:
        loader.load_state_dict(loaded.extra["loader"])

What is written is an ordinary `torch.distributed.checkpoint` with a manifest beside it; PyTorch's own functions
(`dcp.save`, `dcp.load`, `get_state_dict`, `set_state_dict`, ...) work on the same models and files.
"""

from hsdp.checkpoint.full import (
    full_optimizer_state_dict,
    full_state_dict,
    iter_full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from hsdp.checkpoint.handles import SaveHandle
from hsdp.checkpoint.loading import Loaded, load, resume, verify
from hsdp.checkpoint.remote import RemotePath
from hsdp.checkpoint.rng import rng_state, set_rng_state
from hsdp.checkpoint.safetensors import load_safetensors, save_safetensors
from hsdp.checkpoint.saving import save
from hsdp.checkpoint.store import latest
from hsdp.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Loaded",
    "RemotePath",
    "SaveHandle",
    "full_optimizer_state_dict",
    "full_state_dict",
    "iter_full_state_dict",
    "latest",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "resume",
    "rng_state",
    "save",
    "save_safetensors",
    "set_rng_state",
    "verify",
]

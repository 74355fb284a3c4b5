"""How the state of a sharded run is kept, and given to it or to another one."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hsdp import checkpoint
from tests.soak.persistence.run import Run, Snapshot
from tests.soak.verdicts import from_bytes, to_bytes


@dataclass
class Kept:
    """A state that was kept.

    Attributes:
        kind: one of `programs.KINDS`.
        at: the number of the action that kept it; `step`: under which it was.
        value: what the kind needs to give it back.
        was: every tensor of the run at that moment, whole, bit for bit.
        twin: the twin's state.
        drawn: the numbers that this rank would draw next.
    """

    kind: str
    at: int
    step: int
    value: Any
    was: dict[str, Any]
    twin: Snapshot
    drawn: torch.Tensor


def keep(kind: str, run: Run, directory: str, number: tuple[int, int], at_most: int | None) -> Any:
    """Keeps a state as that of an action and a step; every rank calls it, and all its files are in `directory`."""
    at, step = number
    extra = {"rng": checkpoint.rng_state(), "schedule": run.schedule(), "rank": dist.get_rank(), "at": at}
    if kind in ("files", "async"):
        given = (os.path.join(directory, "steps"), run.model, run.optimizer, extra)
        return checkpoint.save(*given, step=step, keep=at_most, async_=kind == "async")
    if kind == "alias":
        return run.model.state_dict(), run.optimizer.state_dict(), extra
    if kind in ("memory", "bytes"):
        states = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), extra))
        return states if kind == "memory" else to_bytes(states)
    if kind == "dcp":
        model, optimizer = get_state_dict(run.model, run.optimizer)
        path = os.path.join(directory, f"dcp-{at}")
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        return path, extra
    if kind == "safetensors":
        path = os.path.join(directory, f"tensors-{at}")
        checkpoint.save_safetensors(path, run.model, max_file_bytes=300)
    else:
        path = to_bytes(checkpoint.full_state_dict(run.model))
    return path, to_bytes(checkpoint.full_optimizer_state_dict(run.model, run.optimizer)), extra


def give(kept: Kept, run: Run) -> Any:
    """Gives a run what was kept; returns what was kept beside the tensors."""
    kind, value = kept.kind, kept.value
    if kind in ("files", "async"):
        loaded = checkpoint.load(value.path, run.model, run.optimizer)
        assert (loaded.step, loaded.world_size) == (kept.step, dist.get_world_size())
        return loaded.extra
    if kind in ("memory", "bytes", "alias"):
        model, optimizer, extra = from_bytes(value) if kind == "bytes" else value
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(copy.deepcopy(optimizer) if kind == "memory" else optimizer)
        return extra
    if kind == "dcp":
        model, optimizer = get_state_dict(run.model, run.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=value[0])
        set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return value[1]
    if kind == "safetensors":
        checkpoint.load_safetensors(value[0], run.model)
    else:
        checkpoint.load_full_state_dict(run.model, from_bytes(value[0]))
    checkpoint.load_full_optimizer_state_dict(run.model, run.optimizer, from_bytes(value[1]))
    return value[2]

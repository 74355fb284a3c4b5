"""Checkpoints of a run: `torch.distributed.checkpoint` for the tensors, one JSON file for the rest.

    CHECKPOINT_DIR/step-000300/      complete, because it has this name
        run.json                     step, data order and model sizes: what must fit before tensors are read
        .metadata, *.distcp          parameters and optimizer state, loadable on another mesh

A checkpoint is written under another name and renamed when all ranks are done, so a run that dies half-way
leaves nothing that looks like a checkpoint.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.optim import Optimizer

from hsdp.examples.launch import JobError, on_rank_zero
from hsdp.examples.llama import LlamaConfig

_RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunState:
    """What a run is besides its tensors.

    No generator state is among it: the data of a step follows from ``seed``, ``step`` and the global batch,
    the model has no dropout, and the sample at the end has its own generator.
    """

    step: int
    seed: int
    batch: int
    model: LlamaConfig


def save(folder: Path, run: RunState, model: nn.Module, optimizer: Optimizer) -> Path:
    """Write ``folder/step-NNNNNN`` from all ranks and return its path; one of the same step is replaced."""
    final = folder / f"step-{run.step:06d}"
    partial = folder / f".{final.name}.partial"

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        # The time is inside the file, not the file's own: it survives copying.
        (partial / _RUN_FILE).write_text(
            json.dumps({**asdict(run), "saved_at": time.time()}, indent=1) + "\n"
        )

    def publish() -> None:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)

    on_rank_zero(prepare)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save_tensors({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    on_rank_zero(publish)
    return final


def newest(folder: Path) -> Path:
    """The checkpoint saved last, on every rank the one that rank 0 sees.

    Not the one of the highest step: a fresh run in an old folder starts counting anew.
    """

    def find() -> Path:
        complete = [path for path in folder.glob("step-*") if (path / _RUN_FILE).is_file()]
        if not complete:
            raise JobError(f"--resume: there is no checkpoint in {folder}")
        return max(complete, key=lambda path: _read(path)["saved_at"])

    return on_rank_zero(find)


def read_run(checkpoint: Path) -> RunState:
    """What was saved beside the tensors."""

    def read() -> RunState:
        fields = _read(checkpoint)
        del fields["saved_at"]
        return RunState(**{**fields, "model": LlamaConfig(**fields["model"])})

    return on_rank_zero(read)


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Fill ``model`` and ``optimizer`` in place; each rank reads the pieces that its own shards overlap."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # Read into the dictionaries, whose tensors are the shards themselves; what is no tensor is replaced in them.
    load_tensors({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def _read(checkpoint: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads((checkpoint / _RUN_FILE).read_text())
    except ValueError as error:
        raise JobError(f"{checkpoint / _RUN_FILE} is damaged: {error}") from None
    return fields

"""Checkpoints of elastic replicas: one replica writes, and any number of replicas goes on from what it wrote."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from hsdp.checkpoint.loading import Loaded
from hsdp.checkpoint.loading import resume as resume_job
from hsdp.checkpoint.lock import release
from hsdp.checkpoint.remote import RemotePath
from hsdp.checkpoint.saving import save as save_job
from hsdp.checkpoint.store import expanded
from hsdp.elastic.optimizer import ElasticOptimizer
from hsdp.errors import CheckpointError

_KEY = "elastic"


def save(
    directory: str | os.PathLike[str],
    optimizer: ElasticOptimizer,
    extra: Any = None,
    *,
    keep: int | None = None,
    process_group: ProcessGroup | None = None,
) -> Path | RemotePath | None:
    """Saves the model and the optimizer as `checkpoint.save` does, from one replica: the first of those that take part.

    Every rank of every replica calls it, between two steps; the number of steps is the manager's. The other replicas return
    at once, and wait for the writing one in the all-reduces of their next step, for as long as the manager's timeout.

    Args:
        directory: where the checkpoints of the run are: a file system that the ranks of all replicas share, or a
            URL, as for `checkpoint.save`.
        optimizer: the wrapper, which knows model and manager.
        extra: as for `checkpoint.save`; that of the replica that writes.
        keep: how many checkpoints remain.
        process_group: the ranks of this replica; None: all of this job.

    Returns:
        The checkpoint; None on replicas that do not write.

    Raises:
        CheckpointError: as `checkpoint.save`.
    """
    manager = optimizer.manager
    if manager.participating_rank() != 0:
        return None
    content = {_KEY: manager.state_dict(), "extra": extra}
    try:
        handle = save_job(
            directory,
            optimizer.model,
            optimizer.optimizer,
            content,
            step=manager.current_step(),
            keep=keep,
            process_group=process_group,
        )
        return handle.path
    finally:
        release(expanded(directory))  # the next one may be saved by another replica, which is another job


def resume(
    directory: str | os.PathLike[str], optimizer: ElasticOptimizer, *, process_group: ProcessGroup | None = None
) -> Loaded | None:
    """Loads the checkpoint saved last, if there is one, also into the manager. Every rank calls it, before the first step.

    A replica that joins a run under way may leave it out: it is healed by the others, whatever it begins with.

    Args:
        directory, optimizer, process_group: as for `save`.

    Returns:
        As `checkpoint.resume`; its `extra` is what `save` was given.

    Raises:
        CheckpointError: as `checkpoint.resume`, or the checkpoint was not saved by `elastic.save`.
    """
    loaded = resume_job(directory, optimizer.model, optimizer.optimizer, process_group=process_group)
    if loaded is None:
        return None
    content = loaded.extra
    if not isinstance(content, dict) or _KEY not in content:
        raise CheckpointError(
            f"elastic.resume: {loaded.path} was not saved by elastic.save, and does not tell how many batches were taken; "
            "load it with checkpoint.load, and the manager with load_state_dict({'step': ..., 'batches_committed': ...})"
        )
    optimizer.manager.load_state_dict(content[_KEY])
    return replace(loaded, extra=content["extra"])

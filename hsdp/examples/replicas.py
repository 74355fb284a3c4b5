"""`train_lm --elastic`: this job is one replica among several that come and go; torchft says who takes part in a step."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but imported in an `if`
from torch.optim import Optimizer

from hsdp import elastic
from hsdp.examples.launch import JobError, on_rank_zero

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
_PART_OF_TIMEOUT = 5
"""The ranks of a replica wait for each other longer than for other replicas: or they would take those for dead too."""
_PART_OF_PATIENCE = 3
"""If another replica dies, forming a group takes up to its timeout, and so does its first all-reduce: with what the
lighthouse takes to miss a heartbeat, no longer than the manager's."""
_QUORUM_PART_OF_TIMEOUT = 0.8
"""A quorum that is not found ends a replica. If another one loses a rank, what is left of it goes on telling the lighthouse
that it is there until torchrun kills it, by default 30 seconds later. Whoever asks for a quorum waits longer."""


def join_replicas(
    name: str, device: torch.device, timeout: float, model: nn.Module, optimizer: Optimizer
) -> elastic.ElasticOptimizer:
    """Makes this job the replica of that name. Every rank of the job calls it, once.

    Args:
        name: the replica's; what runs at the same time must have others.
        device: this rank's.
        timeout: seconds that the ranks of this job wait for each other; for other replicas it is a fifth, a fifteenth
            to form a group and in an all-reduce, and 0.8 of it to know who takes part.
        model, optimizer: sharded over the ranks of this job.

    Raises:
        JobError: torchft is not installed, or no lighthouse is told.
    """
    try:
        torchft: Any = import_module("torchft")
    except ImportError:
        raise JobError("--elastic needs torchft: pip install 'hsdp[elastic]'") from None
    if not os.environ.get(LIGHTHOUSE):
        raise JobError(f"--elastic needs the address of a lighthouse in {LIGHTHOUSE} (run torchft_lighthouse for one)")
    # Not torchrun's store: it outlives a restart of the processes, with the addresses of those before in it.
    host = socket.gethostname()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    host, port = on_rank_zero(lambda: (host, store.port if store is not None else 0))
    patience = timedelta(seconds=max(1, timeout / _PART_OF_TIMEOUT))
    groups = torchft.ProcessGroupNCCL if device.type == "cuda" else torchft.ProcessGroupGloo
    manager = torchft.Manager(
        pg=elastic.BoundedGroup(groups, timeout=patience / _PART_OF_PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        init_sync=False,  # all begin with the weights of one seed, or of one checkpoint
        timeout=patience,
        quorum_timeout=timedelta(seconds=_QUORUM_PART_OF_TIMEOUT * timeout),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        store_addr=host,
        store_port=port,
        replica_id=name,
    )
    manager.store = store  # the replicas meet in it: it lives as long as the manager
    return elastic.ElasticOptimizer(manager, model, optimizer)

"""Sequence numbers of autograd nodes: the order in which nodes were made."""

from __future__ import annotations

from hsdp.torch_private import NO_TASK

SequenceNumber = tuple[int, int]
"""Orders autograd nodes by creation: the graph task that made the node (NO_TASK: none), then torch's sequence number.

torch's numbers alone do not order nodes: each thread counts its own, and on a device a recomputation runs on a thread of
the engine. What is recomputed inside of a task is run by a task inside of that one, before the outer task goes on: it
counts as later.
"""

BEFORE_ALL: SequenceNumber = (NO_TASK, -1)
"""Before any node that a forward made."""

"""When autograd nodes were made."""

from __future__ import annotations

from hsdp.torch_private import NO_TASK

Moment = tuple[int, int]
"""When an autograd node was made: the graph task inside of which that was (NO_TASK: none), then the node's number.

Numbers alone do not tell, as each thread counts its own, and on a device a recomputation runs on a thread of the engine.
What is recomputed inside of a task is run by a task inside of that one, before the outer task goes on: it counts as later.
"""

BEFORE_ALL: Moment = (NO_TASK, -1)
"""Before any node that a forward made."""

"""What hsdp asks of autograd's engine: the only file that uses its private functions, which torch 2.11 to 2.13 all have.

There are no public ones for it. DDP, FSDP2 and activation checkpointing in PyTorch itself rely on the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

NO_TASK = -1
"""What `graph_task` returns outside of every backward."""

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the graph task, one call of `backward` or `autograd.grad`, that runs on this thread."""

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Has a function called at the end of the present graph task. If that raises, the function is dropped instead."""

will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the present graph task will run a node: which gradients will come, and which parameters were not used.

Raises RuntimeError for inputs of `autograd.grad`, about which the engine does not tell.
"""

retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the present graph task keeps its graph (`retain_graph=True`), so that there may be another one through it."""

keeping_versions: Callable[[Any], AbstractContextManager[None]] = torch.autograd.grad_mode._unsafe_preserve_version_counter
"""Inside it, writing to these tensors does not count as a change that a backward would object to."""

next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the autograd node that this thread makes next. The engine runs nodes with higher numbers first."""

"""Labels in torch.profiler: what hsdp starts, waits for and runs, with the unit's name.

    hsdp::forward blocks.3              the unit's own forward
    hsdp::all_gather blocks.3           starting a collective: all_gather, reduce_scatter, all_reduce, all_to_all
    hsdp::wait all-gather blocks.3      the host waits for one (on a device the stream does, and the host goes on)

They exist while a profiler runs; otherwise each costs the look at a flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.autograd.profiler import record_function

from hsdp.torch_private import is_profiling

R = TypeVar("R")


class Named(Protocol):
    """Whatever a collective is for; its name appears in labels and errors."""

    name: str


def labelled(what: str, name: str, call: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Calls with a label, if a profiler runs."""
    if not is_profiling():
        return call(*args, **kwargs)
    with record_function(f"hsdp::{what} {name}"):
        return call(*args, **kwargs)

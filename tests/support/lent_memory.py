"""Memory that a collective under way uses must stay where it is: watches every collective and every flat buffer.

A flat buffer that shrinks while a backend's thread still reads or writes it corrupts the heap, which shows, if at all, much
later and in somebody else's code. Here the questions are put where they can be answered at once, whatever the timing: each
call of a process group notes its work and the storages of its tensors, and each flat buffer that comes or goes asks whether
one of these works is still under way. Nothing of hsdp's own bookkeeping takes part.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hsdp.buffers.flat_buffer import FlatBuffer

VERBS = (
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "allgather_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
)

_under_way: list[tuple[Any, set[int], str]] = []


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _noted(verb: str, start: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = start(self, *args, **kwargs)
        if work is not None and hasattr(work, "is_completed"):
            storages = {t.untyped_storage()._cdata for t in _tensors((*args, *kwargs.values()))}
            _under_way.append((work, storages, f"{verb}\n{''.join(traceback.format_stack(limit=14)[:-1])}"))
        return work

    return call


def _asks(what: str, change: Any) -> Any:
    def call(self: FlatBuffer) -> None:
        key = self._storage._cdata
        _under_way[:] = [one for one in _under_way if not one[0].is_completed()]
        changes = bool(self.held) == (what == "free")
        if changes and self.nbytes:
            for _, storages, started in _under_way:
                if key in storages:
                    stack = "".join(traceback.format_stack(limit=25)[:-1])
                    text = (
                        f"{what} of {self.nbytes} bytes that a collective under way uses\n{stack}\n--- started by {started}"
                    )
                    raise AssertionError(text)
        change(self)

    return call


@contextmanager
def watched() -> Iterator[None]:
    """While it lasts, in this process. A rank raises AssertionError where a buffer comes or goes that is in use."""
    group = dist.ProcessGroup
    # From the class's own dict: what `getattr` gives of a pybind class is no method any more when it is put back.
    methods = {verb: vars(group)[verb] for verb in VERBS if verb in vars(group)}
    alloc, free = FlatBuffer.alloc, FlatBuffer.free
    try:
        watch()
        yield
    finally:
        FlatBuffer.alloc, FlatBuffer.free = alloc, free  # type: ignore[method-assign]
        for verb, method in methods.items():
            setattr(group, verb, method)
        _under_way.clear()


def watch() -> None:
    """From now on, in this process."""
    for verb in VERBS:
        if (start := getattr(dist.ProcessGroup, verb, None)) is not None:
            setattr(dist.ProcessGroup, verb, _noted(verb, start))
    FlatBuffer.alloc = _asks("alloc", FlatBuffer.alloc)  # type: ignore[method-assign]
    FlatBuffer.free = _asks("free", FlatBuffer.free)  # type: ignore[method-assign]

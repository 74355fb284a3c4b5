"""What hsdp knows about backends: what they can do, how they call it, and from which sizes on it pays."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hsdp.buffers.layout import NEVER
from hsdp.torch_private import compares_arguments

GATHER_ALONE_BYTES = 0
"""From this size per rank on, gloo gathers with a call per tensor: all do.

Gloo's two threads write the name of what each carries to one string of the group, without a lock (torch 2.11 to 2.13). A
name of more than 15 letters has memory on the heap, which the other thread may be writing to when it is freed: of gloo's
works that is "ALLGATHER_COALESCED" alone.
"""

REDUCE_ALONE_BYTES = 1024 * 1024
"""Measured: from this size per rank on, gloo reduces faster with a call per tensor than with one for all."""

UNEVEN_LISTS = frozenset({"nccl", "xccl"})
"""Backends of torch's own groups that gather and reduce lists of tensors of different sizes (uneven.py)."""

UNEVEN = UNEVEN_LISTS | {"gloo", "fake"}
"""With those for which that is spelled out: a broadcast, and a reduction, for each rank that holds a part."""

UNEVEN_BYTES = 1024 * 1024
"""Padding is spared from so many bytes on for each rank that holds a part: what a fast link sends in the time that one more
transfer takes to start on all ranks."""

UNGUARDED = frozenset({"fake"})
"""Backends behind which there are no other ranks."""

MULTIPLIES = frozenset({"nccl", "fake"})
"""Backends that can multiply what they sum. FSDP2 has NCCL average gradients so: a kernel less behind each reduction. The
fake one moves nothing; it counts as NCCL does, so that what is counted there holds on GPUs."""

MULTIPLIED = frozenset({torch.float16, torch.float32, torch.float64})
"""What they multiply rightly. Of bfloat16 torch hands NCCL a float, of which NCCL reads the lower half: 0 for all powers of
two (PyTorch's issue 190745)."""

ASK_IN_GROUP = frozenset({"gloo", "nccl", "xccl"})
"""Backends of torch's own groups whose works tell the host when they have ended, so that it can look around meanwhile."""

NAMES = {
    "gather": ("all_gather_single", "_allgather_base"),
    "gather_coalesced": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    "scatter": ("reduce_scatter_single", "_reduce_scatter_base"),
    "scatter_coalesced": ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    "all_to_all": ("all_to_all_single", "alltoall_base"),
    "all_reduce_coalesced": ("allreduce_coalesced",),
}
"""A process group's methods: their name in new versions of torch, and the one in old ones."""


@functools.cache
def names_in(kind: Any) -> dict[str, str | None]:
    """Under which name a class of groups has each of the methods in `NAMES`; None: under none.

    A class written in Python (torch's threaded groups, torchft's managed ones) counts with what it defines by itself, under
    the name of whatever torch it was written for: the methods that it inherits need a backend, which it may not have.
    """
    own = {name for base in kind.__mro__ if base not in ProcessGroup.__mro__ for name in vars(base)}
    if not own.intersection(("allgather", "allreduce", *(name for names in NAMES.values() for name in names))):
        own = set(dir(kind))  # one of torch's own
    return {verb: next((name for name in names if name in own), None) for verb, names in NAMES.items()}


def direct_bytes(backend: str) -> tuple[int, int]:
    """A backend's measured defaults of `CommPolicy.direct_gather_bytes` and `CommPolicy.direct_reduce_bytes`."""
    # gloo gathers each by a call of its own: it must be worth a round of latency.
    return (256 * 1024, 1024 * 1024) if backend == "gloo" else (32 * 1024, 32 * 1024)


def uneven_bytes(backend: str) -> int:
    """From how many bytes of padding on a parameter goes unevenly, see `Thresholds.uneven_bytes`."""
    if backend != "gloo" and compares_arguments():
        return NEVER  # torch compares what ranks pass to lists of tensors, and takes other sizes for a mistake
    return UNEVEN_BYTES if backend in UNEVEN else NEVER


def share_calls(sizes: list[int], alone: int) -> list[list[int]]:
    """How tensors of these bytes share calls on gloo, as lists of their indices: from `alone` bytes on each has its own."""
    large = [[i] for i, size in enumerate(sizes) if size >= alone]
    small = [i for i, size in enumerate(sizes) if size < alone]
    return [*large, small] if small else large


def by_dtype(first: list[Tensor], second: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Pairs of lists with one dtype each: a coalesced reduction takes no mixture."""
    if len(first) == 1 or len({tensor.dtype for tensor in first}) <= 1:
        return [(first, second)] if first else []
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(first, second, strict=True):
        pair = groups.setdefault(a.dtype, ([], []))
        pair[0].append(a)
        pair[1].append(b)
    return list(groups.values())


def without_autocast() -> AbstractContextManager[object]:
    """For gloo's coalesced calls, which concatenate on the CPU: autocast would cast what they do, or refuse it."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()

"""What a process group is: the name of its backend, its patience, and groups of some of its ranks, made once."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hsdp.torch_private import backend_of, is_alive, named_group, timeout_of_backend


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves a device in a group: "gloo", "nccl", ...

    A group written in Python, which may have no backends, goes by its own name. It never passes for gloo, whose habits
    (waiting in ticks, a reduce-scatter that is better avoided) are those of torch's own.

    Raises:
        ValueError: none does.
    """
    if type(group) is not ProcessGroup:
        own = str(group.name()).lower()
        return own if own not in ("", "gloo") else type(group).__name__.lower()
    try:
        name = backend_of(group, device).name()
    except RuntimeError as error:
        raise ValueError(
            f"fully_shard(mesh=...): the process group of the mesh has no backend for device {device.type!r}; call "
            "init_process_group with one, e.g. backend='cpu:gloo,cuda:nccl'"
        ) from error
    return str(name).lower()


def own_rank() -> int:
    """The number of this rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def timeout_of(group: ProcessGroup | None, device: torch.device) -> float:
    """Seconds after which the group's ranks give up: its own timeout, or that of the default group (None) if it is shorter.

    Groups that `init_device_mesh` makes have torch's 30 minutes, whatever `init_process_group(timeout=...)` was told.
    """
    found: list[float] = []
    for of in (group, dist.group.WORLD):
        try:
            timeout = timeout_of_backend(backend_of(of, device)) if of is not None else None
        except RuntimeError:  # the default group does not serve this device
            continue
        if timeout is not None:
            found.append(timeout.total_seconds())
    return min(found, default=dist.default_pg_timeout.total_seconds())


def subgroup(group: ProcessGroup, rank: int, size: int, device: torch.device) -> ProcessGroup:
    """The group of `size` neighbouring ranks of `group` that this rank (number `rank` in it) belongs to.

    Every rank of `group` calls it; a group is made once for all callers.
    """
    first = rank // size * size
    ranks = dist.get_process_group_ranks(group)[first : first + size]
    return shared_group("part", ranks, timeout_of(group, device))


_shared_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[str, tuple[int, ...]], ProcessGroup]]
_shared_groups = weakref.WeakKeyDictionary()
"""By the default group, which is each thread's own where ranks are threads."""


def shared_group(purpose: str, ranks: list[int], timeout: float) -> ProcessGroup:
    """The group of some ranks for one purpose; they all call it. Made once, and again if it was destroyed meanwhile.

    Args:
        purpose: what it is for.
        ranks: their numbers in the default group.
        timeout: seconds, if the group is made now.
    """
    known, key = _shared_groups.setdefault(_world(), {}), (purpose, tuple(ranks))
    found = known.get(key)
    if found is None or not is_alive(found):
        found = known[key] = new_group(purpose, ranks, timedelta(seconds=timeout))
    return found


_counts: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""How many groups were made beside a default group, by the beginnings of their names."""


def new_group(purpose: str, ranks: list[int], timeout: timedelta | None, backend: str | None = None) -> ProcessGroup:
    """A new group of some ranks, which all call it as often; see `torch_private.named_group`."""
    counts = _counts.setdefault(_world(), Counter())
    # Alike on its ranks, whatever other groups each of them is in; and short, however many they are.
    name = f"hsdp_{purpose}_{backend}_{hashlib.sha1(repr(sorted(ranks)).encode(), usedforsecurity=False).hexdigest()}"
    counts[name] += 1
    return named_group(f"{name}_{counts[name]}", ranks, timeout, backend)


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "groups are made beside a default group"
    return world

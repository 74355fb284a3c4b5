"""Parameters that share memory without being one parameter: what was one weight becomes several when it is sharded.

`load_state_dict(assign=True)` unties weights so, and so does `other.data = weight.data`. On one device an optimizer steps
both at once; shards have memory of their own, and would go apart without a word.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hsdp.params.local import local_of
from hsdp.params.subclass import parts_of
from hsdp.torch_private import has_storage, storage_key, storage_uses


@dataclass(frozen=True)
class _Span:
    """Bytes from `start` to `stop` of a storage that a parameter lies in."""

    start: int
    stop: int
    name: str
    param: nn.Parameter

    def meets(self, other: _Sharded) -> bool:
        """Whether it lies where a parameter did that is sharded by now, and one of the two is trained."""
        trained = self.param.requires_grad or other.trained
        return trained and self.start < other.stop and other.start < self.stop and other.param() is not self.param


@dataclass(frozen=True)
class _Sharded:
    """Where a parameter lay that is sharded by now, in a storage that somebody else held, too."""

    start: int
    stop: int
    name: str
    trained: bool
    param: Any
    storage: StorageWeakRef


_left: dict[int, list[_Sharded]] = {}
"""Storages that held parameters which are sharded by now, and that were others' too."""


def check_apart(params: Sequence[tuple[str, nn.Parameter]], unit: str) -> None:
    """Looks for memory that parameters share, before they become those of one unit. Warns if another unit had a part of it.

    Raises:
        ValueError: two of them share memory, and one is trained.
    """
    for key, gone in list(_left.items()):
        if gone[0].storage.expired():
            del _left[key]
    by_storage: dict[int, list[_Span]] = {}
    shared: list[tuple[int, Tensor, _Span]] = []
    for name, param in params:
        for key, part, span in _spans_of(name, param):
            by_storage.setdefault(key, []).append(span)
            if storage_uses(part) > 1:
                shared.append((key, part, span))
    for spans in by_storage.values():
        _refuse_overlaps(sorted(spans, key=lambda span: span.start), unit)
    for key, part, span in shared:
        before = next(filter(span.meets, _left.get(key, ())), None)
        if before is not None:
            warnings.warn(
                f"hsdp: fully_shard({unit}): parameter {span.name!r} shares memory with {before.name}, which is sharded "
                "already, and is not the same parameter: from now on each has values of its own "
                "(load_state_dict(assign=True) unties weights so). If they are to be one, tie them (module.weight = "
                "other.weight) before fully_shard",
                stacklevel=4,
            )
        storage = StorageWeakRef(part.untyped_storage())
        ref, trained = weakref.ref(span.param), span.param.requires_grad
        where = f"{span.name!r} of {unit}"
        _left.setdefault(key, []).append(_Sharded(span.start, span.stop, where, trained, ref, storage))


def _spans_of(name: str, param: nn.Parameter) -> Iterator[tuple[int, Tensor, _Span]]:
    for part in parts_of(local_of(param)):
        if part.numel() and has_storage(part):
            start = int(part.storage_offset()) * part.itemsize
            # Of what has gaps, where others may lie, the first element alone is sure.
            stop = start + (part.numel() * part.itemsize if part.is_contiguous() else 1)
            yield storage_key(part.untyped_storage()), part, _Span(start, stop, name, param)


def _refuse_overlaps(spans: Sequence[_Span], unit: str) -> None:
    reaches: Any = None  # the span that ends last, so far
    for span in spans:
        overlaps = reaches is not None and span.start < reaches.stop and span.param is not reaches.param
        if overlaps and (span.param.requires_grad or reaches.param.requires_grad):
            raise ValueError(
                f"fully_shard({unit}): parameters {reaches.name!r} and {span.name!r} share memory and are not one "
                "parameter, so that the sharded ones would go apart (load_state_dict(assign=True) unties weights so); "
                "make them one before (module.weight = other.weight), or give each memory of its own "
                "(nn.Parameter(weight.clone()))"
            )
        if reaches is None or span.stop > reaches.stop:
            reaches = span

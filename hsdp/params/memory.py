"""Parameters that share memory without being one parameter: one weight would become several when it is sharded.

`load_state_dict(assign=True)` unties weights so, and so does `other.data = weight.data`. On one device an optimizer steps
both at once; shards have memory of their own, and would silently drift apart.
"""

from __future__ import annotations

import warnings
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hsdp.params.local import local_of
from hsdp.params.param import ParamName
from hsdp.params.subclass import parts_of
from hsdp.torch_private import has_storage, storage_key, storage_uses

_start_of = attrgetter("start")
_TABLES = frozenset(vars(nn.Module()))
"""The attributes of every module: its parameters, buffers, hooks."""


@dataclass(frozen=True)
class _Span:
    """Bytes from `start` to `stop` of a storage that a parameter of `unit` lies in, or lay in before it was sharded."""

    start: int
    stop: int
    place: ParamName
    unit: str
    trained: bool

    def meets(self, other: _Span) -> bool:
        """Whether two spans overlap, and one of the two parameters is trained."""
        return (self.trained or other.trained) and self.start < other.stop and other.start < self.stop


class _Storage:
    """A storage that other tensors use too, and where in it parameters lay that are sharded by now."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.ref = StorageWeakRef(storage)
        self._spans: list[_Span] = []  # by their starts

    def add(self, span: _Span) -> _Span | None:
        """Notes a span; returns one that it meets, if there is any.

        A file of weights may be one storage with thousands of parameters in it, hardly any of which overlap: those that
        begin inside of the span are looked at, and the one before. A model that is gone, and was built of the same file
        before this one, does not count.
        """
        first = max(0, bisect_left(self._spans, span.start, key=_start_of) - 1)
        behind = bisect_left(self._spans, span.stop, key=_start_of)
        near = [other for other in self._spans[first:behind] if other.place.module() is not None]
        self._spans[first:behind] = near
        insort(self._spans, span, key=_start_of)
        # Where `fully_shard` was refused, it is called again with the same parameter in the same place.
        return next((other for other in near if span.meets(other) and not _is_same(span.place, other.place)), None)

    def met_by(self, span: _Span) -> _Span | None:
        """One of the noted spans, of models that are there, that a span meets."""
        return next((other for other in self._spans if span.meets(other) and other.place.module() is not None), None)


_left: dict[int, _Storage] = {}
"""Storages of parameters that are sharded by now, which other tensors use too."""


def check_apart(params: Sequence[tuple[ParamName, nn.Parameter]], unit: str) -> None:
    """Looks for memory that parameters share, before they become those of one unit. Warns if another unit had a part of it.

    Raises:
        ValueError: two of them share memory, and one is trained.
    """
    # As many as may be added here, the oldest first, so that the table does not grow with what is freed.
    for key in list(islice(_left, len(params))):
        storage = _left.pop(key)
        if not storage.ref.expired():
            _left[key] = storage
    spans: dict[int, list[_Span]] = {}
    shared: list[tuple[int, Tensor, _Span]] = []
    for place, param in params:
        for key, part, span in _spans_of(place, param, unit):
            spans.setdefault(key, []).append(span)
            if storage_uses(part) > 1 or key in _left:  # the last user of a storage, whose earlier ones are noted
                shared.append((key, part, span))
    for those in spans.values():
        _refuse_overlaps(sorted(those, key=_start_of), unit)
    met = []
    for key, part, span in shared:
        if key not in _left:
            _left[key] = _Storage(part.untyped_storage())
        if (other := _left[key].add(span)) is not None:
            met.append((span, other))
    if met:
        span, other = met[0]
        more = f", and so it is with {len(met) - 1} more" if len(met) > 1 else ""
        warnings.warn(
            f"hsdp: fully_shard({unit}): parameter {span.place.fqn!r} shares memory with {other.place.fqn!r} of "
            f"{other.unit}, which is sharded already, and is not the same parameter{more}: from now on each has values of "
            "its own (load_state_dict(assign=True) unties weights so). If they are to be one, tie them (module.weight = "
            "other.weight) before fully_shard",
            stacklevel=4,
        )


def check_kept(modules: Sequence[nn.Module], unit: str) -> None:
    """Looks for buffers, and tensors in attributes, in memory of parameters that `check_apart` has seen.

    Args:
        modules: those of a unit. The parameters may be those of units inside of it.
        unit: its name.

    Raises:
        ValueError: one lies in that of a parameter that is trained.
    """
    parts = chain.from_iterable(module.named_modules() for module in modules if _left)
    for (prefix, part), (kind, name, tensor) in ((one, kept) for one in parts for kept in _kept_by(one[1])):
        fqn = f"{prefix}.{name}" if prefix else name
        for key, _, span in _spans_of(ParamName(weakref.ref(part), name, fqn), tensor, unit):
            if key in _left and (other := _left[key].met_by(span)) is not None:
                raise ValueError(
                    f"fully_shard({unit}): {kind} {fqn!r} lies in the memory of parameter {other.place.fqn!r} of "
                    f"{other.unit}; shards have memory of their own, and the {kind} would keep the values of now: "
                    "compute what it is for from the parameter in the forward, or keep a clone"
                )


def _kept_by(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """The buffers of a module itself, and the tensors in its attributes or in lists and dicts there: kind, name, tensor."""
    for name, buffer in module.named_buffers(recurse=False):
        yield "buffer", name, buffer
    for name, value in vars(module).items():
        if name in _TABLES or f"{name}_orig" in module._parameters:  # `torch.nn.utils.spectral_norm` makes it anew
            continue
        found = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for tensor in found:
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                yield "attribute", name, tensor


def _spans_of(place: ParamName, param: Tensor, unit: str) -> Iterator[tuple[int, Tensor, _Span]]:
    for part in parts_of(local_of(param)):
        if part.numel() and has_storage(part):
            start = int(part.storage_offset()) * part.itemsize
            # Gaps may belong to other tensors: then the first element alone is sure.
            stop = start + (part.numel() * part.itemsize if part.is_contiguous() else 1)
            yield storage_key(part.untyped_storage()), part, _Span(start, stop, place, unit, param.requires_grad)


def _is_same(one: ParamName, other: ParamName) -> bool:
    return one.name == other.name and one.module() is other.module()


def _refuse_overlaps(spans: Sequence[_Span], unit: str) -> None:
    reaches = spans[0]  # the span that ends last, so far
    for span in spans[1:]:
        if span.place is not reaches.place and span.meets(reaches):
            raise ValueError(
                f"fully_shard({unit}): parameters {reaches.place.fqn!r} and {span.place.fqn!r} share memory and are not "
                "one parameter, so that the sharded ones would go apart (load_state_dict(assign=True) unties weights "
                "so); make them one before (module.weight = other.weight), or give each memory of its own "
                "(nn.Parameter(weight.clone()))"
            )
        if span.stop > reaches.stop:
            reaches = span

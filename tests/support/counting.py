"""Counters that watch torch operators go by: collectives and their bytes, bytes copied, live bytes.

All are dispatch modes and see what the thread that entered them does: forward, and on the CPU the backward too. They
nest. Operators on DTensors are seen as what they become on local tensors.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("allreduce", "all_reduce"),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce_",),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "barrier": ("barrier", "monitored_barrier"),
    "send": ("send", "isend"),
    "receive": ("recv", "irecv"),
}
# What a collective among n ranks costs on the wire: which operand's bytes, times what.
_WIRE: dict[str, tuple[str, Callable[[int], float]]] = {
    "all_gather": ("bytes_out", lambda n: (n - 1) / n),
    "reduce_scatter": ("bytes_in", lambda n: (n - 1) / n),
    "all_to_all": ("bytes_in", lambda n: (n - 1) / n),
    "all_reduce": ("bytes_in", lambda n: 2 * (n - 1) / n),
    # On average over ranks: all but one receive it, or send it.
    "broadcast": ("bytes_in", lambda n: (n - 1) / n),
    "reduce": ("bytes_in", lambda n: (n - 1) / n),
}


class _Watch(TorchDispatchMode):
    """Calls `before` and `after` around every operator on plain tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # lets DTensor run first: its local operators come here then
        kwargs = kwargs or {}
        self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self.after(func, args, kwargs, result)
        return result

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Called before an operator runs."""

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called when it has run."""


@dataclass(frozen=True)
class Call:
    """One collective call. `transfers` is the number of tensors it moved, more than 1 when coalesced."""

    kind: str
    op: str
    group: str
    size: int
    transfers: int
    bytes_in: int
    bytes_out: int
    dtypes: tuple[torch.dtype, ...]
    in_ptrs: tuple[int, ...]
    out_ptrs: tuple[int, ...]

    @property
    def wire_bytes(self) -> float:
        """What a rank sends (and receives), by the formulas of docs/formulas.md; 0 for kinds that have none there."""
        if self.kind not in _WIRE:
            return 0.0
        operand, factor = _WIRE[self.kind]
        return float(getattr(self, operand) * factor(self.size))


@dataclass(frozen=True)
class Total:
    """Sums over calls."""

    calls: int
    transfers: int
    bytes_in: int
    bytes_out: int
    wire_bytes: float


class CollectiveCounter(_Watch):
    """Records every collective that starts while it is entered, in order, in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace in ("c10d", "_c10d_functional"):
            bound = _bind(func, args, kwargs)
            if "process_group" in bound or "group_name" in bound:  # else it waits, wraps or checks
                self.calls.append(_call(func._schema.name.partition("::")[2], bound, result))

    def select(self, kind: str | None = None, group: dist.ProcessGroup | None = None) -> list[Call]:
        """The calls of one kind and/or group, in order."""
        return [
            call for call in self.calls if kind in (None, call.kind) and (group is None or call.group == group.group_name)
        ]

    def total(self, kind: str | None = None, group: dist.ProcessGroup | None = None) -> Total:
        """Sums over `select`."""
        calls = self.select(kind, group)
        return Total(
            len(calls),
            sum(call.transfers for call in calls),
            sum(call.bytes_in for call in calls),
            sum(call.bytes_out for call in calls),
            sum(call.wire_bytes for call in calls),
        )

    def counts(self) -> dict[str, int]:
        """Number of calls by kind."""
        return dict(Counter(call.kind for call in self.calls))


@dataclass(frozen=True)
class Copy:
    """One operator that copied: bytes read and written, and whether dtypes differ (then it is a cast)."""

    op: str
    read: int
    written: int
    cast: bool


class CopyCounter(_Watch):
    """Records, in `copies`, operators that move bytes without computing: copies, casts, concatenation, padding."""

    _MORE = ("clone", "copy_", "cat", "stack", "_foreach_copy_", "_chunk_cat", "constant_pad_nd", "repeat")
    _FSDP = ("all_gather_copy_in", "chunk_cat", "copy_", "split_with_sizes_copy")

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Copy] = []

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "aten":
            copying = name in self._MORE or name.endswith("_copy")
        else:
            copying = func.namespace == "fsdp" and name in self._FSDP  # its kernels hide their aten operators
        if copying:
            self._record(name, _bind(func, args, kwargs), result)

    def _record(self, name: str, bound: dict[str, Any], result: Any) -> None:
        operands = list(bound.values())
        if name in ("copy_", "_foreach_copy_"):
            targets, sources = _tensors(operands[0]), _tensors(operands[1])
        elif name == "all_gather_copy_in":
            sources = targets = _tensors(bound["all_gather_inputs"])
        else:
            targets = _tensors(bound["out"]) if "out" in bound else _tensors(result)
            sources = [one for key, operand in bound.items() if key != "out" for one in _tensors(operand)]
        cast = {one.dtype for one in sources} != {one.dtype for one in targets}
        if targets:
            self.copies.append(Copy(name, _bytes(sources), _bytes(targets), cast))

    def written(self, *, casts: bool | None = None, min_bytes: int = 0) -> int:
        """Bytes written; only by casts or by others if told, only by calls that wrote at least `min_bytes`."""
        return sum(one.written for one in self._select(casts, min_bytes))

    def read(self, *, casts: bool | None = None, min_bytes: int = 0) -> int:
        """Bytes read, likewise."""
        return sum(one.read for one in self._select(casts, min_bytes))

    def by_op(self) -> dict[str, int]:
        """Bytes written by operator, the largest first."""
        sums: Counter[str] = Counter()
        for one in self.copies:
            sums[one.op] += one.written
        return dict(sums.most_common())

    def _select(self, casts: bool | None, min_bytes: int) -> Iterator[Copy]:
        return (one for one in self.copies if casts in (None, one.cast) and one.written >= min_bytes)


class LiveBytes(_Watch):
    """Bytes of tensor memory alive beyond what was alive when it was entered: `live` now, `peak` at most.

    No operator tells of `untyped_storage().resize_()`, so all known storages are measured again at each operator.
    What was alive before counts by its change: a buffer that is refilled adds, a parameter that is freed subtracts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._baseline = 0
        self.peak = 0
        self.peak_sizes: list[int] = []  # sizes of all storages made inside, at the peak, the largest first
        self._old: set[int] = set()

    def __enter__(self) -> LiveBytes:
        gc.collect()  # or garbage of before, collected inside, would count as freed
        for found in gc.get_objects():
            if issubclass(type(found), Tensor):
                self._note(found, old=True)
        super().__enter__()
        return self

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        for one in _tensors((args, list(kwargs.values()))):
            # Unknown though nothing made it inside: only C++ held it when we entered (a gradient, for instance).
            self._note(one, old=True)
        self._measure()

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        for one in _tensors(result):
            self._note(one, old=False)
        self._measure()

    @property
    def live(self) -> int:
        """Bytes alive now, less what was alive at the start; negative when more was freed than made."""
        return sum(storage.nbytes() for storage in self._storages()) - self._baseline

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = 0
        self._measure()

    def _measure(self) -> None:
        live = self.live
        if live > self.peak:
            self.peak = live
            new = [ref() for key, ref in self._known.items() if key not in self._old]
            self.peak_sizes = sorted((one.nbytes() for one in new if one is not None), reverse=True)

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        return (storage for ref in list(self._known.values()) if (storage := ref()) is not None)

    def _note(self, tensor: Tensor, old: bool) -> None:
        # Fake tensors, which torch.compile leaves behind, say that they are on a device and take nothing there.
        if isinstance(tensor, (DTensor, FakeTensor)) or tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return

        def forget(_: object) -> None:
            self._known.pop(key, None)
            self._old.discard(key)

        self._known[key] = weakref.ref(storage, forget)
        if old:
            self._old.add(key)
            self._baseline += storage.nbytes()


def _bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the names in the operator's schema."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _call(name: str, bound: dict[str, Any], result: Any) -> Call:
    inputs = [one for key, value in bound.items() if key.startswith("input") for one in _tensors(value)]
    outputs = [one for key, value in bound.items() if key.startswith("out") for one in _tensors(value)]
    inputs = inputs or _tensors(bound.get("tensors", bound.get("tensor")))
    outputs = outputs or (_tensors(result) if "group_name" in bound else inputs)
    group = _group(bound)
    return Call(
        kind=next((kind for kind, starts in _KINDS.items() if name.lstrip("_").startswith(starts)), name),
        op=name,
        group=group.group_name,
        size=group.size(),
        transfers=max(len(inputs), 1) if name != "barrier" else 0,
        bytes_in=_bytes(inputs),
        bytes_out=_bytes(outputs),
        dtypes=tuple(dict.fromkeys(one.dtype for one in inputs)),
        in_ptrs=tuple(one.data_ptr() for one in inputs),
        out_ptrs=tuple(one.data_ptr() for one in outputs),
    )


def _group(bound: dict[str, Any]) -> dist.ProcessGroup:
    if "group_name" in bound:
        named = bound["group_name"]
        return distributed_c10d._resolve_process_group(named) if isinstance(named, str) else named
    return dist.ProcessGroup.unbox(bound["process_group"])


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def no_shared_memory() -> Any:
    """Patches hsdp so that ranks that meet inside it communicate by gloo alone."""
    return mock.patch("hsdp.comm.collectives.host_memory_of", lambda group: None)


def by_sockets(check: Callable[..., Any]) -> Callable[..., Any]:
    """Has ranks communicate by gloo alone in a function that counts gloo's calls, or tests how hsdp uses it."""

    @functools.wraps(check)
    def call(*args: Any, **kwargs: Any) -> Any:
        with no_shared_memory():
            return check(*args, **kwargs)

    return call

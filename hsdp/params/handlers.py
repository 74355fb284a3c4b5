"""DTensor's table of operators that somebody does otherwise than DTensor itself, one for the process; hsdp's entries in it.

A handler does an operator as torch does with `as_torch_does`. Its entry stays in the table meanwhile, and is hidden from
that thread alone: other threads, which train another model, or save this one, do the same operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the operator and its arguments."""


class _Hidden(threading.local):
    """The operators whose handlers this thread passes by."""

    ops: tuple[Any, ...] = ()


_hidden = _Hidden()


class _Entry:
    """An operator as a key of the table. DTensor asks the table for the operator, and a dict compares its keys with it."""

    __slots__ = ("op",)

    def __init__(self, op: Any) -> None:
        self.op = op

    def __hash__(self) -> int:
        return hash(self.op)

    def __eq__(self, other: object) -> bool:
        return other is self or (other is self.op and other not in _hidden.ops)


def handle(ops: Iterable[Any], handler: Handler) -> None:
    """Has DTensor call `handler` for these operators from now on, on all meshes."""
    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    table.update((_Entry(op), handler) for op in ops)


@contextmanager
def past_handler(op: Any) -> Iterator[None]:
    """Inside it this thread does an operator as DTensor does."""
    before = _hidden.ops
    _hidden.ops = (*before, op)
    try:
        yield
    finally:
        _hidden.ops = before


def as_torch_does(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Does an operator as DTensor does."""
    with past_handler(op):
        return op(*args, **(kwargs or {}))

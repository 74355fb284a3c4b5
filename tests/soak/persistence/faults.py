"""Errors where a state is on its way: at a torch operator, or at the use of a file, on the rank that a fault names."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from hsdp.checkpoint import reading
from tests.soak.persistence.programs import Fault

_USES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")
"""Python's audit events of the uses of files that fail."""


class Planted(Exception):  # noqa: N818
    """What the errors of a fault are, besides the types that programs know."""


class _PlantedMemoryError(Planted, MemoryError):
    pass


class _PlantedRuntimeError(Planted, RuntimeError):
    pass


class _PlantedSystemError(Planted, OSError):
    pass


class Charge:
    """Goes off at one of the moments that it counts, once; `fired` tells whether it has, and `where` in the code."""

    def __init__(self, count: int, error: str) -> None:
        self.left, self.error = count, error
        self.fired = False
        self.where = ""

    def count(self) -> None:
        """A moment.

        Raises:
            Planted: it is the one.
        """
        self.left -= 1
        if self.left < 0 and not self.fired:
            self.fired = True
            self.where = "".join(traceback.format_stack(limit=9)[:-2])
            if self.error == "OSError":
                raise _PlantedSystemError(errno.EIO, "planted")
            raise (_PlantedMemoryError if self.error == "MemoryError" else _PlantedRuntimeError)("planted")


class _Operators(TorchDispatchMode):
    """Counts what torch computes on this thread, but views, which need no memory, and the messages of ranks: those that
    wait for one have no other way to hear that it cannot be made."""

    def __init__(self, charge: Charge) -> None:
        super().__init__()
        self._charge = charge

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" not in func.namespace and not _gives_a_view(func) and not _talks():
            self._charge.count()
        return func(*args, **(kwargs or {}))


def _talks() -> bool:
    """Whether the code that computes is that of a message or of a collective, or none of hsdp's."""
    messages = ("_post", "_receive", "alike", "_are_equal", "_summed")
    frame = sys._getframe(2)
    while frame is not None and "/hsdp/" not in frame.f_code.co_filename and "c10d" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or frame.f_code.co_name in messages or "c10d" in frame.f_code.co_filename


def _gives_a_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


_watching: tuple[str, Charge] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching is not None and event in _USES and args and isinstance(args[0], (str, os.PathLike)):
        directory, charge = _watching
        if os.fspath(args[0]).startswith(directory):
            charge.count()


_hooked: list[bool] = []


@contextlib.contextmanager
def planted(fault: Fault | None, rank: int, directory: str) -> Iterator[Charge]:
    """The fault is there in the body, if it is this rank's; the files are those of a directory."""
    global _watching
    place, count, where, error = fault or ("", 0, None, "")
    charge = Charge(count, error)
    if fault is None or where not in (None, rank):
        yield charge
        return
    if place == "op":
        with _Operators(charge):
            yield charge
        return
    if not _hooked:  # it cannot be removed
        sys.addaudithook(_audit)
        _hooked.append(True)
    _watching = directory, charge
    try:
        with _counted(reading, "read_into", charge), _counted(os, "fsync", charge):
            yield charge
    finally:
        _watching = None


def _counted(owner: Any, name: str, charge: Charge) -> Any:
    call: Callable[..., Any] = getattr(owner, name)

    def counting(*args: Any) -> Any:
        charge.count()
        return call(*args)

    return mock.patch.object(owner, name, counting)

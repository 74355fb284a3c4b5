"""The files of one checkpoint while it is read."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from hsdp.checkpoint.remote import AnyPath

_MOST_OPEN = 256


class OpenFiles:
    """The files of one checkpoint, opened as they are needed, and kept open: what is deleted meanwhile can still be
    read."""

    def __init__(self, open_file: Callable[[str], BinaryIO]) -> None:
        self._open = open_file
        self._streams: OrderedDict[str, BinaryIO] = OrderedDict()

    def open(self, name: str) -> BinaryIO:
        """A file, at any position; not to be closed."""
        if name not in self._streams:
            if len(self._streams) >= _MOST_OPEN:
                self._streams.popitem(last=False)[1].close()
            self._streams[name] = self._open(name)
        self._streams.move_to_end(name)
        return self._streams[name]

    def close(self) -> None:
        """Closes all."""
        while self._streams:
            self._streams.popitem()[1].close()


def opener(path: AnyPath) -> Callable[[str], BinaryIO]:
    """Opens files of a directory, unbuffered."""

    def open_file(name: str) -> BinaryIO:
        check_kind(path / name)
        return cast(BinaryIO, (path / name).open("rb", buffering=0))

    return open_file


def check_kind(path: AnyPath) -> None:
    """Raises OSError of what is there and is neither file nor directory: a named pipe would keep its reader waiting."""
    if isinstance(path, Path) and path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is not a file", str(path))

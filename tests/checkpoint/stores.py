"""File systems of fsspec that have no rename: one in memory that dies, one on disk that several processes share."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from hsdp.checkpoint import RemotePath


class Crash(BaseException):
    """The process is gone: no cleanup may count on running after it."""


class Fragile(MemoryFileSystem):
    """Memory in which the process dies at the operation that `die_at` says; what it wrote stays. Objects are removed one by
    one, and one that is being written may be there without content."""

    protocol = ("fragile",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    die_at: ClassVar[int] = 0
    operations: ClassVar[int] = 0
    failure: ClassVar[BaseException | None] = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).replace("fragile://", "memory://"))

    @classmethod
    def die(cls, at: int) -> None:
        """Dies at the operation of this number from now on, and stays dead; 0: lives."""
        Fragile.die_at, Fragile.operations = at, 0

    def _operate(self) -> None:
        Fragile.operations += 1
        if Fragile.die_at and Fragile.operations >= Fragile.die_at:
            raise Crash

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        try:
            self._operate()
        except Crash:
            if Fragile.operations == Fragile.die_at:
                MemoryFile(self, self._strip_protocol(path), b"").commit()
            raise
        super().pipe_file(path, value, mode)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self._operate()
        return super()._open(path, mode, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._operate()
        if Fragile.failure is not None:
            raise Fragile.failure
        return super().info(path)

    def rm_file(self, path: str) -> None:
        self._operate()
        del self.store[self._strip_protocol(path)]

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for name in self.find(path):
            self.rm_file(name)
        below = self._strip_protocol(path)
        self.pseudo_dirs[:] = [one for one in self.pseudo_dirs if one != below and not one.startswith(f"{below}/")]


class NoRename(LocalFileSystem):
    """Files on disk that cannot be renamed."""

    protocol = ("norename",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("norename://"))

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("an object store renames nothing")

    mv_file = mv


def register() -> None:
    """Makes their URLs known to this process."""
    for kind in (Fragile, NoRename):
        fsspec.register_implementation(kind.protocol[0], kind, clobber=True)


def names(url: str) -> list[str]:
    """What is below a URL."""
    return sorted(path.name for path in RemotePath(url).iterdir())

"""Paths in the file systems of fsspec, object stores say: the part of pathlib's interface that checkpoints use.

    s3://bucket/run     gs://bucket/run     memory://run     and whatever else fsspec, or a package for it, knows

An object store has no directories, only objects whose names begin alike, and no rename. An object appears when it is
written to its end, and is then seen by everybody.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
from collections.abc import Iterator
from functools import total_ordering
from pathlib import Path
from typing import Any

_PART = 16 << 20
"""How many bytes are handed to fsspec at a time: it may keep a copy of what it is handed."""
_BLOCK = 64 << 20
"""How many bytes an object is uploaded by; stores bound the number of such parts, S3 by 10,000."""


@total_ordering
class RemotePath(os.PathLike[str]):
    """A path in a file system of fsspec, which `save` and `load` take as they take its URL.

    Errors of any kind come out of its methods as OSError, with the URL.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """Finds the file system; nothing is read or written.

        Args:
            url: the URL, "s3://bucket/run" say.
            options: what fsspec hands to the file system: credentials, an endpoint. Without them it takes what its own
                configuration says.

        Raises:
            ImportError: fsspec, or the package that it needs for this kind of URL, is not installed.
            ValueError: no file system is known for this kind of URL, or it names nothing in one.
        """
        self._url = url.rstrip("/")
        self._fs, self._path = _fsspec().core.url_to_fs(url, **options)
        self._path = self._path.rstrip("/")
        if not self._path:
            raise ValueError(f"{url!r} names no directory; give a URL like 's3://bucket/run' or 'memory://run'")

    def _other(self, url: str, path: str) -> RemotePath:
        made = object.__new__(RemotePath)
        made._url, made._fs, made._path = url, self._fs, path
        return made

    def __truediv__(self, name: str) -> RemotePath:
        return self._other(f"{self._url}/{name}", f"{self._path}/{name}")

    def __fspath__(self) -> str:
        return self._url

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < other._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The URL without its last part."""
        return self._other(self._url.rpartition("/")[0], self._path.rpartition("/")[0])

    # -- looking ---------------------------------------------------------------------------------------------------

    def _type(self) -> str | None:
        """ "file" or "directory"; None for what is not there. fsspec's own `exists` calls what cannot be read missing."""
        try:
            with self._named_errors():
                self._fs.invalidate_cache()  # other processes write there too
                return str(self._fs.info(self._path)["type"])
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it."""
        return self._type() is not None

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        return self._type() == "directory"

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self._type() == "file"

    def iterdir(self) -> Iterator[RemotePath]:
        """What is directly below it."""
        for entry in self._listed():
            yield self / entry["name"].rstrip("/").rpartition("/")[2]

    def sizes(self) -> dict[str, int]:
        """The sizes in bytes of the files directly below it, by name: a request for many, where each would be one."""
        found = {entry["name"].rpartition("/")[2]: entry for entry in self._listed()}
        return {name: int(entry["size"]) for name, entry in found.items() if entry["type"] == "file"}

    def _listed(self) -> list[dict[str, Any]]:
        with self._named_errors():
            self._fs.invalidate_cache()
            entries = self._fs.ls(self._path, detail=True)
        # Some stores have an object that stands for the directory itself.
        return [entry for entry in entries if entry["name"].strip("/") != self._path.strip("/")]

    # -- reading and writing ---------------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """The content."""
        with self._named_errors():
            return bytes(self._fs.cat_file(self._path))

    def write_bytes(self, data: bytes) -> None:
        """Writes an object at once; in an object store it appears whole or not at all."""
        with self._named_errors():
            self._fs.pipe_file(self._path, data)

    def open(self, mode: str, buffering: int = 0) -> io.RawIOBase:
        """Opens it as a file without a buffer, "rb" or "wb"; an object that is written appears when it is closed."""
        assert mode in ("rb", "wb") and not buffering, "nothing else is needed"
        with self._named_errors():
            more = {"block_size": _BLOCK} if mode == "wb" else {}
            return _Stream(self._fs.open(self._path, mode, **more), self)

    def mkdir(self) -> None:
        """Makes the directory and those above it, in a file system that has directories; never a bucket."""
        if "/" not in self._path or self.exists():
            return
        self.parent.mkdir()
        with contextlib.suppress(FileExistsError), self._named_errors():
            self._fs.mkdir(self._path, create_parents=False)

    def unlink(self) -> None:
        """Removes an object."""
        with self._named_errors():
            self._fs.rm_file(self._path)

    def remove_below(self) -> None:
        """Removes everything whose name begins with it, in whatever order; there may be nothing."""
        with contextlib.suppress(FileNotFoundError), self._named_errors():
            self._fs.invalidate_cache()
            self._fs.rm(self._path, recursive=True)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Packages for fsspec raise what they like, and OSErrors without a number."""
        try:
            yield
        except OSError as error:
            raise OSError(_number(error), error.strerror or str(error) or type(error).__name__, self._url) from error
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self._url) from error


AnyPath = Path | RemotePath
"""Where a file or a directory is."""


class _Stream(io.RawIOBase):
    """A file of fsspec as an unbuffered one of Python; what it buffers itself, it keeps to itself."""

    def __init__(self, file: Any, path: RemotePath) -> None:
        self._file = file
        self._named_errors = path._named_errors

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with self._named_errors():
            self._file.seek(offset, whence)
            return int(self._file.tell())

    def tell(self) -> int:
        with self._named_errors():
            return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        with self._named_errors():
            data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        part = memoryview(data).cast("B")[:_PART]
        with self._named_errors():
            count = self._file.write(part)
        return len(part) if count is None else int(count)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with self._named_errors():
                self._file.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The error that came first is the one to tell.
        with contextlib.suppress(*(() if error is None else (OSError,))):
            self.close()


def _number(error: OSError) -> int:
    kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, FileExistsError: errno.EEXIST}
    return error.errno or next((number for kind, number in kinds.items() if isinstance(error, kind)), errno.EIO)


def _fsspec() -> Any:
    try:
        importlib.import_module("fsspec.core")
        return importlib.import_module("fsspec")
    except ImportError as error:
        raise ImportError(
            "checkpoints at URLs need fsspec, an optional extra of hsdp: pip install 'hsdp[remote]', and for s3:// "
            "or gs:// also s3fs or gcsfs"
        ) from error

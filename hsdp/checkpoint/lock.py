"""The lock of a directory of checkpoints: one job saves there at a time, and a second one is told who does.

The operating system holds the lock for a process and lets go of it when the process ends, however it ends. The file says
which process it is, and for file systems without locks that is all there is: then the lock of a process that is gone, on
    this
host, counts for nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import socket
from pathlib import Path
from typing import IO, Any

from hsdp.errors import CheckpointError

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"

_held: dict[tuple[int, Path], IO[str]] = {}
"""Locks by process and file: a forked child inherits the table, not the locks. Used by the thread that calls `save`."""


def lock(directory: Path) -> None:
    """Takes the lock of a directory for as long as this process lives, if it does not have it already.

    Raises:
        CheckpointError: another process has it; names it.
    """
    file = directory.resolve() / LOCK
    if (held := _held.get((os.getpid(), file))) is not None:
        with contextlib.suppress(OSError):
            if os.fstat(held.fileno()).st_ino == file.stat().st_ino:
                return
        unlock(directory)  # the directory was removed, and perhaps made anew
    stream = file.open("a+", encoding="utf-8")
    try:
        _take(stream, directory)
    except BaseException:
        stream.close()
        raise
    _held[os.getpid(), file] = stream
    stream.truncate(0)
    stream.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}))
    stream.flush()


def unlock(directory: Path) -> None:
    """Gives up the lock of a directory, if this process has it."""
    file = directory.resolve() / LOCK
    stream = _held.pop((os.getpid(), file), None)
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.truncate(0)
        stream.close()


def _take(stream: IO[str], directory: Path) -> None:
    stream.seek(0)
    if fcntl is not None:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _taken(directory, _owner(stream)) from None
        else:
            return
    owner = _owner(stream)
    if owner and not _is_gone(owner):
        raise _taken(directory, owner)


def _taken(directory: Path, owner: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"process {owner.get('pid', '?')} on host {owner.get('host', '?')} is saving checkpoints to {directory}; end it, "
        f"or save to another directory (if there is no such process: remove {directory / LOCK})"
    )


def _owner(stream: IO[str]) -> dict[str, Any]:
    try:
        found = json.loads(stream.read(10_000))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether the process that a lock file names is known to have ended."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    if pid == os.getpid():
        return owner.get("started") == _started(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return owner.get("started") != _started(pid)  # another process has its number now


def _started(pid: int) -> str | None:
    """When a process began, as Linux counts it; None where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


@atexit.register
def _release() -> None:
    for _, file in list(_held):
        unlock(file.parent)

"""The lock of a directory of checkpoints: one job saves there at a time, and a second one is told who does.

The operating system holds the lock for a process and lets go of it when the process ends, however it ends; but also when
the process closes the file anywhere else, as a copy of the directory does. So each save takes the lock anew. The file says
which process has it: who is given the lock while that process lives (on this host) is not the first. For file systems
without locks that is all there is: then the lock of a process that is gone, on this host, counts for nothing.

An object store has no locks, and a job that was moved to another host must be able to go on, though nobody can tell it
whether the one before has ended. So there the later process takes the directory over, and the earlier one is told of it at
its next save.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import IO, Any

from hsdp.checkpoint.remote import AnyPath, RemotePath
from hsdp.errors import CheckpointError

logger = logging.getLogger("hsdp.checkpoint")

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"

_held: dict[tuple[int, Path], IO[str]] = {}
"""Locks by process and file: a forked child inherits the table, not the locks. Used by the thread that calls `save`."""

_claimed: dict[tuple[int, RemotePath], str] = {}
"""What this process wrote into lock files where there are no locks, by process and directory."""


def lock(directory: Path) -> None:
    """Takes the lock of a directory for as long as this process lives, if it does not have it already.

    Raises:
        CheckpointError: another process has it; names it.
    """
    file = directory.resolve() / LOCK
    if (held := _held.get((os.getpid(), file))) is not None:
        if _is_same(held, file):
            try:
                _take(held, directory)
            except BaseException:
                del _held[os.getpid(), file]
                held.close()
                raise
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
    inode = os.fstat(stream.fileno()).st_ino  # a copy of the directory has another
    stream.write(json.dumps({**_this_process(), "inode": inode}))
    stream.flush()


def owner_of(path: Path) -> str:
    """Whose a file or directory is, for messages."""
    try:
        return f"user {path.owner()!r}"
    except (KeyError, OSError, NotImplementedError):  # no such name here, as in a container; or no users at all
        with contextlib.suppress(OSError):
            return f"the user of number {path.lstat().st_uid}"
        return "another user"


def _is_same(stream: IO[str], file: Path) -> bool:
    """Whether an open file still has this name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(stream.fileno()), file.stat())
    return False


def unlock(directory: Path) -> None:
    """Gives up the lock of a directory, if this process has it."""
    file = directory.resolve() / LOCK
    stream = _held.pop((os.getpid(), file), None)
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.truncate(0)
        stream.close()


def claim(directory: RemotePath) -> None:
    """Takes a directory in which nothing can be locked, or sees that this process still has it.

    Raises:
        CheckpointError: a process on this host has it, or one took it since this one did; names it.
    """
    key, file = (os.getpid(), directory), directory / LOCK
    owner = _parsed(file.read_bytes()) if file.exists() else {}
    mine = _claimed.get(key)
    if mine is not None and owner.get("nonce") == mine:
        return
    if mine is not None and owner:
        raise CheckpointError(
            f"process {owner.get('pid', '?')} on host {owner.get('host', '?')} has begun to save checkpoints to "
            f"{directory} since this one did; end one of the two, or save to another directory"
        )
    if owner and not _is_gone(owner):
        if owner.get("host") == socket.gethostname():
            raise _taken(directory, owner)
        logger.warning(
            "process %s on host %s saved checkpoints to %s before; if it still runs, its next save will fail",
            owner.get("pid", "?"),
            owner.get("host", "?"),
            directory,
        )
    nonce = secrets.token_hex(8)
    file.write_bytes(json.dumps({**_this_process(), "nonce": nonce}).encode())
    _claimed[key] = nonce


def release(directory: AnyPath) -> None:
    """Lets another process save to a directory, if this one has locked or claimed it."""
    if not isinstance(directory, RemotePath):
        unlock(directory)
    elif _claimed.pop((os.getpid(), directory), None) is not None:
        (directory / LOCK).unlink()


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def _take(stream: IO[str], directory: Path) -> None:
    stream.seek(0)
    if fcntl is not None:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _taken(directory, _owner(stream)) from None
        else:
            owner = _owner(stream)
            here = owner.get("host") == socket.gethostname() and owner.get("inode") == os.fstat(stream.fileno()).st_ino
            if here and not _is_gone(owner):  # it has lost the lock, and does not know
                raise _taken(directory, owner)
            return
    owner = _owner(stream)
    if owner and not _is_gone(owner):
        raise _taken(directory, owner)


def _taken(directory: Path | RemotePath, owner: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"process {owner.get('pid', '?')} on host {owner.get('host', '?')} is saving checkpoints to {directory}; end it, "
        f"or save to another directory (if there is no such process: remove {directory / LOCK})"
    )


def _owner(stream: IO[str]) -> dict[str, Any]:
    return _parsed(stream.read(10_000))


def _parsed(text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether the process that a lock file names is known to have ended."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    if pid == os.getpid():
        return True  # this process itself, or one that had its number before (a container starts with the same ones again)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return owner.get("started") != _started(pid)  # another process has its number now


def _started(pid: int) -> str | None:
    """When a process began, as Linux counts it; None where that is not known, and of one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # a dead one stays there until its parent asks for it
    except (OSError, IndexError):
        return None


@atexit.register
def _release() -> None:
    for _, file in list(_held):
        unlock(file.parent)

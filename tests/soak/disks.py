"""Small disks, full ones, and ones that may not be written to, for tests that run as root on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_CAPABILITIES_V3, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 0x20080522, 1, 2


@contextlib.contextmanager
def small_disk(where: Path, size: str = "8m") -> Iterator[Path]:
    """A file system of a few megabytes."""
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def fill_disk(mount: Path) -> None:
    """Takes all the space there is."""
    with (mount / "another's").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(1 << 16)):
            pass


def remount(mount: Path, mode: str) -> None:
    """Mounts a file system that is mounted anew: mode "ro", read-only, or "rw"."""
    subprocess.run(["mount", "-o", f"remount,{mode}", str(mount)], check=True)


@contextlib.contextmanager
def obeying() -> Iterator[None]:
    """Permissions mean something in the body, also to root: the thread goes without the capabilities to pass over them."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0, os.strerror(ctypes.get_errno())
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
    assert libc.capset(header, fewer) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0, os.strerror(ctypes.get_errno())

"""A process group of which collectives do nothing at all, for host costs: torch's fake one copies on the host.

The fake backend copies each gathered tensor into its output rank by rank, a small operator each. No real backend does
that on the host. The C++ source beside this file, compiled once into torch's extension cache, leaves it out; everything
else is the fake group's, its name too.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.device import why_not
from tests.support.rig import RankEnv, fake_world


@contextmanager
def still_world(size: int) -> Iterator[RankEnv]:
    """`fake_world` with collectives that do nothing. It needs a C++ compiler, as the emulated device does."""
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg

    if (reason := why_not()) is not None:
        raise SystemExit(reason.replace("the emulated device", "benchmarks.host"))
    built = build()
    _register(lambda common, _: built.make(common.group_rank, common.group_size))
    try:
        with fake_world(size) as env:
            yield env
    finally:
        _register(_create_fake_pg)


def build() -> Any:
    """Compiles the extension, which takes half a minute, unless it was, and loads it; waits where another process does."""
    from torch.utils import cpp_extension

    source = Path(__file__).with_suffix(".cpp")
    return cpp_extension.load(f"hsdp_still_group_{_digest(source)}", [str(source)], extra_cflags=["-O1", "-g0"])


@functools.cache
def start_build() -> subprocess.Popen[bytes] | None:
    """Begins to compile it in a process of its own, where there is a compiler."""
    if why_not() is not None:
        return None
    command = [sys.executable, "-c", f"from {__name__} import build; build()"]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)


def _digest(source: Path) -> str:
    return hashlib.sha256(f"{torch.__version__} {sys.version}".encode() + source.read_bytes()).hexdigest()[:12]


def _register(create: Any) -> None:
    dist.Backend.register_backend("fake", create, extended_api=True, devices=["cpu"])

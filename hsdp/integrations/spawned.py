"""hsdp in the place of FSDP2 in processes that a script spawns: these import it anew, in an interpreter of their own.

parent    what the interpreter is told before it imports the script (its path, its name) has one more entry
child     unpickles that, which replaces FSDP2's functions and has its own children told the same, and then imports
"""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.fsdp as fsdp

from hsdp.api.fully_shard import fully_shard
from hsdp.integrations import replace_fsdp2

ENTRY = "hsdp"
"""The name of the entry, which multiprocessing does not look at."""


class _Replacing:
    """What its pickle does where it is read is all that it is for.

    It is source, as the child has not been told yet where the parent found hsdp, and may not find it by itself.
    """

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        paths = [*sys.path, str(Path(__file__).parents[2])]
        return exec, (f"import sys; sys.path += {paths!r}; import {__name__} as spawned; spawned.replace_here_and_below()",)


def replace_here_and_below() -> None:
    """`replace_fsdp2`, in this process and in those that it starts by multiprocessing's spawn or forkserver."""
    replace_fsdp2()
    prepare = multiprocessing.spawn.get_preparation_data
    if getattr(prepare, "__module__", None) == __name__:
        return  # it does already

    def prepare_replacing(name: str) -> dict[str, Any]:
        data = prepare(name)
        if vars(fsdp)["fully_shard"] is fully_shard:  # the script may have put FSDP2's back
            data[ENTRY] = _Replacing()
        return data

    multiprocessing.spawn.get_preparation_data = prepare_replacing

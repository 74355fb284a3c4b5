"""hsdp in libraries that shard models themselves: their calls of torch's `fully_shard` become calls of hsdp's.

accelerate, transformers' `Trainer` and `from_pretrained`, TRL and torchtitan import `fully_shard` from
`torch.distributed.fsdp`, some when they are imported, others when they shard. `replace_fsdp2()` reaches both:

    import hsdp.integrations

    hsdp.integrations.replace_fsdp2()

`python -m hsdp.integrations SCRIPT ...` and `python -m hsdp.integrations -m MODULE ...` do the same before a script that
nobody wants to edit. For a launcher it is a module: `accelerate launch -m hsdp.integrations train.py`.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch.distributed.fsdp as fsdp

from hsdp.api.forward_methods import register_fsdp_forward_method
from hsdp.api.fsdp2 import share_comm_ctx
from hsdp.api.fully_shard import fully_shard

__all__ = ["replace_fsdp2"]

_OWN: dict[str, Any] = {
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
"""FSDP2's functions that hsdp has too, by name. Its classes stay: hsdp takes the policies, and makes `FSDPModule`s."""

_TORCH = {name: getattr(fsdp, name) for name in _OWN}

_replaced: list[tuple[dict[str, Any], str]] = []
"""In the names of which modules, and which function."""


def replace_fsdp2(replace: bool = True) -> None:
    """Puts hsdp's functions in the place of FSDP2's, wherever a module that is imported has one under its own name.

    Call it before models are sharded; whether libraries are imported before or after it is the same. What has kept one
    under another name (`from torch.distributed.fsdp import fully_shard as shard`, a default argument) keeps FSDP2's.
    Models that are sharded already stay as they are, and go on working.

    Args:
        replace: False puts FSDP2's back where an earlier call replaced them. A module keeps what it imported from hsdp, and
            what it imported from `torch.distributed.fsdp` between the two calls.
    """
    if not replace:
        for names, function in _replaced:
            if names.get(function) is _OWN[function]:
                names[function] = _TORCH[function]
        _replaced.clear()
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "hsdp":
            names = getattr(module, "__dict__", {})
            for function in _OWN:
                # FSDP2's own file calls them for models that it has sharded.
                defined_here = names is inspect.unwrap(_TORCH[function]).__globals__
                if names.get(function) is _TORCH[function] and not defined_here:
                    names[function] = _OWN[function]
                    _replaced.append((names, function))

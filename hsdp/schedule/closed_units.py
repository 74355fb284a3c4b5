"""The error of a forward that computes with parameters of a unit which it has not called."""

from __future__ import annotations

from torch import nn

from hsdp.params.ownership import owner_of
from hsdp.unit.lookup import class_name

_MIXED = "mixed torch.Tensor and DTensor"
"""In the error of torch's operators that get both; all versions have it."""


def closed_unit_used(error: BaseException) -> str | None:
    """Names the parameters, and says what to do, if `error` is torch's about one of them; else None.

    Called before units are closed: then all parameters are sharded ones.
    """
    if not isinstance(error, RuntimeError) or _MIXED not in str(error):
        return None
    module, traceback = None, error.__traceback__
    while traceback is not None:  # the innermost module whose code ran
        this = traceback.tb_frame.f_locals.get("self")
        module = this if isinstance(this, nn.Module) else module
        traceback = traceback.tb_next
    if module is None:
        return None
    closed = [(name, owner.name) for name, param in module.named_parameters() if (owner := owner_of(param)) is not None]
    if not closed:
        return None
    names = ", ".join(f"{name!r} (unit {unit!r})" for name, unit in closed[:3]) + (", ..." if len(closed) > 3 else "")
    return (
        f"code of {class_name(module)} computes with a sharded parameter of a unit that it has not called, one of {names}: "
        f"it is whole only inside of its unit's forward. Make {class_name(module)} the unit, or call the module that "
        "holds the parameter"
    )

"""Which sums of gradients a sharded model has not sent, found without asking it.

A model that is asked drops what was zeroed and lands what is on its way, before the next action of a program does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hsdp.unit.zero_grad import ZeroGradSentinel


def pending(model: Any) -> bool:
    """Whether gradient sums wait to be communicated, or are lost."""
    return any(
        sums.stashed or sums.lost or sums.deferred_sums or (sums.deferred and sums.in_flight)
        for sums in (unit.gradients for unit in _units_not_zeroed(model))
    )


def lost(model: Any) -> bool:
    """Whether sums went with a backward that failed: whoever would take gradients for complete is refused."""
    return any(unit.gradients.lost for unit in _units_not_zeroed(model))


def _units_not_zeroed(model: Any) -> Iterator[Any]:
    """The units of which a sentinel stands in a gradient that nobody has zeroed."""
    if any(runtime.backward is not None for runtime in model._runtimes()):
        model.pending_gradients()  # behind a backward that failed, what is pending is known when it is cleared up
    for unit in model._units():
        for slot, backing in unit.gradients.sentinels._backings.items():
            local = getattr(unit.params[slot].sharded.grad, "_local_tensor", None)
            if isinstance(local, ZeroGradSentinel) and local.backing is backing and not backing.cleared:
                yield unit
                break

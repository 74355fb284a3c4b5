"""What the environment switches on.

`HSDP_SLOW=10` makes ranks that have waited 10 seconds for others to come to the same point say for which ranks.

`HSDP_DEBUG=1`, the debug mode, makes silent reads and writes of unsharded parameters visible. Memory of unsharded
parameters is filled with NaN whenever it is allocated and not yet gathered, and again before it is freed, so that a read
at the wrong moment shows in the numbers. Unsharded parameters are compared with what was gathered before they are freed,
so that writes which autograd's version counters do not see (`weight.data.clamp_()`) are refused. It costs a copy of each
unsharded parameter, and on a device a host synchronisation per unit.
"""

from __future__ import annotations

import contextlib
import os


def _switch(name: str) -> bool:
    setting = os.environ.get(name) or "0"
    if setting not in ("0", "1"):
        raise ValueError(f"{name}={setting!r}: expected 1 to switch it on, or 0")
    return setting == "1"


def _seconds(name: str) -> float:
    setting = os.environ.get(name) or "inf"
    with contextlib.suppress(ValueError):
        if float(setting) > 0:
            return float(setting)
    raise ValueError(f"{name}={setting!r}: expected a number of seconds above 0, such as 10; unset it to switch it off")


ON = _switch("HSDP_DEBUG")
"""Whether the debug mode is on, as of the import of hsdp."""


SLOW = _seconds("HSDP_SLOW")
"""From how many seconds of waiting on a rank says for whom; infinity: never."""

"""What the environment switches on.

`HSDP_SLOW=10` makes ranks that have waited 10 seconds for others to come to the same point say for which ranks.

`HSDP_DEBUG=1`, the debug mode, makes silent reads and writes of unsharded parameters visible. Memory of unsharded
parameters is filled with NaN whenever it is allocated and not yet gathered, and again before it is freed, so that a read
at the wrong moment shows in the numbers. Unsharded parameters are compared with what was gathered before they are freed,
so that writes which autograd's version counters do not see (`weight.data.clamp_()`) are refused. It costs a copy of each
unsharded parameter, and on a device a host synchronisation per unit.
"""

from __future__ import annotations

import os

ON = os.environ.get("HSDP_DEBUG", "0") not in ("", "0")
"""Whether the debug mode is on, as of the import of hsdp."""


def _seconds(name: str) -> float:
    told = os.environ.get(name) or "inf"
    try:
        return float(told)
    except ValueError:
        raise ValueError(f"{name}={told!r}: expected a number of seconds, such as 10") from None


SLOW = _seconds("HSDP_SLOW")
"""From how many seconds of waiting on a rank says for whom; infinity: never."""

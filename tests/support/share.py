"""How many of their cases long tests run: by default a third of random ones and of planted bugs, and half of those that
repeat on gloo what pretended ranks have shown; all with HSDP_FULL=1."""

from __future__ import annotations

import os

FULL = os.environ.get("HSDP_FULL", "0") not in ("", "0")


def share(cases: int) -> int:
    """Of `cases`, how many to run now."""
    return cases if FULL else max(1, cases // 3)

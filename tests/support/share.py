"""How many of their cases long tests run: of random ones and of planted bugs a third by default; all with HSDP_FULL=1."""

from __future__ import annotations

import os

FULL = os.environ.get("HSDP_FULL", "0") not in ("", "0")


def share(cases: int) -> int:
    """Of `cases`, how many to run now."""
    return cases if FULL else max(1, cases // 3)

"""`python -m hsdp.integrations SCRIPT ...` or `-m MODULE ...`: runs it with hsdp in the place of FSDP2."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hsdp.integrations import replace_fsdp2

USAGE = "usage: python -m hsdp.integrations (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main(argv: Sequence[str]) -> int:
    """Runs a script or a module as `__main__`; returns the exit status where it does not end the process itself."""
    if not argv or argv[0] in ("-h", "--help") or list(argv) == ["-m"]:
        asked = bool(argv) and argv[0] != "-m"
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    replace_fsdp2()
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

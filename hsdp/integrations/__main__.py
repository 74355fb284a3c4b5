"""`python -m hsdp.integrations SCRIPT ...` or `-m MODULE ...`: runs it with hsdp in the place of FSDP2."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hsdp.integrations.spawned import replace_here_and_below

USAGE = "usage: python -m hsdp.integrations (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main(argv: Sequence[str]) -> int:
    """Runs a script or a module as `__main__`; returns the exit status where it does not end the process itself."""
    if not argv or argv[0] in ("-h", "--help") or list(argv) == ["-m"]:
        asked = bool(argv) and argv[0] != "-m"
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    if (missing := _missing(argv)) is not None:
        print(f"python -m hsdp.integrations: error: {missing}\n{USAGE}", file=sys.stderr)
        return 2
    replace_here_and_below()
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        # `-m` has put the current directory first, where Python has the script's. With PYTHONSAFEPATH it puts neither.
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")
    return 0


def _missing(argv: Sequence[str]) -> str | None:
    """What there is to say if there is no such script or module."""
    if argv[0] != "-m":
        return None if Path(argv[0]).exists() else f"there is no script {argv[0]!r}"
    try:
        found = importlib.util.find_spec(argv[1]) is not None
    except ModuleNotFoundError as error:
        if not f"{argv[1]}.".startswith(f"{error.name}."):
            raise  # a package around it lacks something else
        found = False
    return None if found else f"there is no module {argv[1]!r}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

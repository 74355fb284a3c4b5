"""`python -m hsdp COMMAND ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hsdp.doctor import command as doctor
from hsdp.planning import command as plan
from hsdp.tracing import command as trace

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "plan": (plan.main, "what a model communicates, holds and waits for on a mesh that need not exist"),
    "doctor": (doctor.main, "versions, a step's correctness on these devices, measured links, and what to set"),
    "trace": (trace.main, "a page to look at traces: one HTML file with zoom, which needs no network"),
}


def main(argv: Sequence[str]) -> int:
    """Runs a command; returns the exit status."""
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]][0](argv[1:])
    asked = bool(argv) and argv[0] in ("-h", "--help")
    lines = ["usage: python -m hsdp COMMAND ... (--help after a command for its options)", ""]
    lines += [f"  {name:8} {what}" for name, (_, what) in COMMANDS.items()]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

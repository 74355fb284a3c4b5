"""`python -m hsdp trace FILE`: a page to look at traces that `Trace.to_chrome` wrote."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from hsdp.tracing.page import page_of


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hsdp trace",
        description="Turns traces (Trace.to_chrome, train_lm --trace) into one HTML file that needs no network.",
    )
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="a trace; ranks lie under each other, as they began"
    )
    parser.add_argument("--out", type=Path, metavar="PAGE", help="where to write (default: FILE with .html)")
    parser.add_argument("--open", action="store_true", help="show it in a browser (default: say where it is)")
    args = parser.parse_args(argv)
    try:
        page = page_of(args.files)
        out: Path = args.out or args.files[0].with_suffix(".html")
        out.write_text(page, encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 2
    sys.stdout.write(f"{out}\n")
    if args.open:
        webbrowser.open(out.resolve().as_uri())
    return 0

"""A soak over random programs of pipelines, on sharded stages and on the plain model, with a table of what came of them.

    python -m tests.soak.pipelines --programs 1000 --ranks 4 --seed 0 --log pipelines.log
    python -m tests.soak.pipelines --programs 100 --device emul        with delays and a detector of races
    python -m tests.soak.pipelines --show 0:17 --ranks 4               prints a program

Each class of failures is told with its count, its seeds, and a program of it that was shrunk. See `programs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.soak import command
from tests.soak.pipelines.play import play
from tests.soak.pipelines.programs import draw, smaller
from tests.soak.verdicts import run_each


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns how many programs failed."""
    parser = command.options(__doc__, ranks=[2, 4], default=4, programs=200, tries=60)
    parser.add_argument("--device", default="cpu", help="of the sharded side: cpu, or emul, the emulated one")
    args = parser.parse_args(argv)
    return command.soak(args, lambda seed: draw(seed, args.ranks), (run_each, play), smaller, device=args.device)

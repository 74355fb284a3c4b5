"""A soak over random programs of optimizers, on a sharded model and on its twin, with a table of what came of them.

    python -m tests.soak.optimizers --programs 5000 --ranks 2 --mesh 1d --seed 0 --log optimizers.log
    python -m tests.soak.optimizers --programs 500 --ranks 4 --mesh 2d --seed 0
    python -m tests.soak.optimizers --programs 500 --ranks 4 --mesh tp --seed 0               with tensor parallelism
    python -m tests.soak.optimizers --programs 500 --device emul       with delays and a detector of races; or cuda
    python -m tests.soak.optimizers --show 0:17 --ranks 4 --mesh 2d                      prints a program

Each class of failures is told with its count, its seeds, and a program of it that was shrunk. See `programs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.soak import command
from tests.soak.actions.soak import Tally, run_all
from tests.soak.optimizers.play import play
from tests.soak.optimizers.programs import PARALLEL, SHAPES, Program, draw, smaller
from tests.soak.verdicts import run_each
from tests.support.rig import Pool


def run(pool: Pool, programs: Sequence[Program], stop_at: int = 0) -> Tally:
    """Runs programs on the pool's ranks; goes on behind failures, up to `stop_at` of them if given."""
    return run_all(pool, programs, stop_at=stop_at, runner=(run_each, play))


def meshes(ranks: int, name: str) -> tuple[tuple[int, ...], int]:
    """A mesh of data parallelism by its name, and how many ranks of tensor parallelism there are at each of its places."""
    return (PARALLEL[name], 2) if name in PARALLEL else (SHAPES[ranks][name], 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns how many programs failed."""
    parser = command.options(__doc__, ranks=[2, 4], default=2, programs=500, tries=100)
    parser.add_argument("--mesh", choices=["1d", "2d", *PARALLEL], default="1d")
    parser.add_argument("--device", default="cpu", help="of the sharded side: cpu, cuda, or emul, the emulated one")
    args = parser.parse_args(argv)
    if args.mesh in PARALLEL and args.ranks != 4:
        parser.error(f"--mesh {args.mesh}: it takes --ranks 4")
    meant = meshes(args.ranks, args.mesh)
    return command.soak(args, lambda seed: draw(seed, *meant), (run_each, play), smaller, device=args.device)

"""`python -m benchmarks.moves`: how often a reader changes file while following one step, hsdp beside FSDP2.

Four blocks and a root on a 2 x 2 mesh of the fake process group, in the third step. Python's profiler tells each call of a
function of the library, in order. A move is a call in another file than the call before it; a move between packages is one
in another folder (FSDP2 has one). What torch runs in between counts as nothing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp

import hsdp
from benchmarks.harness import publish
from tests.support.rig import fake_world

DIM, BLOCKS, MESH = 16, 4, (2, 2)
HERE = str(Path(hsdp.__file__).parent)
THEIRS = str(Path(fsdp.__file__).parent / "_fully_shard")


@dataclass(frozen=True)
class Walk:
    """One pass, as a reader follows it.

    Attributes:
        calls: of Python functions of the library.
        files: that are entered.
        moves: calls in another file than the call before; `packages`: in another package.
    """

    calls: int
    files: int
    moves: int
    packages: int


def walk(run: Callable[[], object], folder: str) -> Walk:
    """Follows what `run` calls in the files below a folder."""
    calls: list[str] = []

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    packages = [str(Path(file).parent) for file in calls]
    return Walk(len(calls), len(set(calls)), _changes(calls), _changes(packages))


def _changes(places: list[str]) -> int:
    return sum(before != now for before, now in itertools.pairwise(places))


def step_of(
    fully_shard: Callable[..., Any], mesh: Any
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """A forward and a backward, behind two steps."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(BLOCKS)), nn.Linear(DIM, DIM))
    for block in list(model)[:BLOCKS]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward() -> torch.Tensor:
        return model(torch.zeros(2, DIM)).sum()

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    for _ in range(2):
        backward(forward())
        optimizer.step()
        optimizer.zero_grad()
    return forward, backward


def walks(name: str) -> dict[str, Walk]:
    """The forward and the backward of "hsdp" or "FSDP2"; the process has no default group."""
    fully_shard, folder = {"hsdp": (hsdp.fully_shard, HERE), "FSDP2": (fsdp.fully_shard, THEIRS)}[name]
    with fake_world(torch.Size(MESH).numel()) as env:
        forward, backward = step_of(fully_shard, env.mesh(MESH))
        losses: list[torch.Tensor] = []
        return {
            "forward": walk(lambda: losses.append(forward()), folder),
            "backward": walk(lambda: backward(losses[0]), folder),
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Counts and reports."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moves", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    args = parser.parse_args(argv)
    lines = [f"{'':8}{'pass':10}{'calls':>7}{'files':>7}{'moves between files':>21}{'between packages':>18}"]
    rows = []
    for name in ("hsdp", "FSDP2"):
        for kind, one in walks(name).items():
            lines.append(f"{name:8}{kind:10}{one.calls:7}{one.files:7}{one.moves:21}{one.packages:18}")
            rows.append({"library": name, "pass": kind, **asdict(one)})
    publish("moves", "\n".join(lines), vars(args), args.json, rows=rows)


if __name__ == "__main__":
    main()

"""An interrupt from the keyboard at each line of the engine that an iteration runs, in turn, on all ranks at the same one:
right after it users see what was before, and the next iteration is that of a fresh model. So it is where something else
than an iteration is interrupted.

    python -m tests.soak.interrupts [--stride 1] [--only offloaded ...] [--acts unshard ...] [--log interrupts.log]

What `tests/schedule/test_fault_injection.py` does to calls that somebody has thought of, this does to all lines. Those of
`hsdp/comm` are left out, unless a rank is alone: a message that was sent to some of the ranks only is not taken back.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hsdp
from tests.support.deep import loss_of
from tests.support.facts import header
from tests.support.failing import Subject
from tests.support.rig import Pool, RankEnv

_HSDP = str(Path(hsdp.__file__).parent) + "/"
_LEFT_OUT = _HSDP + "comm/"

SETUPS: dict[str, tuple[tuple[int, ...], bool | None, dict[str, Any]]] = {
    "plain": ((2,), None, {}),
    "recomputed": ((2,), False, {}),
    "recomputed, reentrant": ((2,), True, {}),
    "replicas": ((2, 1), None, {}),
    "kept whole": ((2,), None, {"reshard_after_forward": False}),
    "direct": ((2,), None, {"comm_policy": hsdp.CommPolicy(fusion="direct")}),
    "accumulated": ((2, 1), None, {"batches": 2}),
    "accumulated whole": ((2,), None, {"batches": 2, "comm_policy": hsdp.CommPolicy(accumulate="local")}),
    "buckets": ((2, 1), None, {"comm_policy": hsdp.CommPolicy(all_reduce_bucket_bytes=1 << 12)}),
    "offloaded": ((2,), None, {"offload_policy": hsdp.CPUOffloadPolicy()}),
    "in bf16": ((2,), None, {"mp_policy": hsdp.MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
    "two axes": ((2, 2), None, {}),
    "alone": ((1,), None, {}),
}
"""Of what model: the mesh, whether blocks are recomputed (True: by reentrant checkpoints), how many
micro-batches there are, options of `fully_shard`."""

ITERATION = "iteration"


def _show_full(model: Any) -> None:
    with hsdp.full_params(model):
        pass


def _unshard(model: Any) -> None:
    model.unshard()
    model.reshard()


def _unshard_asynchronously(model: Any) -> None:
    model.unshard(async_op=True).wait()
    model.reshard()


def _step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model, dist.get_rank(), 0).backward()
    hsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def _evaluate(model: Any) -> None:
    loss_of(model, dist.get_rank(), 0)


ACTS: dict[str, Callable[[Any], object] | None] = {
    ITERATION: None,
    "full_params": _show_full,
    "unshard": _unshard,
    "unshard, asynchronously": _unshard_asynchronously,
    "to": lambda model: model.to(torch.float64),
    "step": _step,
    "evaluation": _evaluate,
    "state_dict": lambda model: model.state_dict(),
    "zero_grad": lambda model: model.zero_grad(set_to_none=False),
}
"""What is interrupted. No act but an iteration leaves gradients, or changes parameters."""


@functools.cache
def _headers(file: str) -> frozenset[int]:
    """The lines of `with` statements. Python traces one again when its block ends, and an exception from there, unlike an
    interrupt, would have nothing closed."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.With):
            found.update(range(node.lineno, node.body[0].lineno))
    return frozenset(found)


@dataclass
class Interrupt:
    """An interrupt at the `at`-th line, and where that was; None while it has not come."""

    at: int
    left_out: str = _LEFT_OUT
    lines: int = 0
    where: str | None = None

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        """Python's trace function: follows frames of the engine."""
        file = frame.f_code.co_filename
        return self.line if file.startswith(_HSDP) and not file.startswith(self.left_out) else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        """Raises at the `at`-th line."""
        file = frame.f_code.co_filename
        if event == "line" and self.where is None and frame.f_lineno not in _headers(file):
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{file.removeprefix(_HSDP)}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt(self.where)
        return self.line


@contextmanager
def interrupting(interrupt: Interrupt) -> Iterator[None]:
    """Lines of the engine are counted, and one of them raises."""
    before = sys.gettrace()
    # A finalizer or a callback of a weak reference is interrupted without anybody learning of it, but for this hook.
    with mock.patch.object(sys, "unraisablehook", lambda args: None):
        sys.settrace(interrupt.enter)
        try:
            yield
        finally:
            sys.settrace(before)


def interrupted(env: RankEnv, setup: str, act: str, first: int, stride: int) -> tuple[int, list[str]]:
    """Interrupts every `stride`-th line of an act from the `first` on; returns how many there are, and what went wrong."""
    shape, recompute, options = SETUPS[setup]
    subject = Subject(env, shape, recompute, **options)
    at, wrong = first, []
    while True:
        interrupt = Interrupt(at, _LEFT_OUT if env.world_size > 1 else "none")
        try:
            subject.fail(interrupting(interrupt), KeyboardInterrupt, ACTS[act])
            if interrupt.where is None:
                return interrupt.lines, wrong
            # Sums of earlier micro-batches are there still, or are known to be lost; a step may have clipped gradients.
            if subject.batches > 1 or act != ITERATION or subject.kept():
                subject.start()
            subject.recover()
        except Exception as error:
            wrong.append(f"line {at}, {interrupt.where}: {type(error).__name__}: {error}".partition("\n")[0])
            subject = Subject(env, shape, recompute, **options)
        at += stride


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns how many interrupts left something behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="interrupt every so many lines (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--acts", nargs="+", choices=ACTS, default=list(ACTS))
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args(argv)
    print(json.dumps({"command": " ".join(sys.argv[1:]), **header()}), file=args.log, flush=True)
    failures = 0
    for setup in args.only:
        with Pool(prod(SETUPS[setup][0]), group_timeout=5.0) as pool:
            for act in args.acts:
                lines, wrong = pool.run(interrupted, setup, act, 1, args.stride, timeout=3600.0)[0]
                failures += len(wrong)
                count = -(-lines // args.stride)
                content = {"setup": setup, "act": act, "lines": lines, "interrupted": count, "wrong": wrong}
                print(json.dumps(content), file=args.log, flush=True)
    return failures


if __name__ == "__main__":
    from tests.soak import interrupts  # under its own name, where the workers find what is sent to them

    sys.exit(min(interrupts.main(), 100))

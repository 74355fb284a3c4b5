"""Bugs of the kind that users' actions bring out, planted in the engine; random programs of actions must find each.

    python -m tests.mutants.actions                       all of them, at most 500 programs each, and a table
    python -m tests.mutants.actions --programs 100 --only "version check dropped"

A program finds a bug if it fails with the bug and passes without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

import hsdp.schedule.module_hooks
import hsdp.schedule.outputs
import hsdp.schedule.pipeline
import hsdp.unit.gradients
import hsdp.unit.rollback
import hsdp.unit.unit
import hsdp.unit.unsharded
import hsdp.unit.zero_grad
from hsdp.params.param import ManagedParam
from hsdp.schedule.backward import Backwards
from hsdp.schedule.outputs import SideOutputs
from hsdp.schedule.pipeline import Reduction, ReductionPipeline
from hsdp.schedule.root import Root
from hsdp.schedule.runtime import Runtime
from hsdp.torch_private import NO_TASK, graph_task
from hsdp.unit.arrivals import Arrivals
from hsdp.unit.gradients import Gradients
from hsdp.unit.landing import run_hooks
from hsdp.unit.rollback import Undo
from hsdp.unit.shadows import Shadows
from hsdp.unit.unit import Unit
from hsdp.unit.write_guard import WriteGuard
from hsdp.unit.zero_grad import SentinelBacking, Sentinels, ZeroGradSentinel
from tests.mutants.planting import Plant, gives, replaced
from tests.soak.actions.play import run_programs
from tests.soak.actions.programs import SHAPES, Program, draw
from tests.soak.actions.soak import run_all
from tests.soak.verdicts import Verdict
from tests.support.facts import header
from tests.support.rig import Pool, RankEnv

PLANTS: dict[str, tuple[Plant, int, str]] = {}
"""By name: the bug, and the number of ranks and kind of mesh whose programs look for it."""


def run_planted(env: RankEnv, name: str, programs: list[Program], system: str) -> list[Verdict]:
    """On a worker: plays programs with a bug planted."""
    with PLANTS[name][0]():
        return run_programs(env, programs, system)


def planted(name: str, ranks: int = 2, mesh: str = "1d") -> Callable[[Plant], Plant]:
    """Registers a function that plants a bug."""

    def register(plant: Plant) -> Plant:
        PLANTS[name] = (plant, ranks, mesh)
        return plant

    return register


def _never(name: str) -> property:
    """An attribute that is False whatever is written to it."""
    return property(lambda owner: False, lambda owner, value: None)


# -- ways into the backward of a unit -------------------------------------------------------------------------------

planted("hooks on nodes of bases dropped")(
    lambda: mock.patch.object(
        hsdp.schedule.module_hooks, "entry_nodes", lambda tensor, first: [] if tensor.grad_fn is None else [tensor.grad_fn]
    )
)
planted("hooks on side outputs dropped")(gives(SideOutputs, "tensors", []))
planted("hooks on what is put into arguments dropped")(
    lambda: replaced(SideOutputs, "tensors", lambda found: lambda outputs, arguments, first: found(outputs, (), first))
)
planted("objects with slots not looked into")(gives(hsdp.schedule.outputs, "_slots_of", ()))
planted("units that are passed over skipped")(gives(Backwards, "_pass_over"))


# -- guards of values -----------------------------------------------------------------------------------------------

planted("version check dropped")(
    lambda: mock.patch.object(Unit, "version", property(lambda unit: (unit.weights_version, 0)))
)
planted("epoch not raised by a step")(gives(Unit, "weights_changed"))
planted("shards_unchanged always True")(gives(Unit, "shards_unchanged", True))
planted("whole guard dropped")(gives(WriteGuard, "written"))
planted("assigned data not noticed")(gives(Shadows, "assigned"))
planted("retained ignored")(lambda: mock.patch.object(Unit, "retained", _never("retained"), create=True))
planted("whole parameters kept after a failed forward")(gives(Root, "_reshard_all"))


@planted("a fill with NaN skipped, and the gather of backward with it")
def _no_fill() -> AbstractContextManager[Any]:
    """A backward reads memory that no gather has filled: with the fill it is NaN, without it what lay there, zeros say."""

    def change(gather: Callable[..., Any]) -> Callable[..., Any]:
        def gathered(unit: Unit, version: Any, looked: bool = False) -> None:
            is_new = unit.residency is hsdp.unit.unsharded.SHARDED
            gather(unit, version, looked)
            if is_new and graph_task() != NO_TASK:
                unit.finish()
                for group in unit.dtype_groups:
                    for param in group.params:
                        if param.unsharded is not None:
                            param.unsharded.data.zero_()

        return gathered

    return replaced(Unit, "gather", change)


# -- requires_grad --------------------------------------------------------------------------------------------------

planted("union of masks dropped")(lambda: mock.patch.object(hsdp.unit.unit, "or_", lambda wanted, before: wanted))


@planted("two leaves replaced by requires_grad_")
def _one_leaf() -> AbstractContextManager[Any]:
    def choose(param: ManagedParam, wanted: bool) -> None:
        assert param.unsharded is not None
        param.trained = param.unsharded.requires_grad_(wanted)  # type: ignore[assignment]

    return mock.patch.object(ManagedParam, "choose", choose)


@planted("a unit reduced with its last gradient, later edits lost")
@contextmanager
def _hasty() -> Iterator[None]:
    def change(arrived: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def and_reduces(unit: Unit) -> None:
            arrived(unit)
            runtime: Any = unit.runtime
            if runtime.backward is not None and unit in runtime.backward.turns.waiting:
                for other in runtime.backward.turns.complete(unit):
                    runtime._reduce(other)

        return and_reduces

    with replaced(Unit, "_all_arrived", change), mock.patch.object(Arrivals, "_assigned", return_value={}):
        yield


@planted("a parameter frozen since gets its gradient")
def _thawed() -> AbstractContextManager[Any]:
    def change(take: Callable[..., Any]) -> Callable[..., Any]:
        def taking(arrivals: Arrivals) -> Any:
            frozen = [param.sharded for param in arrivals._params if not param.sharded.requires_grad]
            for sharded in frozen:
                sharded.requires_grad_(True)
            try:
                return take(arrivals)
            finally:
                for sharded in frozen:
                    sharded.requires_grad_(False)

        return taking

    return replaced(Arrivals, "take", change)


@planted("sums pending while the choice of parameters changes")
def _choice() -> AbstractContextManager[Any]:
    def change(choose: Callable[..., Any]) -> Callable[..., Any]:
        def choosing(gradients: Gradients, *args: Any) -> None:
            with mock.patch.object(Gradients, "is_pending", lambda _: False):
                choose(gradients, *args)

        return choosing

    return replaced(Gradients, "choose", change)


# -- pending sums ---------------------------------------------------------------------------------------------------

planted("pending sums not refused")(gives(Gradients, "refuse_pending"))
planted("zeroing not heeded")(gives(Sentinels, "gone", frozenset()))
planted("micro-batches forgotten")(lambda: mock.patch.object(Gradients, "stash", lambda grads: grads.arrivals.drop()))
planted("flush does nothing")(gives(Runtime, "flush"))
planted("zeroed parameters stay in deferred sums", 4, "2d")(gives(hsdp.unit.gradients, "zero"))
planted("a sentinel of each parameter used on this rank only")(gives(Gradients, "_watch_all"))


@planted("aliases of a sentinel not shared")
def _own_standing() -> AbstractContextManager[Any]:
    def change(dispatch: Any) -> Any:
        def dispatched(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name in hsdp.unit.zero_grad._ALIASES and isinstance(args[0], ZeroGradSentinel):
                backing = args[0].backing
                return ZeroGradSentinel(SentinelBacking(backing.fqn, backing.like, backing.base))
            return dispatch(func, types, args, kwargs)

        return classmethod(dispatched)

    return replaced(ZeroGradSentinel, "__torch_dispatch__", change)


@planted("additions to a sentinel of zeros lost")
def _still_blank() -> AbstractContextManager[Any]:
    return replaced(SentinelBacking, "memory", lambda memory: lambda backing, write: memory(backing, False))


@planted("a scaling by zero taken for any other")
def _no_scaling() -> AbstractContextManager[Any]:
    return mock.patch.object(hsdp.unit.zero_grad, "_SCALES", frozenset())


# -- failed backwards -----------------------------------------------------------------------------------------------

planted("roll-back skipped")(
    lambda: replaced(Gradients, "roll_back", lambda _: lambda gradients, at_once=False: gradients.arrivals.drop())
)
planted("what was undone stays")(lambda: mock.patch.object(Undo, "run", lambda undo, at_once: (undo.clear(), True)[1]))
planted("lost sums not refused")(gives(Gradients, "refuse_lost"))
planted("what was owed before is not remembered")(gives(Gradients, "_note_owed"))
planted("void reductions land")(lambda: mock.patch.object(Reduction, "is_void", False))


@planted("values from before a landing not copied")
def _no_copy() -> AbstractContextManager[Any]:
    def add(undo: Undo, memory: Any, landed: Any, backing: Any = None) -> None:
        memory.add_(landed)
        undo.entries.append(hsdp.unit.rollback._Added(memory, memory, memory._version, backing))

    return mock.patch.object(Undo, "add_noted", add)


@planted("deferred sums not put back", 4, "2d")
def _no_deferred() -> AbstractContextManager[Any]:
    def replace(gradients: Gradients, sums: Any, undoable: bool) -> None:
        gradients.deferred_sums = sums

    return mock.patch.object(Gradients, "_replace_deferred", replace)


@planted("errors of landings swallowed")
def _swallowed() -> AbstractContextManager[Any]:
    return mock.patch.object(ReductionPipeline, "tell_errors", lambda pipeline: pipeline._errors.clear())


@planted("hooks run before their gradient is added")
def _early_hooks() -> AbstractContextManager[Any]:
    def change(land: Callable[..., Any]) -> Callable[..., Any]:
        def landing(gradients: Gradients, parts: Any) -> None:
            for part in parts:
                seen = [param.sharded.grad is not None for param in part.plan.params]
                run_hooks(part.plan, seen)
            with mock.patch.object(hsdp.unit.gradients, "run_hooks", lambda plan, used: None):
                land(gradients, parts)

        return landing

    return replaced(Gradients, "land", change)


@planted("gradients that came from outside replaced")
def _replaced() -> AbstractContextManager[Any]:
    def change(assign: Callable[..., Any]) -> Callable[..., Any]:
        def assigning(gradients: Gradients, part: Any, used: Any, undoable: bool) -> None:
            for param in part.grad_layout.params:
                if param.sharded.grad is not None and not isinstance(param.sharded.grad._local_tensor, ZeroGradSentinel):
                    param.sharded.grad = None
            assign(gradients, part, used, undoable)

        return assigning

    return replaced(Gradients, "_assign", change)


# -- the search -----------------------------------------------------------------------------------------------------


class Search:
    """Looks for planted bugs with one pool, and remembers which programs fail without any."""

    def __init__(self, pool: Pool, programs: Sequence[Program]) -> None:
        self.pool, self.programs = pool, programs
        self.bad: set[str] = set()
        self.good: set[str] = set()

    def find(self, name: str) -> tuple[int, str, str]:
        """How many programs it took (0: none found it), the seed of that which did, and how it failed."""
        left = [program for program in self.programs if program.seed not in self.bad]
        while left:
            tally = run_all(self.pool, left, stop_at=1, runner=(run_planted, name))
            if not tally.failures:
                break
            failure, found = next(iter(tally.failed.items()))
            program = found[0][0]
            at = left.index(program)
            if not self._tells(program, name):
                left = left[at + 1 :]
                continue
            return 1 + self.programs.index(program), program.seed, failure
        return 0, "", ""

    def _tells(self, program: Program, name: str) -> bool:
        """Whether a program, alone, fails with the bug and passes without it: in company it may fail for another's sake."""
        if program.seed not in self.good and run_all(self.pool, [program]).failures:
            self.bad.add(program.seed)
            return False
        self.good.add(program.seed)
        return bool(run_all(self.pool, [program], runner=(run_planted, name)).failures)


def main(argv: Sequence[str] | None = None) -> int:
    """Looks for each bug; returns how many were not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500, help="the most that look for one bug")
    parser.add_argument("--seed", default="mutants")
    parser.add_argument("--only", nargs="*", choices=sorted(PLANTS))
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(json.dumps({"command": " ".join(sys.argv[1:]), **header()}), file=args.log, flush=True)
    print(f"{'planted bug':58} {'mesh':>7} {'found by':>8}  how", file=args.log)
    missed, start = 0, time.monotonic()
    for ranks, mesh in sorted({(ranks, mesh) for _, ranks, mesh in PLANTS.values()}):
        shape = SHAPES[mesh][ranks]
        with Pool(ranks) as pool:
            search = Search(pool, [draw(f"{args.seed}:{n}", shape) for n in range(args.programs)])
            for name, (_, *where) in PLANTS.items():
                if where != [ranks, mesh] or name not in (args.only or PLANTS):
                    continue
                count, seed, failure = search.find(name)
                missed += not count
                told = f"no. {count}" if count else "NONE"
                at = "x".join(map(str, shape))
                print(f"{name:58} {at:>7} {told:>8}  {failure} ({seed})", file=args.log, flush=True)
    print(f"{missed} missed; {time.monotonic() - start:.0f} s", file=args.log, flush=True)
    return missed


if __name__ == "__main__":
    from tests.mutants import actions  # under its own name, where the workers find what is sent to them

    sys.exit(min(actions.main(), 100))

"""Plays programs of persistence on a sharded run and on its twin, and judges them: equal, a named error, or a failure.

What is loaded is compared bit for bit with what the run was when it was kept, and with the twin before each step and at
the end. Behind an error the state must be as before, or the error says that it is partly changed: then the checkpoint
saved last must load. All ranks must get an error if one does.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hsdp
from hsdp import checkpoint
from tests.soak.persistence import kept as keeping
from tests.soak.persistence.faults import Planted, planted
from tests.soak.persistence.kept import Kept
from tests.soak.persistence.programs import OF_RANKS, Fault, Layout, Program
from tests.soak.persistence.run import Run, Snapshot
from tests.soak.persistence.values import equal, near
from tests.soak.verdicts import Over, Verdict, Wrong
from tests.support.rig import RankEnv
from tests.support.twin import full, whole

FILES = ("files", "async")
PARTLY = "partly changed"
COMPLETE = "is complete, but an earlier checkpoint could not be removed"
NAMED = (hsdp.HSDPError, Planted)


def play(env: RankEnv, program: Program) -> Verdict:
    """Plays one program on this rank."""
    verdict = Verdict()
    folder = [tempfile.mkdtemp(prefix="hsdp-persistence-") if env.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    played = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            played = _Play(env, program, verdict, folder[0])
            with suppress(Over):
                played.all()
    except Wrong as wrong:
        verdict.failure, verdict.told = wrong.failure, wrong.told
    except Exception as error:
        at = "" if played is None else played.doing
        kind = "" if played is None else played.kind_of_action
        verdict.failure, verdict.told = (
            f"unexpected {type(error).__name__} in {kind}",
            f"{at}\n{traceback.format_exc()[-3500:]}",
        )
    finally:
        if not verdict.failure:
            dist.barrier()
        if env.rank == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    return verdict


class _Play:
    """One program on its way.

    Attributes:
        states: what was kept, in that order; `stored`: of them the checkpoints that must be in the directory.
    """

    def __init__(self, env: RankEnv, program: Program, verdict: Verdict, folder: str) -> None:
        self.env, self.program, self.verdict, self.folder = env, program, verdict, folder
        self.steps = os.path.join(folder, "steps")
        self.doing, self.kind_of_action = "the beginning", ""
        self.layout = program.layout
        self.states: list[Kept] = []
        self.stored: list[Kept] = []
        self.run = self.laid_out(self.layout, "other", seed=7)
        self.twin = self.plain(seed=7)

    def laid_out(self, layout: Layout, start: str, seed: int) -> Run:
        run = Run(self.program, [self.env.rank], seed)
        run.lay_out(layout, self.env.mesh(layout.shape), start)
        run.begin()
        return run

    def plain(self, seed: int) -> Run:
        twin = Run(self.program, range(self.env.world_size), seed)
        twin.begin()
        return twin

    def all(self) -> None:
        for at, action in enumerate(self.program.actions):
            self.doing, self.kind_of_action = (
                f"action {at} {action}",
                " ".join(map(str, action[: 1 + (action[0] != "load")])),
            )
            getattr(self, action[0])(at, *action[1:])
        self.doing = "the end"
        self.settle()
        self.run.ready()
        self.compare(gradients=True)
        hsdp.check_replicas(self.run.model, self.run.optimizer)

    # -- training -----------------------------------------------------------------------------------------------------

    def micro(self, at: int, context: str) -> None:
        for run in (self.run, self.twin):
            run.micro(at, context)

    def step(self, at: int) -> None:
        self.run.ready()
        self.compare(gradients=True)
        if any(param.grad is not None for param in self.twin.params.values()):
            self.run.step()
            self.twin.step()

    def mode(self, at: int, training: bool) -> None:
        for run in (self.run, self.twin):
            run.model.train(training)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def save(self, at: int, kind: str, at_most: int | None, again: bool, fault: Fault | None) -> None:
        if kind == "dcp" and not self.suits_torch():
            return
        if kind in (*OF_RANKS, "dcp"):
            fault = None  # that is torch's doing
        before = self.stored[-1] if self.stored else None
        step = before.step if again and before is not None and kind in FILES else at
        self.settle()
        draws = torch.get_rng_state()
        drawn = torch.rand(3)
        torch.set_rng_state(draws)
        was = {} if kind == "alias" else self.whole(self.run)
        made = Kept(kind, at, step, None, was, Snapshot(self.twin, alias=kind == "alias"), drawn)
        value, told = self.attempt(
            lambda: keeping.keep(kind, self.run, self.folder, (at, step), at_most), fault, kind == "async"
        )
        made.value = value
        torch.rand(1)  # a load brings the generator back
        if told is None:
            self.states.append(made)
            if kind in FILES:
                self.store(made, at_most)
            return
        if PARTLY in told:
            raise Wrong("a save says that something is partly changed", f"{self.doing}\n{told}")
        self.same_as(was, "behind a save that failed")
        if kind in FILES:
            self.look_for(made, at_most, COMPLETE in told)

    def store(self, made: Kept, at_most: int | None) -> None:
        self.stored = [one for one in self.stored if one.step != made.step] + [made]
        self.stored = self.stored[-at_most:] if at_most else self.stored

    def look_for(self, made: Kept, at_most: int | None, promised: bool) -> None:
        """Behind a save that failed: what the directory has must be whole, and nothing else be gone."""
        answer: list[Any] = [None]
        if self.env.rank == 0:
            found = checkpoint.latest(self.steps)
            newer = (
                found is not None and int(found.name[5:]) == made.step and checkpoint.verify(found).extra["at"] == made.at
            )
            answer = [newer]
        dist.broadcast_object_list(answer)
        if promised and not answer[0]:
            raise Wrong("a checkpoint that is complete is not there", self.doing)
        if answer[0]:
            raise Over  # nobody knows what else retention has done
        self.there()

    def there(self) -> None:
        """Every checkpoint that must be there is whole."""
        wrong = []
        for one in self.stored if self.env.rank == 0 else ():
            try:
                checkpoint.verify(one.value.path)
            except checkpoint.CheckpointError as error:
                wrong.append(f"step {one.step}: {error}")
        self.same(wrong, "a checkpoint is gone")

    def verify(self, at: int) -> None:
        """Beside a save that may be under way in the background: that is not over before its `wait`."""
        if self.env.rank > 0 or not self.stored or (len(self.stored) == 1 and not self.stored[0].value.done()):
            return
        found = checkpoint.verify(self.steps)
        if found.step not in [one.step for one in self.stored[-2:]]:
            raise Wrong("another checkpoint is verified", f"{self.doing}\n{found}")

    def settle(self) -> None:
        """Saves in the background come to their end, and retention with them."""
        for one in self.stored:
            one.value.wait()
        found: set[str] = set()
        if self.env.rank == 0 and os.path.isdir(self.steps):
            found = {name for name in os.listdir(self.steps) if name.startswith("step-")}
        wrong = sorted(found - {os.path.basename(one.value.path) for one in self.stored})
        self.same(wrong, "a checkpoint is there that retention was to remove")

    # -- getting back -------------------------------------------------------------------------------------------------

    def load(self, at: int, back: int, fault: Fault | None) -> None:
        if not self.states:
            return
        chosen = self.states[-1 - back % len(self.states)]
        gone = chosen.kind in FILES and not any(one is chosen for one in self.stored)
        if chosen.kind == "dcp" and not self.suits_torch():
            return
        self.settle()
        if gone and any(one.step == chosen.step for one in self.stored):
            return  # another has its place
        fault = None if chosen.kind in (*OF_RANKS, "dcp") else fault
        before = self.whole(self.run)
        extra, told = self.attempt(lambda: keeping.give(chosen, self.run), fault)
        if told is None:
            if gone:
                raise Wrong("a checkpoint loads that retention was to remove", self.doing)
            self.take(chosen, extra)
        else:
            self.refused(chosen, before, told, gone)

    def resume(self, at: int, fault: Fault | None) -> None:
        self.settle()
        before = self.whole(self.run)
        loaded, told = self.attempt(lambda: checkpoint.resume(self.steps, self.run.model, self.run.optimizer), fault)
        if told is not None:
            self.refused(None, before, told, False)
        elif loaded is None:
            self.same(["there are some"] * bool(self.stored), "resume finds no checkpoint")
        else:
            self.same([f"step {loaded.step}"] * (loaded.step != self.stored[-1].step), "resume takes another checkpoint")
            self.take(self.stored[-1], loaded.extra)

    def take(self, chosen: Kept, extra: Any) -> None:
        """What was loaded is what was kept."""
        self.run.put_schedule(extra["schedule"])
        checkpoint.set_rng_state(extra["rng"])
        wrong = [] if torch.equal(torch.rand(3), chosen.drawn) else ["random numbers differ"]
        wrong += [] if extra["rank"] == self.env.rank else ["extra is another rank's"]
        self.same(wrong, "what was kept beside the state differs")
        if chosen.kind == "safetensors":  # it has tensors alone
            chosen.twin.give_weights(self.twin, "*", extras=False)
            chosen.twin.give_states(self.twin)
        else:
            chosen.twin.give(self.twin)
        if chosen.kind != "alias":
            self.same_as(chosen.was, "behind a load", chosen.kind)
        self.compare()

    def refused(self, chosen: Kept | None, before: dict[str, Any], told: str, gone: bool) -> None:
        """Behind an error of a load: nothing is changed, or the last checkpoint brings everything back."""
        if PARTLY not in told and (chosen is None or chosen.kind in FILES):  # of others, weights may be loaded by now
            self.same_as(before, "behind a load that failed")
            return
        if not self.stored:
            raise Over
        loaded = checkpoint.resume(self.steps, self.run.model, self.run.optimizer)
        assert loaded is not None
        self.take(self.stored[-1], loaded.extra)

    def move(self, at: int, kind: str, layout: Layout, start: str) -> None:
        if kind in OF_RANKS:
            layout = replace(layout, shape=self.layout.shape, units=self.layout.units, replicated=self.layout.replicated)
            layout = replace(layout, wrap=self.layout.wrap)
        if kind == "dcp" and not self.suits_torch():
            return
        self.save(at, kind, None, False, None)
        chosen = self.states[-1]
        moved = self.laid_out(layout, start, seed=at + 100)
        if start == "stepped" or kind == "dcp":
            moved.micro(at, "")
            moved.step()
        moved.model.train(self.twin.model.training)
        if kind == "safetensors":
            for part, old in zip(moved.model.parts, self.run.model.parts, strict=True):
                part.set_extra_state(old.get_extra_state())
        self.settle()
        self.run, self.layout = moved, layout
        self.states = [one for one in self.states if one.kind not in OF_RANKS]
        twin = self.plain(seed=at + 100)
        twin.model.train(self.twin.model.training)
        _passing(self.twin, twin, moved)
        twin.put_schedule(self.twin.schedule())
        if kind == "safetensors":
            for part, old in zip(twin.model.parts, self.twin.model.parts, strict=True):
                part.set_extra_state(old.get_extra_state())
        self.twin = twin
        extra, told = self.attempt(lambda: keeping.give(chosen, moved), None)
        if told is not None:
            raise Wrong(f"{told.partition(':')[0]} in move", f"{self.doing}\n{told}")
        self.take(chosen, extra)

    def part(self, at: int, kind: str, pattern: str) -> None:
        found = [one for one in self.states if one.kind == kind and (kind != "files" or one in self.stored)]
        if not found:
            return
        self.settle()
        chosen = found[-1]
        names = [name for name in chosen.twin.model if not name.endswith("_extra_state")]
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            return
        if kind == "files":
            load: Callable[[], Any] = lambda: checkpoint.load(  # noqa: E731
                chosen.value.path, self.run.model, strict=False, include=[pattern]
            )
        else:
            load = lambda: checkpoint.load_safetensors(chosen.value[0], self.run.model, include=[pattern])  # noqa: E731
        _, told = self.attempt(load, None)
        if told is not None:
            raise Wrong(f"{told.partition(':')[0]} in part", f"{self.doing}\n{told}")
        chosen.twin.give_weights(self.twin, pattern, extras=kind == "files")
        self.compare()

    def halves(self, at: int) -> None:
        """The last checkpoint on fewer ranks."""
        if not self.stored or self.env.world_size == 1:
            return
        self.settle()
        half = self.env.world_size // 2
        mesh = self.env.mesh((2, half), ("job", "shard"))["shard"]
        side = Run(self.program, [self.env.rank], at + 200)
        side.lay_out(replace(self.layout, shape=(half,), wrap=""), mesh, "other")
        side.begin()
        loaded = checkpoint.load(self.steps, side.model, side.optimizer, process_group=mesh.get_group())
        chosen = self.stored[-1]
        assert loaded.step == chosen.step and loaded.extra["rank"] == 0
        self.same_as(chosen.was, "on half of the ranks", run=side)

    # -- judging ------------------------------------------------------------------------------------------------------

    def suits_torch(self) -> bool:
        """Whether torch's functions bring the state to another optimizer as it is: they take steps where there is none."""
        if "extra" in self.program.parts or any(param.grad is not None for param in self.run.params.values()):
            return False
        params = [param for group in self.run.optimizer.param_groups for param in group["params"]]
        return all(self.run.optimizer.state.get(param) for param in params)

    def attempt(self, call: Callable[[], Any], fault: Fault | None, wait: bool = False) -> tuple[Any, str | None]:
        """Does what may fail; returns what it gave, or what was told on all ranks.

        Raises:
            Wrong: it failed on some ranks alone, or by an error that has no name.
        """
        value, told, named = None, None, True
        with planted(fault, self.env.rank, self.folder) as charge:
            try:
                value = call()
                if wait and fault is not None:
                    value.wait()
            except Exception as error:
                told, named = f"{type(error).__name__}: {error}", isinstance(error, (*NAMED, ValueError))
                stack = "".join(traceback.format_exception(error))[-2500:]
        if charge.fired:
            self.doing += f"\nplanted on rank {self.env.rank} at\n{charge.where}"
        answers: list[Any] = [None] * self.env.world_size
        dist.all_gather_object(answers, told)
        if told is not None and not named:
            raise Wrong(f"unexpected {told.partition(':')[0]} in {self.kind_of_action}", f"{self.doing}\n{stack}")
        failed = [one for one in answers if one is not None]
        if not failed:
            return value, None
        if len(failed) < len(answers):
            raise Wrong(f"an error of some ranks in {self.kind_of_action}", f"{self.doing}\n{answers}")
        self.verdict.named[f"{failed[0].partition(':')[0]} in {self.kind_of_action}"] += 1
        return None, next((one for one in failed if PARTLY in one), failed[0])

    def whole(self, run: Run) -> dict[str, Any]:
        """Everything of a run, tensors whole and copied."""
        tensors = run.tensors()
        found = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        gathered = {name: value.clone() for name, value in whole(found).items()}
        return {name: gathered.get(name, value) for name, value in tensors.items()}

    def same_as(self, was: dict[str, Any], when: str, kind: str = "", run: Run | None = None) -> None:
        """Compares bit for bit with what was."""
        now = self.whole(run or self.run)
        if kind == "safetensors":
            was, now = ({k: v for k, v in one.items() if not k.startswith("extra")} for one in (was, now))
        wrong = [f"{name} {'appeared' if name in now else 'is gone'}" for name in was.keys() ^ now.keys()]
        wrong += [f"{name} differs" for name in was.keys() & now.keys() if not equal(was[name], now[name])]
        self.same(sorted(wrong), f"{when} something differs")

    def compare(self, gradients: bool = False) -> None:
        """Compares with the twin."""
        wrong = []
        mine, other = self.whole(self.run), self.twin.tensors()
        wrong += [f"{name} is on one side only" for name in mine.keys() ^ other.keys()]
        wrong += [f"{name} differs" for name in mine.keys() & other.keys() if not near(mine[name], other[name])]
        for name, param in self.run.params.items() if gradients else ():
            ours, theirs = param.grad, self.twin.params[name].grad
            if ours is None or theirs is None:
                wrong += [f"gradient of {name} is on one side only"] if ours is not theirs else []
            elif not near(full(ours), theirs):
                wrong.append(f"gradient of {name} differs")
        for name, buffer in self.run.model.named_buffers():
            if not near(buffer, self.twin.model.get_buffer(name)):
                wrong.append(f"buffer {name} differs")
        if not near(self.run.schedule(), self.twin.schedule()):
            wrong.append("schedule differs")
        self.same(sorted(wrong), "something differs from the twin")

    def same(self, wrong: list[str], failure: str) -> None:
        """Raises on all ranks what is wrong on some."""
        some = torch.tensor([float(bool(wrong))])
        dist.all_reduce(some)
        if some.item():
            found: list[list[str]] = [[]] * self.env.world_size
            dist.all_gather_object(found, wrong)
            first = re.sub(r" of .*| differs.*", "", next(filter(None, found))[0])
            raise Wrong(f"{failure}: {first.split()[0]}", f"{self.doing}\n" + "\n".join(map(str, found)))


def _passing(old: Run, new: Run, moved: Run) -> None:
    """Buffers that are not persistent begin anew, on both sides alike."""
    for name, buffer in moved.model.named_buffers():
        if name.endswith("passing"):
            new.model.get_buffer(name).copy_(buffer)

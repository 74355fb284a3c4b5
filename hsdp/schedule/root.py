"""A root: the units below it, their shared state, and recovery when an iteration fails.

    Root              the units, what they share, recovery              this file
    BackwardCommit    what landed in a backward stays, or is undone     backward_commit.py
    Backwards         one backward after another                        backward.py
    Runtime           forwards, optimizer steps, what users call        runtime.py

Each inherits from the one above it: it must be able to clear up behind a failed backward, and calls only those above itself
in this list.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from threading import get_ident
from typing import ClassVar, cast

import torch
from torch import nn

from hsdp.comm.collectives import Comm
from hsdp.comm.divergence import FAILED, DivergenceGuard
from hsdp.comm.observer import Point
from hsdp.comm.streams import Streams
from hsdp.errors import HSDPError, StateError
from hsdp.format import dotted
from hsdp.policies import unheeded
from hsdp.schedule.gather_order import BackwardGatherOrder, GatherOrders, RankSet, RankSets
from hsdp.schedule.passes import BackwardPass, EnclosingTasks, ForwardPass, Token, Visit
from hsdp.schedule.pipeline import ReductionPipeline
from hsdp.schedule.reduce_order import ReduceOrder
from hsdp.schedule.sequence_numbers import SequenceNumber
from hsdp.torch_private import NO_TASK, graph_task, running_node, runs_all_leaves
from hsdp.unit.landing import note_grads_read
from hsdp.unit.lookup import STATE, class_name
from hsdp.unit.unit import Schedule, Unit

_LETS_GO = 0.1
"""Seconds in which the engine's thread lets go of a backward that failed on a device: it takes microseconds."""


class Root:
    """What the units below one root share.

    Attributes:
        generation: raised by every `fully_shard` call, in any model: roots then look again at which units are below them.
        reference: the weak reference that its units hold (`Unit.runtime_ref`).
        units: every unit of the root, parents before children.
        pipeline: the queue of its reductions.
        reduce_order: the order in which units are submitted to the pipeline.
        forward_pass: the last forward that began.
        backward: the backward under way, or one that failed and was not noticed yet.
        enclosing: the graph tasks of other backwards that its backwards run inside of.
        begun: how many backwards have begun; `begun_before`: before the last forward.
        last_watched: the sequence number of the node that was hooked last, through which gradients will enter a unit.
        depth: forward calls under way; `thread`: the thread that they run in.
        stepping: the class of an optimizer whose step on weights of the root has begun, and has not ended.
        awaits_gradients: a forward ran with gradients, and no backward that accumulates into parameters since.
    """

    generation: ClassVar[int] = 0
    # For all roots: a unit that a graph reads may be called under another root, or by itself.
    _graphs: ClassVar[list[weakref.ref[Visit]]] = []

    def __init__(self, root: Unit, modules: list[nn.Module], device: torch.device) -> None:
        self.root = root
        self.reference = weakref.ref(cast(Schedule, self))
        self.depth = self.thread = self.begun = self.begun_before = 0
        self.units: list[Unit] = []
        self.streams = Streams(device, root.context.streams.home)
        self.pipeline = ReductionPipeline(self.streams, root.comm_policy)
        self._forward_order: GatherOrders[Unit] = GatherOrders()
        self._backward_order: BackwardGatherOrder[Unit] = BackwardGatherOrder()
        self.reduce_order = ReduceOrder()
        self.forward_pass = ForwardPass(0, 0)
        self.backward: BackwardPass | None = None
        self.enclosing = EnclosingTasks()
        self.awaits_gradients = False
        self.last_watched = -1
        self.stepping = ""
        self._generation = -1
        self._shard_guards: dict[DivergenceGuard, list[RankSet]] = {}
        self._backward_guards: list[DivergenceGuard] = []
        self._members: list[tuple[Unit, Unit | None, str]] = []
        self._modules = [weakref.ref(module) for module in modules]

    def adopt(self) -> None:
        """Puts the units below the root under this runtime; searches for them anew if `fully_shard` was called since."""
        if fresh := self._generation != Root.generation:
            self.units, self._members = [], []
            for module in self.modules():
                self._collect(module, None, "")
            self._serve_rank_sets()
            comms = [c for u in self.units for c in (u.replicate_comm, u.scatter_comm, u.part_comm) if c is not None]
            self._backward_guards = [a for a in _guards(comms) if a not in self._shard_guards]
            self._generation = Root.generation
        this = cast(Schedule, self)
        for unit, parent, name in self._members:
            before = None if unit.runtime_ref is None else unit.runtime_ref()
            if before is this and not fresh and unit.context.streams is self.streams:
                continue
            if before is not None and before is not this and not before.in_backward():
                # The unit had another root, whose backward may have failed, or left reductions that run on: calls
                # for the unit's gradients do not reach that root any more.
                before.settle()
            unit.join(this, self.streams, parent, name)
        if fresh:
            self._warn_of_unheeded()

    def _serve_rank_sets(self) -> None:
        rank_sets = RankSets(unit.mesh_ranks for unit in self.units)
        self._forward_order.serve(rank_sets)
        self._backward_order.serve(rank_sets)
        self._shard_guards = {guard: [] for guard in _guards(unit.shard_comm for unit in self.units)}
        for unit in self.units:
            guard = unit.shard_comm.divergence_guard
            if guard is not None and unit.mesh_ranks not in (known := self._shard_guards[guard]):
                known.append(unit.mesh_ranks)

    def _warn_of_unheeded(self) -> None:
        """Warns of settings in units' policies that only the root's policy decides."""
        for unit in self.units:
            if left := unheeded(unit.comm_policy, self.root.comm_policy):
                settings = ", ".join(f"{name}={value}" for name, value in left.items())
                warnings.warn(
                    f"hsdp: CommPolicy({settings}) of unit {unit.name!r} has no effect: the outermost unit decides, "
                    f"{self.root.name!r}; give it that policy",
                    stacklevel=6,
                )
                return

    def _warn_of_half_a_step(self) -> None:
        """Warns of weights of which a step that raised has changed an unknown part.

        Ranks whose step ended learn of it from the versions of weights, which are alike on all ranks whose step raised.
        """
        name, self.stepping = self.stepping, ""
        warnings.warn(
            f"hsdp: a step of {name} before this forward raised. Some parameters may have been stepped, others not, and on "
            "each rank others: what shards and replicas hold need not belong together any more. Load a checkpoint, or step "
            "again before the forward. hsdp.check_replicas(model, optimizer) compares replicas",
            stacklevel=5,
        )

    def modules(self) -> Iterator[nn.Module]:
        """The root's module(s)."""
        return (module for ref in self._modules if (module := ref()) is not None)

    def notify(self, point: Point) -> None:
        """Tells observers of the root's units that it passes a point."""
        notified = None
        for unit in self.units:
            observer = unit.context.observer
            if observer is not None and observer is not notified:  # one observer's units come in a row
                notified = observer
                observer.passes(point, self)

    def share_streams(self, other: Root) -> None:
        """Uses the side streams of another root from now on. Between iterations only."""
        self.streams = self.pipeline.streams = other.streams

    def _collect(self, module: nn.Module, parent: Unit | None, name: str) -> None:
        state = module.__dict__.get(STATE)
        if state is not None and state.unit is not parent:
            unit: Unit = state.unit
            if unit not in self.units:
                self.units.append(unit)
                self._members.append((unit, parent, name or f"{class_name(module)} (root)"))
            parent = unit
        for child_name, child in module.named_children():
            self._collect(child, parent, dotted(name, child_name))

    def lacks_gradients(self) -> bool:
        """Whether a backward has begun since the last forward, and none since one with gradients has accumulated any.

        Behind a forward without a backward, an evaluation's, earlier backwards tell nothing.
        """
        return self.awaits_gradients and self.begun != self.begun_before

    def has_graphs(self) -> bool:
        """Whether a graph of gradients (`create_graph=True`) is alive, of whatever root: it reads unsharded parameters."""
        Root._graphs = [graph for graph in Root._graphs if graph() is not None]
        return bool(Root._graphs)

    def _release(self, unit: Unit) -> None:
        """Reshards a unit, unless its forward is under way."""
        if not unit.calls:
            unit.reshard()

    def _reshard_all(self) -> None:
        for unit in self.units:
            unit.rest()
            if unit.undo_writes():
                unit.let_go()
            try:
                unit.reshard()
            except HSDPError:  # its gather failed: the error was raised, or is propagating
                unit.discard_gather()

    def _unregister(self) -> None:
        """A backward is over, or failed: `parameters()` gives sharded parameters, except in units whose forward runs."""
        for unit in self.units:
            if unit.shadows.registered and not unit.calls:
                unit.shadows.unregister()

    def drain(self) -> None:
        """Waits for every reduction under way; afterwards all gradients that were communicated are in `.grad`."""
        active = self.streams.active  # a CPU is spared the question which stream is current
        with torch.no_grad(), self.streams.at_home() if active else nullcontext():
            self.pipeline.drain()
        if active:
            self.note_gradients_read()

    def note_gradients_read(self) -> None:
        """`hsdp.unit.landing.note_grads_read` for all units."""
        note_grads_read((param for unit in self.units for param in unit.params), self.streams)

    def _accumulates(self) -> bool:
        """Whether this graph task accumulates into unsharded parameters, on any rank; that of `autograd.grad` does not.

        A rank whose loss reaches no trained parameter decides by the other leaves of its graph, inputs of the model say:
        `backward()` accumulates into all of them, `backward(inputs=...)` does not. If another rank's `backward(inputs=...)`
        does reach a parameter, the ranks disagree, and the divergence guard raises.
        """
        try:
            if any(unit.will_get_gradients() for unit in self.units):
                return True
            return any(any(unit.trainable) for unit in self.units) and runs_all_leaves()
        except RuntimeError:  # the engine raises: the parameter is an input of autograd.grad
            return False

    def _asks_for_weights(self) -> bool:
        """Whether this graph task is an `autograd.grad` of unsharded parameters, as pipeline schedules call it."""
        try:
            any(unit.will_get_gradients() for unit in self.units)
        except RuntimeError:
            return True
        return False

    def splits(self) -> bool:
        """Whether a pipeline schedule may still compute gradients of weights by an `autograd.grad` that enters no unit.

        A recomputation in it (of a checkpoint around a unit) is a part of a backward all the same.
        """
        return any(unit.split for unit in self.units)

    def take_outside(self) -> None:
        """Keeps gradients that a pipeline schedule computed by `autograd.grad` and put on unsharded parameters.

        Once it `splits` backwards, of all units, also of units that this rank's loss does not use: another rank's loss
        may, and units are reduced on all ranks alike.
        """
        splits = self.splits()
        with self.streams.at_home():
            for unit in self.units:
                if unit.take_outside() or (splits and any(unit.trainable)):
                    unit.gradients.stash()
                    unit.gradients.commit()

    def refuse_landing(self, what: str) -> None:
        """Raises StateError where a user's hook runs the model while the last gradients of a backward land."""
        if self.is_ending():
            raise StateError(
                f"{what} of {self.root.name!r}: a hook on a parameter's gradient runs the model while its backward ends, "
                "which would drop the gradients that have landed; run it after backward() has returned"
            )

    def recover(self, reason: str = "a backward pass failed") -> None:
        """Forgets a backward that failed, if there is one, and warns of it. Called before gradients are read, and
        before a pass begins.
        """
        if self.backward is None:
            return
        reduces, kept = self.backward.reduces, self.backward.kept
        self.reset()
        # Last: where warnings are errors, the state is cleared all the same.
        lost = "gradients of that iteration are dropped" if reduces else "an autograd.grad: no parameter's gradient is lost"
        if kept:
            lost = "it was over, and its gradients are kept"
        warnings.warn(f"hsdp: {reason}; {lost}", stacklevel=2)

    def reset(self) -> None:
        """Forgets the iteration under way: waits for its collectives, frees its buffers, restores gradients."""
        self.streams.catch_up()
        # Gradients before the queue: `roll_back` marks the reductions that `abort` is not to land any more.
        self._roll_back()
        if self.backward is None or self.backward.reduces:  # `autograd.grad` has no gradients to give up
            for divergence_guard in (*self._shard_guards, *self._backward_guards):
                divergence_guard.note_event(FAILED)
        with self.streams.at_home():
            self.pipeline.abort()
        self._reshard_all()
        for unit in self.units:
            unit.gradients.commit()
            for param in unit.params:
                if param.trained is not None:
                    param.trained.grad = None  # a hook that was interrupted did not take the gradient
            unit.remaining.clear()
        self._forward_order.leave()
        # Last: if the reset fails half-way, `backward` is still set, and the next `recover` resets once more.
        self.backward = None
        self.notify(Point.DROPPED)

    def _leave_word(self) -> None:
        """Notifies ranks that may wait for this one, which failed."""
        for divergence_guard in (*self._shard_guards, *self._backward_guards):
            divergence_guard.note_failure()
        for stage in {unit.settings.replica_reduce for unit in self.units}:
            stage.fail()

    def _roll_back(self, at_once: bool = False) -> None:
        if self.backward is not None and not self.backward.reduces:
            return  # `autograd.grad` took no gradients
        if self.backward is not None:
            self._leave_word()
            if self.backward.kept:  # interrupted while units commit: some have, others not
                self._keep_landed()
                return
        with torch.no_grad(), self.streams.at_home():
            for unit in self.units:
                unit.gradients.roll_back(at_once)

    def _keep_landed(self) -> None:
        """A backward ended well: its gradients stay."""
        for unit in self.units:
            unit.gradients.commit()

    def in_backward(self) -> bool:
        """Whether the caller runs inside a backward of this root (a recomputation, say)."""
        backward = self.backward
        if backward is None or backward.ending or not backward.tasks or graph_task() == NO_TASK:
            return False
        bury_tasks(backward.tasks)
        return bool(backward.tasks)

    def is_ending(self) -> bool:
        """Whether the last graph task of a backward is over, and its gradients land or wait for those of other roots."""
        if self.backward is None or not self.backward.ending:
            return False
        bury_tasks(self.backward.tasks)
        return bool(self.backward.tasks)

    def runs_elsewhere(self) -> bool:
        """Whether another thread runs a forward or backward of this root."""
        if graph_task() != NO_TASK:  # a recomputation, on a device in the engine's thread
            return False
        if self.depth:
            return self.thread != get_ident()
        backward = self.backward
        # A traceback of a caught error may hold the tokens whose end tells that the backward is over.
        if backward is None or backward.thread == get_ident():
            return False
        bury_tasks(backward.tasks)
        # On a device, a failed backward's error is raised before the engine's thread has let go of its tokens.
        deadline = time.monotonic() + (_LETS_GO if self.streams.active else 0.0)
        while backward.tasks and time.monotonic() < deadline:
            time.sleep(1e-4)
            bury_tasks(backward.tasks)
        return bool(backward.tasks)

    def running(self) -> SequenceNumber:
        """The sequence number of the autograd node that asks for a recomputation, in a backward of this root."""
        made_in, this = NO_TASK, graph_task()
        for task in () if self.backward is None else self.backward.tasks:  # the outermost one first
            if task == this:
                break
            made_in = task
        return made_in, running_node()


def bury_tasks(tasks: dict[int, weakref.ref[Token]]) -> None:
    """Forgets graph tasks that failed: the engine dropped their callbacks, and with them the tokens."""
    for task, token in list(tasks.items()):
        if token() is None:
            del tasks[task]


def _guards(comms: Iterable[Comm]) -> list[DivergenceGuard]:
    return list(dict.fromkeys(comm.divergence_guard for comm in comms if comm.divergence_guard is not None))

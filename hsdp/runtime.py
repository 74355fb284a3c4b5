"""The runtime of one root: the only place where units meet.

It keeps the order in which units run, gathers ahead along it, decides whose turn it is to reduce, and tells one
iteration from the next, so that nothing of a failed or abandoned one survives.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from hsdp.agreement import STEP, Agreement
from hsdp.autograd import NO_TASK, graph_task, queue_callback, will_execute
from hsdp.collectives import Comm
from hsdp.errors import HSDPError
from hsdp.order import Order
from hsdp.pipeline import Reduction, ReductionPipeline
from hsdp.streams import Streams
from hsdp.training_state import TrainingState, expect, stale
from hsdp.turns import Turns
from hsdp.unit import Residency, Unit
from hsdp.wording import dotted


class Visit(NamedTuple):
    """One forward of a unit, as its backward needs to know it.

    Attributes:
        epoch: the unit's epoch in that forward.
        first_node: number of the first autograd node made inside it.
    """

    epoch: int
    first_node: int


class _Token:
    """Lives as long as the engine means to call back at the end of a graph task."""


class Runtime:
    """What the units below one root share.

    Attributes:
        generation: raised by every `fully_shard` call, in any model: roots then look again at which units are below them.
        units: every unit of the root, parents before children.
        pipeline: the queue of its reductions.
        turns: the order in which units come to it.
        depth: forward calls under way.
    """

    generation: ClassVar[int] = 0

    def __init__(self, root: Unit, modules: list[nn.Module], device: torch.device) -> None:
        self.root = root
        self.depth = 0
        self.units: list[Unit] = []
        self.streams = Streams(device)
        self.pipeline = ReductionPipeline(self.streams, root.comm_policy)
        self._forward = Order()
        self._backward = Order()
        self.turns = Turns()
        self._left: dict[Unit, None] = {}
        self._unfinished = False
        self._keeps_graph = False
        self._tasks: dict[int, weakref.ref[_Token]] = {}
        self._reduces = True
        self._opened: dict[Unit, tuple[Visit | None, int]] = {}
        self._generation = -1
        self._shard_agreements: list[Agreement] = []
        self._backward_agreements: list[Agreement] = []
        self._members: list[tuple[Unit, Unit | None, str]] = []
        self._parents: set[Unit | None] = set()
        self._modules = [weakref.ref(module) for module in modules]

    # -- belonging -----------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Gathers the units below the root under this runtime, anew if `fully_shard` was called since."""
        if self._generation != Runtime.generation:
            self.units = []
            for module in self.modules():
                self._collect(module, None, "")
            self._shard_agreements = _agreements(unit.shard_comm for unit in self.units)
            comms = [c for u in self.units for c in (u.replicate_comm, u.scatter_comm, u.part_comm) if c is not None]
            self._backward_agreements = [a for a in _agreements(comms) if a not in self._shard_agreements]
            self._parents = {parent for _, parent, _ in self._members}
            self._generation = Runtime.generation
        for unit, parent, name in self._members:
            before = unit.runtime
            if before is not None and before is not self and not before.in_backward():
                before.recover()  # the unit had another root, whose backward may have failed
            unit.join(self, self.streams, parent, name)

    def modules(self) -> Iterator[nn.Module]:
        """The root's module(s)."""
        return (module for ref in self._modules if (module := ref()) is not None)

    def share_streams(self, other: Runtime) -> None:
        """Uses the side streams of another root from now on. Between iterations only."""
        self.streams = self.pipeline.streams = other.streams

    def _collect(self, module: nn.Module, parent: Unit | None, name: str) -> None:
        if parent is None:
            self._members = []
        state = module.__dict__.get("_hsdp_state")
        if state is not None and state.unit is not parent:
            unit: Unit = state.unit
            if unit not in self.units:
                self.units.append(unit)
                self._members.append((unit, parent, name or f"{type(module).__name__} (root)"))
            parent = unit
        for child_name, child in module.named_children():
            self._collect(child, parent, dotted(name, child_name))

    # -- forward -------------------------------------------------------------------------------------------------

    def in_backward(self) -> bool:
        """Whether the caller runs inside a backward of this root (a recomputation, say)."""
        if not self._tasks or graph_task() == NO_TASK:
            return False
        self._bury_tasks()
        return bool(self._tasks)

    def begin_forward(self) -> None:
        """A forward of the root begins."""
        self.recover("a backward pass did not end")
        self.adopt()
        self.turns.begin_forward()
        if not self.turns.awaited:
            self._left = {}
        # Parameters that an earlier forward left whole may have been written since (`p.data`), which nothing shows.
        for unit in self.units:
            if unit.lent:
                expect(unit, "forward", TrainingState.IDLE)
            if unit.holds_whole and not (unit.pinned and unit.gathered_epoch == unit.epoch):
                unit.reshard()
        self._forward.begin()
        plan = hash((self._forward.plan, self._backward.plan, torch.is_grad_enabled()))
        for agreement in self._shard_agreements:
            agreement.begin(plan)

    def enter_forward(self, unit: Unit) -> None:
        """`unit`'s forward begins: opens it and gathers ahead."""
        self.turns.enter(unit)
        unit.choose_trainable()
        unit.state = TrainingState.FORWARD
        ahead = self._forward.visit(unit, unit.comm_policy.prefetch)
        self._open(unit, ahead if unit.settings.forward_prefetch is None else unit.settings.forward_prefetch)

    def leave_forward(self, unit: Unit, keep: bool, more: bool) -> None:
        """`unit`'s forward ended. `keep`: its parameters stay whole; `more`: other modules of it are still to run.

        Where the user leaves it open, the last unit stays whole too: its backward comes first, with nothing to hide a
        gather behind. Last is who is gathered last, which all ranks agree about; the backward's order may be their own.
        """
        self._left.pop(unit, None)
        self._left[unit] = None
        unit.state = TrainingState.IDLE
        if more:
            return
        if unit.settings.reshard_after_forward is None and torch.is_grad_enabled() and self._forward.is_last(unit):
            self._backward.skip(unit)
            keep = True
        if keep:
            unit.hide()
            return
        if torch.is_grad_enabled():
            unit.keep_part()
        else:
            unit.reshard()

    def end_forward(self) -> None:
        """The root's forward ended: prefetched units that were not used are freed, without gradients all units are."""
        self._forward.end()
        self.turns.end_forward()
        grad = torch.is_grad_enabled()
        for unit in self.units:
            unused = unit.residency is Residency.GATHERING or (not grad and unit.residency is Residency.WHOLE)
            if unused and not unit.pinned:
                unit.reshard()
        # Whoever writes to offloaded shards after a forward, by hand or by a load, must not change what it computes.
        self.streams.finish_host_reads()

    def forget_forward(self) -> None:
        """The root's forward raised: frees whatever is whole. Sums of earlier micro-batches stay."""
        self._forward.cancel()
        self.turns.forget_forwards()
        self._left = {}
        self._reshard_all()

    def _open(self, unit: Unit, ahead: list[Unit]) -> None:
        if not unit.open and unit.residency is not Residency.SHARDED and unit.gathered_epoch != unit.epoch:
            unit.reshard()
        if unit.residency is Residency.SHARDED:
            unit.launch()
        for other in ahead:
            if other.residency is Residency.SHARDED:
                other.launch()
        unit.show()

    def _reshard_all(self) -> None:
        for unit in self.units:
            unit.state = TrainingState.IDLE
            try:
                unit.reshard()
            except HSDPError:  # its gather failed: somebody was told, or an error is on its way up
                unit.discard_gather()

    # -- backward ------------------------------------------------------------------------------------------------

    def enter_task(self) -> int:
        """Notes the graph task that the caller runs in; at its end the runtime is called back."""
        task = graph_task()
        if task not in self._tasks:
            self._bury_tasks()
            if not self._tasks:
                self.recover()
                self._begin_backward()
            elif not self._reduces:
                self._reduces = self._accumulates()
            token = _Token()
            self._tasks[task] = weakref.ref(token, self._dropped)
            queue_callback(lambda: self._end_task(task, token))
        return task

    def _dropped(self, token: object) -> None:
        """The engine dropped a callback, and with it the token: that graph task failed.

        With the outermost one the backward has. On the CPU the exception is just passing: gradients are put back before
        anybody can look at them. On a device this may be the engine's own thread, which must not: `recover` does it.
        """
        if not self._tasks or self.streams.active:
            return
        self._bury_tasks()
        if not self._tasks and self._unfinished:
            self._roll_back(at_once=True)

    def _bury_tasks(self) -> None:
        """Forgets graph tasks that failed: the engine dropped their callbacks, and with them the tokens."""
        for task, token in list(self._tasks.items()):
            if token() is None:
                del self._tasks[task]

    def _begin_backward(self) -> None:
        self._reduces = self._accumulates()
        if self._reduces:
            for unit in self.units:
                unit.gradients.refuse_lost(unit.name, "backward")
        self._unfinished = True
        self._keeps_graph = False
        self._backward.begin(unit for unit in reversed(self._left) if unit.residency is Residency.SHARDED)
        self.turns.begin()
        self._opened = {}
        for agreement in self._backward_agreements:
            agreement.begin(0)

    def _accumulates(self) -> bool:
        """Whether this graph task accumulates into a whole parameter; that of `autograd.grad` does not."""
        try:
            return any(
                wanted and will_execute(param.node)
                for unit in self.units
                for param, wanted in zip(unit.params, unit.trainable, strict=True)
            )
        except RuntimeError:  # the engine will not say: the parameter is an input of autograd.grad
            return False

    def enter_backward(self, unit: Unit, visit: Visit | None, creates_graph: bool, node: int = 0) -> None:
        """The gradient of an output of `unit` is there, or it is recomputed: opens the unit for its backward.

        Args:
            unit: the unit.
            visit: the forward whose backward begins; None for a recomputation.
            creates_graph: the backward runs with create_graph=True.
            node: number of the autograd node behind that output, which is about to run. Of no matter in a recomputation.

        Raises:
            StaleParametersError: the parameters changed since the forward.
            StateError: somebody's `full_params` has the unit.
        """
        if unit.lent:
            expect(unit, "backward", TrainingState.IDLE)
        task = self.enter_task()
        if (visit is not None and visit.epoch != unit.epoch) or (not unit.open and unit.disturbed()):
            raise stale(unit)
        # With create_graph=True the whole parameters are part of the new graph: they stay.
        self._keeps_graph = self._keeps_graph or creates_graph
        if self._reduces and task not in unit.remaining:
            unit.begin_task(task)
        unit.state = TrainingState.BACKWARD_PRE
        if visit is not None and (unit not in self._opened or self._opened[unit][0] is not visit):
            self._end_visits_behind(node)
            self.turns.visit(unit)
        if unit.open:
            if visit is not None or unit not in self._opened:
                self._opened[unit] = (visit, task)
            return
        self.pipeline.advance()
        if visit is not None and not unit.settings.unshard_in_backward:
            self._opened[unit] = (visit, task)
            return
        window = unit.comm_policy.prefetch
        # Only what is gathered counts: ranks may enter units that stayed whole in different orders, or not at all.
        whole = unit.residency is Residency.WHOLE
        ahead = self._backward.peek(window) if whole else self._backward.visit(unit, window)
        ahead = ahead if unit.settings.backward_prefetch is None else unit.settings.backward_prefetch
        self._open(unit, [other for other in ahead if other.settings.unshard_in_backward])
        self._opened[unit] = (visit, task)

    def _end_visits_behind(self, node: int) -> None:
        """Ends the visits that are over when an autograd node is about to run.

        The engine runs nodes that were made later first. So units whose forward began after the node was made have run
        all of theirs, also those that only hand gradients through frozen weights.
        """
        for unit, (visit, _) in list(self._opened.items()):
            if visit is not None and visit.first_node > node:
                self._end_visit(unit)

    def _end_visit(self, unit: Unit) -> None:
        """A visit of `unit` is over: if it was the last one, so is the unit, whatever this rank used of it."""
        if self.turns.expects(unit):
            return
        if self._reduces and unit.in_turn and not unit.ready:
            self._make_ready(unit)
        if not self._keeps_graph:
            del self._opened[unit]
            if unit.settings.reshard_after_backward:
                unit.reshard()

    def completed(self, unit: Unit) -> None:
        """All gradients of `unit` that this graph task will make on this rank are there."""
        if unit in self._opened and self._opened[unit][1] != graph_task():
            return  # A reentrant checkpoint inside the unit: the visit goes on in other tasks.
        if not unit.in_turn:
            self._reduce(unit)
        elif unit not in self._parents:
            self._make_ready(unit)
        # Else other units run in the middle of its visit, and which of its own parts come behind them differs by rank.

    def _make_ready(self, unit: Unit) -> None:
        unit.ready = True
        for other in self.turns.take():
            self._reduce(other)

    def _reduce(self, unit: Unit) -> None:
        unit.state = TrainingState.BACKWARD_POST
        unit.ready = False
        settings = unit.settings
        with torch.no_grad():
            if not settings.requires_grad_sync:
                unit.gradients.stash()
                return
            self.pipeline.make_room()
            parts = unit.gradients.take(not self.root.settings.drains, settings.requires_all_reduce)
            if parts:
                self.pipeline.submit(Reduction(unit, parts, settings.requires_all_reduce))

    def _end_task(self, task: int, token: _Token) -> None:
        """A graph task ended. With the outermost one the backward is over: whatever is left is swept."""
        if task not in self._tasks:
            return  # of an iteration that was aborted
        del self._tasks[task]
        if not self._tasks:
            try:
                self._end_backward()
            except BaseException:
                if not self.streams.active:
                    self._roll_back(at_once=True)
                raise
            return
        for unit, (_, opened_in) in list(self._opened.items()):
            if opened_in == task:  # what an inner task (reentrant checkpointing) entered is over with it
                self._end_visit(unit)

    def _end_backward(self) -> None:
        if self._reduces:
            left = self.turns.end()
            for unit in (*left, *(u for u in self.units if u not in left)):
                settings, gradients = unit.settings, unit.gradients
                deferred = gradients.deferred and settings.requires_all_reduce
                due = settings.requires_grad_sync and (gradients.kept or deferred)
                if due or unit in left or gradients.waiting():
                    self._reduce(unit)
        self.turns.clear()
        self._backward.end()
        if self.root.settings.drains:
            self.drain()
        else:
            self.pipeline.tell_errors()
        for unit in self.units:
            unit.remaining.clear()
            unit.ready = False
            unit.state = TrainingState.IDLE
            if (unit.residency is Residency.GATHERING and not unit.pinned) or (
                unit.holds_whole and unit.settings.reshard_after_backward and not self._keeps_graph
            ):
                unit.reshard()
        for unit in self.units:
            unit.gradients.commit()
        self.streams.finish_host_reads()
        self._opened = {}
        self._unfinished = False

    def drain(self) -> None:
        """Waits for every reduction under way; afterwards all gradients that were communicated are in `.grad`."""
        with torch.no_grad():
            self.pipeline.drain()

    def settle(self) -> None:
        """What comes before anybody looks at gradients: a failed backward is forgotten, reductions under way land.

        Not inside a backward, where an optimizer's step is that of a hook.
        """
        if not self.in_backward():
            self.recover()
            if len(self.pipeline):
                self.drain()

    def flush(self) -> None:
        """Communicates every pending sum now, outside of a backward. Every rank calls it."""
        self.recover()
        for unit in self.units:
            unit.gradients.refuse_lost(unit.name, "flush")
        try:
            with torch.no_grad():
                for unit in self.units:
                    if unit.gradients.kept or unit.gradients.deferred:
                        parts = unit.gradients.take(runs_on=False)
                        if parts:
                            self.pipeline.submit(Reduction(unit, parts, all_reduce=True))
            self.drain()
        except BaseException:
            self.reset()
            raise
        for unit in self.units:
            unit.gradients.commit()

    def stepped(self) -> None:
        """An optimizer stepped parameters of this root: every rank does, between the same passes."""
        # In a backward it is a hook's optimizer, which runs when a reduction lands: that depends on this rank's timing.
        if not self._unfinished:
            self.turns.awaited = 0  # what was forward before would be stale
            for agreement in (*self._shard_agreements, *self._backward_agreements):
                agreement.note(STEP)

    # -- failure -------------------------------------------------------------------------------------------------

    def recover(self, reason: str = "a backward pass failed") -> None:
        """Forgets a backward that failed, if one did since. Whatever looks at gradients or begins a pass asks for it."""
        if self._unfinished:
            self.abort(reason)

    def abort(self, reason: str) -> None:
        """Forgets the iteration under way and warns of it."""
        self.reset()
        # Last: where warnings are errors, the next iteration is fresh all the same.
        warnings.warn(f"hsdp: {reason}; gradients of that iteration are dropped", stacklevel=3)

    def reset(self) -> None:
        """Forgets the iteration under way: its work is waited for, its buffers are freed, gradients are those before it."""
        self._roll_back()
        self.pipeline.abort()
        self._reshard_all()
        for unit in self.units:
            unit.gradients.commit()
            for param in unit.params:
                if param.whole is not None:
                    param.whole.grad = None  # a hook that was interrupted did not take it
            unit.remaining.clear()
            unit.ready = False
        self._tasks.clear()
        self.turns.clear()
        self.turns.forget_forwards()
        self._opened = {}
        self._left = {}
        self._forward.cancel()
        self._backward.cancel()
        self._unfinished = False

    def _roll_back(self, at_once: bool = False) -> None:
        with torch.no_grad():
            for unit in self.units:
                unit.gradients.roll_back(at_once)


def _agreements(comms: Iterable[Comm]) -> list[Agreement]:
    return list(dict.fromkeys(comm.agreement for comm in comms if comm.agreement is not None))

"""The backwards of one root: which units they enter, what is gathered ahead, whose gradients are reduced when."""

from __future__ import annotations

import weakref

import torch

from hsdp.schedule.pipeline import Reduction
from hsdp.schedule.root import Moment, Root, Token, Visit
from hsdp.torch_private import graph_task, queue_callback
from hsdp.unit.state import TrainingState, expect, stale
from hsdp.unit.unit import Unit
from hsdp.unit.unsharded import Residency, Version


class Backwards(Root):
    """What happens between the first hook of a root's backward and its end, or the failure of one."""

    def has_entered(self, unit: Unit) -> bool:
        """Whether the backward under way has entered `unit`."""
        return unit in self._entered

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
            token = Token()
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

    def _begin_backward(self) -> None:
        self._reduces = self._accumulates()
        if self._reduces:
            for unit in self.units:
                unit.gradients.refuse_lost(unit.name, "backward")
        self._unfinished = True
        self._keeps_graph = False
        self._behind = None
        self.reduce_order.begin(answers=not self.depth)
        self._opened = {}
        self._entered = set()
        for divergence_guard in self._backward_guards:
            divergence_guard.begin_pass(0)

    def _accumulates(self) -> bool:
        """Whether this graph task accumulates into an unsharded parameter; that of `autograd.grad` does not."""
        try:
            return any(unit.will_get_gradients() for unit in self.units)
        except RuntimeError:  # the engine will not say: the parameter is an input of autograd.grad
            return False

    def enter_backward(self, unit: Unit, visit: Visit | None, creates_graph: bool, node: Moment) -> None:
        """The gradient of an output of `unit` is there, or it is recomputed: opens the unit for its backward.

        Args:
            unit: the unit.
            visit: the forward whose backward begins; None for a recomputation.
            creates_graph: the backward runs with create_graph=True.
            node: when the autograd node that is about to run was made: the one behind that output, or the one that asked
                for the recomputation.

        Raises:
            StaleParametersError: the parameters changed since the forward.
            StateError: somebody's `full_params` has the unit.
        """
        if unit.lent:
            expect(unit, "backward", TrainingState.IDLE)
        task = self.enter_task()
        if not unit.open and unit.disturbed():
            raise stale(unit)
        if visit is not None and creates_graph:
            # The unsharded parameters are part of the new graph, which keeps that of the forward alive: they stay.
            self._keeps_graph = unit.retained = True
            self._graphs.append(weakref.ref(visit))
            unit.note_shards()
        self._entered.add(unit)
        if visit is None or not unit.open:
            # What is recomputed, be it inside of the unit's own forward, sees what is trained by then.
            unit.choose_trainable(afresh=False)
        if self._reduces and task not in unit.remaining:
            unit.begin_task(task)
        unit.state = TrainingState.BACKWARD_PRE
        first_node = None if visit is None else visit.first_node
        begins = visit is not None and (unit not in self._opened or self._opened[unit][0] != first_node)
        # A unit that is open may begin another visit, that of an earlier forward, or be recomputed before that.
        comes = begins or visit is None
        passed = self._pass_to(unit, visit, node) if comes or not unit.open else []
        # What comes behind the node is over on every rank, before this one gathers ahead.
        if comes:
            self._end_visits_behind(node)
        for other in passed:
            self._pass_over(other)
            if comes:
                self._end_visits_behind(node)
        # Behind what all ranks do before they come here: an error finds them at one point.
        version = unit.version
        if (visit is not None and visit.version != version) or not (unit in self._opened or unit.as_kept()):
            raise stale(unit)
        self._backward.move_to(unit)
        if begins:
            self.reduce_order.visit(unit)
        if unit.open:
            if comes:  # as on ranks on which it is not: which earlier visits a rank made is its own affair
                self._launch(self._ahead(unit))
            if visit is not None or unit not in self._opened:
                self._opened[unit] = (first_node, task)
            return
        self.pipeline.advance()
        if visit is not None and not unit.settings.unshard_in_backward:
            self._opened[unit] = (first_node, task)
            return
        self._gather(unit, version, looked=True)
        self._launch(self._ahead(unit))
        unit.show()
        self._opened[unit] = (first_node, task)

    def _pass_to(self, unit: Unit, visit: Visit | None, node: Moment) -> list[Unit]:
        """Goes on to `unit` in the order of the backward; returns the units that others may have entered before it."""
        behind = visit.of if visit is not None else None
        behind = behind or self._behind or self.forward_pass
        if self._behind is None or behind.number < self._behind.number:
            # The engine runs what was made later first: with several forwards behind one backward, the last one's.
            # Units that stayed whole have their place in the order too: it is that of the reductions.
            self._pass_over_rest()
            self._backward.end()
            self._backward.begin(
                (other, left is not None)
                for other, left in reversed(behind.left.items())
                if other.settings.unshard_in_backward
            )
            self._behind = behind
        if self._backward.expects(unit):
            return self._backward.before(unit)
        # Recomputed against expectation: others have entered what the engine has come behind by now.
        return [other for other in self._backward.rest() if self._left(other)[0] > node]

    @staticmethod
    def _launch(ahead: list[Unit]) -> None:
        """Gathers units ahead, which are taken to have their versions of the forward; what is entered is looked at."""
        for other in ahead:
            if other.residency is Residency.SHARDED:
                other.launch(other.forward_version, looked=True)

    def _ahead(self, unit: Unit) -> list[Unit]:
        """The units that are gathered when the backward of `unit` begins."""
        chosen = unit.settings.backward_prefetch
        ahead = self._backward.next_units(unit.comm_policy.prefetch) if chosen is None else chosen
        return [other for other in ahead if other.settings.unshard_in_backward]

    def _pass_over(self, unit: Unit) -> None:
        """This rank's backward comes behind `unit` without having entered it: does what ranks do that entered it.

        They gather it, gather ahead from there, and end its visit when a node of an earlier unit is about to run.

        Raises:
            StaleParametersError: the parameters changed since the forward, as those ranks are told.
        """
        first_node, version = self._left(unit)
        if unit.disturbed() or unit.version != version or not unit.as_kept():
            raise stale(unit)
        self._backward.move_to(unit)
        if unit.residency is Residency.SHARDED:
            unit.launch(version, looked=True)
        self._launch(self._ahead(unit))
        unit.retained = unit.retained or self._keeps_graph
        self.reduce_order.visit(unit)
        self._opened[unit] = (first_node, graph_task())

    def _pass_over_rest(self) -> None:
        for unit in self._backward.rest():
            self._end_visits_behind(self._left(unit)[0])
            self._pass_over(unit)

    def _left(self, unit: Unit) -> tuple[Moment, Version]:
        """How the forward whose backward runs left a unit: see `Pass.left`."""
        assert self._behind is not None, "an order belongs to a forward"
        left = self._behind.left[unit]
        assert left is not None, f"no gradient can enter unit {unit.name!r}"
        return left

    def _end_visits_behind(self, node: Moment) -> None:
        """Ends the visits that are over when an autograd node is about to run.

        The engine runs nodes that were made later first. So units whose forward began after the node was made have run
        all of theirs, also those that only hand gradients through frozen weights.
        """
        for unit, (first_node, _) in list(self._opened.items()):
            if first_node is not None and first_node > node:
                self._end_visit(unit)

    def _end_visit(self, unit: Unit) -> None:
        """A visit of `unit` is over: if it was the last one, so is the unit, whatever this rank used of it."""
        if self.reduce_order.expects(unit):
            return
        if self._reduces and unit.queued and not unit.ready:
            self._make_ready(unit)
        if not self._keeps_graph:
            del self._opened[unit]
            unit.check_unwritten()
            if unit.settings.reshard_after_backward:
                self._release(unit)
            else:
                _stay(unit)

    def completed(self, unit: Unit) -> None:
        """All gradients of `unit` that this graph task will make on this rank are there."""
        if unit in self._opened and self._opened[unit][1] != graph_task():
            return  # A reentrant checkpoint inside the unit: the visit goes on in other tasks.
        if not unit.queued:
            self._reduce(unit)
        elif unit not in self._parents:
            self._make_ready(unit)
        # Else other units run in the middle of its visit, and which of its own parts come behind them differs by rank.

    def _make_ready(self, unit: Unit) -> None:
        unit.ready = True
        for other in self.reduce_order.take():
            self._reduce(other)

    def _reduce(self, unit: Unit) -> None:
        if torch.is_grad_enabled():  # with create_graph=True; to ask takes the host a twentieth of `no_grad`
            with torch.no_grad():
                self._reduce(unit)
            return
        unit.state = TrainingState.BACKWARD_POST
        unit.ready = False
        settings = unit.settings
        if not settings.requires_grad_sync:
            unit.gradients.stash()
            return
        self.pipeline.make_room()
        parts = unit.gradients.take(not self.root.settings.drains, settings.requires_all_reduce)
        if parts:
            self.pipeline.submit(Reduction(unit, parts, settings.requires_all_reduce))

    def _end_task(self, task: int, token: Token) -> None:
        """A graph task ended. With the outermost one the backward is over: whatever is left is swept."""
        if task not in self._tasks:
            return  # of an iteration that was aborted
        del self._tasks[task]
        self._bury_tasks()  # a task inside of this one may have failed, and its error been caught there
        if not self._tasks:
            try:
                self._ending = True
                self._end_backward()
            except BaseException:
                if not self.streams.active:
                    self._roll_back(at_once=True)
                raise
            finally:
                self._ending = False
            return
        for unit, (_, opened_in) in list(self._opened.items()):
            if opened_in == task:  # what an inner task (reentrant checkpointing) entered is over with it
                self._end_visit(unit)

    def _end_backward(self) -> None:
        self._pass_over_rest()
        # Before reductions land: an optimizer in a hook may write to shards, which on one shard rank are the parameters.
        for unit in self._opened:
            unit.check_unwritten()
        if self._reduces:
            left = self.reduce_order.end()
            for unit in (*left, *(u for u in self.units if u not in left)):
                settings, gradients = unit.settings, unit.gradients
                deferred = gradients.deferred and settings.requires_all_reduce
                due = settings.requires_grad_sync and (gradients.kept or deferred)
                if due or unit in left or gradients.waiting():
                    self._reduce(unit)
        self.reduce_order.clear()
        self._backward.end()
        if self.root.settings.drains:
            self.drain()
        else:
            self.pipeline.tell_errors()
        for unit in self.units:
            unit.remaining.clear()
            unit.ready = False
            unit.state = TrainingState.FORWARD if unit.calls else TrainingState.IDLE
            if self._keeps_graph and unit.retained:  # entered or passed over: whole on all ranks until the next forward
                if unit.residency is Residency.UNSHARDED and not unit.calls:
                    unit.keep()
            elif unit in self._opened and not unit.settings.reshard_after_backward:
                _stay(unit)
            elif (unit.residency is Residency.GATHERING and not unit.pinned) or (
                unit.holds_unsharded and unit.settings.reshard_after_backward and not self._keeps_graph
            ):
                self._release(unit)
        for unit in self.units:
            unit.gradients.commit()
        self.streams.finish_host_reads()
        self._opened = {}
        self._entered = set()
        self._unfinished = False


def _stay(unit: Unit) -> None:
    """A unit whose visit is over stays whole, also on ranks that passed over it: then its next use gathers on none."""
    if unit.residency is Residency.GATHERING:
        unit.finish()

"""The backwards of one root: which units they enter, what is gathered ahead, whose gradients are reduced when."""

from __future__ import annotations

import warnings
import weakref
from bisect import bisect_right
from collections.abc import Collection
from typing import cast

import torch

from hsdp.comm.observer import Point
from hsdp.schedule.backward_commit import BackwardCommit
from hsdp.schedule.passes import BackwardPass, OpenVisits, Token, Visit
from hsdp.schedule.pipeline import Reduction
from hsdp.schedule.root import Root, bury_tasks
from hsdp.schedule.sequence_numbers import BEFORE_ALL, SequenceNumber
from hsdp.torch_private import graph_task, queue_callback
from hsdp.unit.state import BACKWARD_POST, BACKWARD_PRE, IDLE, TrainingState, expect, stale
from hsdp.unit.unit import Unit
from hsdp.unit.unsharded import GATHERING, SHARDED, UNSHARDED, launch_ahead


class Backwards(BackwardCommit):
    """Runs a root's backward from its first hook to its end, or to its failure."""

    def has_entered(self, unit: Unit) -> bool:
        """Whether the backward under way has entered `unit`."""
        return self.backward is not None and unit in self.backward.entered

    def state_of(self, unit: Unit) -> TrainingState | None:
        """The state of `unit` in the backward under way; None if there is none, or it has not come to the unit."""
        if not self.in_backward() or not self.has_entered(unit):
            return None
        assert self.backward is not None
        return BACKWARD_POST if unit in self.backward.reduced else BACKWARD_PRE

    def enter_task(self) -> None:
        """Notes the graph task that the caller runs in; at its end the runtime is called back."""
        self._join(graph_task())

    def _join(self, task: int) -> BackwardPass:
        """The backward that a graph task belongs to; with the first task it begins."""
        backward = self.backward
        if backward is not None and task in backward.tasks:
            return backward
        if backward is not None:
            bury_tasks(backward.tasks)
        if backward is None or backward.ending or not backward.tasks:
            # A backward that failed is rolled back before a new one begins: later that would undo the new gradients too.
            self.refuse_landing("backward")
            self.recover()
            backward = self._begin_backward()
        elif not backward.reduces:
            backward.reduces = self._accumulates()
        now, token = backward, Token()
        now.tasks[task] = weakref.ref(token, self.note_failure)
        queue_callback(lambda: self._end_task(now, task, token))
        return now

    def _begin_backward(self) -> BackwardPass:
        self.begun += 1
        self.pipeline.policy = self.root.comm_policy  # the user may set its bounds between iterations
        reduces = self._accumulates()
        if reduces:
            for unit in self.units:
                if unit.gradients.lost:
                    unit.gradients.refuse_lost(unit.name, "backward")
        found: list[Unit] = []
        if not self.root.settings.drains:
            self.take_outside()
            asks = self._asks_for_weights()
            found = [unit for unit in self.units if asks or unit.shadows.registered]
        self.backward = BackwardPass(reduces, self.reduce_order.begin(answers=not self.depth), found)
        for divergence_guard in self._backward_guards:
            divergence_guard.begin_pass(0)
        return self.backward

    def enter_backward(self, unit: Unit, visit: Visit | None, creates_graph: bool, node: SequenceNumber) -> None:
        """The gradient of an output of `unit` has arrived, or a recomputation begins: opens the unit for its backward.

        Args:
            unit: the unit.
            visit: the forward whose backward begins; None for a recomputation.
            creates_graph: the backward runs with create_graph=True.
            node: when the autograd node that is about to run was made: the one behind that output, or the one that asked
                for the recomputation.

        Raises:
            StaleParametersError: the parameters changed since the forward.
            StateError: the unit is lent to `full_params`.
        """
        if unit.context.observer is not None:
            unit.context.observer.passes(Point.BACKWARD_ENTERED, unit)
        if unit.lent:
            expect(unit, "backward", IDLE)
        task = graph_task()
        backward = self._join(task)
        if unit.runtime_ref is not self.reference and (other := unit.runtime) is not None:
            # The unit was called under another root since: recomputations of a reentrant checkpoint in it are that root's.
            cast(BackwardCommit, other).enclose()
        if not unit.open and unit.disturbed():
            raise stale(unit)
        if visit is not None and creates_graph:
            self._keep_for_graph(backward, unit, visit)
        backward.entered.add(unit)
        backward.reduced.discard(unit)
        if visit is None or not unit.open:
            # A recomputation, also one inside the unit's own forward, uses the present `requires_grad`.
            unit.choose_trainable(afresh=False)
        if backward.reduces and task not in unit.remaining:
            unit.begin_task(task)
        opened = backward.opened.get(unit)
        begins = visit is not None and (opened is None or visit.first_node not in opened.begun)
        # A unit that is open may begin another visit, that of an earlier forward, or be recomputed before that.
        others_gather_here = begins or visit is None
        if others_gather_here or not unit.open:
            self._catch_up(backward, unit, visit, node, ends_visits=others_gather_here)
        _count_calls_behind(backward, unit, node)
        # All ranks have passed over the same units when one of them finds that weights changed: all stop at one point.
        version = unit.version
        if (visit is not None and visit.version != version) or not (unit in backward.opened or unit.shards_unchanged()):
            raise stale(unit)
        ahead = _move_to(backward, unit)
        if visit is not None and begins:
            backward.turns.visit(unit, None if visit.forward_pass is None else visit.first_node)
        if unit.open:
            unit.shadows.register()
            if unit.readers is not None:
                unit.readers.add(unit.context.streams, unit.dtype_groups)
            if others_gather_here:  # also where the unit is open on this rank alone, by a visit of its own
                launch_ahead(ahead)
            if visit is None and unit in backward.opened:
                return  # recomputed in the middle of a visit, which goes on
        elif visit is None or unit.settings.unshard_in_backward:
            unit.gather(version, looked=True)
            launch_ahead(ahead)
            unit.show(registered=True)  # a part of the module may be recomputed without a hook of hsdp's
        opened = backward.opened.get(unit)  # perhaps newly gathered: the unit was passed over, or its visits have ended
        begun, earliest = (set(), None) if opened is None else (opened.begun, opened.earliest)
        if visit is not None and begins:
            begun.add(visit.first_node)
            earliest = visit.first_node if earliest is None else min(earliest, visit.first_node)
        backward.opened[unit] = OpenVisits(begun, earliest, task)

    def come_to(self, node: SequenceNumber) -> None:
        """The engine is about to run a node outside of units: visits that it has come behind are over."""
        if (backward := self.backward) is not None and graph_task() in backward.tasks:
            self._end_visits_behind(backward, node)

    def _keep_for_graph(self, backward: BackwardPass, unit: Unit, visit: Visit) -> None:
        """Unsharded parameters are part of the new graph, which keeps the forward's graph alive: they stay."""
        backward.keeps_graph = True
        unit.retain()
        Root._graphs.append(weakref.ref(visit))
        unit.note_shards()

    def _catch_up(
        self, backward: BackwardPass, unit: Unit, visit: Visit | None, node: SequenceNumber, ends_visits: bool
    ) -> None:
        """Passes over the units that other ranks may have entered before `unit`.

        `ends_visits`: the visits that the engine has come behind when it runs `node` are over, on every rank, and end
        before this one gathers ahead. Of those, each ends where it does on ranks that enter the units passed over.
        """
        for other in self._pass_to(backward, unit, visit, node):
            if ends_visits:
                self._end_visits_behind(backward, max(backward.exit_of(other)[0], node))
            self._pass_over(backward, other)
        if ends_visits:
            self._end_visits_behind(backward, node)

    def _pass_to(self, backward: BackwardPass, unit: Unit, visit: Visit | None, node: SequenceNumber) -> list[Unit]:
        """Goes on to `unit` in the order of the backward; returns the units that other ranks may have entered before."""
        forward_pass = visit.forward_pass if visit is not None else None
        forward_pass = forward_pass or backward.forward_pass or self.forward_pass
        gathers = backward.gathers
        if gathers is None or backward.forward_pass is None or forward_pass.number < backward.forward_pass.number:
            # The engine runs nodes that were made later first: with several forwards behind one backward, the last one's.
            # Units that stayed whole have a place in the order too: reductions follow it.
            self._pass_over_rest(backward)
            gathers = backward.gathers = self._backward_order.begin(
                (other, None if ended is None else ended[0])
                for other, ended in reversed(forward_pass.exits.items())
                if other.settings.unshard_in_backward
            )
            backward.forward_pass, backward.uncounted = forward_pass, {}
        return gathers.enter(unit, node)

    def _pass_over(self, backward: BackwardPass, unit: Unit) -> None:
        """This rank's backward passes `unit` without having entered it: starts the collectives of ranks that entered it.

        They gather it, gather ahead from there, and end its visit when a node of an earlier unit is about to run. A unit
        that an earlier backward of this forward visited, and that was stepped since, can be entered on no rank, and is
        skipped: layers are trained one by one inside of a forward.

        Raises:
            StaleParametersError: the parameters changed since the forward, as those ranks are told.
        """
        first_node, version = backward.exit_of(unit)
        assert backward.gathers is not None and backward.forward_pass is not None, "a unit is passed over in an order"
        if unit in backward.forward_pass.visited and unit.version != version:
            backward.gathers.move_to(unit)
            return
        if not unit.open:
            unit.choose_trainable(afresh=False)
        if unit.disturbed() or unit.version != version or not unit.shards_unchanged():
            raise stale(unit)
        if unit.residency is SHARDED:
            unit.launch(version, looked=True)
        launch_ahead(_move_to(backward, unit))
        if backward.keeps_graph:
            unit.retain()
        backward.turns.visit(unit, first_node)
        backward.opened[unit] = OpenVisits({first_node}, first_node, graph_task())

    def _pass_over_rest(self, backward: BackwardPass) -> None:
        """The backward of one forward is over: passes over what is left of it."""
        if backward.gathers is not None:
            for unit in backward.gathers.rest():
                self._end_visits_behind(backward, backward.exit_of(unit)[0])
                self._pass_over(backward, unit)
            self._backward_order.end(backward.gathers)
            assert backward.forward_pass is not None, "an order belongs to a forward"
            for unit in backward.opened:
                _count_calls_behind(backward, unit, BEFORE_ALL)
            if not self.reduce_order.retained:  # else other ranks may come back to these units
                backward.forward_pass.visited.update(backward.gathers.expected)

    def _end_visits_behind(self, backward: BackwardPass, node: SequenceNumber) -> None:
        """Ends the visits that are over when an autograd node is about to run.

        The engine runs nodes that were made later first. So units whose forwards began after the node was made have run
        all of theirs, also those that only hand gradients through frozen weights.
        """
        calls = {} if backward.forward_pass is None else backward.forward_pass.calls
        for unit, opened in list(backward.opened.items()):
            if opened.earliest is None or opened.earliest <= node:
                continue
            if unit not in calls or calls[unit][0] > node:
                _count_calls_behind(backward, unit, node)
                self._end_visit(backward, unit)

    def _end_visit(self, backward: BackwardPass, unit: Unit) -> None:
        """A visit of `unit` is over: behind the last one its gradients are reduced, whatever this rank used of it.

        Not before, though all may have arrived: users' hooks still edit them, or put others beside them, and of a unit with
        units below it the time of the last one differs by rank.
        """
        turns = backward.turns
        if unit in turns.waiting:
            if turns.expects(unit):
                return
            if backward.reduces:
                for other in turns.complete(unit):
                    self._reduce(other)
        if not backward.keeps_graph:
            del backward.opened[unit]
            unit.check_unwritten()
            if not unit.settings.reshard_after_backward:
                _stay(unit)
            elif not unit.calls:  # else its forward is under way
                unit.reshard()

    def _reduce(self, unit: Unit) -> None:
        # With create_graph=True (asking takes a twentieth of `no_grad`); or on another stream than gradients arrive on.
        if torch.is_grad_enabled() or (self.streams.active and self.streams.is_away()):
            with torch.no_grad(), self.streams.at_home():
                self._reduce(unit)
            return
        if self.backward is not None:
            self.backward.reduced.add(unit)
        settings = unit.settings
        if settings.requires_grad_sync:
            self._submit(unit, not self.root.settings.drains, settings.requires_all_reduce)
            return
        observer = unit.context.observer
        if observer is not None:
            observer.begins("copy", unit)
        try:
            unit.gradients.stash()
        finally:
            if observer is not None:
                observer.ends("copy", unit)

    def _submit(self, unit: Unit, runs_on: bool, all_reduce: bool) -> None:
        """Starts a reduction of all gradients of `unit`; `runs_on` and `all_reduce` as `Gradients.take` has them."""
        # Before the operands are made: to wait here frees those of earlier reductions, so that both never exist at once.
        self.pipeline.make_room(unit.gradients.scatter_bytes)
        observer = unit.context.observer
        if observer is not None:
            observer.begins("copy", unit)
        try:
            parts = unit.gradients.take(runs_on, all_reduce)
        finally:
            if observer is not None:
                observer.ends("copy", unit)
        if not parts:
            return
        if observer is not None:
            observer.begins("launch", unit)
        try:
            self.pipeline.submit(Reduction(unit, parts, all_reduce))
        finally:
            if observer is not None:
                observer.ends("launch", unit)

    def _end_task(self, backward: BackwardPass, task: int, token: Token) -> None:
        """A graph task ended. With the outermost one the backward is over: whatever is left is swept."""
        if backward is not self.backward or task not in backward.tasks:
            return  # a task of an iteration that was aborted
        bury_tasks(backward.tasks)  # a task inside of this one may have failed, with an error that was caught
        if len(backward.tasks) == 1:
            try:
                backward.ending = True
                self._end_backward(backward)
            except BaseException:
                self.fail(backward)
                raise
            self.commit_behind_others(backward)
            return
        del backward.tasks[task]
        for unit, opened in list(backward.opened.items()):
            if opened.task == task:  # units that an inner task (reentrant checkpointing) entered are over with it
                self._end_visit(backward, unit)

    def _end_backward(self, backward: BackwardPass) -> None:
        self._pass_over_rest(backward)
        # Before reductions land: an optimizer in a hook may write to shards, which on one shard rank are the parameters.
        for unit in backward.opened:
            unit.check_unwritten()
        drains = self.root.settings.drains
        if not drains and not backward.reduces:
            for unit in backward.entered:
                if any(unit.trainable):
                    unit.note_split(found=unit in backward.found)
        if backward.reduces:
            if backward.keeps_graph:
                warnings.warn(
                    f"hsdp: backward(create_graph=True) through {self.root.name!r}: the gradients in .grad are summed over "
                    "ranks, outside of autograd, and have no graph. A loss of them changes nothing: compute it of "
                    "torch.autograd.grad inside of a unit's forward, or of gradients of inputs",
                    stacklevel=2,
                )
            left = self.reduce_order.end(backward.turns)
            for unit in (*left, *(u for u in self.units if u not in left)):
                settings, gradients = unit.settings, unit.gradients
                deferred = gradients.deferred and settings.requires_all_reduce
                due = settings.requires_grad_sync and (gradients.stashed or deferred)
                if due or unit in left or gradients.arrivals.has_any():
                    self._reduce(unit)
        # Where units have been called under another root since, no call will wait for what runs on here.
        if drains or any(unit.runtime_ref is not self.reference for unit in self.units):
            self.drain()
        else:
            self.pipeline.tell_errors()  # for landed reductions; those that run on do so in `drain`
            self.note_gradients_read()
        for unit in self.units:
            unit.remaining.clear()
            if backward.keeps_graph and (unit.retained or unit in backward.opened):
                # Entered or passed over, the unit stays whole on all ranks until the next forward: else a second backward
                # would gather it on some ranks only.
                _stay(unit)
                if unit.residency is UNSHARDED and not unit.calls:
                    unit.keep()
            elif unit in backward.opened and not unit.settings.reshard_after_backward:
                _stay(unit)
            elif not unit.calls and (
                (unit.residency is GATHERING and not unit.pinned)
                or (unit.holds_unsharded and unit.settings.reshard_after_backward and not backward.keeps_graph)
            ):
                unit.reshard()
        self._unregister()
        self.streams.finish_host_reads()


def _move_to(backward: BackwardPass, unit: Unit) -> Collection[Unit]:
    """The backward is at `unit`; returns the units to be gathered ahead from there."""
    ahead = unit.settings.backward_prefetch
    if backward.gathers is not None:
        backward.gathers.move_to(unit)
        if ahead is None:
            ahead = backward.gathers.next_units(unit, unit.comm_policy.prefetch)
    return ahead or ()


def _count_calls_behind(backward: BackwardPass, unit: Unit, node: SequenceNumber) -> None:
    """Counts the calls of `unit` that the engine is behind when it runs `node`: their visits are over on all ranks.

    Calls that this rank's loss does not use may be used by other ranks' losses. Not counted before this rank has entered
    the unit, or passed over it, in the forward whose backward runs. So calls are counted when the unit is entered, where a
    visit might end, and when the backward of that forward is over.
    """
    calls = None if backward.forward_pass is None else backward.forward_pass.calls.get(unit)
    if not calls:
        return
    uncounted = backward.uncounted.get(unit)
    if uncounted is None:
        uncounted = backward.uncounted[unit] = list(calls)
    if not uncounted or uncounted[-1] <= node:
        return
    visits: Collection[SequenceNumber] = backward.turns.visits.get(unit, ())
    entered = backward.gathers is not None and unit in backward.gathers.entered
    if entered or any([first in visits for first in calls]):
        at = bisect_right(uncounted, node)
        if over := [first for first in uncounted[at:] if first not in visits]:
            backward.turns.skip(unit, over)
        del uncounted[at:]


def _stay(unit: Unit) -> None:
    """A unit whose visit is over stays whole, also on ranks that passed over it: then its next use gathers on none."""
    if unit.residency is GATHERING:
        unit.finish()
    unit.note_shards()  # writes to `p.data` meanwhile change them alone, which an earlier forward's backward is to see

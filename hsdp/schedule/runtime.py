"""The runtime of one root: its forwards, the optimizer's steps between them, and `flush`.

Its backwards are in backward.py; what all of them share, and recovery, in root.py. A new forward first clears what a failed
iteration left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from threading import get_ident
from typing import cast

import torch

from hsdp.comm.divergence import STEP, note_event_of
from hsdp.comm.observer import Point
from hsdp.schedule.backward import Backwards
from hsdp.schedule.passes import ForwardPass, Visit
from hsdp.torch_private import NO_TASK, graph_task, next_node
from hsdp.unit.state import FORWARD, IDLE, expect, refuse_assigned
from hsdp.unit.unit import Unit
from hsdp.unit.unsharded import GATHERING, SHARDED, UNSHARDED


class Runtime(Backwards):
    """The schedule of one root's units: forwards, and what comes between iterations."""

    def begin_forward(self) -> None:
        """A forward of the root begins.

        Raises:
            TypeError: `torch.jit.trace` runs it, and would keep unsharded parameters, which are about to go, as constants.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise TypeError(
                f"{self.root.name} is sharded and cannot be traced by torch.jit; trace a plain module that was given "
                "hsdp.checkpoint.full_state_dict(model)"
            )
        self.thread = get_ident()
        # First: a failed backward is rolled back before units are asked whether they are whole, or have pending sums.
        self.refuse_landing("forward")
        self.recover("a backward pass did not end")
        self.adopt()
        self.notify(Point.FORWARD_BEGINS)
        if (event := self.root.settings.post_optim_event) is not None:
            self.root.settings.post_optim_event = None
            self.streams.join(event)
        if graph_task() != NO_TASK:  # also without gradients: a checkpoint inside of the running one calls it again
            self.enclose()
        if self.stepping:
            self._warn_of_half_a_step()
        graphs = self.has_graphs()
        refuse_assigned(self.units, "forward")
        self.reduce_order.begin_forward()
        self.forward_pass = ForwardPass(self.forward_pass.number + 1, next_node())
        self.awaits_gradients = self.awaits_gradients or torch.is_grad_enabled()
        self.begun_before = self.begun
        # The shards of parameters that stayed whole may have been written to since (`p.data`), unseen by versions.
        for unit in self.units:
            if unit.lent:
                expect(unit, "forward", IDLE)
            if unit.retained and (not graphs or unit.is_stale()):
                unit.let_go()
            if unit.pinned:
                unit.reshard_stale()
            elif unit.holds_unsharded:
                unit.check_opened()  # as this forward gathers the shards anew
                unit.reshard()
        self._forward_order.begin()
        grad, identities = torch.is_grad_enabled(), (self._forward_order.identity, self._backward_order.identity)
        for divergence_guard, rank_sets in self._shard_guards.items():
            divergence_guard.begin_pass(hash((grad, *(of(ranks) for ranks in rank_sets for of in identities))))

    def enter_forward(self, unit: Unit) -> None:
        """`unit`'s forward begins: opens it and gathers ahead."""
        if unit.context.observer is not None:
            unit.context.observer.passes(Point.FORWARD_ENTERED, unit)
        self.reduce_order.enter(unit)
        ahead = self._forward_order.enter(unit, unit.comm_policy.prefetch)
        chosen = unit.settings.forward_prefetch
        unit.enter_forward(afresh=not self.reduce_order.awaited)
        # Its own gather before those ahead: a group runs its collectives in the order in which they were started, and
        # only then does `show` wait, so that those ahead are on their way meanwhile, unless the unit `unpacks_first`.
        unit.gather(unit.forward_version)
        for other in ahead if chosen is None else chosen:
            if other.residency is SHARDED:
                other.launch()
        unit.show(registered=True)
        guard, grad = unit.guard, torch.is_grad_enabled()
        guard.forwards[grad] += 1
        if guard.forwards[grad] == guard.next_look[grad]:
            guard.look()

    def leave_forward(self, unit: Unit, more: bool, visit: Visit | None) -> None:
        """The forward of one of `unit`'s modules ended.

        Args:
            unit: the unit.
            more: other modules of it are still to run.
            visit: the record for its backward; None if no gradient can enter it.

        Raises:
            StateError: the forward wrote to an unsharded parameter.
        """
        exits = self.forward_pass.exits
        before = exits.pop(unit, None)
        if visit is None:
            exits[unit] = before
        else:
            exits[unit] = (visit.first_node, visit.version)
            calls = self.forward_pass.calls.setdefault(unit, [])
            at = bisect_left(calls, visit.first_node)
            if at == len(calls) or calls[at] != visit.first_node:  # else the unit called itself: both calls are one visit
                calls.insert(at, visit.first_node)
                counts = self.reduce_order.calls
                counts[unit] = counts.get(unit, 0) + 1
        if not more:
            self._close(unit, hidden=visit is None and any(unit.trainable))
        if unit.context.observer is not None:
            unit.context.observer.passes(Point.FORWARD_LEFT, unit)

    def _close(self, unit: Unit, hidden: bool) -> None:
        """`unit`'s forward ended: its unsharded parameters are freed, or stay for its backward.

        Args:
            unit: the unit.
            hidden: it trains, but none of its visible outputs carries gradients: a tensor left the forward in a way that
                hooks cannot see.

        Where the user leaves it open, the last unit stays whole too: its backward comes first, with nothing to hide a
        gather behind. "Last" is the unit that the forward gathers last: that is one unit on all ranks, while the order of
        the backward may differ by rank.
        """
        unit.leave_forward()
        reshard = unit.settings.reshard_after_forward
        stays = reshard is False or (reshard is None and unit is self.root)
        if not torch.is_grad_enabled():
            if stays:
                unit.keep()
            else:
                unit.reshard()
            return
        if stays or hidden or (reshard is None and self._forward_order.of[unit.mesh_ranks].last is unit):
            unit.keep()
        elif type(reshard) is int:
            unit.keep_part()
        else:
            unit.reshard()

    def end_forward(self) -> None:
        """The root's forward ended: prefetched units that were not used are freed, without gradients all units are."""
        self._forward_order.end()
        self.reduce_order.end_forward()
        grad = torch.is_grad_enabled()
        for unit in self.units:
            if unit.state is FORWARD and not unit.calls:
                # Not all of its modules were called, some were again after all of them had been, or a forward raised. One
                # that raised returned no output, but hooks may have kept what came inside of it.
                self._close(unit, hidden=unit not in self.forward_pass.exits and any(unit.trainable))
            unused = unit.residency is GATHERING or (not grad and unit.residency is UNSHARDED)
            if unused and not unit.pinned:
                self._release(unit)
        # The user's writes to offloaded shards after a forward, by hand or by a load, must not change what it computes.
        self.streams.finish_host_reads()

    def forget_forward(self) -> None:
        """The root's forward raised: frees whatever is whole. Sums of earlier micro-batches stay.

        A pipeline schedule's announcement of further backwards is void: that schedule does not go on. The next one
        begins with an `autograd.grad` to find out shapes, which would pass for a part of a backward that it splits.
        """
        if self.splits():
            self.take_outside()  # into pending sums, which `zero_grad()` clears, unlike gradients on unsharded weights
        self._forward_order.leave()
        self.reduce_order.forget_forward()
        for unit in self.units:
            unit.ran.clear()
            unit.settings.drains = True
            unit.end_split()
        self._reshard_all()
        self.notify(Point.DROPPED)

    def settle(self) -> None:
        """Makes gradients ready to be read: a failed backward is forgotten, reductions under way land.

        Does nothing inside a backward, or at its end, where reductions land: an optimizer's step there is a hook's.
        """
        if not self.is_ending() and not self.in_backward():
            self.recover()
            if len(self.pipeline):
                self.drain()

    def flush(self) -> None:
        """Communicates every pending sum now, outside of a backward, and waits for all that is under way."""
        self.send_pending(runs_on=False)

    def send_pending(self, runs_on: bool) -> None:
        """Communicates every pending sum now, outside of a backward. Every rank calls it.

        Args:
            runs_on: wait for nothing. `flush` waits, and so do readers of gradients.
        """
        self.recover()
        # All units are asked before any communicates: where one raises, no rank has started a collective.
        for unit in self.units:
            unit.gradients.refuse_lost(unit.name, "flush")
        try:
            with torch.no_grad(), self.streams.at_home():
                for unit in self.units:
                    if unit.gradients.stashed or unit.gradients.deferred:
                        self._submit(unit, runs_on, all_reduce=True)
            if not runs_on:
                self.drain()
        except BaseException:
            self._leave_word()
            self.reset()
            raise
        for unit in self.units:
            unit.gradients.commit()

    def stepped(self, units: Sequence[Unit]) -> None:
        """An optimizer stepped parameters of `units`, which are this root's, on all ranks between the same passes."""
        # In a backward, the optimizer runs in a hook when a reduction lands: other units are still to be reduced.
        if self.backward is None:
            self.reduce_order.awaited = 0  # graphs of earlier forwards are stale now
            for unit in self.units:
                if unit.retained and not unit.calls:
                    unit.let_go()
                    unit.reshard()
            note_event_of(STEP, (comm for unit in units for comm in (unit.shard_comm, unit.replicate_comm)))


def runtime_of(unit: Unit) -> Runtime | None:
    """The runtime of the root that `unit` belongs to; None before its root's first forward."""
    return cast("Runtime | None", unit.runtime)


def await_failure(unit: Unit) -> None:
    """Waits until the engine's thread has let go of a backward that failed on a device; the caller gets the error before.

    Until then `parameters()` would give unsharded ones.
    """
    if (runtime := runtime_of(unit)) is not None:
        runtime.runs_elsewhere()

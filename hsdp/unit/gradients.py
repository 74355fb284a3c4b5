"""A unit's gradients on this rank: from autograd's hooks to the operands of a reduction, and from those to `.grad`.

    arrivals   unsharded gradients of the backward under way
    stash      whole sums of micro-batches that were not communicated              } pending: visible, cleared with the
    deferred   sharded sums whose all-reduce is left to a later micro-batch        } gradients by both kinds of zero_grad
    .grad      sharded DTensors, or None: what users and the optimizer see

Pending sums are fp32, or the reduce dtype if that is wider. While a parameter has some, its `.grad` has a sentinel (see
zero_grad.py), on every rank alike: it keeps what users add to the gradient, and notes when they zero it.

What a backward does to gradients and to pending sums is undone if it fails (rollback.py), with one exception: whole sums
are added in place, as a second copy of an unsharded model would not fit. They are *lost* then: on all ranks or on none,
as that follows from what all ranks did alike, not from what this rank has added; until gradients are zeroed, their use
as complete sums is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor

from hsdp.buffers.flat_buffer import owned
from hsdp.comm.observer import CommContext
from hsdp.comm.replica_reduce import DEFAULT
from hsdp.comm.streams import host_wait, note_read
from hsdp.errors import StateError
from hsdp.params.dtensors import as_dtensor
from hsdp.params.param import ManagedParam
from hsdp.unit.arrivals import Arrivals
from hsdp.unit.deferred_sums import defer_sums
from hsdp.unit.dtype_group import DtypeGroup
from hsdp.unit.landing import (
    assign_grad,
    assign_grads,
    has_hooks_and_grads,
    host_reads,
    mark_landed,
    run_grad_hooks,
    run_hooks,
    shared_memory,
    zero,
)
from hsdp.unit.reduce_plan import GroupReduction, ReducePlan, ReducePlans
from hsdp.unit.rollback import Undo
from hsdp.unit.settings import UnitSettings
from hsdp.unit.stash import Stash
from hsdp.unit.zero_grad import Sentinels, ZeroGradSentinel, local_grad

DeferredSums = list[list[Tensor]]
"""Sharded sums that wait for their all-reduce: the operands of each dtype group."""


class Gradients:
    """The gradients of one unit.

    Attributes:
        arrivals: unsharded gradients of the backward under way.
        scatter_bytes: what a reduction of them gives to its reduce-scatter; every trainable parameter takes part.
        deferred_sums: per dtype group, sharded sums that wait for their all-reduce; None when nothing was deferred.
        stashed: some rank, perhaps not this one, holds whole sums of backwards that did not communicate. Equal on all
            ranks, as is `deferred`: they decide about collectives.
        deferred: a reduction without all-reduce was submitted, and none with it since.
        sentinels: those in gradients of parameters that have pending sums.
        lost: whole sums went with a backward that failed; see `refuse_lost`.
        shared: replicas have shares of some of them.

    Args:
        params, settings, context: the unit's.
        ranks: over how many gradients are summed, also as an attribute.
    """

    def __init__(self, params: list[ManagedParam], settings: UnitSettings[Any], context: CommContext, ranks: int) -> None:
        self._params = params
        self._settings = settings
        self._context = context
        self.ranks = ranks
        self._dtype_groups: list[DtypeGroup] = []
        self._mask: tuple[bool, ...] | None = None
        self._plans: list[ReducePlan] = []
        self.arrivals = Arrivals(params)
        self._stash = Stash(settings, ranks)
        self.scatter_bytes = 0
        self.deferred_sums: DeferredSums | None = None
        self.stashed = self.deferred = self.lost = self.shared = False
        self.sentinels = Sentinels(params)
        self._running: list[GroupReduction] = []
        # Of the backward under way: its reductions, and the state from before it.
        self._open: list[GroupReduction] = []
        self._undo = Undo()
        self._owed_before: tuple[bool, bool, list[int]] | None = None
        self._deferred_before: tuple[DeferredSums | None] | None = None

    def arrange(self, dtype_groups: list[DtypeGroup]) -> None:
        """New buffers: plans and sums made for the old ones are forgotten."""
        self._dtype_groups = dtype_groups
        self.shared = any(param.share is not None for param in self._params)
        self._mask = None
        self._few_rows = [
            param
            for group in dtype_groups
            for param in group.params
            if param.spec.dim is not None and param.spec.cut < group.shards
        ]
        self._made = ReducePlans(len(dtype_groups))
        self.clear()

    # -- towards a reduction -------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets everything that has not landed."""
        self.arrivals.drop()
        self._stash.clear()
        self._running.clear()
        self.deferred_sums = None
        self.stashed = self.deferred = self.lost = False
        self.commit()
        self.sentinels.take_all_down()

    def choose(self, mask: tuple[bool, ...], unit: str) -> None:
        """Sets which parameters take part in reductions.

        Raises:
            StateError: the choice changes while sums of the parameters chosen before are pending.
        """
        if self._mask != mask:
            if self._mask is not None and self.is_pending():
                changed = next(p.fqn for p, a, b in zip(self._params, self._mask, mask, strict=True) if a != b)
                raise StateError(
                    f"unit {unit!r}: requires_grad of parameter {changed!r} changed while gradients of earlier "
                    "micro-batches have not been summed over all ranks; call model.flush() or zero_grad() first"
                )
            self._mask = mask
            self._plans = []
            for group in self._dtype_groups:
                if trainable := tuple(i for i, slot in enumerate(group.slots) if mask[slot]):
                    self._plans.append(self._made.plan(group, trainable))
            self.scatter_bytes = sum(plan.scatter_bytes for plan in self._plans)

    def take(self, runs_on: bool, all_reduce: bool = True) -> list[GroupReduction]:
        """Hands all gradients over as the operands of one reduction; every trainable parameter takes part.

        Args:
            runs_on: the reduction may land after the end of backward, behind a `zero_grad` of the user's.
            all_reduce: it sums over replicas too; if not, its result comes back to `defer`.
        """
        if self.sentinels.up:
            self.heed_zero_grad()
        if self._owed_before is None:
            self._note_owed()
        if self.stashed:
            self._stash.weigh(begun=True)
        self.stashed, self.deferred = False, not all_reduce
        taken = self.arrivals.take()
        for slot, held in self._stash.items():
            taken[slot] = held.add_(taken[slot]) if slot in taken else held
        self._stash.clear()
        parts, settings = [], self._settings  # users' code that sees a reduction's buffers finds zeros between gradients
        clean = settings.all_reduce_hook is not None or settings.reduces_by_custom or settings.replica_reduce is not DEFAULT
        for plan in self._plans:
            # Popped: `fill` has the last references to gradients, so that what it casts is not alive twice.
            parts.append(part := plan.fill(list(map(taken.pop, plan.slots, repeat(None))), clean))
            part.undoable = True
        self._open += parts
        if runs_on:
            self._running += parts
            self._watch_all(self._plans)
        return parts

    def stash(self) -> None:
        """Keeps the gradients on this rank, summed with those of earlier micro-batches."""
        self.heed_zero_grad()
        self._note_owed()
        self._stash.weigh(begun=self.stashed and bool(self.sentinels.up))
        self.stashed = True
        taken = self.arrivals.take()
        for group in self._dtype_groups:
            for slot in group.slots:
                grad, held = taken.get(slot), self._stash.get(slot)
                if grad is not None:
                    self._stash[slot] = owned(grad.to(group.kind.accumulate)) if held is None else held.add_(grad)
                    self.sentinels.put_up(slot)
        for plan in self._plans:
            for slot, param in zip(plan.slots, plan.params, strict=True):
                # Used here or not: other ranks may have used it. A parameter frozen since its forward has none on any rank.
                if slot in self._stash or param.sharded.requires_grad:
                    self.sentinels.put_up(slot)

    def defer(self, parts: list[GroupReduction]) -> None:
        """Keeps reduce-scattered sums, added to those of earlier micro-batches; their all-reduce comes later.

        Like `land` it runs on the compute stream, behind the reduction.
        """
        undoable = self._settle(parts)
        for part in parts:
            if part.dropped:
                zero(part.plan, part.operands, part.dropped)
        before, sums = self.deferred_sums, [defer_sums(part) for part in parts]
        if before is not None:
            for mine, held in zip(sums, before, strict=True):
                torch._foreach_add_(mine, held)
        self._replace_deferred(sums, undoable)
        self._watch_all(part.plan for part in parts)

    def hand_over_deferred(self, parts: list[GroupReduction]) -> None:
        """Hands what was deferred to the operands that it will be added to, by `join_deferred`.

        Operands hold it until they land: by then the compute stream, to which its memory belongs, is behind the sum.
        """
        if self.deferred_sums is not None:
            for held, part in zip(self.deferred_sums, parts, strict=True):
                part.joined = held
            self._replace_deferred(None, parts[0].undoable)

    def _replace_deferred(self, sums: DeferredSums | None, undoable: bool) -> None:
        if undoable and self._deferred_before is None:
            self._deferred_before = (self.deferred_sums,)
        self.deferred_sums = sums

    def _note_owed(self) -> None:
        if self._owed_before is None:
            self._owed_before = (self.stashed, self.deferred, list(self.sentinels.up))

    # -- pending sums and zero_grad ------------------------------------------------------------------------------

    def is_pending(self) -> bool:
        """Whether sums are pending, on any rank: the same on all of them."""
        self.heed_zero_grad()
        return bool(self.sentinels.up) and (self.stashed or self.deferred or self.lost or bool(self._running))

    def has_ops_beside(self, op: str) -> bool:
        """Whether whole sums are pending, and not all of backwards with this reduce op."""
        return self.stashed and self.is_pending() and self._stash.has_ops_beside(op)

    def refuse_lost(self, unit: str, what: str) -> None:
        """Raises StateError if whole sums were lost and gradients have not been zeroed since."""
        if self.lost:
            self.heed_zero_grad()
        if self.lost:
            raise StateError(
                f"{what}: gradients of unit {unit!r} are incomplete: a backward (or flush) failed that had sums of earlier "
                "micro-batches in hand, and they are lost; call zero_grad() and run the micro-batches again"
            )

    def refuse_pending(self, unit: str, what: str) -> None:
        """Raises StateError if sums are pending, or lost."""
        if not self.sentinels.up:
            return
        self.refuse_lost(unit, what)
        self.heed_zero_grad()
        if self.sentinels.up and (self.stashed or self.deferred):
            names = ", ".join(self.sentinels.names())
            raise StateError(
                f"{what}: unit {unit!r} has gradients that were not summed over all ranks ({names}); run the last "
                "micro-batch under accumulate(last=True), outside of no_sync(), or with set_requires_grad_sync(True) and "
                "set_requires_all_reduce(True); or call model.flush(), or drop them with zero_grad()"
            )

    def cut_whole(self) -> None:
        """Shards gradients that DTensor left whole: those of penalties on parameters with few rows."""
        for param in self._few_rows:
            if param.sharded.grad is not None:
                local_grad(param)

    def pending(self) -> dict[str, str]:
        """Which parameters have sums that were not communicated, and how far those came: the same names on all ranks."""
        self.heed_zero_grad()
        found = dict.fromkeys(self.sentinels.names(), "on other ranks") if self.stashed else {}
        found.update((self._params[slot].fqn, "on this rank") for slot in self._stash)
        if self.deferred_sums is not None:
            for fqn in self.sentinels.names():
                found[fqn] = f"{found[fqn]} and in the shard group" if fqn in found else "in the shard group"
        if self.lost:
            found.update(dict.fromkeys(self.sentinels.names(), "lost with a backward that failed"))
        return found

    def local_sums(self) -> dict[str, Tensor]:
        """Unsharded gradients of this rank that have not been communicated, by parameter name."""
        self.heed_zero_grad()
        for value in self._stash.values():
            note_read(value)  # by the caller
        return {self._params[slot].fqn: value for slot, value in self._stash.items()}

    def _watch_all(self, plans: Iterable[ReducePlan]) -> None:
        for plan in plans:
            for slot in plan.slots:
                self.sentinels.put_up(slot)

    def heed_zero_grad(self) -> set[int]:
        """Drops the pending sums of parameters whose gradient was set to None or zeroed meanwhile; returns them."""
        gone = self.sentinels.gone()
        for slot in gone:
            self.sentinels.take_down(slot)
            self._stash.pop(slot, None)
        if gone:
            for part in self._running:
                part.dropped |= gone
            if self.deferred_sums is not None:
                with self._context.streams.at_home():  # whose memory they are
                    for plan, held in zip(self._plans, self.deferred_sums, strict=True):
                        zero(plan, held, gone)
        if not self.sentinels.up:
            self.lost = False
            if gone:
                self.deferred_sums = None
        return gone

    def _remove_sentinels(self) -> None:
        if self.sentinels.up and not (self.deferred_sums or self._running or self.stashed or self.lost or self.deferred):
            self.sentinels.take_all_down()

    # -- landing -------------------------------------------------------------------------------------------------

    def land(self, parts: list[GroupReduction]) -> None:
        """Turns reduced operands into gradients of the sharded parameters, or adds them to those there."""
        undoable = self._settle(parts)
        if self.sentinels.up:
            self._remove_sentinels()
        for part in parts:
            layout = part.grad_layout
            used = part.used if self._settings.unused_grads == "none" else [True] * len(part.used)
            if not all(used):
                # The one host synchronisation of a step, and only on a rank that left a parameter unused.
                used = [mine or count != 0 for mine, count in zip(used, part.flags().tolist(), strict=True)]
            if part.dropped:
                used = [was_used and slot not in part.dropped for was_used, slot in zip(used, layout.slots, strict=True)]
            if layout.offload is not None and host_reads(layout.params):
                host_wait(layout.device)
            hooked, has_grads = has_hooks_and_grads(layout)
            if hooked:
                run_grad_hooks(part, used)
                has_grads = True  # they may have given a gradient to any of the parameters
            noted = len(self._undo.entries)
            if not has_grads and all(used):
                assign_grads(part, self._undo if undoable else None)
            elif not (all(used) and self._add_flat(part, undoable)):
                self._assign(part, used, undoable)
            if run_hooks(layout, used):
                self._undo.forget_taken(noted)

    def _settle(self, parts: list[GroupReduction]) -> bool:
        """The parts are about to land, or to be deferred. Returns whether their backward may still fail."""
        if self.sentinels.up:
            self.heed_zero_grad()
        undoable = parts[0].undoable
        if undoable:
            self._open = [part for part in self._open if part not in parts]
        if self._running:
            self._running = [part for part in self._running if part not in parts]
        return undoable

    def _assign(self, part: GroupReduction, used: list[bool], undoable: bool) -> None:
        """A part's values are added to the gradients of the used parameters, or become them."""
        mark_landed(locals_ := part.locals())
        for param, local in compress(zip(part.grad_layout.params, locals_, strict=True), used):
            sharded: Any = param.sharded
            backing = None
            if sharded.grad is None:
                grad = as_dtensor(local, param.grad_spec)
                if undoable:
                    self._undo.note_assigned([param], [grad], [local])
                assign_grad(sharded, grad)
            else:
                held = local_grad(param)
                backing = held.backing if isinstance(held, ZeroGradSentinel) else None
                if backing is None or backing.is_blank:
                    memory = held if backing is None else backing.memory(write=True)
                    if undoable:
                        self._undo.add_noted(memory, local, backing)
                    else:
                        memory.add_(local)
                    continue
                if undoable:
                    self._undo.note_assigned([param], [sharded.grad], [local])
                backing.base = local  # the sentinel stood for zeros; now for the gradient

    def _add_flat(self, part: GroupReduction, undoable: bool) -> bool:
        """One kernel for the unit, when its gradients are still the views of one buffer that an earlier landing left."""
        values = part.stored()
        if len(values) > 1:
            return False
        flat, base = values[0], shared_memory(part.grad_layout)
        if base is None or base.ndim != 1 or base.numel() < flat.numel():
            return False
        if undoable:
            self._undo.add_noted(base[: flat.numel()], flat)
        else:
            base[: flat.numel()].add_(flat)
        return True

    # -- the end of a backward -----------------------------------------------------------------------------------

    def commit(self) -> None:
        """The backward ended well: its gradients stay."""
        for part in self._open:
            part.undoable = False
        self._open.clear()
        self._undo.clear()
        self._owed_before = self._deferred_before = None

    @property
    def in_flight(self) -> bool:
        """Whether reductions that run on past their backward have not landed."""
        return bool(self._running)

    def held_bytes(self) -> int:
        """Bytes of unsharded gradients and reduction buffers in the reductions under way."""
        return sum(part.held_bytes() for part in {*self._open, *self._running})

    def roll_back(self, at_once: bool = False) -> None:
        """The backward failed: gradients and sums are restored. `at_once`: no user code ran since."""
        self.arrivals.drop()
        self._running = [part for part in self._running if part not in self._open]
        for part in self._open:
            part.void, part.undoable = True, False
        self._open.clear()
        able = self._undo.run(at_once)
        if self._owed_before is not None:
            self.stashed, self.deferred, watched = self._owed_before
            self.sentinels.restore(watched)
        if self._deferred_before is not None:
            self.deferred_sums = self._deferred_before[0]
        self._owed_before = self._deferred_before = None
        self._stash.clear()
        if self.stashed or not able:
            self.lose()
        self._remove_sentinels()

    def lose_all(self) -> None:
        """All pending sums are lost, also those that wait for their all-reduce."""
        self.deferred_sums, self.deferred = None, False
        self.lose()

    def lose(self, parts: Sequence[GroupReduction] = ()) -> None:
        """Whole sums, or `parts` that have left the queue, are lost: until gradients are zeroed, their use raises."""
        self._running = [part for part in self._running if part not in parts]
        self._stash.clear()
        self.stashed, self.lost = False, True
        self._watch_all(self._plans)

"""A unit's gradients on this rank: from autograd's hooks to the operands of a reduction, and from those to `.grad`.

    slots      whole gradients of the backward under way
    stash      whole sums of micro-batches that were not communicated              } pending: visible, cleared with the
    partial    sharded sums whose all-reduce is deferred to a later micro-batch    } gradients by both kinds of zero_grad
    .grad      sharded DTensors, or None: what users and the optimizer see

Pending sums are fp32, or the reduce dtype if that is wider. While a parameter has some, its `.grad` has a witness (see
witness.py) by which we see that somebody called `zero_grad`; a parameter without a gradient shows zeros meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.dtensors import as_dtensor
from hsdp.errors import StateError
from hsdp.lane import Lane
from hsdp.memory import owned
from hsdp.param import ManagedParam
from hsdp.reduce_plan import LaneReduction, ReducePlan
from hsdp.streams import host_wait
from hsdp.witness import Witness


class Gradients:
    """The gradients of one unit.

    Attributes:
        unused: what a parameter gets that no rank used: None or zeros.
        slots: whole gradients of the backward under way, one per parameter; None where none came.
        partial: per lane, sharded sums that wait for their all-reduce; None when nothing was deferred.
    """

    def __init__(self, params: list[ManagedParam]) -> None:
        self._params = params
        self._lanes: list[Lane] = []
        self._mask: tuple[bool, ...] | None = None
        self._plans: list[ReducePlan] = []
        self._made: dict[tuple[int, tuple[int, ...]], ReducePlan] = {}
        self.unused: Literal["none", "zero"] = "none"
        self.slots: list[Tensor | None] = [None] * len(params)
        self._stash: dict[int, Tensor] = {}
        self.partial: list[list[Tensor]] | None = None
        self._witnesses: dict[int, Any] = {}
        self._running: list[LaneReduction] = []
        self._uncommitted: list[tuple[list[ManagedParam], list[Any]]] = []

    def arrange(self, lanes: list[Lane]) -> None:
        """New buffers: plans and sums made for the old ones are forgotten."""
        self._lanes = lanes
        self._mask = None
        self._made.clear()
        self.clear()

    # -- towards a reduction -------------------------------------------------------------------------------------

    def put(self, slot: int, grad: Tensor) -> None:
        """Takes a gradient; adds it if the slot holds one that was not reduced yet."""
        held = self.slots[slot]
        self.slots[slot] = grad if held is None else held.to(torch.promote_types(held.dtype, torch.float32)) + grad

    def waiting(self) -> bool:
        """Whether gradients of the backward under way wait to be reduced."""
        return any(grad is not None for grad in self.slots)

    def drop(self) -> None:
        """Forgets the gradients of the backward under way."""
        self.slots = [None] * len(self._params)

    def clear(self) -> None:
        """Forgets everything that has not landed."""
        self.drop()
        self._stash.clear()
        self._running.clear()
        self.partial = None
        for slot in list(self._witnesses):
            self._dismiss(slot)

    def choose(self, mask: tuple[bool, ...], unit: str) -> None:
        """Sets which parameters take part in reductions.

        Raises:
            StateError: the choice changes while sums of the parameters chosen before are pending.
        """
        if self._mask != mask:
            if self._mask is not None and (self._stash or self._running or self.partial is not None):
                changed = next(p.fqn for p, a, b in zip(self._params, self._mask, mask, strict=True) if a != b)
                raise StateError(
                    f"unit {unit!r}: requires_grad of parameter {changed!r} changed while gradients of earlier "
                    "micro-batches have not been summed over all ranks; call model.flush() or zero_grad() first"
                )
            self._mask = mask
            self._plans = []
            for lane in self._lanes:
                trainable = tuple(i for i, slot in enumerate(lane.slots) if mask[slot])
                if trainable:
                    self._plans.append(self._plan_for(lane, trainable))

    def _plan_for(self, lane: Lane, trainable: tuple[int, ...]) -> ReducePlan:
        key = (id(lane), trainable)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = ReducePlan(lane, trainable)
        return found

    def plans(self) -> list[ReducePlan]:
        """One plan per lane that has trainable parameters."""
        return self._plans

    def take(self, runs_on: bool) -> list[LaneReduction]:
        """Hands all gradients over as the operands of one reduction; every trainable parameter takes part.

        `runs_on`: the reduction may land after the end of backward, when somebody may have called `zero_grad`.
        """
        if self._witnesses:
            self._heed_zero_grad()
        if self._stash:
            self.slots = [self._joined(slot) for slot in range(len(self.slots))]
            self._stash.clear()
        slots = self.slots
        self.drop()
        parts = []
        for plan in self._plans:
            grads = [slots[slot] for slot in plan.slots]
            for slot in plan.slots:
                slots[slot] = None  # `fill` holds the last reference: what it casts is not alive twice
            parts.append(plan.fill(grads, [grad is not None for grad in grads]))
        if runs_on:
            self._running += parts
            for plan in self._plans:
                for slot in plan.slots:
                    self._witness(slot)
        return parts

    def stash(self) -> None:
        """Keeps the gradients on this rank, summed with those of earlier micro-batches."""
        self._heed_zero_grad()
        for lane in self._lanes:
            for slot in lane.slots:
                grad, held = self.slots[slot], self._stash.get(slot)
                if grad is not None:
                    self._stash[slot] = owned(grad.to(lane.kind.accumulate)) if held is None else held.add_(grad)
                    self._witness(slot)
        self.drop()

    def defer(self, parts: list[LaneReduction]) -> None:
        """Keeps reduce-scattered sums, added to those of earlier micro-batches; their all-reduce comes later."""
        self._heed_zero_grad()
        for part in parts:
            self._settle(part)
            if part.dropped:
                _zero(part.plan, part.operands, part.dropped)
        if self.partial is None:
            self.partial = [[t.to(part.plan.kind.accumulate) for t in part.operands] for part in parts]
        else:
            for held, part in zip(self.partial, parts, strict=True):
                torch._foreach_add_(held, part.operands)

    def join_partial(self, parts: list[LaneReduction]) -> None:
        """Adds what was deferred to the operands that are about to be all-reduced."""
        if self.partial is None:
            return
        self._heed_zero_grad()
        if (partial := self.partial) is not None:
            for held, part in zip(partial, parts, strict=True):
                torch._foreach_add_(held, part.operands)
                torch._foreach_copy_(part.operands, held)
        self.partial = None

    def _joined(self, slot: int) -> Tensor | None:
        grad, stash = self.slots[slot], self._stash.get(slot)
        if stash is None:
            return grad
        return stash if grad is None else stash.add_(grad)

    # -- pending sums and zero_grad ------------------------------------------------------------------------------

    def pending(self) -> dict[str, str]:
        """Which parameters have sums that have not been communicated, and how far those came."""
        self._heed_zero_grad()
        found = {self._params[slot].fqn: "on this rank" for slot in self._stash}
        if self.partial is not None:
            for plan in self._plans:
                for param in plan.params:
                    found[param.fqn] = (
                        "in the shard group" if param.fqn not in found else "on this rank and in the shard group"
                    )
        return found

    def witness_partial(self) -> None:
        """Puts witnesses up for what `defer` keeps."""
        for plan in self._plans:
            for slot in plan.slots:
                self._witness(slot)

    def local_sums(self) -> dict[str, Tensor]:
        """Whole gradients of this rank that have not been communicated, by parameter name."""
        self._heed_zero_grad()
        return {self._params[slot].fqn: value for slot, value in self._stash.items()}

    def _witness(self, slot: int) -> None:
        if slot in self._witnesses:
            return
        param = self._params[slot]
        grad: Any = param.sharded.grad
        if grad is None:
            local = Witness(param.local, None)
            param.sharded.grad = as_dtensor(local, param.tensor_spec)
        else:
            grad._local_tensor = Witness(param.local, _local_grad(param))
        self._witnesses[slot] = param.sharded.grad

    def _heed_zero_grad(self) -> None:
        """Drops the pending sums of parameters whose gradient somebody set to None or zeroed meanwhile."""
        gone = {slot for slot, grad in self._witnesses.items() if self._is_gone(slot, grad)}
        for slot in gone:
            self._dismiss(slot)
            self._stash.pop(slot, None)
        if gone:
            for part in self._running:
                part.dropped |= gone
            if self.partial is not None:
                self._drop_partial(gone)

    def _settle(self, part: LaneReduction) -> None:
        if part in self._running:
            self._running.remove(part)

    def _is_gone(self, slot: int, grad: Any) -> bool:
        witness: Witness = grad._local_tensor
        return witness.zeroed or self._params[slot].sharded.grad is not grad

    def _dismiss(self, slot: int) -> None:
        """Takes a witness down: the gradient it stood for shows again."""
        grad = self._witnesses.pop(slot)
        param = self._params[slot]
        base = grad._local_tensor.base
        if base is not None:
            grad._local_tensor = base
        elif param.sharded.grad is grad:
            param.sharded.grad = None

    def _drop_partial(self, gone: set[int]) -> None:
        assert self.partial is not None, "checked by the caller"
        for plan, held in zip(self._plans, self.partial, strict=True):
            _zero(plan, held, gone)
        if len(gone) >= sum(len(plan.slots) for plan in self._plans):
            self.partial = None

    # -- landing -------------------------------------------------------------------------------------------------

    def land(self, parts: Iterable[LaneReduction]) -> None:
        """Turns reduced operands into gradients of the sharded parameters, or adds them to those there."""
        if self._running:
            self._heed_zero_grad()
            for part in parts:
                self._settle(part)
        self._retire_witnesses()
        for part in parts:
            plan = part.plan
            used = part.used if self.unused == "none" else [True] * len(part.used)
            if not all(used):
                # The one host synchronisation of a step, and only on a rank that left a parameter unused.
                used = [mine or count > 0 for mine, count in zip(used, part.flags().tolist(), strict=True)]
            if part.dropped:
                used = [was_used and slot not in part.dropped for was_used, slot in zip(used, plan.slots, strict=True)]
            values = part.stored()
            if plan.offload is not None and _host_reads(plan.params):
                host_wait(plan.device)
            _run_grad_hooks(plan, values, used)
            if not (all(used) and len(values) == 1 and self._add_flat(plan, values[0])):
                self._assign(plan, values, used)
            _run_hooks(plan.params, used)

    def _assign(self, plan: ReducePlan, values: list[Tensor], used: list[bool]) -> None:
        fresh: list[Any] = []
        for param, local, was_used in zip(plan.params, plan.locals(values), used, strict=True):
            grad = None
            if was_used:
                sharded = param.sharded
                if sharded.grad is None:
                    sharded.grad = grad = as_dtensor(local, param.tensor_spec)
                else:
                    held = _local_grad(param)
                    if isinstance(held, Witness):  # it stood for zeros; now it stands for the gradient
                        held.base = local
                    else:
                        held.add_(local)
            fresh.append(grad)
        self._uncommitted.append((plan.params, fresh))

    def _add_flat(self, plan: ReducePlan, flat: Tensor) -> bool:
        """One kernel for the unit, when its gradients are still the views of one buffer that an earlier landing left."""
        base: Tensor | None = None
        for param, piece in zip(plan.params, plan.layout.pieces, strict=True):
            if param.sharded.grad is None:
                return False
            local = _local_grad(param)
            base = local._base if base is None else base
            if base is None or local._base is not base or local.storage_offset() != piece.offset:
                return False
        if base is None or base.ndim != 1 or base.numel() < flat.numel():
            return False
        base[: flat.numel()].add_(flat)
        return True

    def _retire_witnesses(self) -> None:
        if self._witnesses and self.partial is None and not self._running:
            for slot in [slot for slot in self._witnesses if slot not in self._stash]:
                self._dismiss(slot)

    def commit(self) -> None:
        """The backward ended well: its gradients stay."""
        self._uncommitted.clear()

    def roll_back(self) -> None:
        """The backward failed: gradients that it made where there was none go again."""
        for params, grads in self._uncommitted:
            for param, grad in zip(params, grads, strict=True):
                if grad is not None and param.sharded.grad is grad:
                    param.sharded.grad = None
        self._uncommitted.clear()


def _zero(plan: ReducePlan, operands: list[Tensor], slots: set[int]) -> None:
    """Takes the parameters at `slots` out of reduced or partial sums."""
    part = LaneReduction(plan, [], [], operands, [])
    flags = part.flags()
    for at, (slot, local) in enumerate(zip(plan.slots, plan.locals(part.values()), strict=True)):
        if slot in slots:
            local.zero_()
            flags[at] = 0


def _local_grad(param: ManagedParam) -> Tensor:
    grad: Any = param.sharded.grad
    if not isinstance(grad, DTensor) or grad._spec.placements != param.tensor_spec.placements:
        raise StateError(
            f"parameter {param.fqn!r} has a gradient that is not sharded as the parameter is ({type(grad).__name__}); "
            f"set it to None, or to a DTensor with placements {param.tensor_spec.placements}"
        )
    local: Tensor = grad._local_tensor
    return local.base if isinstance(local, Witness) and local.base is not None else local


def _host_reads(params: list[ManagedParam]) -> bool:
    """Whether offloaded gradients are needed at once, to be added or handed on, and not only after the backward."""
    return any(
        p.sharded.grad is not None or p.sharded._post_accumulate_grad_hooks or p.sharded._backward_hooks for p in params
    )


def _run_grad_hooks(plan: ReducePlan, values: list[Tensor], used: list[bool]) -> None:
    """Hooks of `param.register_hook` on sharded parameters: they see the reduced gradient, and may return another one.

    They run when the reduction has ended, which depends on this rank's timing: they must not communicate.
    """
    if not any(param.sharded._backward_hooks for param in plan.params):
        return
    for param, local, was_used in zip(plan.params, plan.locals(values), used, strict=True):
        for hook in list((param.sharded._backward_hooks or {}).values()) if was_used else ():
            other: Any = hook(as_dtensor(local, param.tensor_spec))
            if other is None:
                continue
            if not isinstance(other, DTensor) or other.placements != param.tensor_spec.placements:
                raise StateError(
                    f"a hook of parameter {param.fqn!r} returned {type(other).__name__} instead of a gradient with "
                    f"placements {param.tensor_spec.placements}; return a DTensor like the one that it gets, or None"
                )
            local.copy_(other.to_local())


def _run_hooks(params: list[ManagedParam], used: list[bool]) -> None:
    """Post-accumulate-grad hooks that users put on sharded parameters (an optimizer in backward, say)."""
    for param, was_used in zip(params, used, strict=True):
        hooks: Any = param.sharded._post_accumulate_grad_hooks
        if hooks and was_used:
            for hook in list(hooks.values()):
                hook(param.sharded)

"""What a landing asks of users' hooks on sharded parameters, and of the memory of reduced sums."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.errors import StateError
from hsdp.params.dtensors import as_dtensor
from hsdp.params.param import ManagedParam
from hsdp.unit.reduce_plan import GroupReduction, ReducePlan


def zero(plan: ReducePlan, operands: list[Tensor], slots: set[int]) -> None:
    """Takes the parameters at `slots` out of reduced or partial sums."""
    part = GroupReduction(plan, [], [], operands, [])
    flags = part.flags()
    for at, (slot, local) in enumerate(zip(plan.slots, plan.locals(part.values()), strict=True)):
        if slot in slots:
            local.zero_()
            flags[at] = 0


def host_reads(params: list[ManagedParam]) -> bool:
    """Whether offloaded gradients are needed at once, to be added or handed on, and not only after the backward."""
    return any(
        p.sharded.grad is not None or p.sharded._post_accumulate_grad_hooks or p.sharded._backward_hooks for p in params
    )


def run_grad_hooks(plan: ReducePlan, values: list[Tensor], used: list[bool]) -> None:
    """Hooks of `param.register_hook` on sharded parameters: they see the reduced gradient, and may return another one.

    They run when the reduction has ended, which depends on this rank's timing: they must not communicate.
    """
    if not any([param.sharded._backward_hooks for param in plan.params]):
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


def run_hooks(params: list[ManagedParam], used: list[bool]) -> bool:
    """Post-accumulate-grad hooks that users put on sharded parameters (an optimizer in backward). Returns if any ran."""
    ran = False
    if not any([param.sharded._post_accumulate_grad_hooks for param in params]):
        return ran
    for param, was_used in zip(params, used, strict=True):
        hooks: Any = param.sharded._post_accumulate_grad_hooks
        if hooks and was_used:
            ran = True
            for hook in list(hooks.values()):
                hook(param.sharded)
    return ran

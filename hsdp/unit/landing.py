"""Steps of a landing: users' hooks on sharded parameters, and the memory of sums and of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.comm.streams import Streams, note_read
from hsdp.errors import StateError
from hsdp.params.dtensors import as_dtensor, as_dtensors
from hsdp.params.param import ManagedParam
from hsdp.torch_private import plain_access
from hsdp.unit.grad_layout import GradLayout
from hsdp.unit.reduce_plan import GroupReduction, ReducePlan
from hsdp.unit.rollback import Undo
from hsdp.unit.zero_grad import ZeroGradSentinel, local_grad

_grad_of = attrgetter("grad")
_wrapper_of = Tensor.untyped_storage
_backward_hooks_of = attrgetter("_backward_hooks")
_accumulate_hooks_of = attrgetter("_post_accumulate_grad_hooks")


def zero(plan: ReducePlan, operands: list[Tensor], slots: set[int]) -> None:
    """Zeroes the parameters at `slots` in reduced or deferred sums."""
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


def has_hooks_and_grads(layout: GradLayout) -> tuple[bool, bool]:
    """Whether `run_grad_hooks` has hooks to run, and whether one of the parameters has a gradient."""
    sharded = layout.sharded
    with plain_access():
        return any(map(_backward_hooks_of, sharded)), any(map(is_not, map(_grad_of, sharded), repeat(None)))


def run_grad_hooks(part: GroupReduction, used: list[bool]) -> None:
    """Hooks of `param.register_hook` on sharded parameters: they see the reduced gradient, and may return another one.

    They run when the reduction has ended, which depends on this rank's timing: they must not communicate.
    """
    for param, local, was_used in zip(part.grad_layout.params, part.locals(), used, strict=True):
        for hook in list((param.sharded._backward_hooks or {}).values()) if was_used else ():
            other: Any = hook(as_dtensor(local, param.grad_spec))
            if other is None:
                continue
            if not isinstance(other, DTensor) or other.placements != param.grad_spec.placements:
                raise StateError(
                    f"a hook of parameter {param.fqn!r} returned {type(other).__name__} instead of a gradient with "
                    f"placements {param.grad_spec.placements}; return a DTensor like the one that it gets, or None"
                )
            local.copy_(other.to_local())


_MARK = "_hsdp_landed"


def mark_landed(locals_: list[Tensor]) -> None:
    """Marks the buffer in which local gradients lie, if they share one, as laid out by hsdp: gaps are padding."""
    if locals_ and (base := locals_[0]._base) is not None:
        setattr(base, _MARK, True)


def is_landed(memory: Tensor) -> bool:
    """Whether hsdp laid out a buffer of gradients; users' gradients may lie side by side, too."""
    return hasattr(memory, _MARK)


_WRAPPER = "_hsdp_wrapper"


def assign_grad(param: Tensor, grad: Tensor) -> None:
    """A gradient becomes that of a sharded parameter; its wrapper is noted for `refuse_assigned_grads`."""
    param.grad = grad
    with plain_access():
        setattr(grad, _WRAPPER, _wrapper_of(grad))


def refuse_assigned_grads(params: Iterable[ManagedParam], unit: str, what: str) -> None:
    """Raises StateError, once, if the `.data` of a gradient was assigned to: the values are lost.

    torch gives such a DTensor another wrapper and leaves its local tensor as it was. `p.grad.data *= 2` writes to that
    first, and then assigns the wrapper that is there already.
    """
    with plain_access():
        for param in params:
            grad: Any = param.sharded.grad
            noted = None if grad is None else getattr(grad, _WRAPPER, None)
            if noted is None or (now := _wrapper_of(grad)) is noted:
                continue
            setattr(grad, _WRAPPER, now)
            raise StateError(
                f"{what}: the .data of the gradient of parameter {param.fqn!r} of unit {unit!r} was assigned to, which "
                "changes nothing in a DTensor; write into it instead (param.grad.copy_(...)), or assign to param.grad"
            )


def assign_grads(part: GroupReduction, undo: Undo | None) -> None:
    """Reduced values become the gradients of parameters that have none; `undo` takes note of them."""
    layout, locals_ = part.grad_layout, part.locals()
    grads = as_dtensors(locals_, layout.grad_specs)
    if undo is not None:
        undo.note_assigned(layout.params, grads, locals_)
    with plain_access():
        for param, grad in zip(layout.sharded, grads, strict=True):
            param.grad = grad
            setattr(grad, _WRAPPER, _wrapper_of(grad))  # `assign_grad`, without its call
    if (base := locals_[0]._base) is not None:  # `mark_landed`, without its call
        setattr(base, _MARK, True)


def note_grads_read(params: Iterable[ManagedParam], streams: Streams) -> None:
    """The current stream may read gradients and drop them, though their memory is that of `streams.home`.

    Once they are dropped, the allocator waits for what the current stream holds by then before it hands the memory out.
    """
    if not streams.active or not streams.is_away():
        return
    with plain_access():
        grads: list[Any] = [grad for param in params if (grad := param.sharded.grad) is not None]
    for grad in grads:
        local = getattr(grad, "_local_tensor", grad)
        if isinstance(local, ZeroGradSentinel):
            local = local.backing.gradient
        if local is not None:
            note_read(local)


def shared_memory(layout: GradLayout) -> Tensor | None:
    """The buffer that the gradients of all of a layout's parameters are views of, as an earlier landing left them.

    Users' gradients may lie side by side, too, without the gaps, and in another order of dims.
    """
    base: Tensor | None = None
    for param, offset in zip(layout.params, layout.offsets, strict=True):
        if param.sharded.grad is None:
            return None
        local = local_grad(param)
        base = local._base if base is None else base
        if base is None or local._base is not base or local.storage_offset() != offset or not local.is_contiguous():
            return None
    return base if base is not None and is_landed(base) else None


def run_hooks(layout: GradLayout, used: list[bool]) -> bool:
    """Post-accumulate-grad hooks that users put on sharded parameters (an optimizer in backward). Returns if any ran."""
    ran = False
    with plain_access():
        hooked = any(map(_accumulate_hooks_of, layout.sharded))
    if not hooked:
        return ran
    for param, was_used in zip(layout.params, used, strict=True):
        hooks: Any = param.sharded._post_accumulate_grad_hooks
        if hooks and was_used:
            ran = True
            for hook in list(hooks.values()):
                hook(param.sharded)
    return ran

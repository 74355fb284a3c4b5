"""Gradients while full parameters are shown: nobody has them whole, and what is done to a full parameter's would be lost.

A full parameter whose sharded one has a gradient shows a stand-in:

    cleared (`zero_grad()`, `p.grad = None`, `zero_`)    so is the sharded one in the end
    read, or changed                                     a StateError that names the parameter

What a full parameter has got beside that, a gradient or a hook, is a StateError in the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from hsdp.errors import StateError
from hsdp.params.param import ManagedParam

_ZEROES = frozenset(("aten::zero_", "aten::_foreach_zero_"))
_ALIASES = frozenset(("aten::detach", "aten::alias", "aten::_to_copy"))


class HeldGradient(Tensor):
    """Stands for the gradient of a sharded parameter on its full one. It has no memory.

    Attributes:
        fqn: the parameter's name.
        first: the one that it is an alias of (`.data`, `detach()`), or itself; `zeroed`: somebody set that to zero.
    """

    fqn: str
    first: HeldGradient
    zeroed: bool

    @staticmethod
    def __new__(
        cls, fqn: str, like: Tensor, dtype: torch.dtype, device: torch.device, first: HeldGradient | None = None
    ) -> HeldGradient:
        """A wrapper without memory of its own."""
        held: HeldGradient = Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=device)
        held.fqn, held.zeroed = fqn, False
        held.first = held if first is None else first
        return held

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"HeldGradient({self.fqn!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = [one for one in tree_iter((args, kwargs)) if isinstance(one, HeldGradient)]
        name = func._schema.name
        if name in _ZEROES:
            for one in found:
                one.first.zeroed = True
            if name == "aten::_foreach_zero_" and (plain := [one for one in args[0] if not isinstance(one, HeldGradient)]):
                func(plain)
            return args[0] if name == "aten::zero_" else None
        one, kwargs = found[0], kwargs or {}
        if name in _ALIASES:
            dtype, device = kwargs.get("dtype") or one.dtype, kwargs.get("device") or one.device
            return cls(one.fqn, one, dtype, device, one.first)
        raise StateError(
            f"the gradient of parameter {one.fqn!r} was read or changed ({name}) inside full_params, gathered_apply or "
            "apply, where parameters are whole and gradients are not. Do so outside, with the sharded param.grad, of which "
            "param.grad.full_tensor() is the whole"
        )


def hold(full: nn.Parameter, param: ManagedParam) -> bool:
    """Shows a stand-in on a full parameter if its sharded one has a gradient; returns whether it has."""
    if param.sharded.grad is None:
        return False
    full.grad = HeldGradient(param.fqn, full, full.dtype, full.device)
    return True


def hand_on(full: nn.Parameter, param: ManagedParam, stood_in: bool) -> Tensor | None:
    """Clears the sharded parameter's gradient if that of the full one was, also where the body raised behind that.

    `stood_in`: what `hold` returned; a gradient that has landed since is not cleared. Returns what the full one has got.
    """
    held = full.grad
    if not isinstance(held, HeldGradient):
        if held is None and stood_in:
            param.sharded.grad = None
        return held
    if held.first.zeroed and param.sharded.grad is not None:
        param.sharded.grad.zero_()
    return None


def drop(full: nn.Parameter) -> None:
    """Takes a stand-in off a full parameter that is shown no more: somebody may go on with it."""
    if isinstance(full.grad, HeldGradient):
        full.grad = None


def refuse_lost(full: nn.Parameter, grad: Tensor | None, param: ManagedParam, what: str) -> None:
    """Raises StateError if a full parameter has got a gradient, or a hook, which would be lost."""
    if full._backward_hooks or full._post_accumulate_grad_hooks:
        raise StateError(
            f"{what}: a hook was registered on the full parameter {param.fqn!r}, which is about to go; register it on the "
            "sharded one, outside"
        )
    if grad is not None:
        raise StateError(
            f"{what}: the full parameter {param.fqn!r} has got a gradient, which is about to go with it. Compute gradients "
            "of the sharded parameters, outside, or by torch.autograd.grad; or set it to None at the end of the block"
        )

"""Where the unsharded gradients of a backward under way are: on the unsharded parameters, until the unit is reduced.

User code that runs backwards inside of a backward (an autograd function that computes an MLP tile by tile) finds them
there as in plain torch, and may read them, edit them, replace them, or set them to None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hsdp.params.param import ManagedParam
from hsdp.torch_private import plain_access

_STRIDED = torch.strided


class Arrivals:
    """The unsharded gradients of one unit that have not been reduced.

    Attributes:
        leaves: the unsharded parameters that got one, by the parameters' numbers.
    """

    def __init__(self, params: list[ManagedParam]) -> None:
        self._params = params
        self._in_blocks = any(param.inner is not None for param in params)
        self.leaves: dict[int, Tensor] = {}
        self._replaced: dict[int, Tensor] = {}  # gradients of leaves that were replaced by other leaves

    def add(self, slot: int, leaf: Tensor) -> None:
        """Notes the gradient of an unsharded parameter, which may be another leaf than the one before it."""
        before = self.leaves.get(slot)
        if before is not None and before is not leaf:
            grad, before.grad = before.grad, None
            if (grad := self._whole(slot, grad)) is not None:
                self._replaced[slot] = grad
        self.leaves[slot] = leaf

    def add_outside(self, zeroed: set[int]) -> bool:
        """Adds gradients that user code put on unsharded parameters, without accumulation; returns whether there were any.

        Gradients of parameters that were `zeroed` since are dropped: a failed pipeline step left them.
        """
        found = False
        for slot, param in enumerate(self._params):
            if param.trained is None or param.trained.grad is None:
                continue
            if slot in zeroed:
                param.trained.grad = None
            else:
                self.add(slot, param.trained)
                found = True
        return found

    def take(self) -> dict[int, Tensor]:
        """Moves all gradients away from the unsharded parameters, also those that user code put there by itself.

        A parameter that was frozen since its forward gets none, as a plain one would not.
        """
        taken: dict[int, Tensor] = {}
        params = self._params
        if len(self.leaves) < len(params):
            self.leaves.update(self._assigned())
        alike = not (self._in_blocks or self._replaced)
        with plain_access():
            for slot, leaf in self.leaves.items():
                grad, leaf.grad = leaf.grad, None
                if grad is None or not alike or grad.layout is not _STRIDED:
                    grad = self._whole(slot, grad)
                if grad is not None and params[slot].sharded.requires_grad:
                    taken[slot] = grad
        self.leaves.clear()
        return taken

    def _assigned(self) -> dict[int, Tensor]:
        """Unsharded parameters with a gradient that did not arrive: a user's autograd function put it there, say."""
        return {
            slot: leaf
            for slot, param in enumerate(self._params)
            if (leaf := param.trained) is not None and slot not in self.leaves and leaf.grad is not None
        }

    def has_any(self) -> bool:
        """Whether a gradient is there, also one that user code put there behind the unit's reduction."""
        return bool(self.leaves or self._assigned())

    def _whole(self, slot: int, grad: Tensor | None) -> Tensor | None:
        """The sum of a parameter's gradients on all its leaves, dense, for the rows of this rank."""
        if grad is not None and (self._in_blocks or grad.layout is not _STRIDED):
            grad = self._params[slot].dense_block(grad)
        if self._replaced and (other := self._replaced.pop(slot, None)) is not None:
            return other if grad is None else other.to(torch.promote_types(other.dtype, torch.float32)) + grad
        return grad

    def drop(self) -> None:
        """Forgets all gradients: the backward under way failed."""
        for leaf in self.leaves.values():
            leaf.grad = None
        self.leaves.clear()
        self._replaced.clear()

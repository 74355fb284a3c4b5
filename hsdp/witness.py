"""A witness sees that somebody zeroed a gradient: optimizers have no hook for `zero_grad`, and versions do not tell.

While gradients are pending (summed, but not communicated), each parameter's `.grad` has a witness for its local tensor. To
everybody it is the tensor it stands for: the gradient that was there before, or zeros that take no memory. It notes when
an operation sets it to zero, and the pending sums then go as the gradient went.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_ZEROING = {"aten::zero_", "aten::_foreach_zero_", "aten::fill_"}


class Witness(Tensor):
    """Stands for `base`, or for zeros of the shape, dtype and device of `like`.

    Attributes:
        base: the gradient it stands for; None for zeros.
        zeroed: whether it was set to zero since it was put up.
    """

    base: Tensor | None
    zeroed: bool

    @staticmethod
    def __new__(cls, like: Tensor, base: Tensor | None) -> Witness:
        """A wrapper without memory of its own."""
        witness: Witness = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
        )
        witness.base = base
        witness.zeroed = False
        return witness

    def __init__(self, like: Tensor, base: Tensor | None) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation on what the witnesses stand for."""
        zeroes = func._schema.name in _ZEROING

        def stand_in(witness: Witness) -> Tensor:
            witness.zeroed = witness.zeroed or zeroes
            if witness.base is None:
                return torch.zeros(witness.shape, dtype=witness.dtype, device=witness.device)
            return witness.base

        real_args, real_kwargs = tree_map_only(Witness, stand_in, (args, kwargs or {}))
        result = func(*real_args, **real_kwargs)
        if func._schema.is_mutable:
            return None if result is None else args[0]
        return result

"""Stands for a sharded parameter's local tensor while parts of it are on their way: any use of it waits first.

`torch.distributed._functional_collectives` has the same for the results of collectives (AsyncCollectiveTensor).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class PendingShard(Tensor):
    """A stand-in without memory. Any function or attribute of it is that of the tensor it stands for, once that is whole.

    Attributes:
        landed: waits, and returns that tensor. It may be called any number of times.
    """

    landed: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, like: Tensor, landed: Callable[[], Tensor]) -> PendingShard:
        """A wrapper of the shape, strides, dtype and device of `like`."""
        stand_in: PendingShard = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
        )
        stand_in.landed = landed
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Python's calls: methods, attributes, what reads memory past the dispatcher (`numpy`, `data_ptr`, pickling)."""
        args, kwargs = tree_map_only(PendingShard, _landed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The dispatcher's calls: what DTensor does with its local tensor."""
        args, kwargs = tree_map_only(PendingShard, _landed, (args, kwargs or {}))
        return func(*args, **kwargs)


def _landed(stand_in: PendingShard) -> Tensor:
    return stand_in.landed()


def landed(local: Tensor) -> Tensor:
    """`local` itself, or the landed tensor that it stands for."""
    return local.landed() if type(local) is PendingShard else local

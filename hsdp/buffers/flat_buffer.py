"""Flat memory that can be freed and filled again while tensors keep pointing at it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import dlpack

from hsdp import debug
from hsdp.torch_private import storage_uses


def owned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy if others share its memory: the result may be changed in place.

    Autograd hands the gradient of a parameter that a forward viewed (`p.view(...)`, `p.unsqueeze(0)`) over as a view of the
    gradient behind it, which the rest of the graph, and other parameters, may hold too.
    """
    return tensor if storage_uses(tensor) <= 1 else tensor.clone()


def with_own_storage(tensor: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own, which begins where `tensor` does and keeps it alive."""
    if not tensor.numel():  # there is no memory to share, and an offset of its own into none would be left
        return torch.empty_like(tensor)
    # By way of a capsule: a tensor's own `__dlpack_device__` refuses third-party devices once they were given a name.
    return dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]


class FlatBuffer:
    """A flat tensor whose storage comes and goes.

    Freeing shrinks the storage to nothing, though autograd or a module still holds views: they come back to life when
    the flat buffer is allocated and filled again. It is born allocated: views can only be made of memory that is there.

    Args:
        tensor: views the memory, whose storage is freed as a whole.
    """

    __slots__ = ("_bytes", "_storage", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._storage = tensor.untyped_storage()
        self._bytes = self._storage.nbytes()

    @classmethod
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        """One of new memory."""
        return cls(torch.empty(numel, dtype=dtype, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when allocated."""
        return self._bytes

    @property
    def held(self) -> int:
        """Bytes that it takes now."""
        return self._storage.nbytes()

    def alloc(self) -> None:
        """Makes the memory present; its content is undefined. Allocates on the current stream."""
        if self._storage.nbytes() != self._bytes:
            self._storage.resize_(self._bytes)
            if debug.ON:
                self._poison()

    def free(self) -> None:
        """Gives the memory back, unless somebody made a NumPy array of it: torch never resizes such a storage again."""
        if debug.ON and self._storage.nbytes():
            self._poison()
        if self._storage.resizable():
            self._storage.resize_(0)

    def _poison(self) -> None:
        # Bits that are NaN in every floating-point dtype, written past autograd, whose version counters must not see it.
        with torch.no_grad():
            self.tensor.data.view(torch.uint8).fill_(0xFF)

    def alias(self, start: int, stop: int) -> Tensor:
        """A view of elements `start:stop` with a version counter of its own.

        Views made by plain slicing share one counter, and refilling the flat buffer would then trip autograd's check that
        saved tensors were not modified; units compare versions instead.
        """
        return self.tensor.data[start:stop]

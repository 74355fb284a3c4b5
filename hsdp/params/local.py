"""This rank's part of a tensor of any kind."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.params.pending import landed
from hsdp.params.subclass import beside, data_of, extends, make_of, parts_of


def local_of(param: Tensor) -> Tensor:
    """What this rank holds of a parameter, as a plain tensor: itself, unless it is a DTensor or has a gather extension."""
    return data_of(_held(param))


def beside_local(param: Tensor) -> dict[str, Tensor]:
    """The scalars that a subclass with a gather extension keeps beside its data on this rank, by name.

    They are equal on all ranks of a mesh, those that share the rows out among themselves too.
    """
    return beside(_held(param))


def parts_beside(param: Tensor) -> list[tuple[str, Tensor]]:
    """The scalars of `beside_local` as plain tensors, with their names."""
    return [(name, part.detach()) for name, held in beside_local(param).items() for part in parts_of(held)]


def is_expanded(tensor: Tensor) -> bool:
    """Whether several of a plain tensor's elements are one place in memory, which must not be written to."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def make_of_local(param: Tensor) -> str | None:
    """What a subclass with a gather extension is on this rank, but for the values of its tensors; None of other tensors."""
    held = _held(param)
    return make_of(held) if extends(held) else None


def _held(param: Tensor) -> Tensor:
    return landed(param._local_tensor) if isinstance(param, DTensor) else param

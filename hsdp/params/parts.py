"""Writes to parts of sharded tensors: `weight[0].fill_(0)`, `grad[:100].zero_()`, `bias[-1] = 1`.

A part along the dim that ranks share is a view in torch, and a copy in DTensor, gathered on every rank: what is written to
it is lost there. Here it goes on to this rank's shard:

    select, slice, split, ...     the local tensor of what comes out is a `Part` (operators.py)
    a write to a `Part`           of the gathered copy, and then of what this rank has of it
    index_put_, index_fill_, ...  (`grad[mask] = 0`) are done to a whole of which this rank's part is kept (operators.py)

All ranks write, each the same: they all hold the copy. What they communicate for a write is whether it may be done: a rank
sees by its own rows alone that a copy is of former values, and all of them have to refuse it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._pytree import tree_iter, tree_map_only

from hsdp.buffers.fingerprints import same_bits
from hsdp.errors import StateError
from hsdp.params.dtensors import largest, part_of_whole
from hsdp.torch_private import storage_key


def after_write(source: DTensor, write: Callable[[Tensor], object]) -> Tensor:
    """This rank's shard as it is behind a write to the whole tensor; the shard itself is not written to.

    Args:
        source: a tensor that is not in stripes.
        write: gets a tensor of the whole's shape, in which nothing but this rank's part has been filled.
    """
    spec, local = source._spec, source._local_tensor
    whole = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    mine = part_of_whole(whole, spec)
    mine.copy_(local)
    write(whole)
    return mine


def refuse_stripes(source: DTensor) -> None:
    """Raises StateError of a write to what ranks hold in stripes, or as parts of a sum: it is not to reach the shards."""
    spec = source._spec
    if any(type(placement) not in (Shard, Replicate) for placement in spec.placements):
        raise StateError(
            f"a write to a part of {_told(source)} with placements {spec.placements}, which torch would lose; multiply the "
            "whole tensor by a mask that is sharded as it is, or write to a parameter inside hsdp.full_params(model, "
            "writeback='rank0')"
        )


@dataclass(eq=False)
class Origin:
    """Where a part was cut from.

    Attributes:
        source: the sharded tensor; `cut`, `args`, `kwargs`: what was done to it; `at`: which of the results this is.
        spec: how that result is distributed: a dim that was not cut may be shared by ranks yet.
        copy: what DTensor made of it on this rank.
    """

    source: DTensor
    cut: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(repr=False)
    at: int | None
    spec: DTensorSpec
    copy: Tensor

    def stale(self) -> bool:
        """Whether another write has reached what this rank has of the part, since it was cut."""
        local = self.source._local_tensor
        return not same_bits(self._merged(), local.value if isinstance(local, Part) else local)

    def write_back(self) -> None:
        """Puts what this rank has of the copy into its shard."""
        self.source._local_tensor.copy_(self._merged())

    def _merged(self) -> Tensor:
        """This rank's shard with what it has of the copy in it."""

        def write(whole: Tensor) -> None:
            found = self.cut(whole, *self.args, **self.kwargs)
            part_of_whole(found if self.at is None else found[self.at], self.spec).copy_(self.copy)

        return after_write(self.source, write)


def _check_fresh(origins: list[Origin]) -> None:
    """Raises StateError on all ranks if a write is not to reach a shard, or another one has since its part was cut."""
    for origin in origins:
        refuse_stripes(origin.source)
    for mesh in dict.fromkeys(origin.source.device_mesh for origin in origins):
        asked = [origin for origin in origins if origin.source.device_mesh == mesh]
        stale = torch.tensor([origin.stale() for origin in asked], dtype=torch.int32, device=asked[0].copy.device)
        for origin, found in zip(asked, largest(stale, mesh).tolist(), strict=True):
            if found:
                raise StateError(
                    f"a write to a part of {_told(origin.source)}, to which somebody has written since: the part is a "
                    "copy, of the values of then; take it anew"
                )


def _told(source: DTensor) -> str:
    """Names the tensor that parts were cut from."""
    shape = f"a DTensor of shape {tuple(source._spec.shape)}"
    while isinstance(local := source._local_tensor, Part):
        source = local.origin.source
    name = _name_of(source)
    return shape if name is None else f"{name} ({shape})"


def _unknown(source: DTensor) -> str | None:
    return None


_name_of: Callable[[DTensor], str | None] = _unknown


def name_by(find: Callable[[DTensor], str | None]) -> None:
    """Has errors name tensors as `find` does: ownership.py, which stands on this file, knows parameters' names."""
    global _name_of
    _name_of = find


class Part(Tensor):
    """The local tensor of a part; it has no memory of its own.

    Attributes:
        value: the copy, or a view of it.
        origin: where the part was cut from.
    """

    value: Tensor
    origin: Origin

    @staticmethod
    def __new__(cls, value: Tensor, origin: Origin) -> Part:
        """A wrapper around a plain tensor."""
        part: Part = Tensor._make_wrapper_subclass(
            cls, value.shape, value.stride(), value.storage_offset(), dtype=value.dtype, device=value.device
        )
        part.value, part.origin = value, origin
        return part

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self.value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.value, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value.__reduce_ex__(protocol)

    def view_as(self, other: Tensor) -> Tensor:
        """A plain tensor: `to_local` and `full_tensor` make what they hand out by this method, and operators do not."""
        return self.value.view(other.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map_only(Part, lambda part: part.value, (args, kwargs))
        written = list({id(part.origin): part.origin for part in _written(func, args, kwargs)}.values())
        _check_fresh(written)
        found = func(*plain_args, **plain_kwargs)
        for origin in written:
            origin.write_back()
        parts = [part for part in tree_iter((args, kwargs)) if isinstance(part, Part)]
        same = {id(part.value): part for part in parts}
        memory = {memory_of(part.value): part.origin for part in parts}

        def again(tensor: Tensor) -> Tensor:
            if id(tensor) in same:
                return same[id(tensor)]
            at = memory_of(tensor)
            return Part(tensor, memory[at]) if at in memory else tensor

        return tree_map_only(Tensor, again, found)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Part]:
    """The parts that an operator writes to."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from (one for one in tree_iter(given) if isinstance(one, Part))


def memory_of(tensor: Tensor) -> int:
    """Tells the memory of a local tensor from others."""
    return storage_key(tensor.untyped_storage()) if not isinstance(tensor, Part) else memory_of(tensor.value)


def span(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage the elements of a tensor begin and end."""
    start = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + (1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0)

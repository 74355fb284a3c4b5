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
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._pytree import tree_iter, tree_map_only

from hsdp.buffers.fingerprints import same_bits
from hsdp.errors import StateError
from hsdp.params.arguments import by_name, written_by
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
            f"a write to a part of {named(source)} with placements {spec.placements}, which torch would lose; multiply the "
            "whole tensor by a mask that is sharded as it is, or write to a parameter inside hsdp.full_params(model, "
            "writeback='rank0')"
        )


_Layer: TypeAlias = "tuple[Tensor, Origin | None]"
"""Memory that a write reaches: all of a tensor, or those elements of it of which a part has a copy."""


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

    def layers(self) -> list[_Layer]:
        """What a write reaches: the copy, and what that was cut from; a copy too, perhaps, and then what is below."""
        local = self.source._local_tensor
        below = local.origin.layers()[1:] if isinstance(local, Part) else []
        return [(self.copy, None), (local.value if isinstance(local, Part) else local, self), *below]

    def covered(self) -> Tensor:
        """Of which elements of this rank's shard it has a copy."""
        spec = self.source._spec
        whole = torch.zeros(spec.shape, dtype=torch.bool, device=self.copy.device)
        self._of(whole).fill_(True)
        return part_of_whole(whole, spec)

    def write_back(self) -> None:
        """Puts what this rank has of the copy into its shard."""
        self.source._local_tensor.copy_(self._merged())

    def _merged(self) -> Tensor:
        """This rank's shard with what it has of the copy in it."""
        return after_write(self.source, lambda whole: self._of(whole).copy_(self.copy))

    def _of(self, whole: Tensor) -> Tensor:
        """What this rank's copy is one of, in a tensor of the whole's shape: a view."""
        found = self.cut(whole, *self.args, **self.kwargs)
        return part_of_whole(found if self.at is None else found[self.at], self.spec)


def _check_write(origins: list[Origin], others: list[Tensor]) -> None:
    """Raises StateError on all ranks if a write is not to reach a shard, or cannot be put there rightly.

    Args:
        origins: those of the parts that an operator writes to.
        others: local tensors that it writes to as they are.
    """
    for origin in origins:
        refuse_stripes(origin.source)
    clashing = _clashing(origins, others)
    for mesh in dict.fromkeys(origin.source.device_mesh for origin in origins):
        asked = [origin for origin in origins if origin.source.device_mesh == mesh]
        faults = [2 if origin in clashing else int(origin.stale()) for origin in asked]
        told = largest(torch.tensor(faults, dtype=torch.int32, device=asked[0].copy.device), mesh)
        for origin, fault in zip(asked, told.tolist(), strict=True):
            if fault == 2:
                raise StateError(
                    f"one operator writes to several parts of {named(origin.source)} that overlap, or to a part and to the "
                    "tensor itself: a part is a copy of all that was cut first, and one of the writes would be lost; take "
                    "a part, write to it, and only then take the next"
                )
            if fault == 1:
                raise StateError(
                    f"a write to a part of {named(origin.source)}, to which somebody has written since: the part is a "
                    "copy, of the values of then; take it anew"
                )


def _clashing(origins: list[Origin], others: list[Tensor]) -> list[Origin]:
    """The parts whose copies share elements of this rank's shard with other parts' copies, or with other tensors."""
    written: list[tuple[Origin | None, list[_Layer]]] = [(origin, origin.layers()) for origin in origins]
    written += [(None, [(one, None)]) for one in others]
    return [
        origin
        for origin, layers in written
        if origin is not None and any(_overlap(layers, found) for other, found in written if other is not origin)
    ]


def _overlap(ones: list[_Layer], others: list[_Layer]) -> bool:
    """Whether two writes reach the same elements of the first memory that both of them reach."""
    for one, covered in ones:
        for other, covered_too in others:
            if memory_of(one) == memory_of(other):
                (start, end), (first, last) = span(one), span(other)
                if min(end, last) <= max(start, first):
                    return False
                low, high = min(start, first), max(end, last)
                painted = torch.zeros(high - low, dtype=torch.bool, device=one.device)
                painted.as_strided(one.shape, one.stride(), start - low).copy_(_mask(one, covered))
                seen = painted.as_strided(other.shape, other.stride(), first - low)
                return bool((seen & _mask(other, covered_too)).any())
    return False


def _mask(tensor: Tensor, origin: Origin | None) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=tensor.device) if origin is None else origin.covered()


def named(source: DTensor) -> str:
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
        targets = list(_written(func, args, kwargs))
        written = list({id(one.origin): one.origin for one in targets if isinstance(one, Part)}.values())
        if written:
            _check_write(written, [one for one in targets if not isinstance(one, Part)])
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


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    given = by_name(func, args, kwargs)
    yield from (one for name in written_by(func) for one in tree_iter(given.get(name)) if isinstance(one, Tensor))


def memory_of(tensor: Tensor) -> int:
    """Tells the memory of a local tensor from others."""
    return storage_key(tensor.untyped_storage()) if not isinstance(tensor, Part) else memory_of(tensor.value)


def span(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage the elements of a tensor begin and end."""
    start = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + (1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0)

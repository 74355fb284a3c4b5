"""`GradLayout`: where gradients lie in the values of a reduction, behind one stage of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from hsdp.buffers.views import runs_of
from hsdp.offload import OffloadPolicy
from hsdp.params.param import ManagedParam
from hsdp.unit.dtype_group import GroupKey


class GradLayout:
    """Where the gradients of some parameters of a dtype group lie in reduced values.

    These are one 1-D tensor, whose tail are the used-flags, or with `alone` a tensor for each parameter, and one of flags.

    Attributes:
        kind: dtypes of the parameters.
        device: where they are reduced.
        offload: where gradients go, if their shards are not on that device; else None.
        params: the parameters; `slots` gives their indices in the unit, `sharded` the DTensors,
            `grad_specs` those of their gradients.
        shapes: of their local gradients.
        offsets: where these start, in elements.
        numel: elements in front of the flags.
        flags: number of flags, one per parameter.
    """

    def __init__(
        self,
        kind: GroupKey,
        device: torch.device,
        offload: OffloadPolicy | None,
        params: Sequence[ManagedParam],
        slots: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        offsets: Sequence[int],
        numel: int,
        alone: bool,
    ) -> None:
        self.kind = kind
        self.device = device
        self.offload = offload
        self.params = list(params)
        self.slots = list(slots)
        self.sharded = [param.sharded for param in params]
        self.grad_specs = [param.grad_spec for param in params]
        self.shapes = list(shapes)
        self.offsets = list(offsets)
        self.numel = numel
        self.flags = len(self.params)
        self.alone = alone
        # Adjacent gradients of one shape are cut by one view: it takes the host as long for one as for two.
        self._stacked: list[bool] = []
        self._cuts: tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int]] = [], [], []
        for first, *rest in runs_of(list(zip(shapes, offsets, strict=True))):
            count, step = ((1 + len(rest),), (offsets[rest[0]] - offsets[first],)) if rest else ((), ())
            self._cuts[0].append(count + shapes[first])
            self._cuts[1].append(step + _strides(shapes[first]))
            self._cuts[2].append(offsets[first])
            self._stacked.append(bool(rest))

    def flags_of(self, used: Sequence[bool]) -> Tensor:
        """This rank's used-flags, made on the device: for a copy of a list the host would wait for all that is enqueued."""
        flags = torch.ones(self.flags, dtype=self.kind.reduce, device=self.device)
        for at, was_used in enumerate(used):
            if not was_used:
                flags[at] = 0.0
        return flags

    def locals(self, values: list[Tensor]) -> list[Tensor]:
        """Splits reduced values (without the flags) into one local gradient per parameter."""
        if self.alone:
            return [value.view(shape) for value, shape in zip(values, self.shapes, strict=True)]
        found = list(map(values[0].as_strided, *self._cuts))
        if len(found) == self.flags:
            return found
        stacks = zip(found, self._stacked, strict=True)
        return list(chain.from_iterable([one.unbind() if stacked else (one,) for one, stacked in stacks]))


def cut(flat: Tensor, start: int, numel: int) -> Tensor:
    """Elements of a 1-D tensor, as slicing gives them, in two thirds of its time on the host."""
    return flat.as_strided((numel,), (1,), start)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(1, shape[dim])
    return tuple(strides)

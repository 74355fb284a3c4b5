"""What an elementwise optimizer steps in the place of its parameters: plain tensors, and where parameters lie in them.

by itself      a parameter's local tensor, or a replica's share of it
flat           a stretch of a unit's shard buffer: parameters that lie side by side
flat shares    these lie apart in that buffer: they are copied beside each other while they are stepped
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.buffers.flat_buffer import FlatBuffer, with_own_storage
from hsdp.optim.states import CONTAINERS, inside
from hsdp.params.local import local_of
from hsdp.params.replica_rows import Share
from hsdp.unit.lookup import memory_of, unit_of

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Entries of PyTorch's optimizers that are numbers: of a scalar parameter they have the parameter's shape, and are no
DTensors."""


def is_number(name: object, value: Tensor, counts: Collection[str] = ()) -> bool:
    """Whether an entry is one of these numbers, or of `counts`: other optimizers call a moment `mu`."""
    named = name == "step" or (name in NUMBERS and value.ndim == 0)
    return value.numel() == 1 and (named or name in counts)


def counts_in(state: Mapping[Any, Mapping[str, Any]]) -> set[str]:
    """Entries that are counts where they have one element, which a parameter may have as well: those of others tell.

    Args:
        state: by parameter, or by what is stepped in its place.
    """
    found = set[str]()
    for tensor, entries in state.items():
        if isinstance(tensor, Tensor) and local_of(tensor).numel() != 1:
            plain = [(name, v) for name, v in entries.items() if isinstance(v, Tensor) and not isinstance(v, DTensor)]
            found.update(name for name, value in plain if value.numel() == 1)
    return found


@dataclass
class Member:
    """A parameter as the stepped tensor that holds it sees it: `count` elements from `start` on, of that shape."""

    param: Any
    shape: torch.Size
    start: int
    count: int
    share: Share | None = None
    place: Tensor | None = None
    """The memory of a share that is copied to be stepped."""
    accepted: object = None
    """The spec of the last gradient that was sharded as the parameter is: it is the same object step after step."""


@dataclass
class Target:
    """A plain tensor that is stepped, and the parameters in it: one, or with flat buffers several.

    `gaps` are ranges between them, which are stepped along with zeros. `memory` is that of a tensor of copies.
    """

    tensor: Tensor
    members: list[Member]
    gaps: list[tuple[int, int]]
    memory: FlatBuffer | None = None

    @property
    def alone(self) -> bool:
        """Whether the tensor is the parameter's own."""
        return len(self.members) == 1 and self.tensor.shape == self.members[0].shape

    def cut(self, value: Tensor, member: Member) -> Tensor:
        """A parameter's part of a tensor that is laid out as the target is."""
        if self.alone:
            return value
        part = value[member.start : member.start + member.count]
        # With a storage of its own, as `DtypeGroup.local` makes them: code that copies storages does not know offsets.
        return with_own_storage(part).view(member.shape)

    def bring(self) -> None:
        """Before a step: copies what is stepped in copies."""
        if self.memory is not None:
            self.memory.alloc()
            torch._foreach_copy_(*self._pairs())

    def take_back(self) -> None:
        """Behind a step: copies are put back."""
        if self.memory is not None:
            copies, places = self._pairs()
            torch._foreach_copy_(places, copies)

    def free(self) -> None:
        """Lets the memory of copies go."""
        if self.memory is not None:
            self.memory.free()

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        copies = [self.tensor[m.start : m.start + m.count].view(m.shape) for m in self.members]
        return copies, [m.place for m in self.members if m.place is not None]


def single(param: Any, share: Share | None = None) -> Target:
    """A parameter by itself, or a replica's share of it."""
    if not isinstance(param, DTensor):
        return Target(param, [Member(param, param.shape, 0, param.numel())], [])
    plain = local_of(param).detach() if share is None else share.of(memory_of(param)).detach()
    plain.requires_grad_(param.requires_grad)  # optimizers may ask for it
    return Target(plain, [Member(param, plain.shape, 0, plain.numel(), share)], [])


class _Place(NamedTuple):
    """Where a parameter lies in its shard buffer, in elements; `stop` is where the next one starts."""

    buffer: Tensor
    start: int
    stop: int


def flat_targets(
    params: Sequence[Any],
    used: dict[int, bool],
    state: Any,
    shares: dict[int, Share | None],
    gradient_of: Callable[[Member], Tensor],
) -> list[Target]:
    """One target for each run of parameters that lie side by side in a shard buffer and step alike.

    Args:
        params: the parameters of a group.
        used: by identity, whether they have gradients: the others are stepped by themselves.
        state: the optimizer's.
        shares: by identity, what this replica steps of them: those of one buffer make one target.
        gradient_of: a member's gradient now.
    """
    places: dict[int, _Place] = {}
    for unit in dict.fromkeys(unit_of(param) for param in params):
        for dtype_group in unit.dtype_groups if unit is not None else ():
            if dtype_group.kind.composite:  # its bytes lie otherwise
                continue
            stops = sorted({piece.offset for piece in dtype_group.layout.pieces} | {dtype_group.layout.numel})
            for managed, piece in zip(dtype_group.params, dtype_group.layout.pieces, strict=True):
                stop = next((stop for stop in stops if stop > piece.offset), dtype_group.layout.numel)
                places[id(managed.sharded)] = _Place(dtype_group.shard, piece.offset, stop)
    targets: list[Target] = []
    runs: dict[tuple[int, bool, object], list[Any]] = {}
    for param in params:
        share = shares.get(id(param))
        nothing = share is not None and not share.rows
        if id(param) not in places or not used[id(param)] or nothing or not param._local_tensor.numel():
            targets.append(single(param, share))
        else:
            runs.setdefault((id(places[id(param)].buffer), share is None, _numbers(state.get(param))), []).append(param)
    for (_, wholes, _), run in runs.items():
        if not wholes:
            targets.append(_copied([single(param, shares[id(param)]) for param in run], gradient_of))
            continue
        run.sort(key=lambda param: places[id(param)].start)
        part: list[Any] = []
        for param in run:
            if part and places[id(part[-1])].stop != places[id(param)].start:
                targets.append(_flat_target(part, places))
                part = []
            part.append(param)
        targets.append(_flat_target(part, places))
    return targets


def _flat_target(params: list[Any], places: dict[int, _Place]) -> Target:
    first, last = places[id(params[0])], places[id(params[-1])]
    members, gaps = [], []
    for param in params:
        place = places[id(param)]
        start, count = place.start - first.start, param._local_tensor.numel()
        members.append(Member(param, param._local_tensor.shape, start, count))
        if place.start + count < place.stop:
            gaps.append((start + count, place.stop - first.start))
    return Target(first.buffer[first.start : last.stop].detach().requires_grad_(), members, gaps)


def _copied(alone: list[Target], gradient_of: Callable[[Member], Tensor]) -> Target:
    """One target of several shares, side by side in the order in which their gradients lie."""
    if len(alone) == 1:
        return alone[0]
    order = {id(target): int(gradient_of(target.members[0]).storage_offset()) for target in alone}
    alone = sorted(alone, key=lambda target: order[id(target)])
    members, start = [], 0
    for target in alone:
        count = target.tensor.numel()
        member = target.members[0]
        members.append(Member(member.param, member.shape, start, count, member.share, place=target.tensor))
        start += count
    with torch.inference_mode(False):
        memory = FlatBuffer.empty(start, alone[0].tensor.dtype, alone[0].tensor.device)
    memory.free()
    return Target(memory.tensor.detach().requires_grad_(), members, [], memory)


def _numbers(state: dict[str, Any] | None) -> object:
    """What must be equal for two parameters to step as one: what their state has, and the numbers in it."""
    if not state:
        return ()
    return tuple(sorted((name, _signature(value)) for name, value in state.items()))


def _signature(value: Any) -> object:
    """What a value of the state must have in common: a number, whatever its name, its own; another plain tensor itself."""
    if isinstance(value, DTensor):
        return ...
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else id(value)
    if isinstance(value, CONTAINERS):
        return type(value), tuple(value) if isinstance(value, dict) else (), tuple(map(_signature, inside(value)))
    return value if isinstance(value, Hashable) else id(value)

"""Full parameters outside of an iteration: gathered per unit, registered under their names for a while, written back.

A forward shadows sharded parameters by whole ones that live in the unit's flat buffer, in its compute dtype. Here they are
tensors of their own, in the storage dtype, and they are *registered*: `named_parameters()` and `state_dict()` are whole
too. Code that initialises, exports or edits a model expects that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp.buffers.fingerprints import as_bytes, same_bits
from hsdp.buffers.layout import Piece
from hsdp.comm.collectives import Comm
from hsdp.errors import StateError
from hsdp.params.local import local_of
from hsdp.params.operators import unwatch_operators, watch_operators
from hsdp.params.param import ManagedParam, ParamName, refresh_flat_weights, rows_of, shown
from hsdp.params.subclass import data_of
from hsdp.policies import is_castable
from hsdp.schedule.runtime import runtime_of
from hsdp.torch_private import NO_TASK, graph_task
from hsdp.unit.dtype_group import DtypeGroup
from hsdp.unit.state import FORWARD, IDLE, expect, wrong_state
from hsdp.unit.unit import Unit
from hsdp.weights.held_grads import drop, hand_on, hold, refuse_lost


def check_idle(units: Iterable[Unit], what: str) -> None:
    """Raises StateError in the middle of a forward or backward of the units' root, or while the units are lent."""
    for unit in units:
        expect(unit, what, IDLE)
        runtime = runtime_of(unit)
        if runtime is not None and runtime.depth:
            raise wrong_state(runtime.root, what, f"{FORWARD.name} ({FORWARD.value})", IDLE)
        if graph_task() != NO_TASK:  # anybody's: the unit may be about to be entered
            raise wrong_state(unit, what, "in the middle of a backward", IDLE)


@contextmanager
def leaving_word(units: Iterable[Unit]) -> Iterator[None]:
    """What raises inside, perhaps on this rank alone, ends the wait of ranks that go on to communicate for these units."""
    try:
        yield
    except BaseException:
        comms = [comm for unit in units for comm in (unit.shard_comm, unit.replicate_comm)]
        for guard in {comm.divergence_guard for comm in comms if comm.divergence_guard is not None}:
            guard.note_failure()
        raise


def is_first(unit: Unit) -> bool:
    """Whether this rank is the first one of the unit's mesh."""
    return unit.axes.shard_rank == 0 and unit.axes.replicate_rank == 0


@torch.no_grad()
def gather(unit: Unit, what: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The full parameters of a unit, in its parameters' order: new tensors on the mesh's device.

    They have the storage dtype, or `dtype`. Every rank of the shard group must call it. While it runs the unit takes its
    memory twice.

    Raises:
        StateError: the unit is still on the meta device.
    """
    if unit.disturbed():
        unit.rebuild()
    wholes: dict[int, Tensor] = {}
    with torch.inference_mode(False):
        for group in unit.dtype_groups:
            if group.shard.is_meta:
                raise StateError(
                    f"{what}: unit {unit.name!r} ({unit.params[0].fqn!r}, ...) is still on the meta device; call "
                    "hsdp.init_sharded(model) first"
                )
            if group.kind.composite:
                param = group.params[0]
                raise StateError(
                    f"{what}: parameter {param.fqn!r} of unit {unit.name!r} is a {type(param.local).__name__} around "
                    "several tensors, which has no full parameter but in a forward; use model.unshard() to look at it"
                )
            rows = _gather_rows(unit, group, what)
            for slot, piece in zip(group.slots, group.layout.pieces, strict=True):
                whole = _whole_of(piece, rows)
                wholes[slot] = whole if dtype is None or not is_castable(whole.dtype) else whole.to(dtype)
    return [wholes[slot] for slot in range(len(unit.params))]


def _gather_rows(unit: Unit, group: DtypeGroup, what: str) -> Tensor:
    """The shard buffers of all ranks of the shard group, one row each."""
    axes, shard = unit.axes, group.shard.to(unit.axes.device)
    if group.shards == 1:
        return shard.view(1, -1)
    unit.shard_comm.differing(
        what, [], unit
    )  # asks whether all are here: DTensor's gather does not hear of a rank that failed
    # As bytes: backends do not know every dtype.
    data = DTensor.from_local(shard.view(torch.uint8), axes.mesh, axes.placements(0), run_check=False).full_tensor()
    return data.view(shard.dtype).view(group.shards, -1)


def _whole_of(piece: Piece, rows: Tensor) -> Tensor:
    at = piece.offset
    if piece.spec.dim is None:  # whole on every rank; the first one's serves
        return rows[0, at : at + piece.numel].view(piece.spec.shape).clone()
    if piece.even:
        # A copy, though the rows may lie as the whole does: with one shard rank they are the shards.
        return rows[:, at : at + piece.numel].clone(memory_format=torch.contiguous_format).view(piece.spec.shape)
    shapes = [piece.local_shape(rank) for rank in range(rows.shape[0])]
    parts = [row[at : at + math.prod(shape)].view(shape) for row, shape in zip(rows, shapes, strict=True)]
    return torch.cat(parts, piece.spec.dim)


@torch.no_grad()
def write(unit: Unit, wholes: Sequence[Tensor]) -> None:
    """Keeps this rank's rows of full parameters as its shards. No communication: all ranks hold the same, or should."""
    unit.join_gather()
    for group in unit.dtype_groups:
        for param, slot, piece in zip(group.params, group.slots, group.layout.pieces, strict=True):
            data_of(param.local).copy_(rows_of(wholes[slot], piece, group.rank))
    changed(unit)


@torch.no_grad()
def write_first(what: str, unit: Unit, wholes: Sequence[Tensor] | None) -> None:
    """Every rank takes the full parameters of the mesh's first rank; the others may pass None. All must call it.

    The shards are written behind the last transfer: what fails before, for want of memory say, leaves replicas equal. For
    that it takes the unit's shards twice.
    """
    if unit.disturbed():
        unit.rebuild()
    found = _from_first(what, unit, wholes) if unit.axes.replicate_rank == 0 else None
    shards = [torch.zeros_like(group.shard) for group in unit.dtype_groups]
    for group, shard in zip(unit.dtype_groups, shards, strict=True):
        if found is not None:
            for slot, piece in zip(group.slots, group.layout.pieces, strict=True):
                rows = rows_of(found[slot], piece, group.rank)
                shard[piece.offset : piece.offset + rows.numel()].view(rows.shape).copy_(rows)
        broadcast(what, shard, unit, unit.replicate_comm)
    unit.join_gather()
    for group, shard in zip(unit.dtype_groups, shards, strict=True):
        group.shard.copy_(shard)
    changed(unit)


@torch.no_grad()
def _from_first(what: str, unit: Unit, wholes: Sequence[Tensor] | None) -> list[Tensor]:
    """The full parameters of the shard group's first rank."""
    found: dict[int, Tensor] = {}
    for group in unit.dtype_groups:
        specs = [param.spec for param in group.params]
        if unit.axes.shard_rank == 0:
            assert wholes is not None, "the first rank has what the others get"
            flat = torch.cat([wholes[slot].reshape(-1).to(group.kind.storage) for slot in group.slots])
            flat = flat.to(unit.axes.device)
        else:
            numel = sum(spec.numel for spec in specs)
            flat = torch.empty(numel, dtype=group.kind.storage, device=unit.axes.device)
        broadcast(what, flat, unit, unit.shard_comm)
        for slot, spec, part in zip(group.slots, specs, flat.split([spec.numel for spec in specs]), strict=True):
            found[slot] = part.view(spec.shape)
    return [found[slot] for slot in range(len(unit.params))]


@torch.no_grad()
def spread(what: str, unit: Unit) -> None:
    """Every replica takes the shards of the first one, and every rank what the first one holds whole."""
    if unit.disturbed():
        unit.rebuild()
    unit.join_gather()
    for group in unit.dtype_groups:
        broadcast(what, group.shard, unit, unit.replicate_comm)
        for param in group.params:
            if param.spec.dim is None:
                broadcast(what, data_of(param.local), unit, unit.shard_comm)
    changed(unit)


def broadcast(what: str, tensor: Tensor, unit: Unit, *comms: Comm) -> None:
    """Overwrites a tensor, on any device, by that of the first rank of each of the unit's `comms`, one after the other.

    Along its replicate axis and then its shard axis, the first rank of the mesh reaches all others.
    """
    if tensor.numel() and any(comm.size > 1 for comm in comms):
        data = tensor.to(unit.axes.device).contiguous()
        for comm in comms:
            comm.broadcast(what, as_bytes(data), unit)
        if data is not tensor:
            tensor.copy_(data)


@torch.no_grad()
def broadcast_all(what: str, tensors: Sequence[Tensor], unit: Unit) -> None:
    """Overwrites plain tensors of any dtype by those of the first rank of the unit's mesh: one transfer per axis."""
    if not tensors:
        return
    # As bytes one buffer serves for all dtypes.
    rows = [as_bytes(tensor).to(unit.axes.device) for tensor in tensors]
    flat = torch.cat(rows)
    broadcast(what, flat, unit, unit.replicate_comm, unit.shard_comm)
    for tensor, row in zip(tensors, flat.split([row.numel() for row in rows]), strict=True):
        # A copy of its own begins where its dtype may begin.
        tensor.copy_(row.clone().view(tensor.dtype).view(tensor.shape))


def changed(unit: Unit) -> None:
    """The shards have new values: whatever was gathered before is void."""
    unit.weights_changed()
    if unit.holds_unsharded:
        unit.reshard()


class Loan:
    """Full parameters registered in place of a unit's sharded ones, in every module and under every name.

    Args:
        unit: the unit; on no other loan.
        wholes: one tensor for each of its parameters; those that were DTensors before hsdp (tensor parallelism) are
            registered as such, around these blocks.
        writes_back: their values become those of the sharded ones.
    """

    def __init__(self, unit: Unit, wholes: Sequence[Tensor], writes_back: bool = True) -> None:
        self.unit = unit
        self._writes_back = writes_back
        with torch.inference_mode(False):
            self.params = [_as_parameter(whole, param) for whole, param in zip(wholes, unit.params, strict=True)]
        if (runtime := runtime_of(unit)) is not None:
            runtime.settle()  # what runs on becomes gradients
        self._stood_in = [hold(full, param) for full, param in zip(self.params, unit.params, strict=True)]
        self._wanted = [param.requires_grad for param in self.params]
        self._now: list[list[Any]] = [[] for _ in self.params]
        self._gradients: list[Tensor | None] = []  # those that the full ones had got, when these were hidden
        self._before: list[tuple[int, ParamName, Any, Any]] = []
        self._watches = ExitStack()

    def show(self) -> None:
        """Registers the full parameters."""
        self.unit.lend(self._writes_back)
        for full in self.params:
            if isinstance(full, DTensor):
                # Not before or behind: in forwards, activations on that mesh are the user's.
                watch_operators(full.device_mesh)
                self._watches.callback(unwatch_operators, full.device_mesh)
        for slot, param in enumerate(self.unit.params):
            for place in param.places:
                module = place.module()
                if module is None:  # users took it out of their model
                    continue
                # A unit that somebody opened (unshard) has shadows, and they would hide what is registered.
                shadow = module.__dict__.pop(place.name, None)
                self._before.append((slot, place, module._parameters[place.name], shadow))
                module._parameters[place.name] = self.params[slot]
                refresh_flat_weights(module, place.name, self.params[slot])

    def hide(self) -> None:
        """Puts back what was registered before, and notes what is now: users may have put other tensors there."""
        if not self._gradients:
            three = zip(self.params, self.unit.params, self._stood_in, strict=True)
            self._gradients = [hand_on(*each) for each in three]
        self._watches.close()
        for full in self.params:
            drop(full)
        for full, param in zip(self.params, self.unit.params, strict=True):
            shown[full] = (weakref.ref(self.unit), param.fqn)
        for slot, place, param, shadow in self._before:
            module = place.module()
            if module is None:
                continue
            self._now[slot].append(module._parameters.get(place.name))
            module._parameters[place.name] = param
            if shadow is not None and self.unit.open:
                module.__dict__[place.name] = shadow
            refresh_flat_weights(module, place.name, getattr(module, place.name))
        self._before = []  # last: who was interrupted in here hides anew
        self.unit.take_back()

    def refuse_lost(self, what: str) -> None:
        """Raises StateError if the full parameters have got gradients or hooks, which would be lost.

        What was put in the place of one, and is written back, has the gradient that the sharded one is to have: none.
        """
        for slot, (param, stood_in) in enumerate(zip(self.unit.params, self._stood_in, strict=True)):
            now = self._held(slot)[0]
            if now is self.params[slot]:
                refuse_lost(now, self._gradients[slot], param, what)
            elif isinstance(now, nn.Parameter) and self._writes_back:
                refuse_lost(now, hand_on(now, param, stood_in), param, what)

    def values(self, what: str) -> list[Tensor]:
        """The full parameters as they were when they were hidden.

        Raises:
            StateError: one of them was replaced by something that cannot be written back.
        """
        values = []
        for slot, param in enumerate(self.unit.params):
            now, *others = self._held(slot)
            where = f"{what}: parameter {param.fqn!r} of unit {self.unit.name!r}"
            for one in (now, *others):
                _check_fits(one, param, where)
            if any(one is not now and not same_bits(local_of(one), local_of(now)) for one in others):
                raise StateError(
                    f"{where} has the names {', '.join(repr(place.fqn) for place in param.places)}, which were tied when "
                    "fully_shard was called and have stayed one parameter; they have different values now, one of which "
                    "would be lost: write into it in place, or put the same value under all of its names"
                )
            values.append(local_of(now.detach()))
        return values

    def keep_marks(self) -> None:
        """The sharded parameters get what was said of the full ones meanwhile: `requires_grad`, and users' attributes.

        So it is with parameters that were put in their place. Behind `values`, which has looked at what these are.
        """
        for slot, (wanted, param) in enumerate(zip(self._wanted, self.unit.params, strict=True)):
            now = self._held(slot)[0]
            if isinstance(now, nn.Parameter) and now.requires_grad != wanted:
                param.sharded.requires_grad_(now.requires_grad)
            vars(param.sharded).update(vars(now))

    def _held(self, slot: int) -> list[Any]:
        """What was registered under the names of a parameter when it was hidden."""
        return self._now[slot] or [self.params[slot]]  # all its modules were taken out of the model, and nothing was noted


def _check_fits(value: Any, param: ManagedParam, where: str) -> None:
    """Raises StateError, which `where` begins, if what is registered in the place of a full parameter is not its like."""
    visible = param.inner is not None and param.inner.visible
    if not isinstance(value, Tensor) or isinstance(value, DTensor) != visible or local_of(value).shape != param.spec.shape:
        description = f"{type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise StateError(
            f"{where} was replaced by {description}, which cannot be written back; it must keep its kind and shape "
            f"{param.spec.shape}: write into it in place"
        )


def _as_parameter(whole: Tensor, param: ManagedParam) -> nn.Parameter:
    whole = whole if param.inner is None else param.inner.wrap(whole)
    new = nn.Parameter(whole, requires_grad=param.sharded.requires_grad)
    new.__dict__.update(vars(param.sharded))  # marks that users and libraries put on parameters
    return new


@contextmanager
def hiding(loans: Mapping[Unit, Loan]) -> Iterator[None]:
    """Hides in the end what is shown by then; an interrupt from the keyboard does not leave some of it shown."""
    try:
        try:
            yield
        finally:
            for loan in loans.values():
                loan.hide()
    except BaseException:
        for loan in loans.values():
            loan.hide()
        raise

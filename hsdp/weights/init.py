"""`init_sharded`: a model that never was whole, built unit by unit; `sync_module_states`: equal values on every rank.

    sharded on the meta device --> unit 1: whole, initialised, cut, freed --> unit 2: ... --> every rank has its shards

Every rank draws the random numbers of the mesh's first rank (random_numbers.py), so that nothing but a check is
communicated. What is not written yet is nan, so that a parameter which the init function forgot is found, and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp.buffers.fingerprints import as_bytes, fingerprints
from hsdp.errors import StateError
from hsdp.format import dotted
from hsdp.params.dtensors import as_dtensor
from hsdp.params.local import local_of, parts_beside
from hsdp.params.param import put_into, rows_of
from hsdp.torch_private import storage_key
from hsdp.unit.lookup import unit_of, units_below
from hsdp.unit.unit import Unit
from hsdp.weights.full_params import visit
from hsdp.weights.gather import (
    Loan,
    broadcast_all,
    check_idle,
    gather,
    hiding,
    leaving_word,
    spread,
    write_first,
)
from hsdp.weights.module_buffers import buffers_by_unit, modules_with_units, widest
from hsdp.weights.random_numbers import RandomNumbers
from hsdp.weights.replica_check import check_makes, check_structures, unequal_values
from hsdp.weights.whole_draws import WholeDraws

InitFn = Callable[[nn.Module], object]


def init_sharded(model: nn.Module, fn: InitFn | None = None, *, device: torch.device | str | None = None) -> nn.Module:
    """Materialises and initialises a sharded model that was built on the meta device, unit by unit.

        with torch.device("meta"):
            model = Model()
        hsdp.shard_units(model, "blocks.*", mesh=mesh)
        hsdp.init_sharded(model)

    Modules are visited children first, as `torch.nn.Module.apply` does. Meanwhile the parameters of a module's unit, and
    of the units around it, are whole, plain and on `device`; then each rank keeps its shards of them. The values are
    those that one process would draw with the random state of the mesh's first rank, on every shard and replica. That
    rank's generators go on from there, and so do those of ranks that were in the same state; others keep theirs. Of
    several meshes it is the largest one's first rank; where those of smaller meshes are in other states, units there draw
    numbers of their own (experts that each rank seeds for itself). Units that are not on the meta device keep their
    values.

    Args:
        model: the whole model, sharded on the meta device; every rank must call it.
        fn: initialises a module in place, its parameters and its buffers, persistent or not. It is called on every
            module with something on the meta device in it or below it. None: `reset_parameters()` of each module that
            has parameters or buffers of its own there.
        device: where parameters are whole and random numbers are drawn; None: the mesh's device. Shards and buffers end
            up on the mesh's device in any case.

    Returns:
        `model`. Its parameters are the same objects as before.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: nothing is sharded, or nothing is on the meta device; a unit reaches beyond `model`; without `fn`, a
            module has no `reset_parameters`.
        StateError: in the middle of a forward or backward; a parameter or buffer was not initialised, or was replaced by
            something of another shape.
        DivergenceError: values differ between ranks, and a unit's `replica_policy` is "check".

    After an error what was not done is on the meta device as before, and another call does the rest.
    """
    if fn is not None and not callable(fn):
        raise TypeError(f"init_sharded(fn={fn!r}): expected a function of a module, or None for reset_parameters()")
    units = units_below(model, True, "init_sharded")
    check_idle(units, "init_sharded")
    on_meta = [unit for unit in units if _is_meta(unit)]
    _check_extent(model, on_meta)
    names = {id(module): name for name, module in model.named_modules() if any(t.is_meta for t in _own(module))}
    if not names:
        raise ValueError(
            f"init_sharded({type(model).__name__}): nothing of it is on the meta device; to initialise it again use "
            "hsdp.gathered_apply(model, fn)"
        )
    if fn is None:
        _check_resets(model, names)
    where = units[0].axes.device if device is None else torch.device(device)
    numbers = RandomNumbers(units, where)
    with leaving_word(units), numbers.of_first(), _loose_tensors(model, widest(units), where):
        _run(model, on_meta, names, fn, where, numbers)
    return model


def _run(
    model: nn.Module,
    units: list[Unit],
    names: dict[int, str],
    fn: InitFn | None,
    device: torch.device,
    numbers: RandomNumbers,
) -> None:
    loans: dict[Unit, Loan] = {}
    blanks: dict[Unit, list[Tensor]] = {}
    entered: list[Unit] = []
    below = {id(m) for m in model.modules() if any(id(child) in names for child in m.modules())}

    def enter(unit: Unit) -> None:
        entered.append(unit)
        if unit in units:
            blanks[unit] = [_blank(p.spec.shape, p.dtype, device) for p in unit.params]
            loans[unit] = Loan(unit, blanks[unit])
        elif any(id(place.module()) in below for param in unit.params for place in param.places):
            # Its modules are visited for the sake of others; what that does to these copies is dropped.
            loans[unit] = Loan(unit, gather(unit, "init_sharded"))
        else:
            return
        loans[unit].show()

    def leave(unit: Unit) -> None:
        entered.remove(unit)
        if (loan := loans.get(unit)) is not None:
            loan.hide()
            loan.refuse_lost("init_sharded")
            if unit in units:
                _materialise(unit, loan.values("init_sharded"), blanks.pop(unit))
                loan.keep_marks()
            del loans[unit]  # last: what an interrupt leaves shown is hidden in the end

    def initialise(module: nn.Module) -> None:
        with numbers.of(entered[-1] if entered else None):
            if fn is not None:
                if id(module) in below:
                    fn(module)
            elif id(module) in names:
                _reset_of(module)()

    with hiding(loans), WholeDraws():
        visit(model, units, initialise, enter, leave)


@torch.no_grad()
def _materialise(unit: Unit, wholes: Sequence[Tensor], blanks: Sequence[Tensor]) -> None:
    """Gives a unit on the meta device its shards, of values that are the same on all ranks.

    Nobody has written to the `blanks` that were lent but by way of `wholes`, which share their memory if it is still they.
    """
    blank = [
        param.fqn
        for param, whole, lent in zip(unit.params, wholes, blanks, strict=True)
        if _is_blank(whole) or (_is_untouched(lent) and _storage_of(whole) == _storage_of(lent))
    ]
    if blank:
        raise StateError(
            f"init_sharded: unit {unit.name!r}: {blank} were not initialised, or not wholly; make fn (or reset_parameters) "
            "write every element"
        )
    equal = _compare(unit, [param.fqn for param in unit.params], wholes)
    with torch.inference_mode(False):
        for group in unit.dtype_groups:
            for param, slot, piece in zip(group.params, group.slots, group.layout.pieces, strict=True):
                rows = rows_of(wholes[slot], piece, group.rank).to(unit.axes.device, param.dtype)
                put_into(param.sharded, as_dtensor(rows, param.tensor_spec), f"init_sharded: parameter {param.fqn!r}")
    unit.rebuild()
    if not equal:
        write_first("init_sharded", unit, wholes)  # fn does not depend on torch's generators alone


def _is_meta(unit: Unit) -> bool:
    return any(param.local.is_meta for param in unit.params)


def _own(module: nn.Module) -> Iterator[Tensor]:
    """A module's own parameters and buffers; of sharded ones the local tensors."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield local_of(tensor)


def _check_extent(model: nn.Module, units: list[Unit]) -> None:
    inside = {id(module) for module in model.modules()}
    for unit in units:
        for param in unit.params:
            if any(id(place.module()) not in inside for place in param.places):
                raise ValueError(
                    f"init_sharded({type(model).__name__}): parameter {param.fqn!r} of unit {unit.name!r} lies outside of "
                    "it, and a unit is initialised as a whole; call it on the module that holds the whole unit"
                )


def _check_resets(model: nn.Module, names: dict[int, str]) -> None:
    modules = {id(module): module for module in model.modules()}
    without = [
        f"{name or '(root)'} ({type(modules[key]).__name__})"
        for key, name in names.items()
        if _reset_of(modules[key]) is None
    ]
    if without:
        raise ValueError(
            f"init_sharded: {', '.join(without)} have parameters or buffers of their own and no reset_parameters(); pass "
            "fn=, a function that initialises a module"
        )


def _reset_of(module: nn.Module) -> Any:
    # nn.MultiheadAttention and the transformers have the name with an underscore.
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


# -- tensors that belong to no unit ------------------------------------------------------------------------------------


class _Loose(NamedTuple):
    """A buffer, or a parameter that no unit owns, on the meta device: one name of it.

    Attributes:
        fqn: the name.
        store, name: where it is registered.
        tensor: the tensor on the meta device.
        unit: on the ranks of whose mesh its values are made equal, and by whose `replica_policy`.
    """

    fqn: str
    store: dict[str, Any]
    name: str
    tensor: Tensor
    unit: Unit


@contextmanager
def _loose_tensors(model: nn.Module, default: Unit, device: torch.device) -> Iterator[None]:
    """Buffers, and parameters that no unit owns: those on the meta device are real inside, and stay so unless it raises.

    They are those of the unit whose module holds them, or of `default`.
    """
    reals: dict[int, Tensor] = {}
    loose: list[_Loose] = []
    for prefix, module, unit in modules_with_units([model], default):
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None and tensor.is_meta and unit_of(tensor) is None:
                    one = _Loose(dotted(prefix, name), store, name, tensor, unit or default)
                    loose.append(one)
                    if id(tensor) not in reals:
                        reals[id(tensor)] = _real_of(tensor, one.fqn, device)
    for one in loose:
        one.store[one.name] = reals[id(one.tensor)]
    try:
        yield
        _check_written(loose, reals)
        _settle(loose)
    except BaseException:
        for one in loose:
            one.store[one.name] = one.tensor
        raise


def _real_of(tensor: Tensor, fqn: str, device: torch.device) -> Tensor:
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"init_sharded: {fqn!r} is a DTensor on the meta device that no unit owns; materialise it before, or let "
            "fully_shard manage it"
        )
    real = _blank(tensor.shape, tensor.dtype, device)
    return nn.Parameter(real, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real


def _check_written(loose: list[_Loose], reals: dict[int, Tensor]) -> None:
    blank = []
    for one in loose:
        now, real = one.store.get(one.name), reals[id(one.tensor)]
        if now is None or now.is_meta or _is_blank(now) or (now is real and _is_untouched(real)):
            blank.append(one.fqn)
    if blank:
        raise StateError(
            f"init_sharded: {blank} were not initialised, or not wholly; make fn (or reset_parameters) write every element "
            "in place: buffers too, also those that no checkpoint has"
        )


@torch.no_grad()
def _settle(loose: list[_Loose]) -> None:
    settled: dict[int, Tensor] = {}
    alike: dict[tuple[Any, ...], list[_Loose]] = {}
    for one in loose:
        now, device = one.store[one.name], one.unit.axes.device
        if id(now) not in settled:
            data = now.detach() if isinstance(now, nn.Parameter) else now
            # A buffer that fn put in place of another keeps the dtype that was chosen (`buffer_dtype`).
            keep = now.is_floating_point() and one.tensor.is_floating_point()
            settled[id(now)] = data.to(device, one.tensor.dtype if keep else None)
            # Units with the same ranks and policy ask one question.
            comms = (one.unit.replicate_comm.group, one.unit.shard_comm.group, one.unit.replica_policy)
            alike.setdefault(comms, []).append(one)
    for ones in alike.values():
        unit, values = ones[0].unit, [settled[id(one.store[one.name])] for one in ones]
        if not _compare(unit, [one.fqn for one in ones], values):
            broadcast_all("init_sharded", values, unit)
    for one in loose:
        value, tensor = settled[id(one.store[one.name])], one.tensor
        if isinstance(tensor, nn.Parameter):
            if tensor.is_meta:
                put_into(tensor, value, f"init_sharded: parameter {one.fqn!r}")
            one.store[one.name] = tensor
        else:
            one.store[one.name] = value


def _compare(unit: Unit, names: Sequence[str], tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors have equal values on all ranks of the unit's mesh, or are trusted to.

    Raises:
        DivergenceError: they have not, and must by the unit's `replica_policy`; or they have other shapes or dtypes.
    """
    if unit.replica_policy == "trust":
        return True
    kinds = [(name, tuple(t.shape), str(t.dtype)) for name, t in zip(names, tensors, strict=True)]
    prints = fingerprints(tensors)
    return not unequal_values(f"init_sharded, unit {unit.name!r}", "tensor", kinds, prints, names, unit)


def _blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that shows, where its dtype can, what nobody wrote."""
    if _shows_blanks(dtype):
        return torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


def _shows_blanks(dtype: torch.dtype) -> bool:
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def _storage_of(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _is_untouched(tensor: Tensor) -> bool:
    """Whether nobody wrote to a blank of a dtype none of whose values says so; zeros by way of `.data` count as nothing."""
    return not _shows_blanks(tensor.dtype) and tensor._version == 0 and not as_bytes(tensor).any()


def _is_blank(tensor: Tensor) -> bool:
    return _shows_blanks(tensor.dtype) and bool(tensor.isnan().any())


# -- equal values ------------------------------------------------------------------------------------------------------


def sync_module_states(model: nn.Module) -> nn.Module:
    """Makes parameters and buffers equal on all replicas: those of the mesh's first rank, or first shard group, win.

    For models that were changed on one rank only, or loaded from files of its own by each. `fully_shard` does it already
    for the values that it finds. Sharded parameters are sent along the replicate axis alone, so each rank of the first
    replica keeps its shards. Buffers, parameters that every rank holds whole, and those that no unit manages
    (`ignored_params`) are those of the mesh's first rank. Left alone are parameters that are DTensors of no unit, buffers
    that are DTensors distributed over these ranks, and sparse buffers.

    Args:
        model: a model with sharded parameters; every rank must call it.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: nothing is sharded.
        StateError: in the middle of a forward or backward, or something is on the meta device.
        DivergenceError: ranks hold buffers of different names, shapes or dtypes, or tensor subclasses with other numbers in
            them that are no tensors.
    """
    units = units_below(model, True, "sync_module_states")
    check_idle(units, "sync_module_states")
    meta = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if meta:
        raise StateError(f"sync_module_states: {meta} are on the meta device; call hsdp.init_sharded(model) first")
    for unit in units:
        check_makes("sync_module_states", unit)
    for unit in units:
        spread("sync_module_states", unit)
    for unit, tensors in _whole_everywhere(model, widest(units)):
        names = [(name, tuple(part.shape), str(part.dtype)) for name, part in tensors]
        check_structures("sync_module_states", "tensor", names, unit)
        broadcast_all("sync_module_states", [part for _, part in tensors], unit)
    return model


def _whole_everywhere(model: nn.Module, default: Unit) -> Iterator[tuple[Unit, list[tuple[str, Tensor]]]]:
    """Buffers and parameters that no unit manages, with their names, and a unit on whose mesh they must be equal."""
    found: dict[Unit, list[tuple[str, Tensor]]] = {default: []}
    for unit, buffers in buffers_by_unit(model, default).items():
        found[unit] = [(buffer.fqn, part) for buffer in buffers for part in buffer.parts]
        for param in unit.params:
            found[unit] += [(f"{name} of {param.fqn}", part) for name, part in parts_beside(param.sharded)]
    found[default] += [(name, p.detach()) for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    alike: dict[tuple[Any, ...], tuple[Unit, list[tuple[str, Tensor]]]] = {}
    for unit, tensors in found.items():
        comms = (unit.replicate_comm.group, unit.shard_comm.group)
        alike.setdefault(comms, (unit, []))[1].extend(tensors)
    yield from alike.values()

"""Whole state dicts: gathered to one rank, or dealt out from one, one tensor at a time (`whole_tensors.py`).

    gather   ranks of dst's shard group --rows, point to point--> their places in one whole tensor on dst
    deal     src --rows, point to point--> ranks of its shard group --broadcast--> their replicas

So the rank that has the whole tensors holds one of them beside its shard (and what its caller keeps), ranks of its
shard group hold nothing beside theirs, other replicas do not even take part in gathering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hsdp.buffers.fingerprints import fingerprint
from hsdp.checkpoint.contents import Entry, model_entries
from hsdp.checkpoint.handles import when_settled
from hsdp.checkpoint.local_state import alike
from hsdp.checkpoint.models import Handover, unwritable
from hsdp.checkpoint.name_conflicts import agree_on_one_model, agree_on_sizes
from hsdp.checkpoint.optimizer_loading import commit_optimizer
from hsdp.checkpoint.optimizer_schema import is_of_weights
from hsdp.checkpoint.optimizers import OptimizerStaging, describe_state, optimizer_state
from hsdp.checkpoint.ranks import Ranks, meet_all
from hsdp.checkpoint.reading import handing_over
from hsdp.checkpoint.structure import leaves_of, mapped
from hsdp.checkpoint.whole_tensors import Withheld, deal, first_rank, largest_mesh, whole_tensor
from hsdp.comm.groups import own_rank
from hsdp.errors import CheckpointError
from hsdp.format import listing
from hsdp.unit.lookup import units_below


def full_state_dict(model: nn.Module, rank0_only: bool = True, cpu: bool = True) -> dict[str, Any]:
    """The model's state dict with whole tensors. Every rank that holds the model calls it.

    Args:
        model: any module, sharded or not.
        rank0_only: only rank 0 (the first rank of the model's mesh) gets it; the others get an empty dict, and allocate
            nothing.
        cpu: whole tensors are moved to host memory one by one; else they stay on the device.

    Returns:
        Whole tensors, copies, by name; tied parameters are one tensor under all their names. Beside its shard, rank 0
        holds at most the dict and, where `cpu` moves it, one whole tensor on the device. To hold no more than one of them
        (and write it, say), go through `iter_full_state_dict`.

    Raises:
        DivergenceError: on these ranks and those that wait for them: only some ranks of the model's meshes call this.
        CheckpointError: on all ranks: a parameter is on the meta device, a hook of the model's raised, ranks hold other
            numbers of bytes (as another dtype has them), other names or, under one name, tensors of their own (experts
            that each rank shards by itself), or another rank failed, for want of memory say.
        Exception: what failed on this rank, when the others have heard of it.
    """
    entries, dst = _begun("full_state_dict", model, rank0_only)
    state: dict[str, Any] = {}
    withheld = Withheld()
    for name, first in first_names(model, entries).items():
        state[name] = state[first] if first in state else whole_value(entries[name].value, dst, cpu, withheld)
        if withheld.error is not None:
            state = dict.fromkeys(state)  # room for what other ranks still send
    alike(model.parameters(), withheld.release)
    return state if dst is None or dst == own_rank() else {}


def iter_full_state_dict(model: nn.Module, rank0_only: bool = True, cpu: bool = True) -> Iterator[tuple[str, Any]]:
    """As `full_state_dict`, one item at a time: rank 0 never holds more than one whole tensor beside its shard.

    Every rank must go through all of them. Tied parameters come under each of their names, gathered anew.

    Yields:
        `(name, whole tensor)`; on ranks that do not get it `(name, None)`.

    Raises:
        DivergenceError, CheckpointError: as `full_state_dict`.
    """
    entries, dst = _begun("iter_full_state_dict", model, rank0_only)
    for name, entry in entries.items():
        withheld = Withheld()
        value = whole_value(entry.value, dst, cpu, withheld)
        alike(model.parameters(), withheld.release)  # before anybody writes it
        yield name, value
        del value  # not beside the next one


def _begun(what: str, model: nn.Module, rank0_only: bool) -> tuple[dict[str, Entry], int | None]:
    """The model's entries, and the rank that gets them whole (None: each)."""

    meet_all(what, model)

    def begun() -> tuple[dict[str, Any], dict[str, Entry], DeviceMesh | None, int | None]:
        entries = model_entries(model)
        values = {name: entry.value for name, entry in entries.items()}
        mesh = largest_mesh(values.values())
        return values, entries, mesh, first_rank(mesh) if rank0_only else None

    values, entries, mesh, dst = alike(model.parameters(), begun, lambda made: made[0].values())
    agree_on_one_model(what, values, mesh)
    return entries, dst


def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Any]:
    """The optimizer's state by parameter name, with whole tensors, arranged as torch's `get_optimizer_state_dict` has it.

    Nothing is initialised, and no step is taken. Arguments as for `full_state_dict`; every rank calls it.

    Returns:
        `{"state": {parameter: {"exp_avg": whole tensor, ...}}, "param_groups": [{"params": [parameter, ...], ...}]}`, and
        what else the optimizer's `state_dict()` has; on ranks that do not get it an empty dict.

    Raises:
        DivergenceError: as `full_state_dict`.
        CheckpointError: on all ranks: a parameter of the optimizer is not one of the model's, or state is a plain tensor
            that has the shape of a rank's rows; or as `full_state_dict`.
        Exception: as `full_state_dict`.
    """

    meet_all("full_optimizer_state_dict", model)

    def begun() -> tuple[dict[str, Any], dict[str, Any], DeviceMesh | None, int | None]:
        state = optimizer_state(model, optimizer)
        leaves = [(name, leaves_of(held)) for name, held in state["state"].items()]
        mesh = largest_mesh(model.parameters())
        values = {f"{at} of {name}": leaf for name, held in leaves for at, leaf in held.items()}
        return values, state, mesh, first_rank(mesh) if rank0_only else None

    values, state, mesh, dst = alike(model.parameters(), begun, lambda made: made[0].values())
    agree_on_one_model("full_optimizer_state_dict", values, mesh)
    held, withheld = state["state"], Withheld()
    for name, entries in held.items():
        held[name] = whole_value(entries, dst, cpu, withheld)
    alike(model.parameters(), withheld.release)
    return state if dst is None or dst == own_rank() else {}


@when_settled
def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    src_rank: int = 0,
    *,
    process_group: ProcessGroup | None = None,
) -> None:
    """Loads whole tensors that one rank has into a model, in place. Every rank that holds the model calls it.

    Hooks and methods of the model that change, or look at, what is loaded are run as by `model.load_state_dict`.

    Args:
        model: any module, sharded or not.
        state: on `src_rank`, whole tensors by name; a lazy mapping or a memory-mapped `torch.load(mmap=True)` keeps the
            peak at one tensor. Ignored on other ranks.
        src_rank: the global rank that has it, one of the mesh's.
        process_group: the ranks that hold the model; None: all.

    Raises:
        ValueError: `src_rank` is not one of the ranks.
        DivergenceError: as `full_state_dict`.
        CheckpointError: on all ranks, before anything is changed: names, shapes or dtypes differ, or ranks were called with
            another `src_rank` or another model. Only if `state` does not give a tensor a second time, memory is short, or a
            hook of the model's raises, the error says that the model is partly changed.
    """
    what = "load_full_state_dict"
    meet_all(what, model, process_group)
    ranks = Ranks(process_group)

    def begun() -> tuple[int, dict[str, Entry]]:
        source, entries = ranks.rank_of(src_rank), model_entries(model)
        for name, entry in entries.items():
            if isinstance(entry.value, Tensor) and (told := unwritable(entry.value)) is not None:
                raise CheckpointError(f"{name!r} cannot be loaded: {told}")
        return source, entries

    source, entries = ranks.agree(what, begun, {"src_rank": src_rank})
    agree_on_sizes(ranks, what, {name: entry.value for name, entry in entries.items()})
    here = ranks.rank == source
    given: Mapping[str, Any] = (state or {}) if here else {}
    firsts = first_names(model, entries)
    ranks.one(what, lambda: _check_state(given, {n: entry.value for n, entry in entries.items()}, firsts), source)
    handover = Handover(model)
    handed: dict[str, Any] = {}
    withheld = Withheld()
    with torch.no_grad():
        for name, entry in entries.items():
            if not isinstance(entry.value, Tensor):
                handed[entry.raw_name] = ranks.one(what, partial(given.get, name), source)
                continue
            if firsts[name] == name:
                whole = withheld.attempt(partial(given.__getitem__, name)) if here else None
                deal(entry.value, whole, src_rank, ranks, withheld)
                del whole  # not beside the next one
            if handover.is_watched or not handover.writes_to(entry.value):
                handed[entry.raw_name] = entries[firsts[name]].value  # that of a tied name may be a copy that a hook made

    def hand_over() -> None:
        with handing_over("the state"):
            withheld.release()
            if handed:
                model.load_state_dict(handed, strict=False)

    ranks.each(what, hand_over)
    tell_units(model)


@when_settled
def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any] | None,
    src_rank: int = 0,
    *,
    process_group: ProcessGroup | None = None,
) -> None:
    """Loads an optimizer's whole state, which one rank has, as `full_optimizer_state_dict` returned it.

    The optimizer may be fresh or stepped, and takes no step. Arguments as for `load_full_state_dict`.

    Raises:
        ValueError: `src_rank` is not one of the ranks.
        DivergenceError: as `full_state_dict`.
        CheckpointError: on all ranks, before anything is changed: the state is of other parameters, or of another kind
            of optimizer; or ranks were called with another `src_rank`. Only if a hook of the optimizer's raises, the error
            says that it is partly changed.
    """
    what = "load_full_optimizer_state_dict"
    meet_all(what, model, process_group)
    ranks = Ranks(process_group)
    begun = ranks.agree(what, lambda: (ranks.rank_of(src_rank), OptimizerStaging(model, optimizer)), {"src_rank": src_rank})
    source, staging = begun
    given: Mapping[str, Any] = (state or {}) if ranks.rank == source else {}
    described, groups, skeletons, added = ranks.one(what, lambda: describe_state(given), source)
    staged: dict[str, dict[str, Any]] = {}
    ranks.each(what, lambda: staged.update(staging.allocate(described)))
    merged: list[dict[str, Any]] = []
    ranks.each(what, lambda: merged.extend(staging.groups(groups)))
    ranks.each(what, lambda: staging.check(described, merged))
    withheld = Withheld()
    with torch.no_grad():
        for name, entries in staged.items():
            whole = leaves_of(given["state"][name]) if given else {}
            for entry, value in entries.items():
                if isinstance(value, Tensor):
                    deal(value, whole.get(entry), src_rank, ranks, withheld)
    ranks.each(what, withheld.release)  # before any rank hands over what it has
    # Nobody tells in which dtype the weights were: state that is narrower than its parameter was made for another one.
    numbers = staging.numbers()
    narrower = {numbers[name] for name, entries in staged.items() if _is_narrower(entries, staging.params[name])}

    def hand_over() -> None:
        with handing_over("the state"):
            commit_optimizer(optimizer, {**added, **staging.state_dict(staged, merged, skeletons)}, narrower)

    ranks.each(what, hand_over)


def _is_narrower(entries: Mapping[str, Any], param: Tensor) -> bool:
    tensors = [v for name, v in entries.items() if isinstance(v, Tensor) and is_of_weights(name, v, param)]
    return any(tensor.dtype.itemsize < param.dtype.itemsize for tensor in tensors)


def tell_units(model: nn.Module) -> None:
    """Parameters were written in place: what their units have gathered is stale."""
    for unit in units_below(model):
        unit.weights_changed()


def _check_state(state: Mapping[str, Any], own: Mapping[str, Any], firsts: Mapping[str, str]) -> None:
    problems = []
    if missing := [name for name in own if name not in state]:
        problems.append(f"the model has {listing(missing)}, which the state does not have")
    if unexpected := [name for name in state if name not in own]:
        problems.append(f"the state has {listing(unexpected)}, which the model does not have")
    for name, value in own.items():
        if isinstance(value, Tensor) and name in state and (told := _misfit(state[name], value)) is not None:
            problems.append(f"{name!r} is {told}")
    for name, first in firsts.items() if not problems else ():
        if first != name and fingerprint(state[first]) != fingerprint(state[name]):
            problems.append(f"it has different values for {first!r} and {name!r}, which are one parameter in the model")
    if problems:
        raise CheckpointError("the state does not fit the model: " + "; ".join(problems[:12]))


def _misfit(found: Any, own: Tensor) -> str | None:
    if not isinstance(found, Tensor) or isinstance(found, DTensor):
        return f"a {type(found).__name__}, not a whole tensor"
    if (found.shape, found.dtype) != (own.shape, own.dtype):
        shapes = tuple(found.shape), tuple(own.shape)
        return f"{found.dtype} of shape {shapes[0]} in the state, {own.dtype} of shape {shapes[1]} in the model"
    return None


def first_names(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Of each name, the first one of the same parameter: itself, but where weights are tied."""
    firsts: dict[int, str] = {}
    names = {}
    for name, entry in entries.items():
        module, _, leaf = entry.raw_name.rpartition(".")
        try:
            held = model.get_submodule(module)._parameters.get(leaf)
        except AttributeError:  # a name that a state-dict hook made
            held = None
        names[name] = name if held is None else firsts.setdefault(id(held), name)
    return names


def whole_value(value: Any, dst: int | None, cpu: bool, withheld: Withheld) -> Any:
    """A value with nothing sharded in it at any depth, for rank `dst` (None: for every rank); None for the others.

    Raises:
        CheckpointError: on every rank: it has shards in an object, where they are not found.
    """
    if isinstance(value, Tensor):
        return whole_tensor(value, dst, cpu, withheld)
    leaf_of = partial(_whole_leaf, dst=dst, cpu=cpu, withheld=withheld)
    whole = mapped(value, leaf_of, "a value")
    return whole if dst is None or dst == own_rank() else None


def _whole_leaf(leaf: Any, dst: int | None, cpu: bool, withheld: Withheld) -> Any:
    return whole_tensor(leaf, dst, cpu, withheld) if isinstance(leaf, Tensor) else leaf

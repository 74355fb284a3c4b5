"""`full_params`: full parameters under their own names for a while; `gathered_apply`: `Module.apply` with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hsdp.unit.lookup import unit_of_module, units_below
from hsdp.unit.unit import Unit
from hsdp.weights.gather import Loan, check_idle, gather, hiding, is_first, leaving_word, write, write_first
from hsdp.weights.whole_draws import WholeDraws

WriteBack = Literal["rank0", "local"]


@contextmanager
def full_params(
    model: nn.Module,
    *,
    recurse: bool = True,
    writeback: WriteBack | None = None,
    rank0_only: bool = False,
    cast: torch.dtype | None = None,
) -> Iterator[nn.Module]:
    """Inside it, the parameters of a sharded model are whole: attributes, `named_parameters()` and `state_dict()`.

        with hsdp.full_params(model, writeback="rank0"):
            model.head.weight.data.mul_(0.5)

    The full parameters are plain `nn.Parameter`s of the storage dtype, on the mesh's device; tied ones are one object
    under all names. Every rank of the mesh must enter and leave together. However the body ends, the sharded parameters
    are back afterwards, the same objects as before; optimizers never notice. Takes the memory of the whole model on each
    rank that shows it. The model cannot run inside: its units gather for themselves.

    Args:
        model: a model with sharded parameters, or a module of one.
        recurse: also those of the units below `model`; False: only those of its own unit.
        writeback: what becomes of changes. None: they are dropped. "rank0": every rank takes those of the mesh's first
            rank. "local": each rank keeps its own rows, nothing is communicated; right if all ranks changed
            alike. After an exception nothing is written back. Each rank keeps what it said of the parameters that it saw,
            too: `requires_grad`, and attributes. All ranks must say the same, also with `rank0_only`.
        rank0_only: only the mesh's first rank holds the full parameters; the others go on seeing sharded ones.
        cast: floating-point dtype of the full parameters, for reading.

    Yields:
        `model`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: nothing is sharded; `writeback` is unknown, is "local" with `rank0_only`, or comes with `cast`.
        StateError: in the middle of a forward or backward, or inside another `full_params` of the same units; a unit is
            on the meta device; a parameter was replaced by something that cannot be written back.
    """
    _check_arguments(writeback, rank0_only, cast)
    units = units_below(model, recurse, "full_params")
    check_idle(units, "full_params")
    loans: dict[Unit, Loan] = {}
    with leaving_word(units if writeback == "rank0" else []):
        with hiding(loans):
            for unit in units:
                # Replicas of the first have nothing to show, and those of its shard group only help it to gather.
                if rank0_only and unit.axes.replicate_rank:
                    continue
                wholes = gather(unit, "full_params", cast)
                if is_first(unit) or not rank0_only:
                    loans[unit] = Loan(unit, wholes, writes_back=writeback is not None)
                    loans[unit].show()
                del wholes
            # One rank may edit alone, so that nothing is asked of others there.
            drawn = any(isinstance(whole, DTensor) for loan in loans.values() for whole in loan.params)
            with WholeDraws(asks=False) if drawn else nullcontext():
                yield model
        for loan in loans.values():
            loan.refuse_lost("full_params")
        values = {unit: loan.values("full_params") for unit, loan in loans.items()} if writeback is not None else {}
    if writeback is not None:
        for unit in units:
            if writeback == "local":
                write(unit, values[unit])
            else:
                write_first("full_params", unit, values.get(unit))
        for loan in loans.values():
            loan.keep_marks()


def _check_arguments(writeback: object, rank0_only: bool, cast: object) -> None:
    if writeback not in (None, "rank0", "local"):
        raise ValueError(f"full_params(writeback={writeback!r}): expected None, 'rank0' or 'local'")
    if writeback == "local" and rank0_only:
        raise ValueError(
            "full_params(writeback='local', rank0_only=True): the other ranks have no full parameters to write back; use "
            "writeback='rank0'"
        )
    if cast is None:
        return
    if not isinstance(cast, torch.dtype) or not cast.is_floating_point:
        raise TypeError(f"full_params(cast={cast!r}): expected a floating-point torch.dtype, or None to keep each dtype")
    if writeback is not None:
        raise ValueError(
            f"full_params(cast={cast}, writeback={writeback!r}): to write back would round every parameter to {cast}; "
            "leave one of the two out"
        )


def gathered_apply(model: nn.Module, fn: Callable[[nn.Module], object]) -> nn.Module:
    """Does `model.apply(fn)` on full parameters, unit by unit: the way to run an init function on a sharded model.

    `fn` is called on every module, children first, as `torch.nn.Module.apply` does, but once on a module that two modules
    hold. Meanwhile the parameters of the module's unit, and of the units around it, are whole plain `nn.Parameter`s; those
    of nested units are sharded again. So memory is that of a few units, never of the model. When a unit is done, every
    rank takes its values from the mesh's first rank: ranks may draw different random numbers. What `fn` says of parameters
    (`requires_grad_(False)`, an attribute) holds for the sharded ones from then on.

    Args:
        model: a model with sharded parameters, or a module of one; every rank must call it.
        fn: changes a module in place; what it returns is ignored.

    Returns:
        `model`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: nothing is sharded.
        StateError: in the middle of a forward or backward, or inside `full_params`; a unit is on the meta device; `fn`
            replaced a parameter by something that cannot be written back.
    """
    if not callable(fn):
        raise TypeError(f"gathered_apply: expected a function of a module, not {fn!r}")
    units = units_below(model, True, "gathered_apply")
    check_idle(units, "gathered_apply")
    loans: dict[Unit, Loan] = {}

    def enter(unit: Unit) -> None:
        loans[unit] = Loan(unit, gather(unit, "gathered_apply"))
        loans[unit].show()

    def leave(unit: Unit) -> None:
        loan = loans[unit]
        loan.hide()
        loan.refuse_lost("gathered_apply")
        write_first("gathered_apply", unit, loan.values("gathered_apply"))
        loan.keep_marks()
        del loans[unit]  # last: what an interrupt leaves shown is hidden in the end

    with leaving_word(units), hiding(loans), WholeDraws():
        visit(model, units, fn, enter, leave)
    return model


def visit(
    model: nn.Module,
    units: list[Unit],
    fn: Callable[[nn.Module], object],
    enter: Callable[[Unit], None],
    leave: Callable[[Unit], None],
) -> None:
    """Calls `fn` on every module, children first, each between the `enter` and `leave` of the units around it.

    A unit is entered with the first of its modules and left after the last one, though they may be siblings.
    """
    modules = list(model.modules())
    left = Counter(unit for module in modules if (unit := unit_of_module(module)) is not None)
    entered: set[Unit] = set()
    around = [unit for unit in units if unit not in left]  # `model` is a part of these
    for unit in around:
        enter(unit)
    for module, begins in _twice(model, set()):
        unit = unit_of_module(module)
        if begins:
            if unit is not None and unit not in entered:
                entered.add(unit)
                enter(unit)
            continue
        fn(module)
        if unit is not None:
            left[unit] -= 1
            if not left[unit]:
                leave(unit)
    for unit in around:
        leave(unit)


def _twice(module: nn.Module, seen: set[int]) -> Iterator[tuple[nn.Module, bool]]:
    """A module and True, the same of each module below it, and the module and False."""
    seen.add(id(module))
    yield module, True
    for child in module.children():
        if id(child) not in seen:
            yield from _twice(child, seen)
    yield module, False

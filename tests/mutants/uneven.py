"""Bugs planted in collectives of tensors of which ranks hold different parts: rows that stay behind, or go astray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import hsdp.comm.collectives
from hsdp.comm.uneven import Uneven
from hsdp.planning.layouts import GroupPlan
from hsdp.unit.dtype_group import DtypeGroup
from hsdp.unit.reduce_plan import GroupReduction, ReducePlan
from tests.buffers import test_uneven as uneven
from tests.mutants.planting import WRONG_NUMBERS, Check, mutant, replaced
from tests.planning import test_traffic as plan_collectives
from tests.support.rig import RankEnv


def trains(env: RankEnv) -> None:
    uneven.check_training(env, (4,), uneven.twin(4, 2), {})


def plans(env: RankEnv) -> None:
    plan_collectives.check_on_gloo(env, (4,), ("three experts",))


TRAINS = Check(trains, world=4)


@mutant(TRAINS, kill=WRONG_NUMBERS)
def leaves_out_the_last_holder() -> Any:
    def change(start: Callable[..., Any]) -> Callable[..., Any]:
        def without(group: Any, backend: str, tensors: Sequence[Uneven], options: Any) -> Any:
            last = [max(rank for rank, size in enumerate(one.sizes) if size) for one in tensors]
            cut = [(*one.sizes[:at], 0, *one.sizes[at + 1 :]) for one, at in zip(tensors, last, strict=True)]
            kept = [one.whole[: sum(sizes)] for one, sizes in zip(tensors, cut, strict=True)]
            fewer = zip(kept, cut, tensors, strict=True)
            return start(group, backend, [Uneven(whole, sizes, one.own) for whole, sizes, one in fewer], options)

        return without

    return replaced(hsdp.comm.transports, "start_gathers", change)


@mutant(TRAINS, kill=WRONG_NUMBERS)
def gets_the_rows_of_the_rank_before() -> Any:
    def change(parts: Callable[..., list[Uneven]]) -> Callable[..., list[Uneven]]:
        def turned(plan: ReducePlan, *args: Any) -> list[Uneven]:
            return [
                Uneven(one.whole.roll(one.sizes[0]), one.sizes, one.own) if one.sizes[1] == one.sizes[0] else one
                for one in parts(plan, *args)
            ]

        return turned

    return replaced(ReducePlan, "_fill_uneven", change)


@mutant(TRAINS, kill=WRONG_NUMBERS)
def leaves_gradients_behind() -> Any:
    def change(make: Callable[..., None]) -> Callable[..., None]:
        def without(reduction: GroupReduction, *args: Any) -> None:
            make(reduction, *args)
            for one in reduction.uneven:
                one.own.zero_()
            reduction.uneven = ()

        return without

    return replaced(GroupReduction, "__init__", change)


@mutant(TRAINS, kill=WRONG_NUMBERS)
def sends_rows_that_nobody_has_filled() -> Any:
    def change(add: Callable[..., None]) -> Callable[..., None]:
        def unfilled(group: DtypeGroup, *args: Any) -> None:
            before = len(group._fill_to)
            add(group, *args)
            del group._fill_to[before:], group._fill_from[before:]

        return unfilled

    return replaced(DtypeGroup, "_add_uneven", change)


@mutant(Check(uneven.check_custom, ((4,),), world=4), kill="AssertionError")
def hands_users_collectives_uneven_parts() -> Any:
    return mock.patch.object(DtypeGroup, "lies_otherwise", return_value=False)


@mutant(Check(plans, world=4), kill="AssertionError")
def plans_without_uneven_ones() -> Any:
    return mock.patch.object(GroupPlan, "uneven_gathers", [])

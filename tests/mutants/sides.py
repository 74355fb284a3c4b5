"""Bugs planted in what stands beside the engine: traces, optimizers that step local tensors, and plans."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hsdp.optim.elementwise
import hsdp.optim.targets
import hsdp.tracing.recorder
import hsdp.tracing.replay
import hsdp.tracing.summary
from hsdp.comm.observer import Point
from hsdp.comm.work import CommWork
from hsdp.planning.layouts import GroupPlan
from hsdp.planning.traffic import Wires
from hsdp.tracing.events import WorkRecord
from tests.mutants.planting import Check, mutant, replaced
from tests.optim import test_local as optim
from tests.planning import test_traffic as plans
from tests.support.rig import RankEnv
from tests.tracing import test_tracing as tracing

# -- traces ---------------------------------------------------------------------------------------------------------


def traces(env: RankEnv, shape: tuple[int, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tracing._trace_and_count(env, folder, shape)


TRACED = Check(traces, ((2,),))


def _without(op: Point) -> Any:
    """A replay that leaves entries of a kind out."""

    def change(apply: Callable[..., None]) -> Callable[..., None]:
        return lambda stack, heights, found, *rest: None if found is op else apply(stack, heights, found, *rest)

    return replaced(hsdp.tracing.replay, "_apply", change)


@mutant(TRACED, kill="AssertionError")
def traces_the_backward_of_the_root_alone() -> Any:
    return _without(Point.BACKWARD_ENTERED)


@mutant(Check(tracing._fails_and_goes_on), kill="AssertionError")
def traces_forwards_that_never_end() -> Any:
    return _without(Point.FORWARD_LEFT)


@mutant(Check(traces, ((2, 2),), world=4), kill="AssertionError")
def traces_operands_as_if_they_were_sent_once() -> Any:
    def change(traffic: Callable[..., Any]) -> Callable[..., Any]:
        def once(comm_work: CommWork) -> Any:
            single, double = traffic(comm_work)
            return [*single, *double], []

        return once

    return replaced(CommWork, "traffic", change)


@mutant(TRACED, kill="no communication buffer")
def traces_buffers_that_are_never_freed() -> Any:
    return mock.patch.object(hsdp.tracing.recorder, "_held_by", lambda unit: unit.whole_bytes)


@mutant(Check(tracing._sleep_beside_a_gather), kill="not when somebody waited")
def traces_collectives_until_somebody_waits() -> Any:
    return mock.patch.object(WorkRecord, "call_done", return_value=None)


@mutant(TRACED, kill="AssertionError")
def counts_waits_as_work() -> Any:
    kinds = hsdp.tracing.summary.WORKING | {"wait all-gather", "wait reduce-scatter"}
    return mock.patch.object(hsdp.tracing.summary, "WORKING", kinds)


# -- optimizers -----------------------------------------------------------------------------------------------------


def loads_optimizers(env: RankEnv) -> None:
    with tempfile.TemporaryDirectory() as folder:
        where = [folder]
        dist.broadcast_object_list(where)
        optim._round_trips(env, where[0], True)
        dist.barrier()  # before the first rank takes its folder away


FLAT = Check(optim.equals_stock, ((2,), True))
LOADED = Check(loads_optimizers)


@mutant(FLAT, kill="AssertionError")
def lets_parameters_that_parted_count_their_steps_together() -> Any:
    return mock.patch.object(hsdp.optim.targets, "_numbers", return_value=())


@mutant(FLAT, kill="AssertionError|KeyError|StateError")
def steps_parameters_that_have_no_gradient() -> Any:
    def change(fits: Callable[..., bool]) -> Callable[..., bool]:
        return lambda stepper, optimizer, used: fits(stepper, optimizer, stepper._used or used)

    return replaced(hsdp.optim.elementwise._Stepper, "_fits", change)


@mutant(FLAT, kill="AssertionError")
def starts_with_new_state_when_it_plans_anew() -> Any:
    def change(gathered: Callable[..., Any]) -> Callable[..., Any]:
        def zeros(target: Any, state: Any) -> Any:
            held = gathered(target, state)
            return {k: torch.zeros_like(v) if k == "exp_avg" else v for k, v in held.items()}

        return zeros

    return replaced(hsdp.optim.elementwise, "gathered_state", change)


@mutant(LOADED, kill="AssertionError: (own|torch|hsdp)")
def does_not_see_that_state_was_loaded() -> Any:
    both = contextlib.ExitStack()
    both.enter_context(mock.patch.object(hsdp.optim.elementwise, "_identity", return_value=("the same",)))
    both.enter_context(mock.patch.object(hsdp.optim.elementwise.Entries, "are_those_of", return_value=True))
    return both


@mutant(FLAT, kill="AssertionError")
def takes_gradients_from_where_they_do_not_lie() -> Any:
    def change(flat_grad: Callable[..., Any]) -> Callable[..., Any]:
        def shifted(target: Any, grads: Any) -> Any:
            grad = flat_grad(target, grads)
            return grad if grad is None or target.alone else grad.roll(1)

        return shifted

    return replaced(hsdp.optim.elementwise, "_flat_grad", change)


# -- plans ----------------------------------------------------------------------------------------------------------


@mutant(Check(plans.check_on_gloo, ((4,), ("kept in parts",)), world=4), kill="AssertionError")
def plans_parts_as_if_they_were_whole() -> Any:
    return mock.patch.object(GroupPlan, "part_bytes", property(lambda group: [group.whole_bytes]))


@mutant(Check(plans.check_on_gloo, ((2, 2), ("wide",)), world=4), kill="AssertionError")
def plans_all_reduces_that_send_once() -> Any:
    def change(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [dataclasses.replace(one, sent=one.sent / 2) for one in all_reduce(*args)]

    return replaced(Wires, "_all_reduce", change)

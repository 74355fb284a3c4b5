"""Bugs planted in what users do to parameters and gradients between steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import hsdp.schedule.optimizer_hooks
import hsdp.unit.landing
import hsdp.unit.zero_grad
import hsdp.weights.gather
from hsdp.params.parts import Origin
from hsdp.unit.state import UnitActivity
from tests.mutants.planting import Check, mutant, replaced
from tests.params import test_operators as operators
from tests.rules import test_rule_14_accumulation as accumulation
from tests.rules import test_rule_30_outside as outside
from tests.rules import test_rule_32_writes as writes
from tests.weights import test_full_params as full


@mutant(Check(operators._frozen_rows, (False,)))
def keeps_writes_to_parts_in_the_copy() -> Any:
    return mock.patch.object(Origin, "write_back", lambda origin: None)


@mutant(Check(operators._stale, ("another part",)), kill="DID NOT RAISE")
def puts_back_parts_that_are_stale() -> Any:
    return mock.patch.object(Origin, "stale", lambda origin: False)


@mutant(Check(outside.check_gathered_in_one, ("side by side",)))
def takes_any_memory_of_gradients_for_its_own() -> Any:
    return mock.patch.object(hsdp.unit.landing, "is_landed", lambda memory: True)


@mutant(Check(writes.check_assigned_gradient, ("step",)), kill="DID NOT RAISE")
def steps_past_data_that_was_assigned_to_gradients() -> Any:
    return mock.patch.object(hsdp.schedule.optimizer_hooks, "refuse_assigned_grads", lambda params, unit, what: None)


@mutant(Check(accumulation.check_hooked, ("stash",)), kill="DID NOT WARN")
def says_nothing_of_hooks_beside_sums() -> Any:
    return mock.patch.object(hsdp.unit.zero_grad, "_warn_of_hook", lambda fqn: None)


@mutant(Check(full._gradients_cleared, ("zero_grad", "rank0", False)))
def shows_no_gradients_on_full_parameters() -> Any:
    return mock.patch.object(hsdp.weights.gather, "hold", lambda full, param: False)


@mutant(Check(full._gradients_lost, ("hook",)), kill="DID NOT RAISE")
def drops_what_full_parameters_have_got() -> Any:
    return mock.patch.object(hsdp.weights.gather, "refuse_lost", lambda *args: None)


@mutant(Check(full._gradients_lost, ("step",)), kill="DID NOT RAISE")
def steps_what_is_written_over() -> Any:
    return replaced(UnitActivity, "lend", lambda lend: lambda unit, writes_back: lend(unit, False))

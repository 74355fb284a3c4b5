"""Bugs planted for the tests of what a training loop meets: rules 1 to 10 and 17, the rows of `test_feature_rows.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hsdp
import hsdp.api.fully_shard
import hsdp.api.module
import hsdp.api.select
import hsdp.api.shard_units
import hsdp.clip
import hsdp.params.param
import hsdp.schedule.backward
import hsdp.schedule.optimizer_hooks
import hsdp.schedule.outputs
import hsdp.unit.dtype_group
import hsdp.unit.gradients
import hsdp.weights.gather
import hsdp.weights.init
import hsdp.weights.replica_check
from hsdp.params.param import ManagedParam
from hsdp.schedule.gather_order import GatherOrder
from hsdp.schedule.module_hooks import ModuleHooks
from hsdp.schedule.passes import ForwardPass
from hsdp.schedule.root import Root
from hsdp.schedule.runtime import Runtime
from hsdp.unit.dtype_group import DtypeGroup
from hsdp.unit.gradients import Gradients
from hsdp.unit.shadows import Shadows
from hsdp.unit.unit import Unit
from hsdp.unit.unsharded import GATHERING
from hsdp.unit.write_guard import WriteGuard
from tests.api import test_feature_rows as rows
from tests.api import test_odd_moments as moments
from tests.mutants.planting import WRONG_NUMBERS, Check, mutant, replaced, trusting_what_is_whole, versions_told_by
from tests.optim import test_closures as closures
from tests.ordinary import program as ordinary
from tests.ordinary import test_changes as ordinary_changes
from tests.ordinary import test_functions as ordinary_functions
from tests.ordinary import test_loops as ordinary_loops
from tests.ordinary import test_outputs as ordinary_outputs
from tests.rules import test_rule_01_ownership as rule_01
from tests.rules import test_rule_02_ties as rule_02
from tests.rules import test_rule_03_mixtures as rule_03
from tests.rules import test_rule_04_shapes as rule_04
from tests.rules import test_rule_05_equal_replicas as rule_05
from tests.rules import test_rule_06_moving as rule_06
from tests.rules import test_rule_07_fresh_weights as rule_07
from tests.rules import test_rule_08_prefetch as rule_08
from tests.rules import test_rule_09_resharding as rule_09
from tests.rules import test_rule_13_recompute as rule_13
from tests.rules import test_rule_17_clipping as rule_17
from tests.rules import test_rule_21_different_losses as rule_21
from tests.rules import test_rule_28_side_channels as side_channels
from tests.rules import test_rule_29_requires_grad as rule_29
from tests.rules import test_rule_32_writes as rule_32
from tests.schedule import test_loops as loops
from tests.unit import test_freshness as freshness
from tests.unit import test_training_state as states

NOT_REFUSED = "DID NOT RAISE|did not match"

# -- rules ----------------------------------------------------------------------------------------------------------


def _collecting(change: Callable[[list[Any]], list[Any]]) -> Any:
    return replaced(hsdp.api.fully_shard, "collect_params", lambda collect: lambda *args: change(collect(*args)))


@mutant(Check(rule_01.check_owners), kill="AssertionError")
@mutant(Check(rule_01.check_alone), kill="AssertionError", name="leaves a layer alone out")
def leaves_direct_parameters_out() -> Any:
    return _collecting(lambda found: [one for one in found if "." in one[0][0].fqn])


@mutant(Check(rule_02.check_tied), kill="untied")
def unties() -> Any:
    return _collecting(lambda found: [(places[:1], param) for places, param in found])


@mutant(Check(rule_02.check_across), kill=NOT_REFUSED)
def does_not_see_ties_across_units() -> Any:
    return mock.patch.object(hsdp.api.select, "check_param", return_value=None)


@mutant(Check(rule_03.check_mixture), kill="was cast|dtype")
def casts_parameters_to_one_dtype() -> Any:
    def change(init: Callable[..., None]) -> Callable[..., None]:
        def cast(param: ManagedParam, *args: Any, **kwargs: Any) -> None:
            init(param, *args, **kwargs)
            param.dtype = torch.float32

        return cast

    return replaced(ManagedParam, "__init__", change)


@mutant(Check(rule_04.check_shapes, ((4,),), world=4))
def takes_strided_memory_as_it_lies() -> Any:
    def flat(whole: Tensor) -> Tensor:
        return whole.as_strided(whole.shape, torch.empty(whole.shape, device="meta").stride())

    return replaced(hsdp.params.param, "rows_of", lambda rows_of: lambda whole, *args: rows_of(flat(whole), *args))


@mutant(Check(rule_04.check_shapes, ((4,),), world=4))
def leaves_one_piece_packed() -> Any:
    def change(assemble: Callable[..., None]) -> Callable[..., None]:
        def go(group: DtypeGroup) -> None:
            assemble(group)
            if group._unpack_to:
                group._unpack_to[-1].zero_()

        return go

    return replaced(DtypeGroup, "assemble", change)


@mutant(Check(rule_05.check_broadcast, ((2, 2),), world=4))
@mutant(Check(rule_05.check_checked, ((2, 2),), world=4), kill=NOT_REFUSED, name="checks no replicas")
def believes_all_replicas_to_be_equal() -> Any:
    return mock.patch.object(hsdp.weights.replica_check, "unequal_values", return_value=[])


@mutant(Check(rule_05.check_meta, ("broadcast",)), kill="AssertionError")
def believes_all_init_functions() -> Any:
    return mock.patch.object(hsdp.weights.init, "_compare", return_value=True)


@mutant(Check(rule_06.check_move, ("to",)), kill="Error")
@mutant(Check(rule_06.check_refused), kill=NOT_REFUSED, name="does not see what was assigned")
def does_not_see_moves() -> Any:
    return mock.patch.object(Shadows, "disturbed", return_value=False)


@mutant(Check(rule_07.check_fresh, ("the root kept its parameters", None)), kill="p.data differs")
def trusts_what_an_earlier_forward_left() -> Any:
    return trusting_what_is_whole()


@mutant(Check(rule_07.check_momentum, ((2,), "p.data", 3, 1)), kill="AssertionError")
def does_not_look_at_what_was_gathered_ahead() -> Any:
    return mock.patch.object(Unit, "note_shards", return_value=None)


@mutant(Check(rule_29.check_inside, ((2,), "frozen, thawed outside", "last", False, False)), kill="should not be")
def does_not_heed_what_a_forward_sets() -> Any:
    return mock.patch.object(Shadows, "_heed_toggles", return_value=None)


@mutant(Check(rule_08.check_bound, (1,)), kill="AssertionError")
def gathers_all_that_follows() -> Any:
    return replaced(GatherOrder, "enter", lambda enter: lambda order, unit, window: enter(order, unit, 99))


@mutant(Check(rule_08.check_other_order), kill="AssertionError")
def never_records_anew() -> Any:
    return replaced(GatherOrder, "end", lambda end: lambda order: order.leave() if order._expected else end(order))


@mutant(Check(rule_09.check_freed), kill="still there")
def frees_nothing() -> Any:
    return mock.patch.object(DtypeGroup, "free_unsharded", return_value=None)


@mutant(Check(side_channels.check_loud_alone, world=2), kill="AssertionError")
def lets_freed_parameters_be_read() -> Any:
    return mock.patch.object(WriteGuard, "freed", return_value=None)


@mutant(Check(side_channels.check_late, (False,)), kill="DID NOT RAISE")
def takes_all_weights_for_the_same() -> Any:
    return replaced(WriteGuard, "opened", lambda opened: lambda guard, fillings: opened(guard, 0))


@mutant(Check(rule_32.check_written_to_data, ((2,), True, 7)), kill=NOT_REFUSED)
def looks_at_content_in_first_forwards_alone() -> Any:
    return replaced(WriteGuard, "look", lambda look: lambda guard: look(guard) if max(guard.forwards) <= 2 else None)


@mutant(Check(rule_32.check_data, ((2,), None)), kill=NOT_REFUSED)
def takes_no_print_of_small_shards() -> Any:
    return mock.patch.object(hsdp.unit.dtype_group, "in_columns", lambda shard: [])


@mutant(Check(rule_09.check_changed, ("step",)), kill=NOT_REFUSED)
def does_not_count_epochs() -> Any:
    return versions_told_by(lambda unit: (0, 0))


def _all_groups(grad: DTensor) -> tuple[Any, ...]:
    mesh = grad.device_mesh
    return tuple(mesh.get_group(axis) for axis in range(mesh.ndim))


@mutant(Check(rule_17.check_norm, (2.0,), world=4), kill="norms differ")
@mutant(Check(rows.check_one_reduction, (), world=4), kill="one reduction", name="reduces over both axes")
def counts_replicas_too() -> Any:
    return mock.patch.object(hsdp.clip, "_groups_of", _all_groups)


@mutant(Check(rule_17.check_norm, (torch.inf,), world=4), kill="norms differ")
def clips_by_its_own_norm() -> Any:
    return mock.patch.object(hsdp.clip, "_groups_of", return_value=())


# -- rows of features -----------------------------------------------------------------------------------------------


@mutant(Check(rows.check_mesh, ((4, 1),), world=4), kill="no copy|differ")
def copies_the_only_shard() -> Any:
    def change(arrange: Callable[[DtypeGroup], None]) -> Callable[[DtypeGroup], None]:
        def copied(group: DtypeGroup) -> None:
            arrange(group)
            for param in group.params:
                assert param.unsharded is not None
                param.unsharded = nn.Parameter(
                    param.unsharded.detach().clone(), requires_grad=param.unsharded.requires_grad
                )

        return copied

    return replaced(DtypeGroup, "_arrange_alone", change)


@mutant(Check(rows.check_reshard, (2,), world=4), kill="AssertionError")
def keeps_no_part() -> Any:
    return mock.patch.object(Unit, "keep_part", Unit.reshard)


@mutant(Check(rows.check_reshard, (None,), world=4), kill="AssertionError")
def frees_the_root_too() -> Any:
    return mock.patch.object(Unit, "keep", Unit.reshard)


@mutant(Check(rows.check_precision, (torch.bfloat16,)), kill="dtype")
def casts_no_inputs() -> Any:
    return mock.patch.object(ModuleHooks, "_cast_inputs", lambda state, args, kwargs: (args, kwargs))


@mutant(Check(rows.check_precision, (torch.bfloat16,)))
def rounds_sums_to_the_compute_dtype() -> Any:
    def change(land: Callable[..., Any]) -> Callable[..., Any]:
        def rounded(gradients: Gradients, parts: Any) -> None:
            for part in parts:
                for operand in part.operands:
                    operand.copy_(operand.bfloat16())
            land(gradients, parts)

        return rounded

    return replaced(Gradients, "land", change)


@mutant(Check(states._refused, ("FULL_PARAMS",)), kill=NOT_REFUSED)
def does_not_know_what_is_lent() -> Any:
    return mock.patch.object(Unit, "lent", property(lambda unit: False, lambda unit, value: None), create=True)


@contextmanager
def _expecting_nothing() -> Any:
    with ExitStack() as stack:
        for module in (hsdp.api.module, hsdp.weights.gather):
            stack.enter_context(mock.patch.object(module, "expect", return_value=None))
        yield


@mutant(Check(states._refused, ("FORWARD",)), kill=NOT_REFUSED)
def does_not_ask_for_states() -> Any:
    return _expecting_nothing()


@mutant(Check(rows.check_full_params, (), world=4))
def writes_nothing_back() -> Any:
    return mock.patch.object(hsdp.weights.full_params, "write_first", return_value=None)


@mutant(Check(rows.check_init, (True,), world=4), kill=f"Error|{WRONG_NUMBERS}")
@mutant(Check(loops.check_apply), kill="AssertionError", name="applies without gathering")
def applies_functions_to_shards() -> Any:
    return mock.patch.object(hsdp.HSDPModule, "apply", nn.Module.apply)


@mutant(Check(rows.check_patterns), kill=NOT_REFUSED)
def lets_patterns_match_nothing() -> Any:
    return mock.patch.object(hsdp.api.shard_units._Matcher, "check", return_value=None)


@mutant(Check(rows.check_scaler, ((4,),), world=4), kill="Error")
def keeps_an_overflow_to_itself() -> Any:
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

    def alone(call: Any, args: Any, kwargs: Any) -> None:
        call([grad._local_tensor for grad in args[0]], *args[1:])

    return mock.patch.dict(DTensor._op_dispatcher._custom_op_handlers, {op: alone})


@mutant(Check(rows.check_entrance), kill="Error")
def has_no_other_entrance() -> Any:
    return mock.patch.object(hsdp, "register_forward_method", return_value=None)


@mutant(Check(rows.check_optimizer_in_backward, ((2,),)), kill="AssertionError")
def runs_no_hooks_of_parameters() -> Any:
    return mock.patch.object(hsdp.unit.gradients, "run_hooks", return_value=None)


@mutant(Check(rows.check_gradient_hooks, ((2,),)))
def runs_no_hooks_of_gradients() -> Any:
    return mock.patch.object(hsdp.unit.gradients, "run_grad_hooks", return_value=None)


# -- loops ----------------------------------------------------------------------------------------------------------


@mutant(Check(loops.check_early_optimizer), kill=NOT_REFUSED)
def forgets_the_original_parameters() -> Any:
    return mock.patch.object(hsdp.schedule.optimizer_hooks, "originals", {})


@mutant(Check(loops.check_raw_gradients), kill="AssertionError")
def communicates_inside_no_sync() -> Any:
    return mock.patch.object(hsdp.HSDPModule, "no_sync", lambda model: nullcontext())


@mutant(Check(closures.check_late_landings, ((2,), "stock", False)))
def has_gradients_ready_before_a_closure_makes_them() -> Any:
    return mock.patch.object(hsdp.schedule.optimizer_hooks, "callable", lambda closure: False, create=True)


@mutant(Check(moments.check_other_root), kill="inplace operation")
def knows_the_graphs_of_one_root_alone() -> Any:
    def change(has_graphs: Callable[[Root], bool]) -> Callable[[Root], bool]:
        return lambda root: has_graphs(root) and len(root.units) > 1

    return replaced(Root, "has_graphs", change)


@mutant(
    Check(ordinary.check, ((2,), ordinary_loops.trains_layers_one_by_one_inside_a_forward)), kill="StaleParametersError"
)
def takes_every_stale_unit_for_one_that_is_used() -> Any:
    return mock.patch.object(ForwardPass, "visited", property(lambda forward: set(), lambda forward, units: None))


@mutant(Check(rule_21.check_calls, ((2,), "in turns", False, 0)), kill="DivergenceError")
def counts_the_visits_that_this_rank_makes() -> Any:
    return mock.patch.object(hsdp.schedule.backward, "_count_calls_behind")


@mutant(Check(rule_13.check_recursion, (None, 2)), kill="inplace operation")
def takes_the_last_visit_that_began_for_all() -> Any:
    both = ExitStack()
    both.enter_context(mock.patch.object(hsdp.schedule.backward, "min", lambda earliest, first: first, create=True))
    both.enter_context(mock.patch.object(hsdp.schedule.runtime, "bisect_left", lambda calls, first: len(calls)))
    return both


@mutant(Check(freshness._moved_and_back), kill="DID NOT RAISE")
def forgets_what_stays_whole_behind_a_backward() -> Any:
    return mock.patch.object(hsdp.schedule.backward, "_stay", lambda unit: unit.residency is GATHERING and unit.finish())


@mutant(Check(ordinary.check, ((2,), ordinary_outputs.ends_a_unit_s_forward_early)), kill="inplace operation")
def frees_what_a_forward_that_ended_early_has_shown() -> Any:
    def change(close: Callable[..., None]) -> Callable[..., None]:
        return lambda runtime, unit, hidden: close(runtime, unit, hidden=False)

    return replaced(Runtime, "_close", change)


@mutant(Check(ordinary.check, ((2,), ordinary_changes.hooks_its_parameters_before_it_is_sharded)))
def leaves_hooks_with_the_original_parameters() -> Any:
    def change(register: Callable[..., None]) -> Callable[..., None]:
        def without(param: ManagedParam, sharded: Any) -> None:
            sharded._backward_hooks = sharded._post_accumulate_grad_hooks = None
            register(param, sharded)

        return without

    return replaced(ManagedParam, "_register", change)


@mutant(Check(ordinary.check, ((2,), ordinary_functions.nests_transforms)), kill="modified by an inplace operation")
def hooks_no_nodes_behind_transforms() -> Any:
    return mock.patch.object(hsdp.schedule.outputs, "tensors_behind", lambda tensor: [tensor])


@mutant(Check(freshness._written_behind_a_hidden_output, ()), kill="DID NOT RAISE")
def trusts_weights_behind_hidden_outputs() -> Any:
    return mock.patch.object(Unit, "shards_unchanged", return_value=True)

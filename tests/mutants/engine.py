"""Planted bugs, each with the check that must fail under it: what shows that the rules' tests test something.

    mutant  a patch of the engine, applied inside the workers      check  a worker function of tests/rules, with arguments

`test_engine.py` runs every check twice: as it is, when it must pass, and under its mutants, when it must fail with
the words that tell that it failed for the mutant's sake.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.distributed.pipelining.schedules import Schedule1F1B

import hsdp.clip
import hsdp.params.param
import hsdp.planning.memory
import hsdp.schedule.optimizer_hooks
import hsdp.schedule.pipeline
import tests.mutants.host
import tests.mutants.loops
import tests.mutants.optimizers
import tests.mutants.outside
import tests.mutants.sides
import tests.mutants.trees
import tests.mutants.uneven  # noqa: F401  (all register their own)
from hsdp.api.fsdp2 import FSDPStateShim
from hsdp.comm.collectives import Comm
from hsdp.comm.divergence import FAILED, DivergenceGuard
from hsdp.comm.work import CommWork
from hsdp.examples.int8_gather import Int8Weight
from hsdp.params.tensor_parallel import Inner
from hsdp.planning.layouts import GroupPlan, UnitPlan
from hsdp.schedule.backward_commit import BackwardCommit
from hsdp.schedule.passes import BackwardPass
from hsdp.schedule.pipeline import ReductionPipeline
from hsdp.schedule.reduce_order import ReduceOrder, ReduceTurns
from hsdp.schedule.runtime import Runtime
from hsdp.schedule.scaling import Scaling
from hsdp.unit.arrivals import Arrivals
from hsdp.unit.dtype_group import DtypeGroup, GroupKey
from hsdp.unit.extension_group import ExtensionGroup, _Member
from hsdp.unit.gradients import Gradients
from hsdp.unit.reduce_plan import GroupReduction
from hsdp.unit.settings import UnitSettings
from hsdp.unit.stash import Stash
from hsdp.unit.unit import Unit
from tests import test_offload as offload
from tests.api import test_compat
from tests.api import test_feature_rows as rows
from tests.api import test_odd_moments as odd_moments
from tests.comm import test_compressed
from tests.comm import test_tree as tree
from tests.mutants.planting import (
    MUTANTS,
    WRONG_NUMBERS,
    Check,
    mutant,
    remembering,
    replaced,
    trusting_what_is_whole,
    versions_told_by,
)
from tests.ordinary import program as ordinary
from tests.ordinary import test_gradient_edits as gradient_edits
from tests.params import test_extension as extension
from tests.params import test_placement as placement
from tests.params import test_tensor_parallel as tensor_parallel
from tests.planning import test_memory as plan_memory
from tests.planning import test_traffic as plan_collectives
from tests.rules import test_rule_03_mixtures as rule_03
from tests.rules import test_rule_10_completion as rule_10
from tests.rules import test_rule_11_unused as rule_11
from tests.rules import test_rule_12_passes as rule_12
from tests.rules import test_rule_13_recompute as rule_13
from tests.rules import test_rule_14_accumulation as rule_14
from tests.rules import test_rule_15_scaling as rule_15
from tests.rules import test_rule_16_waiting as rule_16
from tests.rules import test_rule_17_clipping as rule_17
from tests.rules import test_rule_18_two_models as rule_18
from tests.rules import test_rule_19_modules as rule_19
from tests.rules import test_rule_20_failures as rule_20
from tests.rules import test_rule_21_divergence as rule_21
from tests.rules import test_rule_24_bounded as rule_24
from tests.rules import test_rule_28_side_channels as rule_28
from tests.schedule import test_backward_commit as commits
from tests.schedule import test_pipelining
from tests.soak.divergence import Case, disagree
from tests.support.counting import no_shared_memory
from tests.support.deep import Deep
from tests.support.models import make_case
from tests.support.rig import RankEnv
from tests.support.twin import adamw, sgd, twin_of


def run_mutated(env: RankEnv, name: str) -> None:
    """On a worker: the check of a mutant, under the mutant."""
    planted = MUTANTS[name]
    with planted.plant():
        planted.check.run(env, *planted.check.args)


def script(text: str, *shapes: tuple[int, ...]) -> Check:
    """A schedule of micro-batches against the twin."""
    return Check(rule_14.check_script, (text, shapes or ((2, 1),), None))


# -- sums -----------------------------------------------------------------------------------------------------------


@mutant(Check(rows.check_pipeline, (None, (2, 2)), world=4), name="loses what was deferred")
@mutant(script("local:abc scatter:abc full:abc"))
def drops_deferred_sums() -> Any:
    return mock.patch.object(
        Gradients, "hand_over_deferred", lambda gradients, parts: setattr(gradients, "deferred_sums", None)
    )


@mutant(script("scatter:abc local:abc scatter:abc full:abc"))
def adds_deferred_sums_twice() -> Any:
    def change(join: Callable[..., Any]) -> Callable[..., Any]:
        def twice(gradients: Gradients, parts: list[GroupReduction]) -> None:
            deferred = gradients.deferred_sums
            join(gradients, parts)
            if deferred is not None:
                for held, part in zip(deferred, parts, strict=True):
                    torch._foreach_add_(part.operands, held)

        return twice

    return replaced(Gradients, "hand_over_deferred", change)


@mutant(script("full:abc local:abc full:abc scatter:abc full:abc"))
def counts_the_stash_again() -> Any:
    def change(take: Callable[..., Any]) -> Callable[..., Any]:
        def keeping(gradients: Gradients, *args: Any, **kwargs: Any) -> Any:
            stash = {slot: held.clone() for slot, held in gradients._stash.items()}
            parts = take(gradients, *args, **kwargs)
            gradients._stash.update(stash)
            return parts

        return keeping

    return replaced(Gradients, "take", change)


@mutant(script("local:abc scatter:abc full:abc"))
def forgets_the_stash() -> Any:
    return mock.patch.object(Gradients, "stash", lambda gradients: gradients.arrivals.drop())


@mutant(Check(rule_12.check_passes, ("F B B", (2,), Deep)))
def lands_twice() -> Any:
    return replaced(Gradients, "land", lambda land: lambda *args: (land(*args), land(*args)))


@mutant(Check(rule_16.check_end_of_backward, ((2, 1), hsdp.CommPolicy())))
def reduces_twice() -> Any:
    return replaced(Comm, "all_reduce", lambda start: lambda *args: (start(*args).wait(), start(*args))[1])


@mutant(Check(rule_14.check_wide_sums, ("local", (2,))), kill="AssertionError")
def sums_in_the_reduce_dtype() -> Any:
    return mock.patch.object(GroupKey, "accumulate", property(lambda kind: kind.reduce))


@mutant(script("local:abc zero full:abc"))
def does_not_heed_zero_grad() -> Any:
    return mock.patch.object(Gradients, "heed_zero_grad", return_value=None)


@mutant(script("async full:abc zero drain full:abc"))
def lands_what_was_zeroed_meanwhile() -> Any:
    return replaced(Gradients, "take", lambda take: lambda gradients, runs_on, *more: take(gradients, False, *more))


@mutant(Check(rule_03.check_mixture), kill="should not be|Error", name="keeps the first choice of trainable parameters")
@mutant(Check(rule_14.check_frozen_then_thawed), kill="Error")
def does_not_follow_requires_grad() -> Any:
    return replaced(Unit, "choose_trainable", lambda choose: lambda unit: None if unit.trainable else choose(unit))


# -- factors --------------------------------------------------------------------------------------------------------


@mutant(Check(rule_15.check_factors, ((2,), rule_15.POLICIES["packed"])))
def skips_the_divide() -> Any:
    return mock.patch.object(UnitSettings, "factor", lambda settings, ranks: settings.gradient_scale)


@mutant(Check(rule_15.check_factors, ((2, 1), rule_15.POLICIES["packed"])))
def forgets_the_scale() -> Any:
    return replaced(UnitSettings, "factor", lambda factor: lambda one, ranks: factor(one, ranks) / one.gradient_scale)


@mutant(Check(tree.check_order, ((2, 2), 3.0), world=4), kill=r"AssertionError: blocks\.0", name="scales below the root")
@mutant(Check(rule_15.check_fp16, ((4,), 30000.0), world=4), kill="AssertionError")
def divides_fp16_behind_the_sum() -> Any:
    return mock.patch.object(hsdp.schedule.pipeline, "scaling_of", lambda factor, *_: Scaling(1.0, factor, 1.0))


@mutant(Check(rule_15.check_changed_between_micro_batches, ((2,), rule_15.POLICIES["packed"])))
def gives_sums_the_factor_of_when_they_are_sent() -> Any:
    return mock.patch.object(Stash, "weigh", lambda stash, begun: None)


# -- clipping -------------------------------------------------------------------------------------------------------


@mutant(Check(rule_17.check_clip_with_empty_shards, ((4,),), world=4), kill="not close|equal")
def clips_by_this_ranks_norm() -> Any:
    return mock.patch.object(hsdp.clip, "all_reduce_now", return_value=None)


@mutant(Check(rule_17.check_clip_with_empty_shards, ((2, 2),), world=4), kill="not close|equal")
def counts_every_replica() -> Any:
    def all_axes(grad: Any) -> hsdp.clip.Groups:
        return tuple(grad.device_mesh.get_group(axis) for axis in range(grad.device_mesh.ndim))

    return mock.patch.object(hsdp.clip, "_groups_of", all_axes)


# -- order, waiting, sweeping ---------------------------------------------------------------------------------------


@mutant(Check(rule_16.check_end_of_backward, ((2,), hsdp.CommPolicy())))
def lands_early() -> Any:
    def change(land: Callable[..., Any]) -> Callable[..., Any]:
        def early(pipeline: ReductionPipeline) -> None:
            for reduction in pipeline._reducing[0].items:
                reduction.unit.gradients.land(reduction.parts)
            with mock.patch.object(Gradients, "land", return_value=None):
                land(pipeline)

        return early

    return replaced(ReductionPipeline, "_land", change)


@mutant(Check(rule_16.check_end_of_backward, ((2,), hsdp.CommPolicy())), kill="AssertionError")
def skips_the_final_drain() -> Any:
    return mock.patch.object(Runtime, "drain", return_value=None)


@mutant(Check(rule_16.check_joined, ((2,), "step")))
def steps_without_joining() -> Any:
    return mock.patch.object(hsdp.schedule.optimizer_hooks, "_units_of", return_value=[])


@mutant(Check(rule_10.check_reductions_start_at_once, ("tokens",)), kill="AssertionError")
def reduces_at_the_end_only() -> Any:
    return mock.patch.object(ReduceTurns, "complete", return_value=[])


@mutant(Check(ordinary.check, ((2,), gradient_edits.halves_them_in_a_full_backward_hook)))
def reduces_at_the_last_gradient() -> Any:
    def change(arrived: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def and_reduces(unit: Unit) -> None:
            arrived(unit)
            for other in unit.runtime.backward.turns.complete(unit):
                unit.runtime._reduce(other)

        return and_reduces

    return replaced(Unit, "_all_arrived", change)


@mutant(Check(ordinary.check, ((2,), gradient_edits.makes_a_weight_s_gradient_itself)))
def takes_arrived_gradients_only() -> Any:
    return mock.patch.object(Arrivals, "_assigned", return_value={})


@mutant(Check(rule_12.check_interleaved, ("F F B B",)), kill="DivergenceError")
def sweeps_in_the_first_backward_only() -> Any:
    return mock.patch.object(ReduceOrder, "end", return_value=[])


@mutant(Check(rule_28.check_heads, ((2,), True, 1)), kill="DivergenceError")
def waits_for_gradients_that_a_rank_never_makes() -> Any:
    return mock.patch.object(Runtime, "_end_visits_behind", return_value=None)


@mutant(Check(rule_12.check_recomputed), kill="DivergenceError")
def reduces_after_each_reentrant_checkpoint() -> Any:
    def anew(end: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(runtime: Runtime, backward: Any, task: int, token: Any) -> None:
            if len(backward.tasks) > 1:
                for unit in backward.opened:
                    runtime._reduce(unit)
            end(runtime, backward, task, token)

        return wrapped

    return replaced(Runtime, "_end_task", anew)


@mutant(Check(rule_12.check_interleaved, ("F F B F B B, other units",)), kill="DivergenceError")
def forgets_forwards_at_the_first_backward() -> Any:
    def change(begin: Callable[..., Any]) -> Callable[..., Any]:
        def forgets(reduce_order: ReduceOrder, answers: bool) -> Any:
            turns = begin(reduce_order, answers)
            reduce_order.awaited = 0
            return turns

        return forgets

    return replaced(ReduceOrder, "begin", change)


@mutant(Check(rule_11.check_case, ("several outputs", (2,))))
def does_not_sweep() -> Any:
    def change(end: Callable[..., Any]) -> Callable[..., Any]:
        def swept(runtime: Runtime, backward: BackwardPass) -> None:
            backward.reduces = False
            end(runtime, backward)

        return swept

    return replaced(Runtime, "_end_backward", change)


@mutant(
    Check(rows.check_kinds, (rows.FROZEN, rows.TWICE)),
    kill="gradient of .*extra is",
    name="takes unused parameters for used",
)
@mutant(Check(rule_11.check_case, ("several outputs", (2,))), kill="idle.*should not be|never.*should not be")
def ignores_used_flags() -> Any:
    def change(land: Callable[..., Any]) -> Callable[..., Any]:
        def all_used(gradients: Gradients, parts: list[GroupReduction]) -> None:
            for part in parts:
                part.used = [True] * len(part.used)
            land(gradients, parts)

        return all_used

    return replaced(Gradients, "land", change)


@mutant(Check(rule_11.check_forward_alone_leaves_no_prefetch), kill="AssertionError")
def leaves_prefetched_units_behind() -> Any:
    return mock.patch.object(Runtime, "end_forward", lambda runtime: runtime._forward_order.end())


@mutant(Check(rule_12.check_input_gradients), kill="AssertionError")
def reduces_under_autograd_grad() -> Any:
    return mock.patch.object(Runtime, "_accumulates", return_value=True)


@mutant(Check(rule_13.check_gathers, ("around, not reentrant", (2,), 0)), kill="Error")
def takes_recomputation_for_forward() -> Any:
    return mock.patch.object(Runtime, "in_backward", return_value=False)


# -- freshness and failure ------------------------------------------------------------------------------------------


@mutant(Check(rule_19.check_inference_first, ("no_grad",)), kill=f"{WRONG_NUMBERS}|whole|StaleParametersError")
def uses_a_stale_gather() -> Any:
    return trusting_what_is_whole()


@mutant(Check(rule_20.check_stale), kill="DID NOT RAISE")
def forgets_the_weights_version() -> Any:
    return versions_told_by(lambda unit: (0, 0))


@mutant(Check(rule_20.check_failed_forward, (rule_20.BoomError,)), kill="whole parameters still show")
def keeps_shadows_after_a_failure() -> Any:
    return mock.patch.object(Runtime, "_reshard_all", return_value=None)


@mutant(Check(rule_20.check_failed_backward, ((2,),)))
def does_not_abort_a_failed_iteration() -> Any:
    def forget(runtime: Runtime) -> None:
        runtime.backward = None

    return mock.patch.object(Runtime, "reset", forget)


@mutant(Check(rule_20.check_failed_backward, ((2,),)))
def does_not_roll_back() -> Any:
    return mock.patch.object(Gradients, "roll_back", lambda gradients, at_once=False: gradients.commit())


@mutant(Check(commits._undone, ("models behind one another", (2,), False)), kill="AssertionError")
def keeps_what_landed_before_other_roots_have_ended() -> Any:
    return mock.patch.object(BackwardCommit, "commit_behind_others", BackwardCommit._commit)


@mutant(Check(commits._undone, ("models in reentrant checkpoints", (2,), False)), kill="AssertionError")
def forgets_the_graph_task_around_a_root() -> Any:
    return mock.patch.object(BackwardCommit, "enclose", return_value=None)


@mutant(Check(rule_20.check_nothing_held), kill="AssertionError")
def remembers_failed_works() -> Any:
    return remembering(CommWork, "__init__")


@mutant(Check(odd_moments.check_lost_reduction, (False,)), kill="DID NOT RAISE|incomplete")
def forgets_reductions_that_it_cannot_start() -> Any:
    return mock.patch.object(ReductionPipeline, "lose", return_value=None)


# -- divergence guard ------------------------------------------------------------------------------------------------------

SKIPS = Case("without sync", (2,), (1,), step=3)  # by then the ranks know what follows, and do not ask


@mutant(Check(disagree, (SKIPS,), ends="DivergenceError"), kill="CollectiveError|Hung|Died|^None")
@contextmanager
def asks_nobody() -> Iterator[None]:
    def count(divergence_guard: DivergenceGuard, *args: Any) -> None:
        divergence_guard.count += 1

    # Through memory, ranks see by themselves whether their collectives belong together.
    with no_shared_memory(), mock.patch.object(DivergenceGuard, "before_collective", count):
        yield


@mutant(Check(disagree, (SKIPS,), ends="DivergenceError"), kill="CollectiveError|DivergenceError.*did not come")
def does_not_look_while_it_waits() -> Any:
    return mock.patch.object(DivergenceGuard, "answer_peers", return_value=None)


@mutant(Check(disagree, (Case("skips the step", (2,), (1,)),), ends="DivergenceError"), kill="^None")
def does_not_tell_of_steps() -> Any:
    return mock.patch.object(DivergenceGuard, "note_event", return_value=None)


@mutant(Check(disagree, (Case("fails at the end of a backward", (2,), (1,)),), ends="DivergenceError"), kill="^None")
def does_not_tell_of_failed_backwards() -> Any:
    return replaced(
        DivergenceGuard, "note_event", lambda note: lambda guard, event: None if event == FAILED else note(guard, event)
    )


@mutant(Check(rule_21.calls_alike_models_in_another_order, ((2,),), ends="DivergenceError"), kill="^None")
def takes_units_of_one_name_for_one() -> Any:
    return mock.patch.object(DivergenceGuard, "next_user", return_value=0)


EXTRA = Check(disagree, (Case("extra model", (2,), (1,)),), ends="DivergenceError")


@mutant(EXTRA, kill="RuntimeError|CollectiveError|Hung|Died|ValueError")
def sets_up_without_asking() -> Any:
    return mock.patch.object(DivergenceGuard, "differing", return_value=[0])


@mutant(Check(rule_21.check_steady_loop, ((2, 2),), world=4), kill="asked")
def asks_all_the_time() -> Any:
    return mock.patch.object(DivergenceGuard, "begin_pass", return_value=None)


# -- bounds ---------------------------------------------------------------------------------------------------------

BOUNDS = Check(rule_24.check_layers, (hsdp.CommPolicy(),), world=4)


@mutant(BOUNDS, kill="AssertionError")
def queues_without_bounds() -> Any:
    def unbounded(pipeline: ReductionPipeline, policy: hsdp.CommPolicy) -> None:
        many = dataclasses.replace(policy, max_inflight_reduce_scatters=999, max_inflight_all_reduces=999)
        pipeline.__dict__["bounds"] = many

    policy = property(lambda pipeline: pipeline.__dict__["bounds"], unbounded)
    return mock.patch.object(ReductionPipeline, "policy", policy, create=True)


@mutant(BOUNDS, kill="AssertionError")
def keeps_whole_gradients() -> Any:
    return mock.patch.object(GroupReduction, "release_inputs", return_value=None)


@mutant(BOUNDS, kill="AssertionError")
def keeps_whole_parameters() -> Any:
    return mock.patch.object(Runtime, "_end_visit", return_value=None)


@mutant(Check(rule_24.check_landing, ((4,), 2), world=4), kill="AssertionError")
def lands_at_the_end_only() -> Any:
    return mock.patch.object(ReductionPipeline, "advance", return_value=None)


@mutant(Check(rule_18.check_deleted), kill="AssertionError")
def holds_units_strongly() -> Any:
    return remembering(Unit, "join")


# -- parameters that are DTensors already, merged dims, offloaded shards --------------------------------------------


def trains_in_sequence_parallel(env: RankEnv) -> None:
    tensor_parallel.check_training(env, (1, 2, 2), "sequence", tensor_parallel.twin(2, 2), {})


def trains_experts(env: RankEnv) -> None:
    placement.check_training(env, (4,), "direct", twin_of(placement.CASE, 4, 1, sgd))


def trains_offloaded(env: RankEnv) -> None:
    offload.check_copies(env, (2, 2), twin_of(make_case("mlp"), 4, 2, adamw))


SEQUENCE = Check(trains_in_sequence_parallel, world=4)
EXPERTS = Check(trains_experts, world=4)
OFFLOADED = Check(trains_offloaded, world=4)


@mutant(SEQUENCE)
def leaves_sums_over_the_inner_mesh_partial() -> Any:
    return mock.patch.object(Inner, "block_of_grad", lambda inner, grad: grad._local_tensor)


@mutant(Check(tensor_parallel.check_as_fsdp2, ((1, 2, 2),), world=4), kill="AssertionError")
def forgets_that_shards_are_strided() -> Any:
    return mock.patch.object(Inner, "_cuts", return_value=[])


@mutant(EXPERTS)
def deals_out_merged_rows_in_another_order() -> Any:
    def rows_of(whole: torch.Tensor, piece: Any, rank: int) -> torch.Tensor:
        return right(whole, piece, 3 - rank if piece.spec.merged > 1 else rank)

    right = hsdp.params.param.rows_of
    return mock.patch.object(hsdp.params.param, "rows_of", rows_of)


@mutant(OFFLOADED)
def gathers_what_was_not_copied_to_the_device() -> Any:
    return mock.patch.object(DtypeGroup, "fill_gather", return_value=None)


@mutant(OFFLOADED, kill="AttributeError|AssertionError")
def stores_other_gradients_than_the_reduced_ones() -> Any:
    def store(part: GroupReduction) -> None:
        if part.plan.offload is not None:
            part._stored = [torch.zeros_like(value) for value in part.values()]

    return mock.patch.object(GroupReduction, "store", store)


# -- beside others --------------------------------------------------------------------------------------------------


@mutant(Check(test_compat._unshards), kill="serves until reshard")
def throws_asynchronous_unshards_away() -> Any:
    return mock.patch.object(Unit, "pinned", property(lambda unit: False, lambda unit, value: None), create=True)


@mutant(Check(test_compat._no_gather_in_backward), kill="AssertionError")
def gathers_ahead_what_backward_does_not_need() -> Any:
    return mock.patch.object(UnitSettings, "unshard_in_backward", property(lambda unit: True, lambda unit, value: None))


@mutant(
    Check(test_pipelining._train, (Schedule1F1B, True), world=4),
    kill="reduced once|differ|names|not summed over all|are pending",
)
def leaves_the_sums_of_a_stage() -> Any:
    return mock.patch.object(FSDPStateShim, "_root_post_backward_final_callback", return_value=None)


@mutant(Check(test_compressed._errors, world=4), kill="AssertionError")
def sums_in_sixteen_bits() -> Any:
    def add(parts: torch.Tensor, ranks: int) -> torch.Tensor:
        rows = parts.view(ranks, -1)
        total = rows[0].clone()
        for row in rows[1:]:
            total = total + row
        return total.float()

    return mock.patch("hsdp.comm.compressed.add_in_order", add)


# -- gather extensions ----------------------------------------------------------------------------------------------

ODD_ROWS = Check(extension.check_odd_rows, ((2,),))


@mutant(ODD_ROWS, kill="DivergenceError")
def asks_each_rank_for_as_many_rows_as_it_has() -> Any:
    return mock.patch.object(ExtensionGroup, "_source", lambda group, piece, local: local)


@mutant(ODD_ROWS, kill="no attribute 'fsdp_pre_all_gather'")
def loses_the_subclass() -> Any:
    return mock.patch.object(ExtensionGroup, "local", DtypeGroup.local)


@mutant(Check(extension.check_odd_rows, ((2, 1),)))
def sends_nothing_where_nobody_else_is() -> Any:
    return mock.patch.object(ExtensionGroup, "fill_gather", DtypeGroup.fill_gather)


@mutant(Check(extension.check_bytes), kill="whole weight only")
def keeps_what_arrived() -> Any:
    return mock.patch.object(_Member, "release_transients", lambda member: None)


@mutant(Check(extension.check_failure, ("post", "post_all_gather", False)), kill="held|holds")
def leaves_the_memory_of_a_gather_that_failed() -> Any:
    return mock.patch.object(Unit, "_release", return_value=None)


@mutant(Check(extension.check_as_another, (extension.Keeping, Int8Weight, hsdp.MixedPrecisionPolicy())), kill="inplace")
def takes_a_refilled_weight_for_a_changed_one() -> Any:
    return mock.patch("hsdp.unit.extension_group.keeping_versions", lambda tensors: nullcontext())


@mutant(Check(extension.check_divergence, ends="DivergenceError"), kill="Died|CollectiveError|AssertionError")
@contextmanager
def does_not_compare_what_is_sent() -> Iterator[None]:
    # Through memory, ranks see by themselves whether their collectives belong together.
    with (
        no_shared_memory(),
        mock.patch.object(ExtensionGroup, "wire_signature", property(lambda group: 0, lambda group, value: None)),
    ):
        yield


# -- plans ----------------------------------------------------------------------------------------------------------

COLLECTIVES = Check(plan_collectives.check_on_gloo, ((2,), ("transformer", "wide")))
PEAK = Check(plan_memory.check_on_gloo, ((2,), ("fp32",)))


@mutant(COLLECTIVES, kill="AssertionError")
def plans_without_used_flags() -> Any:
    return mock.patch.object(GroupPlan, "flags", 0)


@mutant(COLLECTIVES, kill="AssertionError")
def plans_a_root_that_is_freed() -> Any:
    return mock.patch.object(UnitPlan, "keeps", False)


@mutant(PEAK, kill="planned .* measured")
def plans_parameters_that_are_never_freed() -> Any:
    return mock.patch.object(hsdp.planning.memory._Ledger, "_free", lambda ledger, unit, index: None)


@mutant(PEAK, kill="reduction below 0")
def plans_reductions_that_take_nothing() -> Any:
    return mock.patch.object(GroupPlan, "buffer_bytes", 0)

"""Bugs planted in optimizers that share their work out: of whole matrices, and over replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import hsdp.optim.matrices
from hsdp.optim.matrices import Bucket, MatrixParam
from hsdp.optim.replicas import ReplicaGathers, Share
from hsdp.optim.states import Entries
from hsdp.optim.targets import Target
from hsdp.optim.whole_matrix import WholeMatrix
from hsdp.schedule import optimizer_hooks
from hsdp.schedule.runtime import Runtime
from hsdp.unit.pending_shards import PendingShards
from tests.mutants.planting import Check, mutant, replaced
from tests.optim import test_failed_steps as failed
from tests.optim import test_muon as muon
from tests.optim import test_muon_replicas as shares
from tests.optim import test_pending_shards as pending
from tests.optim import test_replicas as replicas
from tests.support.rig import RankEnv


def trains(env: RankEnv, shape: tuple[int, ...]) -> None:
    muon._trains(env, shape, muon.expected(env.world_size), {})


def trains_shares(env: RankEnv, shape: tuple[int, ...]) -> None:
    shares._trains(env, shape, muon.expected(env.world_size), {})


REPLICAS = Check(trains, ((2, 1),))
MOMENTA = Check(trains_shares, ((2, 1),))
SHARDS = Check(trains, ((2,),))
SHARED = Check(replicas.equals_repeated, ((2, 1),))
FLAT = Check(replicas.equals_repeated, ((2, 1), True))
READ = Check(pending._is_read, ((2, 1),))
HELD = Check(pending._is_held, (), world=4)


@mutant(REPLICAS, kill="differs between replicas")
def brings_updates_to_the_owner_s_replica_alone() -> Any:
    def change(route: Callable[..., None]) -> Callable[..., None]:
        def near(bucket: Bucket, rank: int) -> None:
            route(bucket, rank)
            for name in ("returns", "gets"):
                pieces = getattr(bucket, name)
                near = [p for p in pieces if bucket.matrices[p.matrix].target.shares_copy(p.peer, rank)]
                setattr(bucket, name, near)

        return near

    return replaced(Bucket, "route", change)


@mutant(SHARDS, kill="fused.weight")
def reads_a_fused_projection_as_one_matrix() -> Any:
    def change(cut: Callable[..., Any]) -> Callable[..., Any]:
        return lambda shape, kind, split_sizes: cut(shape, kind, None)

    return replaced(hsdp.optim.matrices, "cut", change)


@mutant(SHARDS, kill="AssertionError")
def puts_pieces_where_they_do_not_belong() -> Any:
    def change(pieces: Callable[..., Any]) -> Callable[..., Any]:
        def turned(number: int, matrix: Any, held: Any) -> Sequence[Any]:
            found = pieces(number, matrix, held)
            # On the way there alone: an iteration does to turned rows what it does to the others.
            if isinstance(held, list) and len(found) == 2 and found[0].part.sizes == found[1].part.sizes:
                a, b = found
                return [dataclasses.replace(a, part=b.part), dataclasses.replace(b, part=a.part)]
            return found  # type: ignore[no-any-return]

        return turned

    return replaced(hsdp.optim.matrices, "_pieces", change)


@mutant(MOMENTA, kill="differ|is not finite|nan")
def brings_owners_the_shares_of_their_own_replica_alone() -> Any:
    return mock.patch.object(MatrixParam, "shares_copy", lambda self, rank, other: rank == other)


@mutant(SHARED, kill="differs|_state|exp_avg|momentum_buffer|sum", name="steps the first rows on every replica")
@mutant(MOMENTA, kill="differ")
def has_the_momentum_of_the_first_rows_on_every_replica() -> Any:
    return mock.patch.object(Share, "of", lambda share, local: local.narrow(0, 0, share.rows))


@mutant(SHARED, kill="differs")
def keeps_what_it_stepped_to_itself() -> Any:
    return mock.patch.object(ReplicaGathers, "run", return_value=None)


@mutant(FLAT, kill="differs")
def leaves_stepped_copies_where_they_are() -> Any:
    return mock.patch.object(Target, "take_back", lambda self: None)


@mutant(READ, kill="nothing waits|read by")
def leaves_pending_shards_without_a_stand_in() -> Any:
    return mock.patch.object(PendingShards, "stand_in", lambda self: None)


@mutant(READ, kill="read by")
def lands_pending_shards_without_waiting() -> Any:
    def change(init: Callable[..., None]) -> Callable[..., None]:
        return lambda self, finish, params, streams: init(self, lambda: None, params, streams)

    return replaced(PendingShards, "__init__", change)


@mutant(HELD, kill="held since the step before")
def overlooks_who_holds_the_memory_of_pending_shards() -> Any:
    return mock.patch.object(PendingShards, "held_elsewhere", lambda self: False)


# -- steps that fail ------------------------------------------------------------------------------------------------


@mutant(Check(failed.check_begun_anew, ("local",)), kill="half a state is left")
def keeps_states_that_a_failed_step_has_begun() -> Any:
    return mock.patch.object(Entries, "begun_since", lambda entries, state: [])


@mutant(Check(failed.check_others_stay, ("local",)), kill="other counts")
def drops_all_states_behind_a_failed_step() -> Any:
    return mock.patch.object(Entries, "begun_since", lambda entries, state: list(state))


@mutant(Check(failed.check_half_a_step, ((2, 1), False)), kill="DID NOT RAISE")
def versions_weights_behind_whole_steps_alone() -> Any:
    return mock.patch.object(optimizer_hooks, "_weights_change", lambda optimizer: None)


@mutant(Check(failed.check_warned, ((2,),)), kill="DID NOT WARN")
def forgets_that_a_step_has_begun() -> Any:
    return mock.patch.object(Runtime, "_warn_of_half_a_step", return_value=None)


APART = Check(failed.check_muon_goes_on, ((2, 1), ("_foreach_lerp", "_foreach_lerp_")), ends="DivergenceError")


@mutant(APART, kill="no rank was told")
def forgets_where_a_step_failed() -> Any:
    nothing = property(lambda optimizer: None, lambda optimizer, value: None)
    return mock.patch.object(WholeMatrix, "_stopped", nothing)

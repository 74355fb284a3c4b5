"""Bugs planted in hsdp.checkpoint, each with the check that must fail under it.

    mutant  a patch, applied where the check runs      check  a test's own body, on ranks or in one process

Checks on ranks are worker functions `check(env, directory)`, the others get the directory. `test_checkpoint.py`
runs each check as it is, when it must pass, and under its mutants, when it must fail with the words of its own failure.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hsdp.checkpoint import (
    SaveHandle,
    archive_reader,
    commits,
    contents,
    full,
    index,
    layouts,
    loading,
    manifests,
    models,
    optimizer_loading,
    optimizers,
    reading,
    saving,
    store,
    whole_tensors,
)
from hsdp.params.shard_geometry import Box
from tests.checkpoint import models as cm
from tests.checkpoint import test_async as in_background
from tests.checkpoint import test_damage as damage
from tests.checkpoint import test_full as whole
from tests.checkpoint import test_mismatch as mismatch
from tests.checkpoint import test_pairs as pairs
from tests.checkpoint import test_store as directories
from tests.checkpoint import test_torch as by_torch
from tests.support.rig import RankEnv

Plant = Callable[[], AbstractContextManager[Any]]
NOT_REFUSED = "DID NOT RAISE|did not match"
DIFFERS = "differ|not close"


@dataclass(frozen=True)
class Mutant:
    """A planted bug; `kill` matches the failed check's error, as "Type: message", on some rank."""

    name: str
    plant: Plant = field(repr=False)
    check: Callable[..., None]
    world: int
    kill: str


MUTANTS: dict[str, Mutant] = {}


def mutant(check: Callable[..., None], world: int = 1, kill: str = NOT_REFUSED) -> Callable[[Plant], Plant]:
    """Registers a function that plants a bug; `world`: on how many ranks its check runs."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", " ")
        assert name not in MUTANTS, f"two mutants are called {name!r}"
        MUTANTS[name] = Mutant(name, plant, check, world, kill)
        return plant

    return register


def run_mutated(env: RankEnv, name: str, directory: str) -> None:
    """On a worker: the check of a mutant, under the mutant."""
    with MUTANTS[name].plant():
        MUTANTS[name].check(env, directory)


def off(owner: Any, name: str) -> Any:
    """Patches a guard so that it never says anything."""
    return mock.patch.object(owner, name, lambda *args, **kwargs: None)


# -- checks ------------------------------------------------------------------------------------------------------------


def check_flipped(directory: Path) -> None:
    target = damage.Target(damage.save_whole(directory / "whole"), directory)
    damage.test_a_flipped_bit_anywhere_is_found_and_the_file_named(target, "__0_0.distcp")


def check_edited(directory: Path) -> None:
    directories.test_a_manifest_that_was_edited_is_refused(directory, "step")


def check_left_out(directory: Path) -> None:
    damage.test_metadata_that_leaves_elements_out_is_refused()


def check_never_read(directory: Path) -> None:
    target = damage.Target(damage.save_whole(directory / "whole"), directory)
    with pytest.MonkeyPatch.context() as patch:
        damage.test_elements_that_nobody_asked_the_files_for_are_noticed(target, patch)


def check_metadata_runs_no_code(directory: Path) -> None:
    target = damage.Target(damage.save_whole(directory / "whole"), directory)
    damage.test_metadata_runs_no_code(target, plain=True)


def check_case(case: str) -> Callable[[Path], None]:
    """One of the models that differ."""
    found = next(one for one in mismatch.CASES if one[0] == case)

    def check(directory: Path) -> None:
        mismatch.test_a_model_that_differs_is_refused_and_unchanged(directory, *found[1:])

    return check


def check_dying(directory: Path) -> None:
    directories.test_dying_at_any_line_of_a_save_loses_nothing(directory, again=True)


def check_roundtrip(env: RankEnv, directory: str) -> None:
    """Saved on 2x1, loaded on 1x2: states and later losses are equal."""
    state, losses = pairs.save_and_go_on(env, (2, 1), directory, cm.two_groups)
    found, later = pairs.load_and_go_on(env, (1, 2), directory, cm.two_groups, stepped=True)
    cm.assert_equal(found, state)
    torch.testing.assert_close(later, losses, rtol=1e-11, atol=1e-11)


def check_writers(env: RankEnv, directory: str) -> None:
    pairs.save_once(env, (2, 1), directory)
    dist.barrier()
    files = sorted(path.name for path in Path(directory, "step-000001").glob("*.distcp"))
    assert files == ["__0_0.distcp"], f"also other replicas wrote: {files}"


def check_whole(env: RankEnv, directory: str) -> None:
    whole.out_and_in(env, (1, 2), 1)


def check_stale(env: RankEnv, directory: str) -> None:
    whole.stale_backward(env)


def check_from_fsdp2(env: RankEnv, directory: str) -> None:
    state = by_torch.save_by_fsdp2(env, directory, "app", flatten=True)
    found, _ = by_torch.load_by_hsdp(env, directory, (1, 4))
    cm.assert_equal(found, state)


def check_to_fsdp2(env: RankEnv, directory: str) -> None:
    path, state = by_torch.save_by_hsdp(env, directory)
    cm.assert_equal(by_torch.load_by_fsdp2(env, path), state)


# -- damage, and what does not fit -------------------------------------------------------------------------------------


@mutant(check_flipped)
def compares_no_checksums() -> Any:
    return off(manifests, "check_content")


@mutant(directories.test_publishing_notices_files_that_are_not_there)
def compares_no_sizes() -> Any:
    return off(store, "check_sizes")


@mutant(check_edited)
def believes_any_manifest() -> Any:
    return mock.patch.object(manifests, "_checksum", lambda body: 0)


@mutant(check_left_out)
def does_not_prove_that_pieces_tile() -> Any:
    return off(index, "check_tiling")


@mutant(check_never_read)
def does_not_count_what_it_reads() -> Any:
    return mock.patch.object(reading, "sum", lambda counts: mock.ANY, create=True)


@mutant(check_case("tied"), kill="of .* differ")
def changes_the_model_before_all_is_checked() -> Any:
    check = models.ModelReading.check

    def early(weights: Any) -> None:
        weights._reader.run()
        check(weights)

    return mock.patch.object(models.ModelReading, "check", early)


@mutant(check_metadata_runs_no_code)
def unpickles_anything_in_metadata() -> Any:
    return mock.patch.object(index, "read_pickle", pickle.loads)


@mutant(damage.test_values_run_no_code)
def unpickles_anything_in_values() -> Any:
    return mock.patch.object(archive_reader, "read_pickle", pickle.loads)


@mutant(check_case("tied"))
def takes_either_value_of_tied_weights() -> Any:
    return mock.patch.object(reading.Reader, "same", lambda *args: True)


@mutant(check_case("unexpected"))
def passes_over_what_the_model_has_not() -> Any:
    return mock.patch.object(models.ModelReading, "_compare", lambda *args: models.Report())


@mutant(mismatch.test_optimizers_that_differ)
def takes_any_optimizers_state() -> Any:
    return off(optimizers.OptimizerReading, "check")


@mutant(mismatch.test_state_keeps_its_dtype, kill=DIFFERS)
def rounds_optimizer_state() -> Any:
    return off(optimizer_loading, "_restore_dtypes")


# -- directories and saving ----------------------------------------------------------------------------------------------


@mutant(directories.test_retention_keeps_those_saved_last, kill="AssertionError")
def takes_the_highest_step_for_the_latest() -> Any:
    scan = store._scan

    def by_step(directory: Path) -> Any:
        found, damaged = scan(directory)
        return sorted(found, key=lambda one: one[0].step), damaged

    return mock.patch.object(store, "_scan", by_step)


@mutant(check_dying, kill="AssertionError")
def removes_the_old_one_before_the_new_one_is_there() -> Any:
    rename = Path.rename

    def deleting(path: Path, target: Path) -> Any:
        return shutil.rmtree(path) if target.name.endswith(".old") else rename(path, target)

    return mock.patch.object(Path, "rename", deleting)


@mutant(directories.test_what_a_dead_run_left_is_swept_by_the_next_save, kill="AssertionError")
def leaves_what_dead_runs_left() -> Any:
    return mock.patch.object(commits, "_LEFTOVER", mock.Mock(fullmatch=lambda name: None))


@mutant(in_background.test_the_staged_copy_is_a_copy, kill="AssertionError")
def writes_what_training_goes_on_changing() -> Any:
    return off(saving._Planner, "stage")


@mutant(in_background.test_a_failure_in_the_background_comes_out_of_wait_or_of_the_next_save)
@contextmanager
def forgets_a_failure_in_the_background() -> Iterator[None]:
    with (
        mock.patch.object(saving, "raise_untold", lambda: None),
        mock.patch.object(loading, "raise_untold", lambda: None),
    ):
        try:
            yield
        finally:
            SaveHandle._in_flight = None  # the next save of this process would raise what nobody was told


@mutant(check_writers, world=2, kill="also other replicas wrote")
def lets_every_replica_write() -> Any:
    init = saving._Planner.__init__

    def balanced(planner: Any, progress: Any) -> None:
        init(planner, progress)
        planner.dedup_save_to_lowest_rank = False

    return mock.patch.object(saving._Planner, "__init__", balanced)


# -- any mesh to any mesh ------------------------------------------------------------------------------------------------


@mutant(check_roundtrip, world=2, kill="differ|not every element")
def takes_the_first_ranks_rows() -> Any:
    box = contents.local_box
    # Of each tensor as many rows as are this rank's, from the top.
    return mock.patch.object(reading, "local_box", lambda tensor: Box((0,) * tensor.ndim, box(tensor).sizes))


@mutant(check_roundtrip, world=2, kill="loading took an optimizer step")
def steps_the_optimizer_to_give_it_a_state() -> Any:
    commit = optimizers.commit_optimizer

    def stepping(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        optimizer.step()
        commit(optimizer, *args)

    return mock.patch.object(optimizers, "commit_optimizer", stepping)


@mutant(check_roundtrip, world=2, kill=DIFFERS)
def keeps_the_optimizers_own_settings() -> Any:
    merge = optimizers.merge_groups

    def own(optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        return [
            {**group, "lr": held["lr"] * 2}
            for group, held in zip(merge(optimizer, *args), optimizer.param_groups, strict=True)
        ]

    return mock.patch.object(optimizers, "merge_groups", own)


@mutant(check_roundtrip, world=2, kill="AssertionError")
def gives_every_rank_the_first_ones_extra() -> Any:
    unpack = loading.unpack_extras
    return mock.patch.object(loading, "unpack_extras", lambda data, rank, size: unpack(data, 0, size))


@mutant(check_from_fsdp2, world=4, kill="CheckpointError")
def knows_one_layout_only() -> Any:
    return mock.patch.object(loading, "find_layout", lambda *args: layouts.KeyLayout("model.", "optimizer."))


@mutant(check_to_fsdp2, world=4, kill="Missing key|CheckpointException|RuntimeError")
def numbers_parameters_in_the_optimizers_state() -> Any:
    state = optimizers.optimizer_state

    def numbered(*args: Any) -> dict[str, Any]:
        found = state(*args)
        return {**found, "state": {str(i): entries for i, entries in enumerate(found["state"].values())}}

    return mock.patch.object(saving, "optimizer_state", numbered)


# -- whole state dicts ---------------------------------------------------------------------------------------------------


@mutant(check_whole, world=2, kill=DIFFERS)
def gathers_rows_in_the_wrong_order() -> Any:
    rows = whole_tensors._rows

    # Only where they are of one size, so that nothing but the values is wrong.
    def swapped(*args: Any) -> list[torch.Tensor]:
        found = rows(*args)
        return found[::-1] if found[0].shape == found[-1].shape else found

    return mock.patch.object(whole_tensors, "_rows", swapped)


@mutant(check_stale, world=2)
def does_not_tell_units_that_parameters_changed() -> Any:
    return off(full, "tell_units")

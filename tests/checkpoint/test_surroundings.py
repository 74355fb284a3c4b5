"""What users do around checkpoints: links, copies, working directories, threads, torch's modes, names of modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError
from hsdp.checkpoint.lock import LOCK
from tests.checkpoint import models as cm
from tests.support.rig import Pool, run_procs
from tests.support.worker import RankEnv

ROOT = Path(__file__).parents[2]


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has state."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param, device="cpu")
    optimizer.step()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- directories -------------------------------------------------------------------------------------------------------


def test_a_background_save_goes_on_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    gone = threading.Event()
    model = nn.Linear(3, 2)
    handle = checkpoint.save("runs", model, step=1, async_=True, progress=lambda done, total: gone.wait(30))
    monkeypatch.chdir(tmp_path / "other")
    gone.set()
    assert handle.wait() == tmp_path / "runs" / "step-000001"
    assert names(tmp_path / "other") == [] and names(tmp_path / "runs") == [LOCK, "step-000001"]


def test_an_empty_path_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 2)
    for call in (
        lambda: checkpoint.save("", model, step=1),
        lambda: checkpoint.resume("", model),
        lambda: checkpoint.latest(""),
    ):
        with pytest.raises(ValueError, match=r"the path of checkpoints is empty; for the working directory give '\.'"):
            call()
    assert names(tmp_path) == []
    assert checkpoint.save(os.fsencode("."), model, step=1).path == tmp_path / "step-000001"  # type: ignore[arg-type]


def test_arguments_of_the_wrong_kind_are_refused_by_name(tmp_path: Path) -> None:
    model: Any = nn.Linear(3, 2)
    checkpoint.save(tmp_path, model, step=1)
    mistakes: list[tuple[Any, str]] = [
        (
            lambda: checkpoint.save(model, tmp_path, step=1),
            "the path of checkpoints is to be a string or a Path, .* Linear",
        ),
        (lambda: checkpoint.resume(None, model), "the path of checkpoints is to be"),  # type: ignore[arg-type]
        (lambda: checkpoint.save(tmp_path, model, step=2, async_="no"), r"checkpoint.save\(async_='no'\): expected True"),  # type: ignore[arg-type]
        (lambda: checkpoint.save(tmp_path, model, [], step=2), r"checkpoint.save\(optimizer=...\): expected one optimizer"),  # type: ignore[arg-type]
        (lambda: checkpoint.load(tmp_path, model, cast="no"), r"load\(cast='no'\): expected True or False"),  # type: ignore[arg-type]
        (lambda: checkpoint.load(tmp_path, model, strict=0), r"load\(strict=0\): expected True or False"),  # type: ignore[arg-type]
    ]
    for call, words in mistakes:
        with pytest.raises(TypeError, match=words):
            call()
    assert names(tmp_path) == [LOCK, "step-000001"]


def test_a_link_to_nothing_is_told_and_is_no_directory_without_checkpoints(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    (tmp_path / "disk").symlink_to(tmp_path / "unmounted")
    for path in (tmp_path / "disk", tmp_path / "disk" / "run"):
        with pytest.raises(CheckpointError, match=r"disk is a link to .*unmounted, which is not there \(is its disk mou"):
            checkpoint.resume(path, model)
        with pytest.raises(CheckpointError, match=r"cannot be made: .*disk is no directory, but a file, or a link to what"):
            checkpoint.save(path, model, step=1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file cannot be made: .*file is no directory"):
        checkpoint.save(tmp_path / "file", model, step=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000001").symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match="step-000001 exists and was not saved by hsdp; move it away"):
        checkpoint.save(tmp_path / "run", model, step=1)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_checkpoint_that_was_moved_and_linked_loads_and_leaves_nothing_when_it_goes(
    tmp_path: Path, replaced: bool
) -> None:
    model, run, far = nn.Linear(3, 2), tmp_path / "run", tmp_path / "far"
    shutil.move(checkpoint.save(run, model, step=1).path, far)
    (run / "step-000001").symlink_to(far)
    loaded = checkpoint.resume(run, model)
    assert loaded is not None and loaded.step == 1
    path = checkpoint.save(run, model, step=1 if replaced else 2, keep=1).path
    assert names(run) == [LOCK, path.name] and not path.is_symlink()
    assert checkpoint.verify(far).step == 1  # what lies elsewhere is not ours to delete


def _load_named_pipe(env: RankEnv, path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, nn.Linear(3, 2))
    return str(caught.value)


def test_named_pipes_are_told_and_not_waited_for(tmp_path: Path) -> None:
    """In a process that the rig ends if it waits."""
    with Pool(1, grouped=False) as pool:
        for name in ("manifest.json", "index.json"):
            path = checkpoint.save(tmp_path, nn.Linear(3, 2), step=1).path
            (path / name).unlink()
            os.mkfifo(path / name)
            assert "is not a file" in pool.run(_load_named_pipe, str(path))[0]
            shutil.rmtree(path)


# -- jobs and threads --------------------------------------------------------------------------------------------------


def _save(env: RankEnv, directory: str) -> str:
    try:
        return checkpoint.save(directory, nn.Linear(3, 2), step=2).path.name
    except CheckpointError as error:
        return str(error)


def save_elsewhere(directory: Path) -> str:
    """What another job says that saves there."""
    results: str = run_procs(_save, 1, str(directory), grouped=False)[0]
    return results


def test_a_copy_of_the_directory_does_not_give_up_its_lock(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    checkpoint.save(tmp_path / "run", model, step=1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # closes .lock, and with it POSIX gives up the lock
    assert f"process {os.getpid()} on host" in save_elsewhere(tmp_path / "run")
    assert checkpoint.save(tmp_path / "run", model, step=3).path.name == "step-000003"
    assert "is saving checkpoints to" in save_elsewhere(tmp_path / "run")  # taken anew by that save
    assert save_elsewhere(tmp_path / "copy") == "step-000002"  # another run, which branched off


def test_who_has_lost_the_lock_is_told_of_the_job_that_has_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, nn.Linear(3, 2), step=1)
    (tmp_path / LOCK).write_text("")  # by hand, as the message advises
    (tmp_path / LOCK).open("a").close()
    holding = "import sys; from pathlib import Path; from hsdp.checkpoint.lock import lock; lock(Path(sys.argv[1]));"
    command = [sys.executable, "-c", holding + "print('locked', flush=True); sys.stdin.readline()", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "locked\n"
            with pytest.raises(CheckpointError, match=rf"process {other.pid} on host .* is saving checkpoints to"):
                checkpoint.save(tmp_path, nn.Linear(3, 2), step=3)
        finally:
            other.kill()
    checkpoint.save(tmp_path, nn.Linear(3, 2), step=4)


def test_threads_take_turns(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    errors: list[Exception] = []

    def saves(number: int) -> None:
        try:
            checkpoint.save(tmp_path, model, step=number, async_=bool(number % 2)).wait()
            checkpoint.load(tmp_path, other)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=saves, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert names(tmp_path) == [LOCK, *(f"step-{number:06d}" for number in range(12))]


# -- what PyTorch may be set to ----------------------------------------------------------------------------------------


def test_tensors_are_made_on_the_cpu_whatever_the_default_device_is(tmp_path: Path) -> None:
    model, optimizer = stepped()
    fresh = nn.Linear(3, 2)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    torch.set_default_device("meta")
    try:
        given = {"empty": torch.empty(0, device="cpu"), "one": torch.ones(1, device="cpu")}
        checkpoint.save(tmp_path / "run", model, optimizer, given, step=1)
        checkpoint.save(tmp_path / "run", model, optimizer, given, step=2, async_=True).wait()
        loaded = checkpoint.load(tmp_path / "run", fresh, fresh_optimizer)
        checkpoint.load_full_state_dict(fresh, checkpoint.full_state_dict(model))
        whole = checkpoint.full_optimizer_state_dict(model, optimizer)
        checkpoint.load_full_optimizer_state_dict(fresh, fresh_optimizer, whole)
    finally:
        torch.set_default_device(None)
    assert torch.equal(loaded.extra["one"], torch.ones(1)) and not loaded.extra["empty"].is_meta
    cm.assert_equal(cm.whole_state(fresh, fresh_optimizer), cm.whole_state(model, optimizer))


def test_safetensors_are_read_whatever_the_default_device_is(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, fresh = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.set_default_device("meta")
    try:
        checkpoint.save_safetensors(tmp_path, model)
        checkpoint.load_safetensors(tmp_path, fresh)
    finally:
        torch.set_default_device(None)
    assert torch.equal(fresh.weight, model.weight)


@pytest.mark.parametrize("half", [False, True])
def test_what_is_loaded_in_inference_mode_can_be_trained(tmp_path: Path, half: bool) -> None:
    model, optimizer = stepped()
    lr = torch.tensor(0.1)
    fresh = nn.Linear(3, 2)
    with torch.inference_mode():
        checkpoint.save(tmp_path, model, optimizer, step=1)
        fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=lr if half else 0.1, foreach=False)
        checkpoint.load(tmp_path, fresh, fresh_optimizer)
    assert cm.whole_state(fresh)["weight"].equal(model.weight)
    step(fresh, fresh_optimizer)
    whole = checkpoint.full_optimizer_state_dict(model, optimizer)
    with torch.inference_mode():
        checkpoint.load_full_optimizer_state_dict(fresh, fresh_optimizer, whole)
    step(fresh, fresh_optimizer)


def test_a_model_of_inference_tensors_loads(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    checkpoint.save(tmp_path, model, step=1)
    with torch.inference_mode():
        fresh = nn.Linear(3, 2)
    checkpoint.load(tmp_path, fresh)
    assert torch.equal(fresh.weight, model.weight)


def in_torchs_modes(env: RankEnv, directory: str) -> None:
    model = cm.build(env.mesh((1, 2)))
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, [0], env.rank, 2)
    fresh = cm.build(env.mesh((2, 1)), seed=1)
    fresh_optimizer = cm.two_groups(fresh)
    torch.set_default_device("meta")
    try:
        with torch.inference_mode():
            checkpoint.save(directory, model, optimizer, step=1)
            checkpoint.load(directory, fresh, fresh_optimizer)
        whole = checkpoint.full_optimizer_state_dict(model, optimizer)
        checkpoint.load_full_optimizer_state_dict(fresh, fresh_optimizer, whole)
        checkpoint.load_full_state_dict(fresh, checkpoint.full_state_dict(model))
    finally:
        torch.set_default_device(None)
    cm.assert_equal(cm.whole_state(fresh, fresh_optimizer), cm.whole_state(model, optimizer))
    cm.train(fresh, fresh_optimizer, [1], env.rank, 2)


def test_ranks_save_and_load_in_torchs_modes(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(in_torchs_modes, str(tmp_path))


# -- names -------------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """A module whose name only ends as torch.compile's wrapper is called, beside a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.myweight = nn.Parameter(torch.rand(5))
        self.my_orig_mod = nn.Linear(3, 2)


def test_only_whole_names_of_wrappers_are_left_out(tmp_path: Path) -> None:
    model, fresh = Named(), Named()
    checkpoint.save(tmp_path, model, step=1)
    checkpoint.load(tmp_path, fresh)
    cm.assert_equal(cm.whole_state(fresh), cm.whole_state(model))
    assert list(checkpoint.full_state_dict(model)) == ["myweight", "my_orig_mod.weight", "my_orig_mod.bias"]


def test_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.net = nn.Linear(3, 2)
    model.net._orig_mod = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"'net\.weight' and 'net\._orig_mod\.weight' of the model would both be"):
        checkpoint.save(tmp_path, model, step=1)
    assert names(tmp_path) == [LOCK]


# -- callbacks ---------------------------------------------------------------------------------------------------------


def raises(done: int, total: int) -> None:
    if done:
        raise RuntimeError("no more")


def test_a_callback_that_raises_while_the_model_is_changed_is_told_to_have_done_so(tmp_path: Path) -> None:
    model, fresh = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    checkpoint.save(tmp_path, model, step=1)
    with pytest.raises(CheckpointError, match=r"progress= raised RuntimeError: no more\. The model .* partly changed"):
        checkpoint.load(tmp_path, fresh, progress=raises)
    fresh.register_load_state_dict_post_hook(lambda module, keys: raises(1, 1))
    with pytest.raises(CheckpointError, match=r"handing it over raised RuntimeError: no more\. The model .* partly chan"):
        checkpoint.load(tmp_path, fresh)


def load_with(env: RankEnv, directory: str, raising: int) -> str:
    model = cm.build(env.mesh((2,)))
    progress: Callable[[int, int], Any] | None = raises if env.rank == raising else None
    try:
        checkpoint.load(directory, model, progress=progress)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_all_ranks_are_told_that_models_are_partly_changed(pool2: Pool, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, cm.build(None), step=1)
    results = pool2.run(load_with, str(tmp_path), 1)
    assert results[0] == results[1] and "on rank 1: " in results[0] and "are partly changed" in results[0]


def without_state(env: RankEnv, directory: str) -> str:
    model = cm.build(env.mesh((2,)))
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, [0], env.rank, 2)
    if env.rank:
        optimizer.state.clear()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(directory, model, optimizer, step=1)
    return str(caught.value)


def test_ranks_that_hold_other_parts_are_told_so(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(without_state, str(tmp_path))
    assert (
        results[0] == results[1]
        and "what the ranks hold does not make up whole tensors; is a rank's model another" in results[0]
    )
    assert names(tmp_path) == [LOCK]
    # torch 2.11 names them in its log alone.
    assert "optimizer.state." in results[0] or results[0].endswith("Failed to validate global plan")


# -- torch's own checks ------------------------------------------------------------------------------------------------


def save_and_load_while_torch_compares(env: RankEnv, directory: str) -> None:
    """As TORCH_DISTRIBUTED_DEBUG=DETAIL has it: torch counts messages too, of which rank 0 has more than the others."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=env.rank, world_size=env.world_size)
    try:
        for shape in ((1, 4), (2, 2)):
            model = cm.build(env.mesh(shape))
            optimizer = cm.two_groups(model)
            cm.train(model, optimizer, range(1), env.rank, env.world_size)
            run = f"{directory}/{shape[1]}"
            handle = checkpoint.save(run, model, optimizer, step=1, async_=True)
            cm.train(model, optimizer, range(1), env.rank, env.world_size)
            handle.wait()
            dist.all_reduce(torch.ones(1))
            checkpoint.load(run, model, optimizer)
            cm.train(model, optimizer, range(1), env.rank, env.world_size)
            checkpoint.load_full_state_dict(model, checkpoint.full_state_dict(model))
            whole = checkpoint.full_optimizer_state_dict(model, optimizer)
            cm.train(model, optimizer, range(1), env.rank, env.world_size)
            checkpoint.load_full_optimizer_state_dict(model, optimizer, whole)
            cm.train(model, optimizer, range(1), env.rank, env.world_size)
            dist.all_reduce(torch.ones(1))
        groups = dist.distributed_c10d._world.group_count
        checkpoint.load(run, model, optimizer)
        assert dist.distributed_c10d._world.group_count == groups, "they are made once"
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_collectives_match_beside_checkpoints_when_torch_compares_them(tmp_path: Path) -> None:
    run_procs(save_and_load_while_torch_compares, 4, str(tmp_path), grouped=False, timeout=150)

"""Offloaded shards: nothing changes but where they live."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import hsdp
import hsdp.checkpoint
from hsdp.comm.mesh import MeshAxes
from hsdp.unit.lookup import units_below
from tests.support.models import make_case
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, mesh_id, shard
from tests.support.twin import Twin, adamw, assert_close_to_twin, assert_same, full_grads, full_params, train, twin_of

MIB = 2**20


def policy_of(kind: str, directory: str) -> Any:
    return {
        "none": None,
        "cpu": hsdp.CPUOffloadPolicy(),
        "torch's": fsdp.CPUOffloadPolicy(pin_memory=False),
        "disk": hsdp.DiskOffloadPolicy(directory),
    }[kind]


def check_training(env: RankEnv, kind: str, shape: tuple[int, ...], directory: str, twin: Twin) -> None:
    case = make_case("mlp")
    model = shard(case.model(), env.mesh(shape), offload_policy=policy_of(kind, directory))
    losses = train(model, case, env.rank, len(twin.losses), adamw(model.parameters()))
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)
    check_rest(model)


@pytest.mark.parametrize("kind", ["cpu", "torch's", "disk"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_training_equals_the_twin(pool4: Pool, kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    pool4.run(check_training, kind, shape, str(tmp_path), twin_of(make_case("mlp"), 4, 3, adamw))


def check_copies(env: RankEnv, shape: tuple[int, ...], twin: Twin) -> None:
    """The mesh's device is told apart from the shards' ("cpu:0" is not "cpu"), so everything is copied as with one."""
    case = make_case("mlp")
    with mock.patch.object(MeshAxes, "device", property(lambda axes: torch.device("cpu", 0))):
        model = shard(case.model(), env.mesh(shape), offload_policy=hsdp.CPUOffloadPolicy())
        assert all(group._moves for unit in units_below(model) for group in unit.dtype_groups)
        losses = train(model, case, env.rank, len(twin.losses), adamw(model.parameters()))
        torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
        assert_close_to_twin(model, twin, grads=True)
        before = full_grads(model)
        case.loss(model, case.batch(9, env.rank)).backward()  # onto offloaded gradients
        assert any(not torch.equal(before[name], grad) for name, grad in full_grads(model).items())  # type: ignore[arg-type]
        check_rest(model)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_shards_and_gradients_are_copied_between_devices(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_copies, shape, twin_of(make_case("mlp"), 4, 3, adamw))


@pytest.mark.parametrize("numel", [0, 3])
def test_shards_are_in_host_memory_whatever_the_default_device_is(numel: int, tmp_path: Path) -> None:
    device = torch.device("cpu", 0)
    with torch.device("meta"):
        for policy in (hsdp.CPUOffloadPolicy(), hsdp.DiskOffloadPolicy(str(tmp_path))):
            memory = policy.memory(numel, torch.float32, device)
            assert memory.is_cpu
            assert policy.staging(memory).is_cpu


def check_same(env: RankEnv, directory: str) -> None:
    """Bit for bit what it is without: bf16 compute, accumulation, gradients added to gradients, one unit on disk only."""
    case = make_case("mlp", torch.float32)
    wide = torch.float32
    precision = hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=wide, output_dtype=wide)
    found = []
    for kind in ("none", "cpu", "disk"):
        model = case.model()
        for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
            offload = policy_of(kind, directory) if index == 0 else None
            hsdp.fully_shard(block, mesh=env.mesh((2, 2)), mp_policy=precision, offload_policy=offload)
        hsdp.fully_shard(model, mesh=env.mesh((2, 2)), mp_policy=precision, offload_policy=policy_of(kind, directory))
        sync = lambda m, last: m.set_requires_grad_sync(last)  # noqa: E731
        train(model, case, env.rank, 2, adamw(model.parameters()), 3, before_micro=sync)
        case.loss(model, case.batch(7, env.rank)).backward()  # onto the gradients that are there
        found.append((full_params(model), full_grads(model)))
    for params, grads in found[1:]:
        assert_same(params, found[0][0], 0, 0)
        assert_same(grads, found[0][1], 0, 0)


def test_offloaded_shards_give_the_same_numbers(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(check_same, str(tmp_path))


def anonymous_bytes() -> int:
    """What this process holds in memory that has no file behind it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def measure(env: RankEnv, directory: str) -> tuple[int, int]:
    """Bytes of anonymous memory that a sharded model of 64 MiB takes: in memory, on disk."""
    taken, models = [], []
    for offload in (None, None, hsdp.DiskOffloadPolicy(directory)):  # the first round pays for what is made only once
        before = anonymous_bytes()
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
        for layer in model:
            hsdp.fully_shard(layer, mesh=env.mesh(2), offload_policy=offload)
        taken.append(anonymous_bytes() - before)
        models.append(model)
    return taken[1], taken[2]


def test_shards_on_disk_take_no_memory(pool2: Pool, tmp_path: Path) -> None:
    for in_memory, on_disk in pool2.run(measure, str(tmp_path)):
        assert in_memory - on_disk > 0.9 * 32 * MIB, (in_memory / MIB, on_disk / MIB)


def check_files(env: RankEnv, directory: str, scratch: str) -> None:
    """Files have no names: nobody can remove them, and nothing is left of them. They move with `.to`, and load."""
    case = make_case("mlp")
    model = shard(case.model(), env.mesh((4,)), offload_policy=hsdp.DiskOffloadPolicy(directory))
    assert os.listdir(directory) == []
    train(model, case, env.rank, 1, adamw(model.parameters()))
    hsdp.checkpoint.save(scratch, model, step=1)
    want = full_params(model)
    other = shard(case.model(seed=1), env.mesh((2, 2)), offload_policy=hsdp.CPUOffloadPolicy())
    hsdp.checkpoint.load(scratch, other)
    assert_same(full_params(other), want, 0, 0)
    model.float()
    dist.barrier()
    if env.rank == 0:
        shutil.rmtree(directory)
    dist.barrier()
    train(model, make_case("mlp", torch.float32), env.rank, 1, adamw(model.parameters()))


def test_files_have_no_names(pool4: Pool, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    pool4.run(check_files, str(tmp_path / "shards"), str(tmp_path / "checkpoint"))


def check_errors(env: RankEnv, directory: str) -> None:
    def refused(where: str, reason: str) -> None:
        model = nn.Linear(1024, 64)
        with pytest.raises(OSError, match=rf"DiskOffloadPolicy\(directory='{where}'\): .* \({reason}\)"):
            hsdp.fully_shard(model, mesh=env.mesh((2,)), offload_policy=hsdp.DiskOffloadPolicy(where))

    refused(f"{directory}/missing", "No such file or directory")
    refused("/proc", "No such file or directory|Permission denied")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as good as a full disk: no more may be written
    try:
        refused(directory, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(TypeError, match=r"fully_shard\(offload_policy=\.\.\.\): expected OffloadPolicy or None, not str"):
        hsdp.fully_shard(nn.Linear(2, 2), mesh=env.mesh((2,)), offload_policy="cpu")  # type: ignore[arg-type]


def test_errors_say_what_is_wrong_with_the_disk(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(check_errors, str(tmp_path))

"""Rule 34: buffers are made equal as parameters are, by the same policy, on the ranks of their own unit's mesh."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import hsdp
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id

KINDS: dict[str, Callable[[int], Tensor]] = {
    "mean": lambda rank: torch.full((3,), float(rank)),
    "thin": lambda rank: torch.full((3, 2), float(rank), dtype=torch.bfloat16).t(),
    "steps": lambda rank: torch.tensor(rank),
    "mask": lambda rank: torch.arange(5) == rank,
    "angles": lambda rank: torch.polar(torch.ones(3), torch.full((3,), float(rank))).conj(),
    "wide": lambda rank: torch.full((2,), complex(rank, 1), dtype=torch.complex128),
    "ids": lambda rank: torch.arange(3, dtype=torch.int32) + rank,
    "empty": lambda rank: torch.empty(0, 4),
    "expanded": lambda rank: torch.tensor([[float(rank)], [7.0]]).expand(2, 6),
    "expanded scalar": lambda rank: torch.tensor(float(rank)).expand(4),
    "equal": lambda rank: torch.arange(4.0),
}


class Holder(nn.Module):
    """A weight, and a buffer of each kind; every other one in no checkpoint."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        for index, (name, make) in enumerate(KINDS.items()):
            self.register_buffer(name, make(rank), persistent=bool(index % 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.expanded[0, 0]


class Nested(nn.Module):
    """A block that becomes a unit, and a module of the root's that shares a buffer with another one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.block, self.rest, self.other = Holder(rank), Holder(rank), nn.Linear(4, 4)
        self.other.register_buffer("mean", self.rest.mean)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.rest(self.block(x)))


def _same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def check_broadcast(env: RankEnv, shape: tuple[int, ...]) -> None:
    model = Nested(env.rank + 1)
    expanded = model.rest.expanded
    hsdp.fully_shard(model.block, mesh=env.mesh(shape))
    assert _same(model.rest.mean, KINDS["mean"](env.rank + 1)), "it is another unit's"
    hsdp.fully_shard(model, mesh=env.mesh(shape))
    for holder in (model.block, model.rest):
        wrong = [name for name, make in KINDS.items() if not _same(getattr(holder, name), make(1))]
        assert not wrong, wrong
    assert model.rest.expanded is expanded and model.other.mean is model.rest.mean


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_rule_34_buffers_of_the_first_rank_are_everybodys(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_broadcast, shape)


def check_checked_and_trusted(env: RankEnv) -> None:
    model = Nested(0)
    if env.rank == 3:
        model.rest.ids += 1
    hsdp.fully_shard(model.block, mesh=env.mesh((2, 2)), replica_policy="check")
    with pytest.raises(hsdp.DivergenceError, match=r"fully_shard\(Nested\): values differ .*'rest\.ids' on ranks \[3\]"):
        hsdp.fully_shard(model, mesh=env.mesh((2, 2)), replica_policy="check")
    assert type(model) is Nested and _same(model.rest.ids, KINDS["ids"](int(env.rank == 3))), "it is as it was"
    hsdp.fully_shard(model, mesh=env.mesh((2, 2)), replica_policy="trust")
    assert _same(model.rest.ids, KINDS["ids"](int(env.rank == 3))), "nobody looks"


def test_rule_34_buffers_that_differ_are_an_error_or_trusted_if_so_told(pool4: Pool) -> None:
    pool4.run(check_checked_and_trusted)


def check_structure(env: RankEnv, change: str) -> None:
    """Named on all ranks, also where values are trusted, and before anything is sent."""
    model: Any = Holder(0)
    if env.rank == 1:
        if change == "name":
            model.register_buffer("more", torch.zeros(2))
        elif change == "missing":
            model.mean = None
        else:
            model.mean = torch.zeros(4) if change == "shape" else torch.zeros(3, dtype=torch.float64)
    with pytest.raises(hsdp.DivergenceError, match=r"fully_shard\(Holder\): .* different models: .*'(more|mean|thin)'"):
        hsdp.fully_shard(model, mesh=env.mesh(2), replica_policy="trust" if change == "shape" else "broadcast")
    assert type(model) is Holder


@pytest.mark.parametrize("change", ["name", "missing", "shape", "dtype"])
def test_rule_34_other_buffers_on_some_ranks_are_an_error(pool2: Pool, change: str) -> None:
    pool2.run(check_structure, change)


def check_meta(env: RankEnv, policy: Any) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    hsdp.fully_shard(model[1], mesh=env.mesh((2, 1)), replica_policy=policy)
    hsdp.fully_shard(model, mesh=env.mesh((2, 1)), replica_policy="check")

    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.ones_(param)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(env.rank + 1)

    if policy == "check":
        with pytest.raises(hsdp.DivergenceError, match=r"init_sharded, .*'1\.running_mean' on ranks \[1\]"):
            hsdp.init_sharded(model, init)
        assert model[1].running_mean.is_meta
        return
    hsdp.init_sharded(model, init)
    expected = 1 if policy == "broadcast" else env.rank + 1
    assert [float(buffer.unique()) for buffer in model.buffers()] == [expected] * 3


@pytest.mark.parametrize("policy", ["broadcast", "check", "trust"])
def test_rule_34_buffers_made_on_meta_follow_their_own_unit_s_policy(pool2: Pool, policy: str) -> None:
    pool2.run(check_meta, policy)


def check_sync(env: RankEnv) -> None:
    """Along the mesh of each buffer's unit: the expert's ranks are another set than the root's."""
    model = Nested(0)
    hsdp.fully_shard(model.block, mesh=env.mesh((2, 2), ("apart", "inner"))["inner"])
    hsdp.fully_shard(model, mesh=env.mesh((2, 2)))
    for buffer in model.buffers():
        if buffer.numel():
            buffer[(..., *[slice(0, 1)] * (buffer.ndim > 0))].fill_(env.rank)
    hsdp.sync_module_states(model)
    assert float(model.block.mean[0]) == env.rank // 2 * 2 and float(model.rest.mean[0]) == 0.0
    assert model.rest.mask.tolist() == [False] * 5 and model.block.steps == env.rank // 2 * 2
    model.rest.ids = torch.zeros(3 + env.rank)
    with pytest.raises(hsdp.DivergenceError, match=r"sync_module_states: .*'rest\.ids', \(3,\).*'rest\.ids', \(4,\)"):
        hsdp.sync_module_states(model)


def test_rule_34_sync_makes_buffers_equal_on_the_ranks_of_their_unit(pool4: Pool) -> None:
    pool4.run(check_sync)


def check_left_alone(env: RankEnv) -> None:
    """Buffers beside ignored parameters, DTensors over these ranks, sparse ones; a DTensor beside the mesh is not."""
    both = env.mesh((2, 2), ("data", "model"))
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    model[1].running_mean.fill_(env.rank)
    model[2].running_mean.fill_(env.rank)
    local = torch.full((2, 2), float(env.rank))
    model.register_buffer("spread", DTensor.from_local(local.clone(), both, [Shard(0), Replicate()], run_check=False))
    model.register_buffer("split", DTensor.from_local(local.clone(), both["model"], [Shard(0)], run_check=False))
    model.register_buffer("whole", DTensor.from_local(local.clone(), both, [Replicate(), Shard(1)], run_check=False))
    model.register_buffer("graph", local.to_sparse())
    hsdp.fully_shard(model, mesh=both["data"], ignored_params=list(model[1].parameters()))
    assert model[1].running_mean.tolist() == [env.rank] * 4
    assert model[2].running_mean.tolist() == [env.rank % 2] * 4
    held = [float(model.get_buffer(name).to_local()[0, 0]) for name in ("spread", "split", "whole")]
    assert held == [env.rank, env.rank % 2, env.rank % 2], held
    assert torch.equal(model.graph.to_dense(), local)


def test_rule_34_buffers_with_an_owner_of_their_own_are_left_alone(pool4: Pool) -> None:
    pool4.run(check_left_alone)


def check_questions(env: RankEnv) -> None:
    """However many buffers there are, they cost no question more; where they differ, three and a transfer."""
    counts = []
    for name in ("none", "equal", "different"):
        model: Any = nn.Linear(4, 4)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        for index in range(20 if name != "none" else 0):
            model.register_buffer(f"b{index}", torch.full((3,), index + env.rank * (name == "different")))
        before = None if not counts else counts[-1][1]
        hsdp.fully_shard(model, mesh=env.mesh(2))
        total = model._units()[0].shard_comm.divergence_guard.count
        counts.append((total - (before or 0), total))
    assert counts[1][0] == 1 and counts[2][0] == 5, counts


def test_rule_34_buffers_ask_no_question_of_their_own(pool2: Pool) -> None:
    pool2.run(check_questions)


def check_shared_cast(env: RankEnv) -> None:
    """`buffer_dtype` reaches the unit's own modules, and a buffer that two of them share stays one."""
    model = Nested(0)
    hsdp.fully_shard(model.block, mesh=env.mesh(2))
    hsdp.fully_shard(model, mesh=env.mesh(2), mp_policy=hsdp.MixedPrecisionPolicy(buffer_dtype=torch.bfloat16))
    assert model.block.mean.dtype == torch.float32
    assert model.rest.mean.dtype == torch.bfloat16 and model.other.mean is model.rest.mean


def test_rule_34_a_shared_buffer_stays_one(pool2: Pool) -> None:
    pool2.run(check_shared_cast)


class Scaled(nn.Linear):
    """Blocks that share one running scale."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)  # type: ignore[operator]
        return super().forward(x) / self.scale  # type: ignore[operator]


def check_shared_by_units(env: RankEnv, device: str) -> None:
    def policy(dtype: torch.dtype) -> hsdp.MixedPrecisionPolicy:
        return hsdp.MixedPrecisionPolicy(buffer_dtype=dtype)

    with torch.device(device):
        scale = torch.ones(())
        blocks = [Scaled(scale) for _ in range(4)]
    for block in blocks[:3]:
        hsdp.fully_shard(block, mesh=env.mesh(2), mp_policy=policy(torch.float64))
    hsdp.fully_shard(blocks[3], mesh=env.mesh(2), mp_policy=policy(torch.bfloat16))
    assert all(block.scale is blocks[0].scale for block in blocks[:3])
    assert blocks[0].scale.dtype == torch.float64 and blocks[3].scale.dtype == torch.bfloat16
    if device == "cpu":
        assert scale.dtype == torch.float32  # whoever else has it keeps it
        x = torch.ones(2, 4)
        for block in blocks[:3]:
            block(x)
        assert blocks[0].scale.item() == 0.125
    tensors = [weakref.ref(block.scale) for block in blocks]
    del blocks, block
    gc.collect()
    assert not any(ref() is not None for ref in tensors), "moved buffers live as long as their modules"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rule_34_a_buffer_that_units_share_stays_one(pool2: Pool, device: str) -> None:
    pool2.run(check_shared_by_units, device)

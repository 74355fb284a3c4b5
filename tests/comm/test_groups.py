"""Groups that hsdp makes of some ranks: under names on which these agree, whatever other groups each of them is in."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hsdp
from hsdp.comm.groups import new_group, shared_group, timeout_of
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_sharded, shard

CPU = torch.device("cpu")


def _beside_a_group_of_one(env: RankEnv) -> None:
    dist.new_group([0])  # torch names groups by how many a rank is in: of these, rank 0 is in one more
    model: Any = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), env.mesh(4), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()
    muon = hsdp.optim.Muon([param for param in model.parameters() if param.ndim == 2])
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        muon.step()
        muon.zero_grad()
    check_sharded(model)


def test_ranks_in_different_numbers_of_groups_make_the_same_ones(pool4: Pool) -> None:
    pool4.run(_beside_a_group_of_one, timeout=30)


def _again(env: RankEnv) -> None:
    ranks = [0, 1]
    first = shared_group("test", ranks, 7.0)
    assert shared_group("test", ranks, 9.0) is first
    assert timeout_of(first, CPU) == 7.0
    assert dist.get_process_group_ranks(first) == ranks
    dist.destroy_process_group(first)
    second = shared_group("test", ranks, 7.0)
    beside = new_group("test", ranks, timedelta(seconds=5), "gloo")
    assert len({id(group) for group in (first, second, beside)}) == 3
    for group in (second, beside):
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [2.0] * 3
        assert dist.get_rank(group) == env.rank


def test_a_group_that_was_destroyed_is_made_again(pool2: Pool) -> None:
    pool2.run(_again)


def _patience(env: RankEnv) -> None:
    """Of its own groups, too, ranks give up when those of the mesh's group do."""
    model: Any = shard(nn.Linear(4, 4), env.mesh(2))
    model.set_separate_reduce_scatter_group()
    unit = hsdp.unit.lookup.unit_of(model.weight)
    assert unit is not None and unit.scatter_comm.group is not unit.shard_comm.group
    assert unit.scatter_comm.group is not None
    assert unit.scatter_comm.group._get_backend(CPU).options._timeout == timedelta(seconds=11)


def test_groups_have_the_patience_of_those_that_they_were_made_of(pool2: Pool) -> None:
    pool2.run(_patience, group_timeout=11)

"""Rule 5: replicas start equal: values are made the same over both axes, checked, or trusted; meta modules unit by unit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.support.deep import Deep
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, shard
from tests.support.twin import assert_same, full_params


def _drawn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Deep()


def check_broadcast(env: RankEnv, shape: tuple[int, ...]) -> None:
    model = shard(_drawn(env.rank), env.mesh(shape))
    told: list[dict[str, Tensor]] = [{} for _ in range(env.world_size)]
    torch.distributed.all_gather_object(told, full_params(model))
    expected = dict(full_params(_drawn(0)))
    for one in told:
        assert_same(dict(one), expected, 0.0, 0.0)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_rule_05_values_of_the_first_rank_are_everybodys(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_broadcast, shape)


def check_checked(env: RankEnv, shape: tuple[int, ...]) -> None:
    """The error names parameters and ranks; equal values pass."""
    model = _drawn(1)
    if env.rank == 3:
        model.blocks[1].weight.data[0, 0] += 1e-6  # type: ignore[index,union-attr]
    hsdp.fully_shard(model.blocks[0], mesh=env.mesh(shape), replica_policy="check")  # type: ignore[index]
    with pytest.raises(hsdp.DivergenceError, match=r"fully_shard\(Linear\): values differ .*'weight' on ranks \[3\]"):
        hsdp.fully_shard(model.blocks[1], mesh=env.mesh(shape), replica_policy="check")  # type: ignore[index]
    assert type(model.blocks[1]) is nn.Linear  # type: ignore[index]
    hsdp.fully_shard(model.blocks[1], mesh=env.mesh(shape))  # type: ignore[index]
    with pytest.raises(hsdp.DivergenceError, match="different models"):
        hsdp.fully_shard(model, mesh=env.mesh(shape), replica_policy="check" if env.rank else "trust")


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_rule_05_values_that_differ_are_an_error_if_so_told(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_checked, shape)


def check_trusted(env: RankEnv) -> None:
    """Nobody looks: each rank keeps its rows of its own values."""
    model = hsdp.fully_shard(nn.Linear(4, 4, bias=False), mesh=env.mesh(2), replica_policy="trust")
    other = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        other.weight.fill_(float(env.rank))
    hsdp.fully_shard(other, mesh=env.mesh(2), replica_policy="trust")
    assert full_params(other)["weight"].unique_consecutive().tolist() == [0.0, 1.0]
    assert model.weight.to_local().shape == (2, 4)  # type: ignore[operator]


def test_rule_05_values_may_be_trusted(pool2: Pool) -> None:
    pool2.run(check_trusted)


def check_meta(env: RankEnv, policy: str) -> None:
    """Values that depend on the rank, not on torch's generators alone, are overruled, or an error."""
    with torch.device("meta"):
        model = Deep()
    shard(model, env.mesh((2, 1)), replica_policy=policy)
    whole: list[int] = []

    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 1.0 + env.rank)
        whole.append(sum(type(param) is nn.Parameter for param in model.parameters()))

    if policy == "check":
        with pytest.raises(hsdp.DivergenceError, match=r"init_sharded, unit .*'weight' on ranks \[1\]"):
            hsdp.init_sharded(model, init)
        assert all(param.is_meta for param in model.parameters()), "what was not done is on the meta device"
        return
    hsdp.init_sharded(model, init)
    assert max(whole) <= 4, f"{max(whole)} parameters were whole at a time: more than a unit and the root around it"
    expected = 1.0 if policy == "broadcast" else 1.0 + env.rank
    assert {float(value) for param in full_params(model).values() for value in param.unique()} == {expected}


@pytest.mark.parametrize("policy", ["broadcast", "check", "trust"])
def test_rule_05_meta_modules_follow_the_policy(pool2: Pool, policy: str) -> None:
    pool2.run(check_meta, policy)

"""Gradients are plain autograd's, whatever graph a unit finds itself in; afterwards nothing is left."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

import hsdp
from tests.schedule.graph_cases import GRAPHS, by_rank
from tests.support.deep import Deep, floats, seeded
from tests.support.graphs import SkipsByRank
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded, pool_for, shard
from tests.support.share import values_once

WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "default": ((2,), {}),
    "freed": ((2,), {"reshard_after_forward": True, "comm_policy": hsdp.CommPolicy(prefetch=0, fusion="direct")}),
    "alone": ((2, 1), {"reshard_after_forward": True}),
    "replicas": ((2, 2), {"reshard_after_forward": False, "comm_policy": hsdp.CommPolicy(prefetch=2)}),
}
# Four ranks for those graphs that change when, or in which order, reductions start.
REPLICATED = re.compile("unused|one rank each|units in units|one backward per|F F B|without|twice|order|child|around units")


def _cases() -> list[tuple[str, str]]:
    return [(name, way) for name in GRAPHS for way in WAYS if way != "replicas" or REPLICATED.search(name)]


def _check(env: RankEnv, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    graph = GRAPHS[name]
    plain = graph.build().double()
    model = shard(copy.deepcopy(plain), env.mesh(shape), **options)
    for _ in range(2):  # the second time with what the first one recorded
        check_grads(model, plain, graph.run, env.rank, env.world_size)
        check_sharded(model)
    if "penalty" not in name and "create_graph" not in name:  # those leave the whole parameters in the graph
        check_rest(model)


@pytest.mark.parametrize(("name", "way"), values_once(_cases()))
def test_gradients_equal_plain_autograd(request: pytest.FixtureRequest, name: str, way: str) -> None:
    shape, options = WAYS[way]
    pool_for(request, shape).run(_check, name, shape, options)


def _leave_units_out(env: RankEnv, options: dict[str, Any]) -> None:
    plain = SkipsByRank().double()
    model = shard(copy.deepcopy(plain), env.mesh((2, 2)), **options)
    for _ in range(2):
        check_grads(model, plain, by_rank, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("reshard", [True, False, None, 2])
def test_ranks_may_leave_different_units_out_of_backward(pool4: Pool, reshard: bool | int | None) -> None:
    pool4.run(_leave_units_out, {"reshard_after_forward": reshard})


def _graph_of_gradients(env: RankEnv) -> None:
    model = shard(seeded(Deep), env.mesh(2))
    with pytest.warns(UserWarning, match=r"'Deep \(root\)': the gradients in \.grad .* have no graph"):
        model(floats(env.rank)).square().sum().backward(create_graph=True)
    assert all(param.grad is not None and not param.grad.requires_grad for param in model.parameters())


def test_a_backward_with_a_graph_of_its_own_warns(pool2: Pool) -> None:
    pool2.run(_graph_of_gradients)

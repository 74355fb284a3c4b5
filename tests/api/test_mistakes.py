"""What users mistype in functions that take a model or an optimizer is refused by name, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hsdp
from tests.support.rig import RankEnv, fake_world

TYPES = (TypeError, ValueError)


@pytest.fixture
def world() -> Iterator[RankEnv]:
    with fake_world(2) as env:
        yield env


def _model(env: RankEnv) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hsdp.shard_units(model, "*", mesh=env.mesh((2,)))
    return model


def _sgd(env: RankEnv) -> torch.optim.Optimizer:
    return torch.optim.SGD(_model(env).parameters(), lr=0.1)


def _traced(model: Any) -> None:
    with hsdp.trace(model):
        pass


MISTAKES: dict[str, tuple[Callable[[RankEnv], Any], str]] = {
    "a flag in words": (lambda env: hsdp.optim.local(_sgd(env), over_replicas="no"), r"optim.local\(over_replicas='no'\)"),  # type: ignore[type-var]
    "another": (lambda env: hsdp.optim.local(_sgd(env), flat=1), r"optim.local\(flat=1\): expected True or False"),  # type: ignore[type-var]
    "Muon's": (
        lambda env: hsdp.optim.Muon([_model(env)[0].weight], over_replicas="no"),  # type: ignore[arg-type]
        r"Muon\(over_replicas='no'\): expected True or False",
    ),
    "of units": (lambda env: hsdp.shard_units(nn.Linear(2, 2), [], root="no"), r"shard_units\(root='no'\)"),  # type: ignore[arg-type]
    "no glob": (lambda env: hsdp.shard_units(nn.Linear(2, 2), "[z-a]"), r"shard_units: pattern '\[z-a\]' is no glob"),
    "no model to trace": (lambda env: _traced(None), "trace: expected an nn.Module, not NoneType"),
    "no model to describe": (lambda env: hsdp.describe("model"), "describe: expected an nn.Module, not str"),  # type: ignore[arg-type]
    "no optimizer": (
        lambda env: hsdp.check_replicas(_model(env), [_sgd(env)]),  # type: ignore[arg-type]
        r"check_replicas\(optimizer=...\): expected an optimizer, not list",
    ),
    "no name of a method": (lambda env: hsdp.register_forward_method(_model(env), None), "has no method None"),  # type: ignore[arg-type]
    "no list": (
        lambda env: hsdp.share_comm_ctx(_model(env)),
        "share_comm_ctx: expected a list of sharded modules",
    ),
    "no name of an axis": (lambda env: hsdp.DataParallelMeshDims(5), r"DataParallelMeshDims\(shard=5\): expected the name"),  # type: ignore[arg-type]
    "no path": (lambda env: hsdp.DiskOffloadPolicy(5), r"DiskOffloadPolicy\(directory=5\): expected the path"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_refused_by_name(world: RankEnv, what: str) -> None:
    call, words = MISTAKES[what]
    with pytest.raises(TYPES, match=words):
        call(world)

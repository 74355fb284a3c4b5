"""What `hsdp.plan` is told: the part of experts that is active, and what it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hsdp
from hsdp.planning import Plan
from tests.support.rig import fake_world

WIDTH, EXPERTS = 32, 8


class Mixture(nn.Module):
    """A layer that all tokens use, and experts: stacked, or as modules."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts: Any
        if stacked:
            self.experts = nn.Module()
            self.experts.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        else:
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)  # type: ignore[no-any-return]


def _plan(model: nn.Module | None = None, **options: Any) -> Plan:
    model = model or nn.Sequential(Mixture(True), Mixture(True))
    return hsdp.plan(model, **{"mesh": (2, 4), "tokens_per_rank": 64, "units": "*", **options})


@pytest.mark.parametrize("stacked", [True, False])
def test_active_experts_compute_and_are_kept(stacked: bool) -> None:
    model = nn.Sequential(Mixture(stacked), Mixture(stacked))
    chosen = nn.Sequential(*(nn.Sequential(*_layers(1 + 2)) for _ in range(2)))
    for recompute in (False, True, "selective"):
        every = _plan(model, recompute=recompute)
        plan = _plan(model, recompute=recompute, active={"**.experts.**": 2 / EXPERTS})
        like = _plan(chosen, recompute=recompute)
        assert plan.time.compute == pytest.approx(like.time.compute) and plan.time.compute < every.time.compute / 2
        assert plan.memory.largest["activations"] <= every.memory.largest["activations"]
        assert plan.collectives == every.collectives and plan.changed(memory=1 << 40).time == plan.time
    assert _plan(model, active={"**.experts.**": 0.25}).memory.largest["activations"] == pytest.approx(
        _plan(chosen).memory.largest["activations"]
    )


def _layers(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"active": 0.5}, TypeError, r"plan\(active=0.5\): expected a mapping"),
    ({"active": {"**": "all"}}, TypeError, r"expected a glob and a number"),
    ({"active": {"**.experts.**": 2}}, ValueError, "chosen experts over all experts, above 0 and at most 1"),
    ({"active": {"**.expert.**": 0.5}}, ValueError, r"matches no parameter .* e\.g\. \['1\.experts\.weight'\]"),
    ({"over_replicas": "no"}, TypeError, r"plan\(over_replicas='no'\): expected True or False"),
    ({"backend": "glooo"}, ValueError, r"plan\(backend='glooo'\): not known; choose one of .*gloo"),
    ({"backend": 3}, TypeError, r"plan\(backend=3\)"),
    ({"ignored_params": ["0.dense.weight"]}, TypeError, r"plan\(ignored_params=\.\.\.\) takes a list of parameters"),
    ({"replicate_params": 3}, TypeError, r"plan\(replicate_params=\.\.\.\) takes a list of parameters, not int"),
    ({"ignored_params": nn.Parameter(torch.ones(2))}, TypeError, "not Parameter"),
]


@pytest.mark.parametrize(("options", "kind", "words"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_mistakes_are_refused_by_name(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        _plan(**options)


def test_backends_may_be_written_in_capitals() -> None:
    assert _plan(backend="GLOO") == _plan(backend="gloo")
    assert _plan().changed(backend="GLOO") == _plan().changed(backend="gloo")
    with pytest.raises(ValueError, match="backend='glooo'"):
        _plan().changed(backend="glooo")


def test_a_model_on_several_meshes_is_refused_unless_one_is_told() -> None:
    with fake_world(8) as env:
        model = Mixture(False)
        for expert in model.experts:
            hsdp.fully_shard(expert, mesh=env.mesh((4, 2), ("ep", "shard"))["shard"])
        hsdp.fully_shard(model, mesh=env.mesh(8))
        words = r"plan\(Mixture\): the unit 'experts.0' is on a mesh of 2 shards .* others on one of 8 shards .* pass mesh="
        with pytest.raises(ValueError, match=words):
            hsdp.plan(model, tokens_per_rank=64)
        assert hsdp.plan(model, mesh=8, tokens_per_rank=64).shards == 8
        assert hsdp.plan(model.experts[0], tokens_per_rank=64).shards == 2

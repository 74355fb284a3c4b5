"""Unsharded parameters that are, or are made of, tensor subclasses: the write guard watches what is inside, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import hsdp
from hsdp.examples.int8_gather import Int8Weight
from tests.params.test_extension import Coded, OneScale
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id


class Writes(nn.Linear):
    """Its forward may write to its weight, and hands out a tensor that it has gone into."""

    def __init__(self, how: str = "") -> None:
        super().__init__(16, 16, bias=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight.codes if isinstance(self.weight, Coded) else self.weight
        with torch.no_grad():
            if self.how == "in place":
                weight.add_(1)
            if self.how == "data":
                weight.data.add_(1)
        by_element = x[:, None, :] * self.weight  # of which autograd saves the weight as it is
        _outside.append(by_element.sum(2))
        return torch.tanh(super().forward(x))


_outside: list[Tensor] = []
"""Where hsdp does not look for outputs."""


def _model(env: RankEnv, shape: tuple[int, ...], kind: type[Int8Weight], how: str, reshard: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Writes(how), nn.Linear(16, 4))
    model[1].weight = nn.Parameter(kind(model[1].weight.detach()))
    for module in (*model, model):
        hsdp.fully_shard(module, mesh=env.mesh(shape), reshard_after_forward=reshard)
    return model


def _write(env: RankEnv, shape: tuple[int, ...], kind: type[Int8Weight], how: str, reshard: bool) -> None:
    model = _model(env, shape, kind, how, reshard)
    with pytest.raises(hsdp.StateError, match="wrote to parameter 'weight'"):
        model(torch.ones(2, 16)).sum().backward()
    _outside.clear()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", ["in place", "data"])
@pytest.mark.parametrize("kind", [Int8Weight, OneScale])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=mesh_id)
def test_a_forward_that_writes_is_refused(
    pool2: Pool, shape: tuple[int, ...], kind: type[Int8Weight], how: str, reshard: bool
) -> None:
    pool2.run(_write, shape, kind, how, reshard)


def _late(env: RankEnv, kind: type[Int8Weight]) -> None:
    model = _model(env, (1, 2), kind, "", True)
    model(torch.ones(2, 16).requires_grad_())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _outside.pop().sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("kind", [Int8Weight, OneScale])
def test_a_backward_that_comes_when_the_weight_is_freed_is_refused(pool2: Pool, kind: type[Int8Weight]) -> None:
    pool2.run(_late, kind)


class Beside(nn.Module):
    """Hands out what its norm makes, and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        _outside.append(self.norm(x))
        return self.linear(x)  # type: ignore[no-any-return]


def _late_with_parts(env: RankEnv) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 16), Beside(), nn.Linear(16, 4))
    mesh = env.mesh((2, 2), ("dp", "tp"))
    parallelize_module(model[1], mesh["tp"], {"norm": SequenceParallel()})
    for module in (*model, model):
        hsdp.fully_shard(module, mesh=mesh["dp"])
    model(torch.randn(4, 6, 16).requires_grad_())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _outside.pop().full_tensor().square().sum().backward()  # type: ignore[attr-defined]
    model.zero_grad()


def test_a_backward_that_comes_when_a_tensor_parallel_weight_is_freed_is_refused(pool4: Pool) -> None:
    pool4.run(_late_with_parts)

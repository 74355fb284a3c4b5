"""Users' collectives that round: ranks agree all the same about which parameters were used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
from hsdp.comm import backends
from hsdp.comm.collectives import Comm
from tests.support.deep import mean_grads
from tests.support.rig import RankEnv
from tests.support.sharded import mesh_id, pool_for
from tests.support.twin import full_grads


class Two(nn.Module):
    """Two layers, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.first(1000.0 * x)
        return out + self.second(1000.0 * x) if both else out


def _quantized(tensor: Tensor, group: Any) -> Tensor:
    """To eighths of the largest value of all ranks: a 1 beside gradients of thousands becomes 0."""
    largest = tensor.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return (tensor * 8 / largest).round() * largest / 8


class EighthsOverReplicas:
    def __call__(self, tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        tensor.copy_(_quantized(tensor, group))
        dist.all_reduce(tensor, group=group)


class EighthsOverShards:
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        whole = _quantized(input_tensor, group)
        dist.all_reduce(whole, group=group)
        output_tensor.copy_(whole.chunk(group.size())[group.rank()])


def check_rounded(env: RankEnv, shape: tuple[int, ...], over: str) -> None:
    torch.manual_seed(0)
    model: Any = hsdp.fully_shard(Two(), mesh=env.mesh(shape))
    if over == "replicas":
        model.set_replica_reduce(EighthsOverReplicas())
    else:
        model.set_custom_reduce_scatter(EighthsOverShards())
    torch.manual_seed(env.rank)
    model(torch.randn(3, 4), env.rank == 0).square().sum().backward()
    assert all(param.grad is not None for param in model.parameters()), "every rank gets what one has made"
    torch.optim.SGD(model.parameters(), lr=1e-8).step()
    hsdp.check_replicas(model)
    model.zero_grad()
    model(torch.randn(3, 4), False).square().sum().backward()
    assert model.first.weight.grad is not None and model.second.weight.grad is None, "nobody has used it"


@pytest.mark.parametrize(
    ("shape", "over"), [((2,), "shards"), ((2, 1), "replicas"), ((2, 2), "replicas"), ((2, 2), "shards")]
)
def test_rounding_loses_no_used_parameter(request: pytest.FixtureRequest, shape: tuple[int, ...], over: str) -> None:
    pool_for(request, shape).run(check_rounded, shape, over)


def check_negative(env: RankEnv, shape: tuple[int, ...]) -> None:
    """A backend that multiplies what it sums multiplies what tells which parameters were used, too."""
    torch.manual_seed(0)
    plain = Two()
    torch.manual_seed(0)
    model: Any = hsdp.fully_shard(Two(), mesh=env.mesh(shape))
    model.set_gradient_scaling_factor(-1.0)

    def run(module: nn.Module, rank: int) -> None:
        x = torch.ones(3, 4) / (rank + 1000)
        module(x, rank == 0).square().sum().backward()

    run(model, env.rank)
    means = mean_grads(plain, run, env.world_size)
    for name, grad in full_grads(model).items():
        assert grad is not None and means[name] is not None, name
        torch.testing.assert_close(grad, -means[name])  # type: ignore[operator]


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_a_negative_factor_loses_no_used_parameter(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(check_multiplied, shape)


def check_multiplied(env: RankEnv, shape: tuple[int, ...]) -> None:
    """gloo does not multiply: its inputs are multiplied in its place."""
    own, multiplies = Comm.reduce_scatter, backends.MULTIPLIES

    def multiplying(
        self: Any,
        owner: Any,
        key: int,
        outputs: Any,
        inputs: Any,
        replicated: Any,
        finish: Any,
        factor: float = 1.0,
        uneven: Any = (),
    ) -> Any:
        torch._foreach_mul_(inputs, factor)
        return own(self, owner, key, outputs, inputs, replicated, finish, 1.0, uneven)

    Comm.reduce_scatter, backends.MULTIPLIES = multiplying, frozenset({"gloo"})  # type: ignore[assignment,misc,method-assign]
    try:
        check_negative(env, shape)
    finally:
        Comm.reduce_scatter, backends.MULTIPLIES = own, multiplies  # type: ignore[method-assign,misc]

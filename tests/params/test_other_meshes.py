"""FSDP2's `ShardPlacementResult`: experts on another mesh inside of one `fully_shard` call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard

import hsdp
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_rest

if not hasattr(fsdp_common, "ShardPlacementResult"):
    pytest.skip(f"torch {torch.__version__} has no ShardPlacementResult", allow_module_level=True)
FSDPMeshInfo, HSDPMeshInfo = fsdp_common.FSDPMeshInfo, fsdp_common.HSDPMeshInfo

EXPERTS, DIM = 4, 6


class Experts(nn.Module):
    """This rank's experts, (experts, dim, dim), each for a part of the rows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, DIM, DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:  # (experts, rows, dim)
        return torch.bmm(x, self.weight)


class Block(nn.Module):
    """A router that everybody has, and experts of which rank `ep` of two has half."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.experts = Experts(EXPERTS // 2)
        self.experts.weight.data.copy_(torch.randn(EXPERTS, DIM, DIM, dtype=torch.float64).chunk(2)[ep])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.router(x).tanh().unflatten(0, (EXPERTS // 2, -1))).square()


def _place(infos: dict[str, Any], experts: set[Any]) -> Any:
    def place(param: nn.Parameter, _experts: Any = experts) -> Any:
        dim, mesh = (Shard(1), "efsdp") if param in _experts else (None, "dp")
        return fsdp_common.ShardPlacementResult(dim, infos[mesh])

    return place


def _meshes() -> tuple[DeviceMesh, DeviceMesh, dict[str, Any]]:
    """That of the experts, that of all ranks, and what FSDP2 calls their axes."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    dp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    return root, dp, {"efsdp": FSDPMeshInfo(root["efsdp"], shard_mesh_dim=0), "dp": FSDPMeshInfo(dp, shard_mesh_dim=0)}


def _results(env: RankEnv, sharded: Any) -> dict[str, Tensor]:
    """Gradients and parameters after a step: all 4 ranks are data parallel, experts are sharded over two of them each."""
    root, dp, infos = _meshes()
    block: Any = Block(root.get_local_rank("ep"))
    sharded(block, mesh=dp, shard_placement_fn=_place(infos, set(block.experts.parameters())))
    block.set_gradient_divide_factor(3.0)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(10 * step + env.rank)
        block(torch.randn(8, DIM, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if step == 0:
            optimizer.zero_grad()
    found = {name: param.full_tensor() for name, param in block.named_parameters()}
    found |= {f"{name}.grad": param.grad.full_tensor() for name, param in block.named_parameters()}
    assert isinstance(block.experts.weight, DTensor) and block.experts.weight.device_mesh == root["efsdp"]
    assert block.experts.weight.to_local().shape == (EXPERTS // 2, DIM // 2, DIM)
    return found


def check_as_fsdp2(env: RankEnv) -> None:
    expected, found = _results(env, fsdp.fully_shard), _results(env, hsdp.fully_shard)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_experts_on_another_mesh_train_as_with_fsdp2(pool4: Pool) -> None:
    pool4.run(check_as_fsdp2)


class Listed(Block):
    """The experts in a list, which has no forward; a step may leave one out."""

    def __init__(self, ep: int) -> None:
        super().__init__(ep)
        whole = self.experts.weight.detach()
        self.experts: Any = nn.ModuleList(nn.Linear(DIM, DIM, bias=False, dtype=torch.float64) for _ in whole)
        for expert, weight in zip(self.experts, whole, strict=True):
            expert.weight.data.copy_(weight)

    def forward(self, x: Tensor, used: int = EXPERTS // 2) -> Tensor:
        x = self.router(x).tanh()
        return torch.stack([expert(x) for expert in self.experts[:used]]).square()


def _listed(env: RankEnv, sharded: Any) -> dict[str, Tensor]:
    root, dp, infos = _meshes()
    block: Any = Listed(root.get_local_rank("ep"))
    sharded(block, mesh=dp, shard_placement_fn=_place(infos, set(block.experts.parameters())))
    assert block.experts[0].weight.device_mesh == root["efsdp"] and block.router.weight.device_mesh == dp
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for step, used in enumerate((2, 1, 2)):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + env.rank)
        block(torch.randn(8, DIM, dtype=torch.float64), used).sum().backward()
        optimizer.step()
    return {name: param.full_tensor() for name, param in block.named_parameters()}


def check_listed(env: RankEnv) -> None:
    expected, found = _listed(env, fsdp.fully_shard), _listed(env, hsdp.fully_shard)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_experts_in_a_list_train_as_with_fsdp2(pool4: Pool) -> None:
    pool4.run(check_listed)


def check_unit(env: RankEnv) -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    infos = {"efsdp": FSDPMeshInfo(root["shard"], shard_mesh_dim=0), "dp": HSDPMeshInfo(root, 1, 0)}
    block: Any = Block(0)
    policy = hsdp.MixedPrecisionPolicy(torch.float32, torch.float32, torch.float64)
    place = _place(infos, set(block.experts.parameters()))
    hsdp.fully_shard(block, mesh=root, shard_placement_fn=place, mp_policy=policy)
    assert block(torch.randn(8, DIM, dtype=torch.float64)).dtype == torch.float64
    block.unshard()
    assert type(block.experts.weight) is nn.Parameter and type(block.router.weight) is nn.Parameter
    block.reshard()
    check_rest(block)


def test_the_experts_unit_is_opened_and_closed_with_the_one_around_it(pool4: Pool) -> None:
    pool4.run(check_unit)


def check_some_axes(env: RankEnv, named: bool) -> None:
    """The same mesh for both, over whose first axis only the router has replicas: each half has experts of its own."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp") if named else None)
    infos = {"efsdp": FSDPMeshInfo(root, shard_mesh_dim=1), "dp": HSDPMeshInfo(root, 1, 0)}
    ep = root.get_local_rank(0)
    block: Any = Block(ep)
    place = _place(infos, set(block.experts.parameters()))
    if not named:
        with pytest.raises(
            ValueError, match=r"parameter 'experts.weight' is put on a mesh of shape \(2, 2\) without names"
        ):
            hsdp.fully_shard(block, mesh=root, shard_placement_fn=place)
        return
    hsdp.fully_shard(block, mesh=root, shard_placement_fn=place)
    assert block.experts.weight.device_mesh.ndim == 1 and block.router.weight.device_mesh == root
    twins = [Block(half) for half in range(2)]
    for rank in range(4):
        torch.manual_seed(rank)
        x = torch.randn(8, DIM, dtype=torch.float64)
        twins[rank // 2](x).sum().backward()
        if rank == env.rank:
            block(x).sum().backward()
    expected = {"router.weight": sum(twin.router.weight.grad for twin in twins) / 4}  # type: ignore[misc]
    expected["experts.weight"] = twins[ep].experts.weight.grad / 2  # type: ignore[operator]
    assert torch.equal(block.experts.weight.full_tensor(), twins[ep].experts.weight)
    for name, grad in expected.items():
        torch.testing.assert_close(block.get_parameter(name).grad.full_tensor(), grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("named", [True, False])
def test_experts_are_sharded_over_the_axes_that_are_told(pool4: Pool, named: bool) -> None:
    pool4.run(check_some_axes, named)


class Mixed(nn.Module):
    """Two parameters, for two meshes, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self) -> Tensor:
        return self.one + self.other


def test_a_module_with_parameters_of_two_meshes_is_refused_by_name() -> None:
    with fake_world(4):
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        dp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = nn.Sequential(Mixed())
        infos = {"efsdp": FSDPMeshInfo(root["efsdp"], shard_mesh_dim=0), "dp": FSDPMeshInfo(dp, shard_mesh_dim=0)}
        with pytest.raises(ValueError, match=r"parameter '0.other' is put on another mesh, and no module inside"):
            hsdp.fully_shard(model, mesh=dp, shard_placement_fn=_place(infos, {model[0].other}))
        assert type(model) is nn.Sequential and type(model[0]) is Mixed


def check_replicated(env: RankEnv) -> None:
    """`replicate_params` may name parameters that are put on the other mesh, there they stay whole."""
    root, dp, infos = _meshes()
    block: Any = Block(root.get_local_rank("ep"))
    replicated = iter([block.experts.weight, block.router.bias])
    hsdp.fully_shard(block, mesh=dp, shard_placement_fn=_place(infos, {block.experts.weight}), replicate_params=replicated)
    for param, mesh in ((block.experts.weight, root["efsdp"]), (block.router.bias, dp)):
        assert param.device_mesh == mesh and param.placements == (Replicate(),)
    assert block.router.weight.placements == (Shard(0),)


def test_parameters_on_the_other_mesh_may_stay_whole(pool4: Pool) -> None:
    pool4.run(check_replicated)

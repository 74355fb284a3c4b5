"""Parameters with annotations of the package spmd_types: the numbers of one device, and of FSDP2 where it reads them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.fsdp._fully_shard import _fsdp_init as fsdp_init
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hsdp
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_rest

spmd: Any = pytest.importorskip("spmd_types")
typecheck: Any = pytest.importorskip("spmd_types.checker").typecheck

DIM, HIDDEN, LENGTH, ROWS = 6, 8, 4, 2
reads = pytest.mark.skipif(
    not hasattr(dist, "_spmd_no_typecheck"), reason=f"FSDP2 of torch {torch.__version__} reads no annotations"
)


class Whole(nn.Module):
    """The block on one device: (rows, length, DIM) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(HIDDEN, DIM, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(DIM, HIDDEN, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn(DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x + torch.tanh((x * self.norm) @ self.up.T) @ self.down.T) * self.scale).square().sum()


class Parallel(Whole):
    """Its part on a rank of tp: half of the sequence for `norm`, half of the hidden width, and all of it for `scale`."""

    def __init__(self, mesh: DeviceMesh, named: bool) -> None:
        super().__init__()
        tp, self.group = mesh.get_local_rank("tp"), mesh.get_group("tp")
        self.up = nn.Parameter(self.up.detach().chunk(2, 0)[tp].clone())
        self.down = nn.Parameter(self.down.detach().chunk(2, 1)[tp].clone())
        dp = (mesh.mesh_dim_names or ())[0]
        axis = {name: spmd.MeshAxis.of(mesh.get_group(name)) for name in (dp, "tp")}
        kinds = {"norm": spmd.R, "up": spmd.S(0), "down": spmd.S(1), "scale": spmd.I}
        for name, kind in kinds.items():
            spmd.assert_type(getattr(self, name), {axis["tp"]: kind} | ({axis[dp]: spmd.R} if named else {}))

    def forward(self, x: Tensor) -> Tensor:  # (rows, length / 2, DIM)
        hidden = spmd.redistribute(x * self.norm, self.group, src=spmd.S(1), dst=spmd.R)
        part = torch.tanh(hidden @ self.up.T) @ self.down.T
        x = x + spmd.redistribute(part, self.group, src=spmd.P, dst=spmd.S(1))
        return (spmd.redistribute(x, self.group, src=spmd.S(1), dst=spmd.I) * self.scale).square().sum()


def _batch(step: int, dp: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dp)
    return torch.randn(ROWS, LENGTH, DIM, generator=generator, dtype=torch.float64)


def _told(params: dict[str, Any], losses: list[Tensor]) -> dict[str, Tensor]:
    def whole(tensor: Any) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    found = {name: whole(param) for name, param in params.items()}
    return found | {f"{name}.grad": whole(param.grad) for name, param in params.items()} | {"loss": torch.stack(losses)}


def _trained(model: nn.Module, loss_of: Callable[[int], Tensor]) -> dict[str, Tensor]:
    """Losses, and gradients and parameters after two steps of two micro-batches each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            losses.append(loss_of(2 * step + micro).detach())
        optimizer.step()
    return _told(dict(model.named_parameters()), losses)


def _expected(dp: int) -> dict[str, Tensor]:
    model = Whole()

    def loss_of(step: int) -> Tensor:
        losses = [model(_batch(step, other)) for other in range(2)]
        (sum(losses) / 2).backward()
        return losses[dp]

    return _trained(model, loss_of)


def _mesh(dp: str = "dp") -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(dp, "tp"))


def _found(sharded: Any, mesh: DeviceMesh, dims: Any, checks: str, named: bool) -> dict[str, Tensor]:
    dp, tp = mesh.get_local_rank(0), mesh.get_local_rank("tp")
    data = spmd.MeshAxis.of(mesh.get_group(0))
    model = Parallel(mesh, named)
    with spmd.set_current_mesh(mesh):
        sharded(model, mesh=mesh, dp_mesh_dims=dims)

    def loss_of(step: int) -> Tensor:
        x = _batch(step, dp).chunk(2, 1)[tp].contiguous()
        with ExitStack() as stack:
            if checks != "nothing":
                stack.enter_context(spmd.set_current_mesh(mesh))
                stack.enter_context(typecheck(strict_mode="strict", local=True))
                spmd.assert_type(x, {data: spmd.V, "tp": spmd.V})
            loss = model(x)
            if checks == "backward":
                loss = spmd.reinterpret(loss, mesh.get_group(0), src=spmd.V, dst=spmd.P)
                loss.backward()
        if checks != "backward":
            loss.backward()
        return loss

    found = _trained(model, loss_of)
    placements = {name: param.placements for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    cut: Any = Shard(0) if dims.shard else Replicate()
    assert placements["norm"] == placements["scale"] == (cut, Replicate())
    assert placements["up"] == (_StridedShard(0, split_factor=2) if dims.shard else cut, Shard(0))
    assert placements["down"] == (cut, Shard(1))
    if isinstance(model, hsdp.HSDPModule):
        check_rest(model)
    return found


def check_as_one_device(env: RankEnv, shard: bool, checks: str, named: bool) -> None:
    dims = hsdp.DataParallelMeshDims(**{"shard" if shard else "replicate": "dp"})
    found, expected = _found(hsdp.fully_shard, _mesh(), dims, checks, named), _expected(env.rank // 2)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("checks", ["nothing", "forward", "backward"])
@pytest.mark.parametrize(("shard", "named"), [(True, True), (True, False), (False, True)])
def test_annotated_parameters_train_as_on_one_device(pool4: Pool, shard: bool, checks: str, named: bool) -> None:
    pool4.run(check_as_one_device, shard, checks, named)


def check_as_fsdp2(env: RankEnv) -> None:
    mesh = _mesh("fsdp")  # FSDP2 wants the very object, and DTensor may give it an equal one that was made before
    for checks in ("nothing", "forward"):
        theirs = _found(fsdp.fully_shard, mesh, fsdp.DataParallelMeshDims(shard="fsdp"), checks, True)
        ours = _found(hsdp.fully_shard, mesh, hsdp.DataParallelMeshDims(shard="fsdp"), checks, True)
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


@reads
def test_annotated_parameters_train_as_with_fsdp2(pool4: Pool) -> None:
    pool4.run(check_as_fsdp2)


class Experts(nn.Module):
    """A weight that everybody has, and experts, of which a rank of ep has half."""

    def __init__(self, dense: DeviceMesh, sparse: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.router = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
        self.experts = nn.Linear(DIM, 4, bias=False, dtype=torch.float64)
        self.experts.weight = nn.Parameter(self.experts.weight.detach().chunk(2)[sparse.get_local_rank("ep")].clone())
        for param, mesh, kinds in (
            (self.router, dense, {"data": spmd.R, "tp": spmd.I}),
            (self.experts.weight, sparse, {"efsdp": spmd.R, "ep": spmd.S(0)}),
        ):
            spmd.assert_type(param, {spmd.MeshAxis.of(mesh.get_group(name)): kind for name, kind in kinds.items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x * self.router).square().sum()


def check_experts(env: RankEnv) -> None:
    dense, sparse = _mesh("data"), init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    infos = [
        fsdp_init._get_mesh_info(mesh, fsdp.DataParallelMeshDims(shard=mesh.mesh_dim_names[0])) for mesh in (dense, sparse)
    ]
    results = []
    for sharded, dims in ((fsdp.fully_shard, fsdp.DataParallelMeshDims), (hsdp.fully_shard, hsdp.DataParallelMeshDims)):
        model: Any = Experts(dense, sparse)
        experts = model.experts.weight

        def place(param: nn.Parameter, _experts: Any = experts) -> Any:
            return fsdp_common.ShardPlacementResult(Shard(0), infos[param is _experts])

        sharded(model, mesh=dense, dp_mesh_dims=dims(shard="data"), shard_placement_fn=place)

        def loss_of(step: int, model: nn.Module = model) -> Tensor:
            loss = model(_batch(step, env.rank // 2))
            loss.backward()
            return loss

        results.append(_trained(model, loss_of))
        assert model.experts.weight.shape == (4, DIM)
    assert all(torch.equal(results[1][name], value) for name, value in results[0].items())


@reads
def test_annotated_experts_on_another_mesh_train_as_with_fsdp2(pool4: Pool) -> None:
    pool4.run(check_experts)


def check_dtypes(env: RankEnv) -> None:
    """Casts of inputs keep their types, and a frozen parameter, or one that thaws, keeps its annotation."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Parallel(mesh, True)
    model.norm.requires_grad_(False)
    policy = hsdp.MixedPrecisionPolicy(torch.float32, torch.float64)
    hsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=hsdp.DataParallelMeshDims(shard="dp"), mp_policy=policy)
    for thaws in (False, True):
        model.norm.requires_grad_(thaws)
        x = _batch(0, 0).chunk(2, 1)[mesh.get_local_rank("tp")].contiguous()
        with spmd.set_current_mesh(mesh), typecheck(strict_mode="strict", local=True):
            spmd.assert_type(x, {"dp": spmd.V, "tp": spmd.V})
            loss = model(x)
            types = {axis.names: kind for axis, kind in spmd.get_local_type(loss).items()}
        assert sorted(kind.name for kind in types.values()) == ["I", "V"] and loss.dtype == torch.float32
        loss.backward()
        assert (model.norm.grad is not None) is thaws
        model.zero_grad()


def test_types_pass_through_mixed_precision_and_thawing(pool4: Pool) -> None:
    pool4.run(check_dtypes)


def _layer(mesh: DeviceMesh, **kinds: Any) -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    spmd.assert_type(layer.weight, {spmd.MeshAxis.of(mesh.get_group(name)): kind for name, kind in kinds.items()})
    return layer


def test_what_an_annotation_does_not_tell_is_refused_by_name() -> None:
    dims = hsdp.DataParallelMeshDims(shard="dp")
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        for kinds, message in (
            ({"dp": spmd.R, "cp": spmd.R}, r"'weight' is annotated by spmd_types, but not on axis 'tp'"),
            (
                {"dp": spmd.I, "cp": spmd.R, "tp": spmd.I},
                r"'weight' is annotated by spmd_types as .*I on axis .*dp.*must be R",
            ),
            ({"cp": spmd.R, "tp": spmd.V}, r"'weight' is annotated by spmd_types as .*V on axis tp.*S\(dim\)"),
            ({"cp": spmd.R, "tp": spmd.P}, r"'weight' is .* with placement P.*, which is neither Shard nor Replicate"),
        ):
            with pytest.raises(ValueError, match=message):
                hsdp.fully_shard(_layer(mesh, **kinds), mesh=mesh, dp_mesh_dims=dims)
        other = init_device_mesh("cpu", (4, 2), mesh_dim_names=("rest", "ep"))
        with pytest.raises(
            ValueError, match=r"as .*R on axis .*rest.*which is neither one of .* nor a part of hsdp's \['dp'\]"
        ):
            hsdp.fully_shard(_layer(other, rest=spmd.R), mesh=mesh, dp_mesh_dims=dims)


def test_annotations_beside_a_mesh_without_their_axes_are_refused() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for kind in (spmd.S(0), spmd.V, spmd.P, spmd.R):
            with pytest.raises(ValueError, match=r"'weight' is annotated by spmd_types as . on axis .*tp.*dp_mesh_dims"):
                hsdp.fully_shard(_layer(mesh, dp=spmd.R, tp=kind), mesh=mesh["dp"])
        hsdp.fully_shard(_layer(mesh, dp=spmd.R, tp=spmd.I), mesh=mesh["dp"])
        hsdp.fully_shard(_layer(mesh, dp=spmd.R, tp=spmd.R).requires_grad_(False), mesh=mesh["dp"])


def check_full_params(env: RankEnv) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer: Any = _layer(mesh, dp=spmd.R, tp=spmd.S(0))
    hsdp.fully_shard(layer, mesh=mesh, dp_mesh_dims=hsdp.DataParallelMeshDims(shard="dp"))
    with hsdp.full_params(layer, writeback="local"):
        assert type(layer.weight) is nn.Parameter and layer.weight.shape == (4, 4)
        layer.weight.data.fill_(mesh.get_local_rank("tp"))
    assert layer.weight.shape == (8, 4)
    assert torch.equal(layer.weight.full_tensor()[:, 0], torch.tensor([0.0] * 4 + [1.0] * 4))


def test_full_params_has_the_block_as_forwards_see_it(pool4: Pool) -> None:
    pool4.run(check_full_params)

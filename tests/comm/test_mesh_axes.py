"""Axes named in a bigger mesh: several as one, none that shards, parameters that live on all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import hsdp
from hsdp.comm.mesh import resolve_mesh
from tests.params.test_tensor_parallel import CASE
from tests.support.models import make_case
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_rest, shard
from tests.support.twin import Twin, assert_close_to_twin, assert_same, full_grads, sgd, train, twin_of

Dims = hsdp.DataParallelMeshDims
TorchsDims = getattr(fsdp, "DataParallelMeshDims", Dims)  # newer than torch 2.11


def check_named(env: RankEnv, shape: tuple[int, ...], names: tuple[str, ...], dims: Any, twin: Twin) -> None:
    case = make_case("mlp")
    model = shard(case.model(), env.mesh(shape, names), dp_mesh_dims=dims)
    losses = train(model, case, env.rank, len(twin.losses), sgd(model.parameters()))
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)
    check_rest(model)


@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    [
        ((2, 2), ("dp", "cp"), Dims(shard=("dp", "cp"))),
        ((2, 2), ("dp", "cp"), Dims(replicate="dp", shard="cp")),
        ((2, 2), ("dp", "cp"), Dims(replicate="cp", shard="dp")),
        ((2, 2), ("dp", "cp"), Dims(replicate=("dp", "cp"))),
        ((4,), ("dp",), Dims(replicate="dp")),
        ((1, 2, 2), ("pp", "a", "b"), Dims(replicate="a", shard="b")),
        ((2, 2), ("dp", "cp"), TorchsDims(shard="cp", replicate="dp")),
    ],
    ids=str,
)
def test_named_axes_train_as_the_twin(pool4: Pool, shape: Any, names: Any, dims: Any) -> None:
    pool4.run(check_named, shape, names, dims, twin_of(make_case("mlp"), 4, 2, sgd))


def check_unsharded(env: RankEnv) -> None:
    """Without a shard axis every rank holds each parameter whole: nothing is gathered."""
    model = hsdp.fully_shard(nn.Linear(4, 4), mesh=env.mesh((4,), ("dp",)), dp_mesh_dims=Dims(replicate="dp"))
    weight = model.weight
    assert isinstance(weight, DTensor) and weight.placements == (Replicate(),) and weight.to_local().shape == (4, 4)
    model(torch.ones(1, 4)).sum().backward()
    assert isinstance(weight.grad, DTensor) and weight.grad.placements == (Replicate(),)


def test_without_a_shard_axis_it_works_as_ddp_does(pool4: Pool) -> None:
    pool4.run(check_unsharded)


def check_whole_mesh(env: RankEnv, twin: Twin) -> None:
    """Parameters are DTensors on the whole mesh: cut over one axis, replicated over hsdp's; so are the activations."""
    mesh = env.mesh((2, 2), ("dp", "tp"))
    model = CASE.model()
    for name, module in model.named_modules():
        for key, param in list(module.named_parameters(recurse=False)):
            over_tp = Shard(0) if name.endswith("up") else Shard(1) if name.endswith("down") else Replicate()
            everywhere = distribute_tensor(param.detach(), mesh, [Replicate(), over_tp], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(everywhere))
    for module in (*model.blocks, model):  # type: ignore[misc]
        hsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))
    up = model.blocks[0].up.weight  # type: ignore[index,union-attr]
    assert up.placements == (_StridedShard(0, split_factor=2), Shard(0)) and up.to_local().shape == (4, 8)  # type: ignore[union-attr]
    model.set_reduce_op_type("sum")  # DTensor's loss is the mean over all ranks already
    x, y = (DTensor.from_local(t, mesh, [Shard(0), Replicate()], run_check=False) for t in CASE.batch(0, env.rank // 2))
    loss = (model(x) - y).square().mean()
    torch.testing.assert_close(loss.full_tensor(), twin.losses[0].mean(), rtol=1e-11, atol=1e-11)
    loss.backward()
    assert_same(full_grads(model), twin.grads)
    check_rest(model)


def test_parameters_on_the_whole_mesh(pool4: Pool) -> None:
    pool4.run(check_whole_mesh, twin_of(CASE, 2, 1, sgd))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        # DTensors of torch 2.11 refuse to flatten rows and positions, as a matrix beside a batch has it.
        return torch.tanh(torch.bmm(x + self.positions, self.weight.expand(len(x), -1, -1)))


def check_cut_sequence(env: RankEnv, replicas: bool, cut: int) -> None:
    """DTensors throughout, of which hsdp's ranks have rows or positions: a gradient may come in parts, not in terms."""
    mesh, plain, model = env.mesh((2, 2), ("dp", "tp")), Positions(), Positions()
    model.load_state_dict(plain.state_dict())
    whole: Any = plain.state_dict()
    model.positions = nn.Parameter(distribute_tensor(whole["positions"], mesh, [Replicate(), Replicate()]))
    model.weight = nn.Parameter(distribute_tensor(whole["weight"], mesh, [Replicate(), Shard(1)]))
    hsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(replicate="dp") if replicas else Dims(shard="dp"))
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    plain(x).square().sum().backward()
    loss = model(distribute_tensor(x, mesh, [Shard(cut), Replicate()])).square().sum()
    loss.redistribute(placements=[Replicate(), Replicate()]).to_local().backward()
    # The mean over ranks of terms of a sum: `set_gradient_divide_factor` is for whoever wants the sum.
    assert_same(full_grads(model), {name: None if p.grad is None else p.grad / 2 for name, p in plain.named_parameters()})


@pytest.mark.parametrize("cut", [0, 1], ids=["batch", "sequence"])
@pytest.mark.parametrize("replicas", [False, True])
def test_gradients_of_what_hsdp_s_own_ranks_cut(pool4: Pool, replicas: bool, cut: int) -> None:
    pool4.run(check_cut_sequence, replicas, cut)


def check_own_mesh(env: RankEnv) -> None:
    """Without a mesh, parameters that have one keep it."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), env.mesh((4,)), [Shard(1)], src_data_rank=None))
    held = model.weight
    hsdp.fully_shard(model)
    assert model.weight is held and isinstance(model.bias, DTensor)


def test_without_a_mesh_dtensors_keep_theirs(pool4: Pool) -> None:
    pool4.run(check_own_mesh)


def check_errors(env: RankEnv) -> None:
    mesh = env.mesh((2, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"\['cp'\] are not different axes of the mesh, whose axes are \('dp', 'tp'\)"):
        hsdp.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=Dims(shard="cp"))
    with pytest.raises(ValueError, match="different axes"):
        hsdp.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=Dims(shard="dp", replicate="dp"))
    with pytest.raises(ValueError, match="pass mesh= too"):
        hsdp.fully_shard(nn.Linear(2, 2), dp_mesh_dims=Dims(shard="dp"))
    with pytest.raises(TypeError, match="expected a DataParallelMeshDims, not str"):
        hsdp.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims="dp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give shard=, replicate= or both"):
        Dims()
    odd = nn.Linear(4, 4)
    odd.weight = nn.Parameter(distribute_tensor(odd.weight.detach(), mesh, [Shard(0), Replicate()], src_data_rank=None))
    with pytest.raises(ValueError, match=r"'weight' is a DTensor .* hsdp shards it over \['dp'\]; it must be Replicate"):
        hsdp.fully_shard(odd, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))


def check_swapped(env: RankEnv, twin: Twin) -> None:
    """Names in the other order than `(replicate, shard)`: shards go over the axis that is called so, its size tells."""
    case = make_case("mlp")
    for names in (("shard", "replicate"), ("dp_shard", "dp_replicate"), ("fsdp", "ddp")):
        mesh = env.mesh((4, 1), names)
        axes = resolve_mesh(mesh)
        assert (axes.shard_size, axes.replicate_size) == (4, 1), names
        model = shard(case.model(), mesh)
        losses = train(model, case, env.rank, len(twin.losses), sgd(model.parameters()))
        torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
        assert_close_to_twin(model, twin, grads=True)
    for shape, names in (((2, 2), ("shard", "dp")), ((2, 2), ("dp", "replicate")), ((4,), ("replicate",))):
        with pytest.raises(ValueError, match=r"not what they are called.*dp_mesh_dims="):
            hsdp.fully_shard(nn.Linear(2, 2), mesh=env.mesh(shape, names))
    for names in (("replicate", "shard"), ("dp", "cp"), ("dp_replicate", "dp_shard_cp"), ("pod", "fsdp"), ("ddp", "dp")):
        assert resolve_mesh(env.mesh((1, 4), names)).shard_size == 4, names


def test_names_of_axes_are_believed_before_their_order(pool4: Pool) -> None:
    pool4.run(check_swapped, twin_of(make_case("mlp"), 4, 2, sgd))


def check_default(env: RankEnv) -> None:
    """The user makes the same mesh, and mixes DTensors on it with parameters on that of `mesh=None`."""
    layer = hsdp.fully_shard(nn.Linear(4, 4))
    assert isinstance(layer.weight, DTensor)
    mine = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
    with torch.no_grad():
        layer.weight.copy_(mine)
        assert (layer.weight + mine).full_tensor().eq(2).all()
    assert layer.weight.device_mesh == mine.device_mesh


def test_the_default_mesh_is_that_of_a_user_who_says_as_little(pool4: Pool) -> None:
    pool4.run(check_default)


def test_wrong_axes_are_refused(pool4: Pool) -> None:
    pool4.run(check_errors)


@pytest.mark.parametrize("dims", [Dims(shard=("c", "a")), Dims(shard="b", replicate=("c", "a"))], ids=str)
def test_axes_in_another_order_than_the_mesh_s_are_refused(dims: Dims) -> None:
    with fake_world(8) as env, pytest.raises(ValueError, match=r"\('c', 'a'\) are in another order .* \('a', 'c'\)$"):
        resolve_mesh(env.mesh((2, 2, 2), ("a", "b", "c")), dims)

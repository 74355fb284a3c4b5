"""Modules that hold parameters or hand out tensors in their own ways: right gradients over two iterations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.params.module_kinds import KINDS, Holder, Kind, LeafOutputs, Tied, weight_handed_out_over_three_steps
from tests.support.deep import mean_into
from tests.support.graphs import DIM, Layer, Net, floats, tokens
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded, mesh_id, pool_for, shard
from tests.support.twin import assert_same, full_grads


def _check(env: RankEnv, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    kind = KINDS[name]
    plain = kind.build().double()
    model = shard(_twin_of(plain, kind), env.mesh(shape), **options)
    for _ in range(2):
        check_grads(model, plain, kind.run, env.rank, env.world_size)
        check_sharded(model)
    check_rest(model)


def _twin_of(plain: nn.Module, kind: Kind) -> nn.Module:
    """The same model again; not all of them can be copied."""
    try:
        return copy.deepcopy(plain)
    except RuntimeError:
        torch.manual_seed(0)
        model = kind.build().double()
        model.load_state_dict(plain.state_dict())
        return model


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
@pytest.mark.parametrize("name", KINDS)
def test_gradients_equal_plain_autograd(request: pytest.FixtureRequest, name: str, shape: tuple[int, ...]) -> None:
    options = {"reshard_after_forward": True} if len(shape) == 1 else {}
    pool_for(request, shape).run(_check, name, shape, options)


def _hand_out_weights(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain = LeafOutputs().double()
    model = shard(copy.deepcopy(plain), env.mesh(shape))
    check_grads(model, plain, weight_handed_out_over_three_steps, env.rank, env.world_size)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_a_unit_may_hand_out_its_parameters(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_hand_out_weights, shape)


LOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "slice": lambda rows: rows[1:],
    "expanded": lambda rows: rows.expand(2, 4, DIM)[0, 1:],
    "detached": lambda rows: rows.detach()[1:],
    "data": lambda rows: rows.data[1:],
}


class Positions(nn.Module):
    """A block that hands out a view of its parameter."""

    class Block(nn.Module):
        def __init__(self, look: Callable[[nn.Parameter], Any]) -> None:
            super().__init__()
            self.first, self.rows = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4, DIM))
            self.look = look

        def forward(self) -> Any:
            return self.look(self.rows)

    def __init__(self, look: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(look)])
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.blocks[0]()
        x = self.head(x)  # here the block is freed
        return x[1:] * (rows.first if isinstance(rows, Holder) else rows)


def _hand_out_views(env: RankEnv, shape: tuple[int, ...]) -> None:
    def run(model: nn.Module, rank: int) -> None:
        model(floats(rank)).square().sum().backward()

    for look in LOOKS.values():
        plain = Positions(look).double()
        model = shard(copy.deepcopy(plain), env.mesh(shape))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(model(floats(0)), plain(floats(0)), rtol=0, atol=0)
        check_grads(model, plain, run, env.rank, env.world_size)
    model = shard(Positions(Holder).double(), env.mesh(shape))
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), pytest.raises(hsdp.StateError, match=r"'blocks\.0' returns its parameter 'rows'.*inside an object"):
            model(floats(0))


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_a_unit_may_hand_out_views_of_its_parameters_with_gradients_and_without(
    request: pytest.FixtureRequest, shape: tuple[int, ...]
) -> None:
    pool_for(request, shape).run(_hand_out_views, shape)


# -- names, identity ------------------------------------------------------------------------------------------------


def _identity(env: RankEnv) -> None:
    plain = Net()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    assert isinstance(model, Net)
    assert isinstance(model, hsdp.HSDPModule)
    assert type(model).__name__ == "FSDPNet"
    assert type(model.blocks[0]).__name__ == "FSDPLayer"
    assert type(shard(Net(), env.mesh(2))) is type(model), "one class for all instances"
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    assert [p.stride() for p in model.parameters()] == [p.stride() for p in plain.parameters()]
    tied = shard(Tied(), env.mesh(2))
    assert tied.blocks[0][0].weight is tied.blocks[0][2].weight
    assert tied.first is tied.second
    linear = nn.Linear(3, 3)
    linear.weight.mark = "kept"
    assert hsdp.fully_shard(linear, mesh=env.mesh(2)).weight.mark == "kept"


def test_names_classes_and_ties_are_kept(pool2: Pool) -> None:
    pool2.run(_identity)


class Marked(nn.Module):
    """Keeps on its parameter what the forwards of training found, and scales by it and by a mark of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.weight.scale = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if self.training:
            weight.most = float(weight.detach().abs().max())
        return x @ weight * weight.scale / weight.most


def _marks(env: RankEnv, frozen: bool) -> None:
    torch.manual_seed(1)
    plain = Marked().double()
    plain.weight.scale = 0.5  # type: ignore[attr-defined]
    model: Any = hsdp.fully_shard(copy.deepcopy(plain), mesh=env.mesh(2))
    for each in (plain, model):
        each.weight.scale = 2.0
        each(floats(0))
        each.weight.scale *= 1.5
        each.requires_grad_(not frozen)
        each.eval()
    assert torch.equal(model(floats(1)), plain(floats(1)))
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()}, assign=True)
    model.weight.scale, model.weight.most, plain.weight.scale = 1.0, plain.weight.most, 0.9  # type: ignore[attr-defined]
    torch.testing.assert_close(model(floats(1)), plain(floats(1)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_forwards_see_the_attributes_of_parameters_and_set_them(pool2: Pool, frozen: bool) -> None:
    pool2.run(_marks, frozen)


def _methods_see_whole_parameters(env: RankEnv) -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(Layer):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(tuple(self.up.weight.shape))
            assert not isinstance(self.up.weight, torch.distributed.tensor.DTensor)
            assert isinstance(self.up.weight, nn.Parameter)
            return super().forward(x)

    model = hsdp.fully_shard(Watching().double(), mesh=env.mesh(2))
    model.register_forward_pre_hook(lambda module, args: seen.append(tuple(module.down.weight.shape)))
    model(floats(env.rank))
    assert seen == [(DIM, 2 * DIM + 1), (2 * DIM + 1, DIM)]


def test_forward_and_its_hooks_see_whole_parameters(pool2: Pool) -> None:
    pool2.run(_methods_see_whole_parameters)


# -- gradients that share memory ------------------------------------------------------------------------------------


class Viewed(nn.Module):
    """Parameters that a forward views: autograd hands views of one gradient over, which goes on to the layer before too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM)])
        self.rows = nn.Parameter(torch.randn(4, DIM))
        self.flat = nn.Parameter(torch.randn(4 * DIM))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x).unsqueeze(0)  # a batch of one: nothing is summed on the way to the parameters
        return self.head(torch.tanh(x + self.rows.unsqueeze(0) + self.flat.view(1, 4, DIM)))


def _share_memory(env: RankEnv, shape: tuple[int, ...], options: dict[str, Any], tolerance: float) -> None:
    def run(model: nn.Module, rank: int, k: int = 0) -> None:
        model(floats(rank, k)).double().square().sum().backward()

    def both(model: nn.Module, rank: int) -> None:
        torch.stack([model(floats(rank, k)).double().square().sum() for k in range(2)]).sum().backward()

    torch.manual_seed(0)
    plain = Viewed().double()
    options = {"comm_policy": hsdp.CommPolicy(fusion="direct"), **options}
    model: Any = shard(copy.deepcopy(plain), env.mesh(shape), **options)
    run(model, env.rank)
    mean_into(plain, run, env.world_size)
    assert_same(full_grads(model), full_grads(plain), tolerance, tolerance)
    model.zero_grad()
    with model.no_sync():
        run(model, env.rank)
    run(model, env.rank, 1)
    mean_into(plain, both, env.world_size)
    assert_same(full_grads(model), full_grads(plain), tolerance, tolerance)


HALF = {"mp_policy": hsdp.MixedPrecisionPolicy(param_dtype=torch.float16)}


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
@pytest.mark.parametrize(("options", "tolerance"), [({}, 1e-11), (HALF, 3e-2)], ids=["float64", "float16"])
def test_gradients_that_share_memory_are_summed_each_by_itself(
    pool2: Pool, shape: tuple[int, ...], options: dict[str, Any], tolerance: float
) -> None:
    pool2.run(_share_memory, shape, options, tolerance)


class Sparse(nn.Module):
    """An embedding whose gradient names rows."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(11, DIM, sparse=sparse)])
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x))


def _sparse_gradients(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain = Sparse(sparse=False).double()
    model = Sparse(sparse=True).double()
    model.load_state_dict(plain.state_dict())

    def run(net: nn.Module, rank: int) -> None:
        net(tokens(rank)).square().sum().backward()

    check_grads(shard(model, env.mesh(shape)), plain, run, env.rank, env.world_size)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_sparse_gradients_are_reduced_as_dense_ones(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_sparse_gradients, shape)


# -- modules that leave ---------------------------------------------------------------------------------------------


def _take_modules_out(env: RankEnv) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    for net in (model, plain):
        del net.blocks[2]  # a unit
        net.head = nn.Identity()  # part of one
        net.blocks[1].up = nn.Identity()
        net.blocks[1].down = nn.Identity()

    def run(net: Any, rank: int) -> None:
        net(tokens(rank)).square().sum().backward()

    check_grads(model, plain, run, env.rank, env.world_size)
    with hsdp.full_params(model):
        assert {name: p.shape for name, p in model.named_parameters()} == {
            name: p.shape for name, p in plain.named_parameters()
        }
    for net in (model, plain):
        net.float()
    torch.testing.assert_close(model(tokens(0)), plain(tokens(0)), rtol=0, atol=0)


def test_modules_may_be_taken_out_of_a_sharded_model(pool2: Pool) -> None:
    pool2.run(_take_modules_out)

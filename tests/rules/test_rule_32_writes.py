"""Rule 32: weights changed by hand between forward and backward are noticed; writes to whole weights are never lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

import hsdp
from hsdp import debug
from hsdp.errors import StaleParametersError, StateError
from hsdp.unit import write_guard
from tests.support.deep import DIM, Deep, floats, loss_of, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, mesh_id, pool_for, shard


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def detached(model: nn.Module) -> None:
    for param in model.parameters():
        param.detach().mul_(0.5)


def local(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            (param.to_local() if isinstance(model, hsdp.HSDPModule) else param).mul_(0.5)  # type: ignore[operator]


NOTICED: dict[str, Callable[[nn.Module], None]] = {f.__name__: f for f in (in_place, detached, local)}


def check_noticed(env: RankEnv, shape: tuple[int, ...], name: str, reshard: bool | None) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape), reshard_after_forward=reshard)
    loss = loss_of(model, env.rank)
    NOTICED[name](model)
    with pytest.raises(StaleParametersError, match=r"unit '(blocks|.*Deep)"):
        loss.backward()
    del loss
    NOTICED[name](plain)
    check_grads(model, plain, step, env.rank, env.world_size)  # the next iteration is fresh
    check_rest(model)


@pytest.mark.parametrize("name", NOTICED)
@pytest.mark.parametrize("reshard", [True, None])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_32_a_change_between_forward_and_backward(
    request: pytest.FixtureRequest, shape: tuple[int, ...], name: str, reshard: bool | None
) -> None:
    pool_for(request, shape).run(check_noticed, shape, name, reshard)


def check_data(env: RankEnv, shape: tuple[int, ...], reshard: bool | None) -> None:
    """`p.data` writes pass by autograd, on one device too: the twin's numbers, or an error."""

    def run(model: nn.Module, rank: int) -> None:
        loss = loss_of(model, rank)
        for param in model.parameters():
            param.data.mul_(0.5)
        loss.backward()
        for param in model.parameters():
            param.data.mul_(2.0)

    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape), reshard_after_forward=reshard)
    if reshard:
        check_grads(model, plain, run, env.rank, env.world_size)
    else:
        with pytest.raises(StaleParametersError, match="unit "):
            run(model, env.rank)


@pytest.mark.parametrize("reshard", [True, None, False])
def test_rule_32_writes_to_data(pool2: Pool, reshard: bool | None) -> None:
    pool2.run(check_data, (2,), reshard)


def check_opened(env: RankEnv, reshard: bool | None) -> None:
    """Parameters that the user opened, or that a graph of gradients keeps whole, are compared with their shards too."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2), reshard_after_forward=reshard)
    units: list[Any] = [module for module in model.modules() if isinstance(module, hsdp.HSDPModule)]
    loss_of(model, env.rank).backward(create_graph=True)
    for unit in units:
        unit.unshard()
    for param in (*model.parameters(), *plain.parameters()):
        param.data.mul_(0.5)
    check_grads(model, plain, step, env.rank, env.world_size)
    loss = loss_of(model, env.rank)
    for unit in units:
        unit.unshard()
    for param in model.parameters():
        param.data.mul_(0.5)
    with pytest.raises(StaleParametersError, match="unit "):
        loss.backward()


@pytest.mark.parametrize("reshard", [True, None, False])
def test_rule_32_writes_to_data_of_open_units(pool2: Pool, reshard: bool | None) -> None:
    pool2.run(check_opened, reshard)


def check_assigned(env: RankEnv, shape: tuple[int, ...], then: str) -> None:
    """An assignment to `.data` is lost by torch: it is refused once, and the model goes on with the weights that it has."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    weight: Any = model.get_parameter("blocks.1.weight")
    weight.data = weight.data * 2.0
    with pytest.raises(StateError, match=r"the \.data of parameter 'weight'"):
        optimizer.step() if then == "step" else model(floats(env.rank))
    weight.data.copy_(weight.data * 2.0)
    with torch.no_grad():
        plain.get_parameter("blocks.1.weight").mul_(2.0)
    optimizer.step()
    torch.testing.assert_close(model(floats(env.rank)), plain(floats(env.rank)))


@pytest.mark.parametrize("then", ["step", "forward"])
def test_rule_32_assigned_data_is_refused(pool2: Pool, then: str) -> None:
    pool2.run(check_assigned, (2,), then)


def check_assigned_gradient(env: RankEnv, then: str) -> None:
    """So is an assignment to the `.data` of a gradient, but not an operation in place that assigns what was there."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(2):  # the second one is added
        model(floats(env.rank)).square().sum().backward()
        (sum(plain(floats(rank)).square().sum() for rank in range(2)) / 2).backward()
        for grad in (model.get_parameter("blocks.1.weight").grad, plain.get_parameter("blocks.1.weight").grad):
            assert grad is not None
            grad.data *= 0.5 + micro
    weight: Any = model.get_parameter("blocks.1.weight")
    weight.grad.data = weight.grad.data * 2.0
    with pytest.raises(StateError, match=r"the \.data of the gradient of parameter 'weight'"):
        optimizer.step() if then == "step" else hsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(model(floats(env.rank)), plain(floats(env.rank)))


@pytest.mark.parametrize("then", ["step", "clip"])
def test_rule_32_assigned_data_of_gradients_is_refused(pool2: Pool, then: str) -> None:
    pool2.run(check_assigned_gradient, then)


class Writes(nn.Linear):
    """A unit that writes to its own weights when it is told to."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "copy_":
            with torch.no_grad():
                self.weight.copy_(self.weight * 0.9)
        elif self.how == "data =":
            self.weight.data = self.weight.data / self.weight.data.norm()
        elif self.how == "data.clamp_":
            self.weight.data.clamp_(-0.1, 0.1)
        elif self.how == "of the bias":
            with torch.no_grad():
                self.bias[0] = 1.0
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writes(DIM, DIM) for _ in range(3))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def check_written(env: RankEnv, shape: tuple[int, ...], how: str, reshard: bool | None, grad: bool) -> None:
    plain, model = seeded(Model), shard(seeded(Model), env.mesh(shape), reshard_after_forward=reshard)
    blocks: Any = model.blocks
    blocks[1].how = how
    with torch.set_grad_enabled(grad), pytest.raises(StateError, match=r"unit 'blocks.1'.*(weight|bias)"):
        model(floats(env.rank))
    blocks[1].how = ""
    if shape[-1] > 1:  # with one shard rank the write went to the shard itself
        for _ in range(2):
            check_grads(model, plain, step, env.rank, env.world_size)
    else:
        step(model, env.rank)
    check_rest(model)


@pytest.mark.parametrize("how", ["copy_", "data =", "data.clamp_", "of the bias"])
@pytest.mark.parametrize(("reshard", "grad"), [(True, True), (None, True), (False, True), (None, False)])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_rule_32_a_forward_that_writes_to_its_weights_is_refused(
    request: pytest.FixtureRequest, shape: tuple[int, ...], how: str, reshard: bool | None, grad: bool
) -> None:
    pool_for(request, shape).run(check_written, shape, how, reshard, grad)


def check_written_to_data(env: RankEnv, shape: tuple[int, ...], grad: bool, forwards: int) -> None:
    """A forward that sets weights by way of `.data`, from its first batch, say: version counters do not see it."""
    plain, model = seeded(Model), shard(seeded(Model), env.mesh(shape))
    blocks: Any = model.blocks
    with mock.patch.object(debug, "ON", False):
        for _ in range(forwards):
            model(floats(env.rank))
            with torch.no_grad():
                model(floats(env.rank))
        blocks[1].how = "data.clamp_"
        with torch.set_grad_enabled(grad), pytest.raises(StateError, match=r"unit 'blocks.1'.*weight"):
            model(floats(env.rank))
        blocks[1].how = ""
        if shape[-1] > 1:
            check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


# Looked at are forwards 1, 2, 4 and 8 of each kind.
@pytest.mark.parametrize(("grad", "forwards"), [(True, 0), (False, 0), (True, 1), (False, 1), (True, 7), (False, 3)])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_rule_32_forwards_that_write_to_data_are_looked_at_outside_of_debug_mode_too(
    request: pytest.FixtureRequest, shape: tuple[int, ...], grad: bool, forwards: int
) -> None:
    pool_for(request, shape).run(check_written_to_data, shape, grad, forwards)


def check_looks(env: RankEnv) -> None:
    model: Any = shard(seeded(Model), env.mesh(2))
    guard = model.blocks[1]._hsdp_state.unit.guard
    seen: list[int] = []
    with mock.patch.object(write_guard, "_MOST_BETWEEN", 6), mock.patch.object(debug, "ON", False), torch.no_grad():
        for forward in range(1, 25):
            before = list(guard.next_look)
            model(floats(env.rank))
            if guard.next_look != before:
                seen.append(forward)
    assert seen == [1, 2, 4, 8, 14, 20]


def test_rule_32_content_is_looked_at_whenever_forwards_have_doubled_and_now_and_then(pool2: Pool) -> None:
    pool2.run(check_looks)


def check_graph(env: RankEnv, how: str) -> None:
    """A graph of gradients reads the unsharded weights that another forward writes to: it is refused."""
    plain, model = seeded(Model), shard(seeded(Model), env.mesh(2))
    blocks: Any = model.blocks
    x = floats(env.rank)
    loss = model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    blocks[1].how = how
    with pytest.raises(StateError, match=r"unit 'blocks.1'.*(weight|bias)"):
        model(floats(env.rank, 1))
    blocks[1].how = ""
    with pytest.raises(RuntimeError, match=r"blocks\.1|modified by an inplace operation"):
        (loss + grad.square().sum()).backward()
    del loss, grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of that backward
        check_grads(model, plain, step, env.rank, env.world_size)


@pytest.mark.parametrize("how", ["copy_", "data =", "of the bias"])
def test_rule_32_a_write_beside_a_graph_of_gradients(pool2: Pool, how: str) -> None:
    pool2.run(check_graph, how)


def check_failed(env: RankEnv, shape: tuple[int, ...], how: str) -> None:
    """A forward that writes to its weights and then raises: where they are the shards, the next one tells of it."""

    def fails(*_: object) -> None:
        raise ArithmeticError

    model = shard(seeded(Model), env.mesh(shape))
    blocks: Any = model.blocks
    blocks[1].how = how
    handle = blocks[1].register_forward_hook(fails)
    with pytest.raises(ArithmeticError):
        model(floats(env.rank))
    handle.remove()
    blocks[1].how = ""
    if shape[-1] == 1:
        with pytest.raises(StateError, match=r"unit 'blocks.1'.*(weight|bias)"):
            model(floats(env.rank))
    plain = seeded(Model)
    with torch.no_grad():  # as the error asks for
        for name, param in model.named_parameters():
            param.copy_(distribute_tensor(plain.get_parameter(name), param.device_mesh, param.placements))  # type: ignore
    check_grads(model, plain, step, env.rank, env.world_size)


@pytest.mark.parametrize("how", ["copy_", "of the bias"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_rule_32_a_write_of_a_forward_that_raised_is_told(
    request: pytest.FixtureRequest, shape: tuple[int, ...], how: str
) -> None:
    pool_for(request, shape).run(check_failed, shape, how)


class Reader(nn.Module):
    """Adds what it has read to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(5, DIM), nn.Linear(DIM, DIM)])

    def forward(self, x: Tensor) -> Tensor:
        words = torch.arange(len(x)) % 5
        return self.blocks[1](x + self.blocks[0](words))  # type: ignore[no-any-return]


def check_between(env: RankEnv, reshard: bool | None) -> None:
    model, plain = (seeded(Reader) for _ in range(2))
    shard(model, env.mesh((2, 1)), reshard_after_forward=reshard)
    x = floats(env.rank).requires_grad_()
    loss = model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    for one in (model, plain):
        one.load_state_dict({name: 0.9 * value for name, value in one.state_dict().items()})
    with pytest.raises(StaleParametersError):
        (loss + grad.square().sum()).backward()
    check_grads(model, plain, step, env.rank, env.world_size)


@pytest.mark.parametrize("reshard", [None, False])
def test_rule_32_a_load_before_a_backward_that_fails_is_no_write_of_the_forward(pool2: Pool, reshard: bool | None) -> None:
    pool2.run(check_between, reshard)


def check_max_norm(env: RankEnv, shape: tuple[int, ...]) -> None:
    model = shard(seeded(lambda: nn.Sequential(nn.Embedding(9, DIM, max_norm=0.1), nn.Linear(DIM, DIM))), env.mesh(shape))
    with pytest.raises(StateError, match="max_norm"):
        model(torch.tensor([env.rank, 3]))


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_rule_32_max_norm_is_refused(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(check_max_norm, shape)


def check_hook(env: RankEnv, root: bool, reshard: bool | None) -> None:
    """A hook that clips weights in backward writes to the copy that is about to be freed."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2), reshard_after_forward=reshard)

    def halve(module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    hook = (model.last if root else model.blocks[1]).register_full_backward_hook(halve)  # type: ignore[union-attr,index]
    with pytest.raises(StateError, match=r"a hook in its backward, .* wrote to parameter '(last\.)?weight'"):
        loss_of(model, env.rank).backward()
    hook.remove()
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("reshard", [True, None, False])
@pytest.mark.parametrize("root", [True, False])
def test_rule_32_a_hook_that_writes_in_backward_is_refused(pool2: Pool, root: bool, reshard: bool | None) -> None:
    pool2.run(check_hook, root, reshard)


def check_unsharded_by_hand(env: RankEnv, then: str) -> None:
    """Who wants to write to whole weights takes `full_params`: what `unshard` shows is a copy."""
    model = shard(seeded(Deep), env.mesh((2,)))
    block: Any = model.blocks[0]  # type: ignore[index]
    block.unshard()
    weight = next(block.parameters())
    name = next(name for name, _ in block.named_parameters())
    owner, _, leaf = name.rpartition(".")
    with torch.no_grad():
        getattr(block.get_submodule(owner), leaf).mul_(2.0)
    with pytest.raises(StateError, match=rf"wrote to parameter.*{leaf}"):
        loss_of(model, env.rank) if then == "forward" else block.reshard()
    block.reshard()
    assert next(block.parameters()) is weight
    check_grads(model, seeded(Deep), step, env.rank, env.world_size)


@pytest.mark.parametrize("then", ["forward", "reshard"])
def test_rule_32_a_write_behind_unshard_is_not_lost_without_a_word(pool2: Pool, then: str) -> None:
    pool2.run(check_unsharded_by_hand, then)

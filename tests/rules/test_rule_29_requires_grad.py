"""Rule 29: a gradient comes if the parameter wanted it in the forward, and still does when it arrives: as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.deep import DIM, Deep, floats, loss_of, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, mesh_id, pool_for, shard


def freeze(model: nn.Module, wanted: bool, *blocks: int) -> None:
    for block in blocks:
        model.blocks[block].requires_grad_(wanted)  # type: ignore[index]


def off_and_on(model: nn.Module, rank: int) -> None:
    """Two losses in one backward; the second forward froze the model for itself (a generator's loss, say)."""
    first = loss_of(model, rank)
    freeze(model, False, 0, 1, 2, 3)
    second = loss_of(model, rank, 1)
    freeze(model, True, 0, 1, 2, 3)
    (first + second).backward()


def off_and_on_apart(model: nn.Module, rank: int) -> None:
    """The same with a backward for each, the frozen one first."""
    first = loss_of(model, rank)
    freeze(model, False, 1, 2)
    second = loss_of(model, rank, 1)
    second.backward()
    freeze(model, True, 1, 2)
    first.backward()


def frozen_before_backward(model: nn.Module, rank: int) -> None:
    loss = loss_of(model, rank)
    freeze(model, False, 1)
    loss.backward()
    freeze(model, True, 1)


def helper_that_restores(model: nn.Module, rank: int) -> None:
    """An evaluation helper that freezes everything and restores it, between a forward and its backward."""
    loss = loss_of(model, rank)
    model.requires_grad_(False)
    with torch.no_grad():
        model(floats(rank, 2))
    model(floats(rank, 3))
    model.requires_grad_(True)
    loss.backward()


def one_parameter(model: nn.Module, rank: int) -> None:
    bias = model.get_parameter("blocks.2.bias")
    first = loss_of(model, rank)
    bias.requires_grad_(False)
    second = loss_of(model, rank, 1)
    bias.requires_grad_(True)
    (first + second).backward()


def frozen_first(model: nn.Module, rank: int) -> None:
    freeze(model, False, 0, 1)
    first = loss_of(model, rank)
    freeze(model, True, 0, 1)
    second = loss_of(model, rank, 1)
    (first + second).backward()


def thawed_before_a_recomputation(model: nn.Module, rank: int) -> None:
    """A reentrant checkpoint inside a unit's own forward makes its graph anew, of what is trained by then."""
    freeze(model, False, 1)
    block = model.blocks[1]  # type: ignore[index]
    forward = block.forward
    linear = lambda x: nn.functional.linear(x, block.weight, block.bias)  # noqa: E731
    block.forward = lambda x: checkpoint(linear, x, use_reentrant=True)
    loss = loss_of(model, rank)
    freeze(model, True, 1)
    loss.backward()
    block.forward = forward


def frozen_for_good(model: nn.Module, rank: int) -> None:
    loss_of(model, rank)  # its loss is dropped
    freeze(model, False, 3)
    loss_of(model, rank, 1).backward()
    freeze(model, True, 3)


PROGRAMS: dict[str, Callable[[nn.Module, int], None]] = {
    program.__name__: program
    for program in (
        off_and_on,
        off_and_on_apart,
        frozen_before_backward,
        helper_that_restores,
        one_parameter,
        frozen_first,
        frozen_for_good,
        thawed_before_a_recomputation,
    )
}


def check(env: RankEnv, shape: tuple[int, ...], name: str, recompute: bool | None) -> None:
    plain, model = (seeded(lambda: Deep(recompute=recompute)) for _ in range(2))
    shard(model, env.mesh(shape))
    for _ in range(2):
        check_grads(model, plain, PROGRAMS[name], env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_29_toggles(request: pytest.FixtureRequest, shape: tuple[int, ...], name: str) -> None:
    pool_for(request, shape).run(check, shape, name, None)


def check_frozen_before_an_accumulating_backward(env: RankEnv, shape: tuple[int, ...]) -> None:
    model = shard(seeded(Deep), env.mesh(shape))
    loss = loss_of(model, env.rank)
    freeze(model, False, 1)
    with model.no_sync():  # type: ignore[operator]
        loss.backward()
    has = {name: param.grad is not None for name, param in model.named_parameters()}
    assert has == {name: not name.startswith("blocks.1.") for name in has}, has


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_29_frozen_before_an_accumulating_backward(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(check_frozen_before_an_accumulating_backward, shape)


class Heads(nn.Module):
    """A trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.tanh(self.blocks[0](x))
        return [self.blocks[1](x), self.blocks[2](x)]


def thawed_before_backwards_of_other_heads(model: nn.Module, rank: int) -> None:
    """All was frozen in the forwards, and the ranks' losses come from different heads: what trains is one answer."""
    model.requires_grad_(False)
    losses = [model(floats(rank, k))[head].square().sum() for k, head in enumerate((rank % 2, 0))]
    model.requires_grad_(True)
    for loss in losses:
        loss.backward()


def check_other_heads(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain, model = seeded(Heads), shard(seeded(Heads), env.mesh(shape))
    check_grads(model, plain, thawed_before_backwards_of_other_heads, env.rank, env.world_size)
    masks = [unit.trainable for unit in model._units()]  # type: ignore[operator]
    assert masks == [tuple(True for _ in mask) for mask in masks], f"thawed, but rank {env.rank} has {masks}"
    for k in range(2):
        run = lambda model, rank: model(floats(rank, k))[rank % 2].square().sum().backward()  # noqa: E731
        check_grads(model, plain, run, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_29_ranks_agree_about_what_trains(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(check_other_heads, shape)


def frozen_behind_a_graph_of_gradients(model: nn.Module, rank: int) -> None:
    """The units are opened by hand, frozen, while a graph of gradients still reads what they gathered."""
    x = floats(rank)
    loss = model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + grad.square().sum()
    loss.backward(retain_graph=True)
    model.requires_grad_(False)
    handles = [module.unshard(async_op=True) for module in model.modules() if hasattr(module, "unshard")]
    loss.backward()
    for handle in handles:
        handle.wait()
    model.requires_grad_(True)


def check_behind_a_graph(env: RankEnv) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    for _ in range(2):
        check_grads(model, plain, frozen_behind_a_graph_of_gradients, env.rank, env.world_size)


def test_rule_29_frozen_behind_a_graph_of_gradients(pool2: Pool) -> None:
    pool2.run(check_behind_a_graph)

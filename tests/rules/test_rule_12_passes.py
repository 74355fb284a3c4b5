"""Rule 12: any number of forwards and backwards give the right gradients, with one reduction per unit and backward."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.deep import DIM, Deep, collectives, floats, loss_of, of_kind, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, shard


def _fbb(model: nn.Module, rank: int) -> None:
    loss = loss_of(model, rank)
    loss.backward(retain_graph=True)
    loss.backward()


def _ffbb(model: nn.Module, rank: int) -> None:
    first, second = loss_of(model, rank), loss_of(model, rank, 1)
    first.backward()
    second.backward()


def _ffbb_stack(model: nn.Module, rank: int) -> None:
    first, second = loss_of(model, rank), loss_of(model, rank, 1)
    second.backward()
    first.backward()


def _ffb(model: nn.Module, rank: int) -> None:
    (loss_of(model, rank) + loss_of(model, rank, 1)).backward()


def _other_half(model: nn.Module, rank: int) -> None:
    # A second backward through the same forward reaches other units than the first.
    x = torch.tanh(model.blocks[0](floats(rank)))  # type: ignore[index,operator]
    y = torch.tanh(model.blocks[1](x))  # type: ignore[index,operator]
    x.sum().backward(retain_graph=True)
    y.sum().backward()


PASSES: dict[str, tuple[Callable[[nn.Module, int], None], int]] = {
    "F B B": (_fbb, 2),
    "F F B B": (_ffbb, 2),
    "F F B B, last in first out": (_ffbb_stack, 2),
    "F F B": (_ffb, 1),
}


class Twice(Deep):
    """Every unit runs twice in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def check_passes(env: RankEnv, name: str, shape: tuple[int, ...], build: Callable[[], nn.Module]) -> None:
    run, backwards = PASSES[name]
    plain = seeded(build)
    model = shard(seeded(build), env.mesh(shape))
    for _ in range(2):
        with collectives() as log:
            check_grads(model, plain, run, env.rank, env.world_size)
        reduced = Counter(of_kind(log, "reduce_scatter"))
        assert len(reduced) == 5
        assert set(reduced.values()) == {backwards}, reduced
        check_rest(model)


@pytest.mark.parametrize("build", [Deep, Twice])
@pytest.mark.parametrize("name", PASSES)
def test_rule_12_one_reduction_per_unit_and_backward(pool2: Pool, name: str, build: Callable[[], nn.Module]) -> None:
    pool2.run(check_passes, name, (2,), build)


class Sparing(nn.Linear):
    """A unit that a rank may run without using its parameters."""

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        return super().forward(x) if uses else 0.5 * x


class Chosen(nn.Module):
    """Runs some of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sparing(DIM, DIM) for _ in range(3))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, units: tuple[int, ...], uses: bool) -> Tensor:
        for unit in units:
            x = torch.tanh(self.blocks[unit](x, uses))
        return self.last(x)


def _interleaved(model: nn.Module, rank: int, events: tuple[object, ...], k: int = 0) -> None:
    """Forwards and backwards in some order.

    Args:
        model: a `Chosen`.
        rank: which rank's batches; a rank other than 0 uses no parameters in forwards that say so.
        events: (units, who) is a forward, who being "all" or "first"; a number is the backward of that forward, and one
            below 0 that of forward -1 - number, whose graph is kept.
        k: the first batch.
    """
    losses: list[Tensor] = []
    for event in events:
        if isinstance(event, tuple):
            units, who = event
            x = floats(rank, k + len(losses))
            losses.append(model(x, units, who == "all" or rank == 0).square().sum())
        else:
            assert isinstance(event, int), "a forward is a tuple"
            losses[event if event >= 0 else -1 - event].backward(retain_graph=event < 0)


INTERLEAVED: dict[str, tuple[tuple[object, ...], list[int]]] = {
    "F F B B": ((((0, 1, 2), "first"), ((0, 1, 2), "all"), 1, 0), [2, 2, 2]),
    "F F B B, one more unit": ((((0, 1), "first"), ((0, 1, 2), "all"), 1, 0), [2, 2, 2]),
    "F B B": ((((0, 1, 2), "first"), -1, 0), [2, 2, 2]),
    "F F B F B B, other units": ((((0, 1), "first"), ((0, 1), "all"), 1, ((0, 2), "first"), 0, 2), [3, 3, 2]),
    "F B F B, other units": ((((0, 1), "first"), 0, ((0, 2), "first"), 1), [2, 1, 1]),
}
"""What happens, and how often each unit is then reduced: in every backward that may reach it, as ranks must agree."""


def check_interleaved(env: RankEnv, name: str) -> None:
    """What a rank uses of a unit, in any of several backwards, does not decide whether it is reduced."""
    events, expected = INTERLEAVED[name]
    plain, model = seeded(Chosen), seeded(Chosen)
    shard(model, env.mesh(2))
    for k in (0, 3):
        with collectives() as log:
            check_grads(model, plain, lambda m, rank: _interleaved(m, rank, events, k), env.rank, env.world_size)
        reduced = Counter(of_kind(log, "reduce_scatter"))
        assert [reduced[f"reduce_scatter blocks.{unit}"] for unit in range(3)] == expected, reduced
        check_rest(model)
        torch.optim.SGD(model.parameters(), lr=0.0).step()


@pytest.mark.parametrize("name", INTERLEAVED)
def test_rule_12_ranks_use_what_they_want_in_each_of_several_backwards(pool2: Pool, name: str) -> None:
    pool2.run(check_interleaved, name)


def check_reentrant(env: RankEnv) -> None:
    """Under reentrant checkpoints each inner backward is a graph task; a unit inside one is reduced in it, once."""
    plain, model = (seeded(lambda: Deep(recompute=True)) for _ in range(2))
    shard(model, env.mesh(2))
    with collectives() as log:
        check_grads(model, plain, _ffbb, env.rank, env.world_size)
    assert set(Counter(of_kind(log, "reduce_scatter")).values()) == {2}


def test_rule_12_one_reduction_per_graph_task_under_reentrant_checkpoints(pool2: Pool) -> None:
    pool2.run(check_reentrant)


class Recomputed(nn.Module):
    """One unit with reentrant checkpoints inside; odd ranks leave the parameters in the first of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sparing(DIM, DIM) for _ in range(2))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, index == 1 or rank % 2 == 0, use_reentrant=True)
        return self.last(x)


def check_recomputed(env: RankEnv) -> None:
    """What reentrant checkpoints inside a unit make is reduced with the rest, when the unit's visit is over."""

    def run(model: nn.Module, rank: int) -> None:
        model(floats(rank), rank).square().sum().backward()

    plain, model = seeded(Recomputed), seeded(Recomputed)
    shard(model, env.mesh(2))
    with collectives() as log:
        check_grads(model, plain, run, env.rank, env.world_size)
    assert len(of_kind(log, "reduce_scatter")) == 1, "one for all of it"
    check_rest(model)


def test_rule_12_reentrant_checkpoints_inside_a_unit_are_reduced_together(pool2: Pool) -> None:
    pool2.run(check_recomputed)


def check_input_gradients(env: RankEnv) -> None:
    plain, model = seeded(Deep), seeded(Deep)
    shard(model, env.mesh(2), reshard_after_forward=True)
    x, y = floats(env.rank), floats(env.rank)
    with collectives() as log:
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
    (expected,) = torch.autograd.grad(plain(y).square().sum(), y)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert of_kind(log, "reduce_scatter", "all_reduce") == []
    assert all(param.grad is None for param in model.parameters())
    check_rest(model)
    check_grads(model, plain, step, env.rank, env.world_size)


def test_rule_12_autograd_grad_of_inputs_reshards_and_reduces_nothing(pool2: Pool) -> None:
    pool2.run(check_input_gradients)


def _penalty_before_another_forward(model: nn.Module, rank: int) -> None:
    """A gradient penalty whose graph is used after another forward, and after another backward."""
    x = floats(rank)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    other = loss_of(model, rank, 1)
    other.backward()
    with torch.no_grad():
        model(floats(rank, 2))
    (grad.norm() - 1.0).square().backward()


def _penalty_in_one_backward(model: nn.Module, rank: int) -> None:
    x = floats(rank)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (loss_of(model, rank, 1) + grad.square().sum()).backward()


class Forces(Deep):
    """A root whose forward differentiates what its units computed: forces are minus the gradient of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=self.training)
        return self.last(force)


def check_derivatives(env: RankEnv, name: str, reshard: bool | None) -> None:
    build, run = {
        "another forward between": (Deep, _penalty_before_another_forward),
        "in one backward": (Deep, _penalty_in_one_backward),
        "in the forward": (Forces, step),
        "in the forward, twice": (Forces, _ffb),
    }[name]
    plain, model = seeded(build), seeded(build)
    shard(model, env.mesh(2), reshard_after_forward=reshard)
    for _ in range(2):
        check_grads(model, plain, run, env.rank, env.world_size)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        check_rest(model)
    model.eval()
    model(floats(env.rank))


@pytest.mark.parametrize("reshard", [True, None])
@pytest.mark.parametrize("name", ["another forward between", "in one backward", "in the forward", "in the forward, twice"])
def test_rule_12_graphs_of_gradients(pool2: Pool, name: str, reshard: bool | None) -> None:
    pool2.run(check_derivatives, name, reshard)


def _restricted(env: RankEnv, by: str) -> None:
    """A backward that is restricted to inputs leaves no gradients; who steps all the same is told."""
    model = shard(seeded(Deep), env.mesh((env.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = floats(env.rank)
    loss = model(x).sum()
    if by == "backward":
        loss.backward(inputs=list(model.parameters()))
    else:
        torch.autograd.grad(loss, x)
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        with torch.no_grad():
            model(x)
        optimizer.step()


@pytest.mark.parametrize("by", ["backward", "grad"])
def test_rule_12_a_step_behind_a_backward_that_was_restricted_to_inputs_warns(pool2: Pool, by: str) -> None:
    pool2.run(_restricted, by)

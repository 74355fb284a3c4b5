"""Rule 12: any number of forwards and backwards give the right gradients, with one reduction per unit and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.rig import Pool, RankEnv
from tests.rules.support import Deep, collectives, floats, loss_of, of_kind, seeded, step
from tests.sharded import check_grads, check_rest, shard


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


def check_reentrant(env: RankEnv) -> None:
    """Under reentrant checkpoints each inner backward is a graph task; a unit inside one is reduced in it, once."""
    plain, model = (seeded(lambda: Deep(recompute=True)) for _ in range(2))
    shard(model, env.mesh(2))
    with collectives() as log:
        check_grads(model, plain, _ffbb, env.rank, env.world_size)
    assert set(Counter(of_kind(log, "reduce_scatter")).values()) == {2}


def test_rule_12_one_reduction_per_graph_task_under_reentrant_checkpoints(pool2: Pool) -> None:
    pool2.run(check_reentrant)


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

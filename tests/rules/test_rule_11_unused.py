"""Rule 11: unused parameters and units, inner losses, hidden and several outputs: the end of backward sweeps them all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.deep import DIM, Deep, collectives, floats, mean_grads, of_kind, only_sharded, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, shard
from tests.support.twin import assert_same, full_grads


@dataclasses.dataclass
class Answer:
    """An output in which tensors hide."""

    value: Tensor
    inner: list[Tensor]


class Holes(Deep):
    """Hands out what is inside; has parameters that it never uses, or on some ranks only."""

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(DIM, DIM)
            self.gain = nn.Parameter(torch.full((DIM,), 0.5))
            self.idle = nn.Parameter(torch.ones(3, 2))

        def forward(self, x: Tensor, gains: bool = True) -> Tensor:
            return super().forward(x * self.gain if gains else x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Layer() for _ in range(4))
        self.never = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, skip: int | None = None, gains: bool = True) -> Answer:
        inner = []
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = torch.tanh(block(x, gains))
            inner.append(x)
        return Answer(self.last(x), inner)


def _inner_loss(model: nn.Module, rank: int) -> None:
    model(floats(rank)).inner[1].square().sum().backward()


def _several(model: nn.Module, rank: int) -> None:
    out = model(floats(rank))
    (out.value.sum() + out.inner[2].square().sum()).backward()


def _by_rank(model: nn.Module, rank: int) -> None:
    # Only rank 1 uses the gains.
    model(floats(rank), gains=rank == 1).value.square().sum().backward()


def _unit_not_run(model: nn.Module, rank: int) -> None:
    # First with the unit, so that it is expected, and gathered ahead, when it does not come.
    model(floats(rank)).value.sum().backward()
    model(floats(rank, 1), skip=2).value.square().sum().backward()


CASES: dict[str, Any] = {
    "inner loss": _inner_loss,
    "several outputs": _several,
    "other parameters on each rank": _by_rank,
    "a unit gathered ahead and not run": _unit_not_run,
}


def check_case(env: RankEnv, name: str, shape: tuple[int, ...]) -> None:
    plain = seeded(Holes)
    model = shard(seeded(Holes), env.mesh(shape))
    for _ in range(2):
        check_grads(model, plain, CASES[name], env.rank, env.world_size)
        check_rest(model)
        assert all(p.grad is None for n, p in model.named_parameters() if "idle" in n or "never" in n)


@pytest.mark.parametrize("name", CASES)
def test_rule_11_unused_parameters_and_units_do_not_stop_their_neighbours(pool4: Pool, name: str) -> None:
    pool4.run(check_case, name, (2, 2))


def check_forward_alone_leaves_no_prefetch(env: RankEnv) -> None:
    model = shard(seeded(Holes), env.mesh(2), reshard_after_forward=True)
    with torch.no_grad():
        model(floats(env.rank))
        model(floats(env.rank), skip=3)
    check_rest(model)


def test_rule_11_a_prefetched_unit_that_did_not_run_is_freed(pool2: Pool) -> None:
    pool2.run(check_forward_alone_leaves_no_prefetch)


def check_zeros(env: RankEnv) -> None:
    plain = seeded(Holes)
    model = shard(seeded(Holes), env.mesh(2))
    only_sharded(model, "set_unused_param_grads", "zero")
    _several(model, env.rank)
    grads = full_grads(model)
    expected = mean_grads(plain, _several, env.world_size)
    zeros = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    assert_same(grads, {name: zeros[name] if grad is None else grad for name, grad in expected.items()})


def test_rule_11_policy_gives_zeros_instead_of_none(pool2: Pool) -> None:
    pool2.run(check_zeros)


def check_ranks_reduce_in_one_order(env: RankEnv) -> None:
    """On one rank the first unit's gradients are complete before the second's, on the other after them."""

    class Loop(Deep):
        detach = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](torch.tanh(self.blocks[0](x)))
            return self.blocks[0](x.detach() if self.detach else x)

    def run(model: nn.Module, rank: int) -> None:
        model.detach = rank == 1  # type: ignore[assignment]
        model(floats(rank)).square().sum().backward()

    plain = seeded(lambda: Loop(layers=2))
    # Whole until the end: what a rank gathers in backward does depend on what its loss reaches.
    model = shard(seeded(lambda: Loop(layers=2)), env.mesh(2), reshard_after_forward=False)
    with collectives() as log:
        check_grads(model, plain, run, env.rank, env.world_size)
    assert [entry.partition(" ")[2] for entry in of_kind(log, "reduce_scatter")][:2] == ["blocks.1", "blocks.0"]


def test_rule_11_ranks_reduce_in_one_order_whoever_completes_first(pool2: Pool) -> None:
    pool2.run(check_ranks_reduce_in_one_order)

"""Rule 13: a recomputation neither records the order, nor uses up prefetched units, nor reshards early."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hsdp
from tests.support.deep import Deep, RootFirst, collectives, floats, of_kind, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, shard


class Inside(Deep):
    """Units that recompute a part of themselves; their first op changes their input in place."""

    class Part(nn.Linear):
        reentrant = True

        def forward(self, x: Tensor) -> Tensor:
            x = x.mul_(0.5)
            return x + checkpoint(super().forward, x, use_reentrant=self.reentrant)

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            part = self.Part(block.in_features, block.out_features)
            part.reentrant = recompute
            self.blocks[index] = part

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(torch.tanh(x) * 1.0)  # an input that nobody saved
        return self.last(x)


BUILDS = {
    f"{where}, {'reentrant' if reentrant else 'not reentrant'}": (build, reentrant)
    for where, build in {"around": Deep, "inside": Inside}.items()
    for reentrant in (True, False)
}


def check_gathers(env: RankEnv, name: str, shape: tuple[int, ...], prefetch: int) -> None:
    build, reentrant = BUILDS[name]
    plain, model = (seeded(lambda: build(recompute=reentrant)) for _ in range(2))
    policy = hsdp.CommPolicy(prefetch=prefetch)
    shard(model, env.mesh(shape), reshard_after_forward=True, comm_policy=policy)
    for _ in range(3):
        with collectives() as log:
            check_grads(model, plain, step, env.rank, env.world_size)
        units = [unit.name for unit in model._units()]  # type: ignore[operator]
        gathered = [entry.partition(" ")[2] for entry in of_kind(log, "all_gather")]
        # Each unit once in forward, in the order in which they run, and once in backward: none for a recomputation.
        assert gathered[:5] == units, gathered
        assert sorted(gathered[5:]) == sorted(units), gathered
        check_rest(model)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", BUILDS)
def test_rule_13_recompute_gathers_nothing_of_its_own(pool2: Pool, name: str, prefetch: int) -> None:
    pool2.run(check_gathers, name, (2,), prefetch)


def check_parameters_stay(env: RankEnv) -> None:
    """A unit that a recomputation opened is still whole when its own backward comes."""
    model = shard(seeded(lambda: Deep(recompute=True)), env.mesh(2), reshard_after_forward=True)
    seen: list[bool] = []

    def watch(module: nn.Module, args: object, out: Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:  # a recomputation
            out.register_hook(lambda grad: seen.append(module._hsdp_state.unit.open))  # type: ignore[union-attr]

    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(watch)
    step(model, env.rank)
    assert seen == [True] * 4, seen
    check_rest(model)


def test_rule_13_recompute_does_not_reshard_early(pool2: Pool) -> None:
    pool2.run(check_parameters_stay)


def step_on_a_thread(model: nn.Module, rank: int) -> None:
    """The backward on a thread of its own, whose autograd nodes are numbered from 0; a device has such a thread."""
    loss = model(floats(rank)).square().mean()
    failed: list[BaseException] = []

    def backward() -> None:
        try:
            loss.backward()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def check_numbers(env: RankEnv, reentrant: bool, shape: tuple[int, ...]) -> None:
    plain, model = (seeded(lambda: RootFirst(reentrant)) for _ in range(2))
    shard(model, env.mesh(shape), reshard_after_forward=True)
    for _ in range(2):
        check_grads(model, plain, step_on_a_thread, env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_rule_13_numbers_of_nodes_are_those_of_a_thread(pool2: Pool, reentrant: bool) -> None:
    pool2.run(check_numbers, reentrant, (2,))


class CallsItself(nn.Module):
    """A unit that recomputes its body, with a unit in it, and calls itself with what comes out."""

    def __init__(self, reentrant: bool | None, depth: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 0.9, 8))
        self.reentrant, self.depth = reentrant, depth

    def units(self) -> list[nn.Module]:
        return [self.inner]

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) * self.scale)

    def forward(self, x: Tensor, calls: int | None = None) -> Tensor:
        calls = self.depth if calls is None else calls
        y = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return y if calls == 0 else self(y, calls - 1) + x * 0.1


def check_recursion(env: RankEnv, reentrant: bool | None, depth: int) -> None:
    plain, model = (seeded(lambda: nn.Sequential(CallsItself(reentrant, depth))) for _ in range(2))
    shard(model[0], env.mesh(2), reshard_after_forward=True)
    hsdp.fully_shard(model, mesh=env.mesh(2))

    def run(module: nn.Module, rank: int) -> None:
        x = torch.full((3, 8), 1.0 + rank, requires_grad=True, dtype=torch.float64)
        module(x).square().sum().backward()

    for _ in range(3):
        check_grads(model, plain, run, env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_rule_13_the_visit_of_an_outer_call_goes_on_behind_that_of_an_inner_one(
    pool2: Pool, reentrant: bool | None, depth: int
) -> None:
    pool2.run(check_recursion, reentrant, depth)

"""One backward that goes through several roots, or around one: what landed in any is undone if another fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hsdp
from tests.support.deep import DIM, Deep, floats, mean_grads, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, shard
from tests.support.twin import assert_same, full_grads


class BoomError(Exception):
    """What the tests raise."""


class Recomputed(nn.Module):
    """A block whose forward is a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(lambda x: torch.tanh(self.up(x)), x, use_reentrant=True)
        return again


class Shelf(nn.Module):
    """Blocks that the program calls itself, or a model in front of one."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recomputed() if recomputed else nn.Linear(DIM, DIM) for _ in range(3))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def _one_behind_another(model: Any, x: Tensor) -> Tensor:
    for block in (*model.blocks, model.last):
        x = torch.tanh(block(x))
    return x


def _recomputed(model: Any, x: Tensor) -> Tensor:
    for block in (*model.blocks, model.last):
        x = checkpoint(block, x, use_reentrant=True)
    return x


def _recomputed_twice(model: Any, x: Tensor) -> Tensor:
    for block in (*model.blocks, model.last):
        x = checkpoint(partial(checkpoint, block, use_reentrant=True), x, use_reentrant=True)
    return x


def _beside_a_part(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x) + model.blocks[-1](x)
    return out


CASES: dict[str, tuple[Callable[[], nn.Module], bool, Callable[[Any, Tensor], Tensor]]] = {
    "models behind one another": (Shelf, False, _one_behind_another),
    "models in reentrant checkpoints": (Shelf, False, _recomputed),
    "models in reentrant checkpoints in others": (Shelf, False, _recomputed_twice),
    "a model and a part of it": (Shelf, True, _beside_a_part),
    "a model and a part of it, a reentrant checkpoint": (partial(Shelf, True), True, _beside_a_part),
    "a model of reentrant checkpoints and a part of it": (partial(Deep, True), True, _beside_a_part),
}
"""The model, whether it is a unit around its blocks, and what is run."""


def _build(env: RankEnv, build: Callable[[], nn.Module], around: bool, shape: tuple[int, ...]) -> Any:
    model: Any = seeded(build)
    if around:
        return shard(model, env.mesh(shape))
    for block in (*model.blocks, model.last):
        hsdp.fully_shard(block, mesh=env.mesh(shape))
    return model


def _step(run: Callable[[Any, Tensor], Tensor], model: Any, rank: int, k: int = 0) -> None:
    run(model, floats(rank, k)).square().sum().backward()


def _locals(model: Any) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.to_local().clone() for n, p in model.named_parameters()}


def _undone(env: RankEnv, case: str, shape: tuple[int, ...], first: bool) -> None:
    build, around, run = CASES[case]
    for name, _ in seeded(build).named_parameters():
        model = _build(env, build, around, shape)
        if first:
            _step(run, model, env.rank)
        before = _locals(model)

        def explode(param: Tensor) -> None:
            raise BoomError

        # When it raises differs: where its unit lands, or at the end of its root's backward.
        handle = model.get_parameter(name).register_post_accumulate_grad_hook(explode)
        with pytest.raises(BoomError):
            _step(run, model, env.rank, 7)
        handle.remove()
        for other, grad in _locals(model).items():
            was = before[other]
            assert (grad is None) == (was is None), (name, other)
            assert grad is None or was is None or torch.equal(grad, was), (name, other)
        with pytest.warns(UserWarning, match="gradients of that iteration are dropped"):
            _step(run, model, env.rank, 1)

        def whole(plain: nn.Module, rank: int) -> None:
            for k in (0, 1) if first else (1,):
                _step(run, plain, rank, k)

        assert_same(full_grads(model), mean_grads(seeded(build), whole, env.world_size))
        for root in (model,) if around else (*model.blocks, model.last):
            check_rest(root)


@pytest.mark.parametrize("first", [False, True], ids=["", "adds"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.parametrize("case", CASES)
def test_what_landed_in_a_root_is_undone_with_another(pool2: Pool, case: str, shape: tuple[int, ...], first: bool) -> None:
    pool2.run(_undone, case, shape, first)


def _caught(env: RankEnv) -> None:
    """A backward inside of another one fails, and its error is caught there: the outer one must not end well."""
    block, model = Shelf(), Shelf()
    for one in (block, model):
        hsdp.fully_shard(one, mesh=env.mesh((2,)))

    @torch.enable_grad()
    def hook(grad: Tensor) -> None:
        x = floats(env.rank).float().detach()
        block(x).sum().backward()
        block.last.weight.register_post_accumulate_grad_hook(lambda param: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            block(x).sum().backward()

    out = model(floats(env.rank).float().detach())
    out.register_hook(hook)
    with pytest.raises(hsdp.StateError, match="let such an error pass"):
        out.sum().backward()
    assert all(param.grad is None for one in (block, model) for param in one.parameters())


def test_an_inner_backward_whose_error_was_caught_is_told(pool2: Pool) -> None:
    pool2.run(_caught)

"""Rule 7: the next forward uses the newest weights, whoever changed them and whatever was gathered before.

`tests/unit/test_freshness.py` has all pairs of a change and what was before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.rules.test_rule_14_accumulation import Choosy
from tests.support.deep import Deep, floats, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, shard


def _optimizer(make: Callable[..., torch.optim.Optimizer], model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.1)
    make(model.parameters(), lr=0.05).step()
    model.zero_grad()


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def _data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.add_(0.1)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "default": partial(_optimizer, torch.optim.SGD),
    "foreach": partial(_optimizer, partial(torch.optim.AdamW, foreach=True)),
    "fused": partial(_optimizer, partial(torch.optim.AdamW, fused=True)),
    "load": _load,
    "p.data": _data,
}


def _unused_prefetch(model: Any, rank: int) -> None:
    model(floats(rank), "abc").sum().backward()
    model(floats(rank), "a").sum().backward()


def _root_kept(model: Any, rank: int) -> None:
    model(floats(rank))


def _eval(model: Any, rank: int) -> None:
    with torch.no_grad():
        model(floats(rank))


def _graph_kept(model: Any, rank: int) -> None:
    model(floats(rank)).sum().backward(create_graph=True)


BEFORE: dict[str, Callable[[Any, int], None]] = {
    "a prefetched unit was not used": _unused_prefetch,
    "the root kept its parameters": _root_kept,
    "evaluation": _eval,
    "the backward kept its graph": _graph_kept,
}


def changed(env: RankEnv, before: str, keep: bool | None) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """A plain model and a sharded one, behind each change."""
    plain, model = seeded(Choosy), shard(seeded(Choosy), env.mesh(2), reshard_after_forward=keep)
    for name, change in CHANGES.items():
        BEFORE[before](model, env.rank)
        model.zero_grad()
        change(model)
        change(plain)
        yield name, plain, model
    check_rest(model)


def check_fresh(env: RankEnv, before: str, keep: bool | None) -> None:
    for name, plain, model in changed(env, before, keep):
        with torch.no_grad():
            expected = plain(floats(env.rank))
        told = model(floats(env.rank))
        torch.testing.assert_close(told, expected, rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name} differs: {m}")
        told.sum().backward()


@pytest.mark.parametrize("keep", [None, False, True])
@pytest.mark.parametrize("before", BEFORE)
def test_rule_07_the_next_forward_uses_the_newest_weights(pool2: Pool, before: str, keep: bool | None) -> None:
    pool2.run(check_fresh, before, keep)


def check_opened(env: RankEnv, before: str, keep: bool | None) -> None:
    """`unshard()` shows the newest weights too."""
    for name, plain, model in changed(env, before, keep):
        units: list[Any] = [module for module in model.modules() if isinstance(module, hsdp.HSDPModule)]
        for unit in units:
            unit.unshard()
        for (where, module), other in zip(model.named_modules(), plain.modules(), strict=True):
            for kind, _ in other.named_parameters(recurse=False):
                shown, expected = getattr(module, kind), getattr(other, kind)
                assert torch.allclose(shown, expected, rtol=1e-11, atol=1e-11), f"{name}: {where}.{kind} is not the newest"
        for unit in units:
            unit.reshard()


@pytest.mark.parametrize("keep", [None, False, True])
@pytest.mark.parametrize("before", BEFORE)
def test_rule_07_unshard_shows_the_newest_weights(pool2: Pool, before: str, keep: bool | None) -> None:
    pool2.run(check_opened, before, keep)


def check_write_behind_a_graph(env: RankEnv, write: bool) -> None:
    """A graph of gradients reads on what was gathered: a hidden write is told in its backward, behind another pass too."""
    model = shard(seeded(Deep), env.mesh((2,)), reshard_after_forward=True)
    x = floats(env.rank).requires_grad_()
    out = model(x).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    model(floats(env.rank, 1)).square().sum().backward()
    if write:
        for param in list(model.parameters())[:2]:
            param.data.mul_(0.5)
        with pytest.raises(hsdp.StaleParametersError):
            (out + grad.square().sum()).backward()
        model.zero_grad()
    else:
        (out + grad.square().sum()).backward()


@pytest.mark.parametrize("write", [True, False])
def test_rule_07_writes_behind_a_graph_of_gradients(pool2: Pool, write: bool) -> None:
    pool2.run(check_write_behind_a_graph, write)


def check_recomputation_behind_a_graph(env: RankEnv) -> None:
    """A recomputation comes first to a unit that a graph of gradients reads: it must look as an output's gradient does."""
    model = shard(seeded(partial(Deep, recompute=False)), env.mesh((2,)))
    x = floats(env.rank).requires_grad_()
    out = model(x).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    model.blocks[0].weight.data.mul_(0.5)  # type: ignore[operator, union-attr]
    with pytest.raises(hsdp.StaleParametersError):
        (out + grad.square().sum()).backward()


def test_rule_07_a_recomputation_behind_a_graph_of_gradients(pool2: Pool) -> None:
    pool2.run(check_recomputation_behind_a_graph)


def check_write_behind_an_unshard(env: RankEnv, waited: bool) -> None:
    """What `unshard(async_op=True)` gathered serves forwards until the shards change, also where only bits tell it."""
    plain = seeded(Deep)
    model = shard(copy.deepcopy(plain), env.mesh((2,)))
    first: Any = model.blocks[0]
    handle = first.unshard(async_op=True)
    if waited:
        handle.wait()
    for module in (model, plain):
        for param in module.parameters():
            param.data.mul_(0.5)
    torch.testing.assert_close(model(floats(env.rank)), plain(floats(env.rank)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("waited", [True, False])
def test_rule_07_writes_behind_an_asynchronous_unshard(pool2: Pool, waited: bool) -> None:
    pool2.run(check_write_behind_an_unshard, waited)


def _by_data(old: list[Any], new: list[Any]) -> None:
    for mine, other in zip(old, new, strict=True):
        mine.data.mul_(0.9).add_(other.data, alpha=0.1)


def _by_foreach(old: list[Any], new: list[Any]) -> None:
    torch._foreach_mul_(old, 0.9)
    torch._foreach_add_(old, new, alpha=0.1)


def _by_lerp(old: list[Any], new: list[Any]) -> None:
    for mine, other in zip(old, new, strict=True):
        mine.lerp_(other, 0.1)


def _by_sign(old: list[Any], new: list[Any]) -> None:
    for mine in old:
        mine.data.neg_()  # sums of words do not see it: an even number of highest bits


def _by_order(old: list[Any], new: list[Any]) -> None:
    for mine in old:
        mine.data.copy_(mine.data.flip(mine.ndim - 1).clone())  # nor the order of words


AVERAGES = {"p.data": _by_data, "foreach": _by_foreach, "in place": _by_lerp, "signs": _by_sign, "order": _by_order}


class Momentum(nn.Module):
    """An encoder that is trained towards its own average, which its forward goes on with before it uses it."""

    def __init__(self, how: str, at: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))  # three that train, then their averages
        self.blocks[3:].requires_grad_(False)
        self.average, self.at, self.moves = AVERAGES[how], at, True

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for at, block in enumerate(self.blocks):
            if at == self.at and self.moves:
                self.move()
            with torch.set_grad_enabled(at < 3):
                y = x if at == 3 else y
                y = torch.tanh(block(y))
            if at == 2:
                mine = y
        return mine - y

    def move(self) -> None:
        with torch.no_grad():
            self.average(list(self.blocks[3:].parameters()), list(self.blocks[:3].parameters()))


def check_momentum(env: RankEnv, shape: tuple[int, ...], how: str, at: int, prefetch: int) -> None:
    plain: Any = seeded(partial(Momentum, how, at))
    model = shard(copy.deepcopy(plain), env.mesh(shape), comm_policy=hsdp.CommPolicy(prefetch=prefetch))
    optimizers = [torch.optim.SGD(list(net.blocks[:3].parameters()), lr=0.5) for net in (model, plain)]
    plain.moves = False
    for k in range(4):
        out = model(floats(env.rank, k))
        out.square().sum().backward()
        plain.move()
        outs = [plain(floats(rank, k)) for rank in range(env.world_size)]
        torch.testing.assert_close(out, outs[env.rank], rtol=1e-11, atol=1e-11)
        (sum(each.square().sum() for each in outs) / env.world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_rest(model)


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("at", [0, 2, 3])
@pytest.mark.parametrize("how", AVERAGES)
def test_rule_07_units_that_are_written_in_a_forward_before_their_own(
    pool2: Pool, pool4: Pool, how: str, at: int, prefetch: int
) -> None:
    pool2.run(check_momentum, (2,), how, at, prefetch)
    if at == 3 and prefetch == 1:
        pool4.run(check_momentum, (2, 2), how, at, prefetch)

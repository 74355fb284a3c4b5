"""Rule 21: ranks whose losses use different units take the same branches all the same: right numbers on all of them.

What one rank enters, another passes over; both have to come to every gather and reduction in one order, in graphs in which
units are recomputed, visited twice, stale, or left by a forward that raised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hsdp
from hsdp.errors import StaleParametersError
from tests.support.deep import DIM, floats, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, mesh_id, pool_for, shard


class Boom(Exception):  # noqa: N818
    """What a user's module raises."""


class TwoHeads(nn.Module):
    """Blocks in a row, the last of them recomputed, and two heads that every forward runs; all of them are units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(DIM, 2) for _ in range(2))
        self.last = nn.Linear(DIM, DIM)
        self.reentrant = False

    def units(self) -> list[nn.Module]:
        """What is sharded on its own."""
        return [*self.blocks, *self.heads]

    def forward(self, x: Tensor, aux: list[Tensor], skip: bool = False, how: str = "") -> list[Tensor]:
        x = torch.tanh(self.last(x))
        if not skip:
            x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        if how == "raises":
            raise Boom
        if how == "raises in backward":
            x = _Raises.apply(x)
        y = checkpoint(self._recomputed, x, aux, how, use_reentrant=self.reentrant)
        y = y.detach() if how == "detached" else y
        return [head(y) for head in self.heads]

    def _recomputed(self, x: Tensor, aux: list[Tensor], how: str) -> Tensor:
        y = torch.tanh(self.blocks[2](x))
        if how == "inner graph":
            with torch.enable_grad():
                probe = x.detach().requires_grad_()
                (grad,) = torch.autograd.grad(self.blocks[2](probe).square().sum(), probe, create_graph=True)
            y = y + 0.1 * grad
        aux.append(y.square().mean())
        return y


def loss_of(model: nn.Module, rank: int, k: int = 0, skip: bool = False, even: bool = False, how: str = "") -> Tensor:
    """The loss of one head for each rank in turns, or of both, and one of the recomputed block beside it."""
    aux: list[Tensor] = []
    outs = model(floats(rank, k), aux, skip, how)
    chosen = outs if even else [outs[rank % 2]]
    beside = torch.zeros((), dtype=torch.float64) if model.reentrant else aux[0]
    return sum((out.square().sum() for out in chosen), beside)


def beside_a_recomputation(model: nn.Module, rank: int) -> None:
    """The loss beside the output asks for a recomputation before the engine has come behind both heads."""
    loss_of(model, rank).backward()


def two_forwards_one_backward(model: nn.Module, rank: int) -> None:
    """The heads are open since the later forward on those ranks that used them in it."""
    first = loss_of(model, rank, even=True)
    (first + loss_of(model, rank, 1, skip=True)).backward()


def recomputed_while_open(model: nn.Module, rank: int) -> None:
    """The recomputed block is open since the later forward when the earlier one's, behind a head of some ranks, begins.

    Behind it comes a block without gradients, which was closed meanwhile and is gathered again.
    """
    model.blocks[0].requires_grad_(False)  # type: ignore[operator, union-attr]
    first, second = (model(floats(rank, k), []) for k in range(2))
    (first[rank % 2].square().sum() + sum(out.square().sum() for out in second)).backward()
    model.blocks[0].requires_grad_(True)  # type: ignore[operator, union-attr]


def another_backward_failed(model: nn.Module, rank: int) -> None:
    """A backward raised before that of another forward: the order of the reductions is that of the forwards."""
    fails, second = loss_of(model, rank, even=True, how="raises in backward"), loss_of(model, rank, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(model, hsdp.HSDPModule):  # it leaves nothing, which plain autograd cannot say of itself
            with pytest.raises(Boom):
                fails.backward()
        second.backward()


def penalty_and_a_failed_forward(model: nn.Module, rank: int) -> None:
    """The graph of a gradient penalty reads unsharded parameters; a forward that raised meanwhile frees none of them."""
    x = floats(rank)
    outs = model(x, [])
    loss = outs[rank % 2].square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(Boom):
        model(floats(rank, 1), [], how="raises")
    (loss + grad.square().sum()).backward()


def recomputed_against_expectation(model: nn.Module, rank: int) -> None:
    """A backward did not reach a reentrant checkpoint, so that nobody expects the next one to."""
    model.reentrant = True
    loss_of(model, rank, even=True, how="detached").backward()
    loss_of(model, rank, 1).backward()
    model.reentrant = False


def graph_in_a_recomputation(model: nn.Module, rank: int) -> None:
    """A recomputed block makes a graph of gradients behind heads that some ranks entered and others passed over."""
    model.reentrant = True
    first, second = loss_of(model, rank, even=True), loss_of(model, rank, 1, how="inner graph")
    second.backward()
    first.backward()
    model.reentrant = False


def stays_after_backward(model: nn.Module, rank: int) -> None:
    """Two forwards, then their backwards. Units stay whole behind the first one, entered by a rank or passed over."""
    both, one = (loss_of(model, rank, k, even=k == 0) for k in range(2))
    if isinstance(model, hsdp.HSDPModule):
        model.set_reshard_after_backward(False)
    one.backward()
    both.backward()
    if isinstance(model, hsdp.HSDPModule):
        model.set_reshard_after_backward(True)


def trained_head_of_one_rank(model: nn.Module, rank: int) -> None:
    """Only a head is trained that one rank does not use: the other's backward accumulates into the model's input alone."""
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("heads.0"))
    loss_of(model, rank).backward()
    model.requires_grad_(True)


def inputs_of_backward(model: nn.Module, rank: int) -> None:
    """A backward into the model's input alone leaves no gradients."""
    x = floats(rank)
    model(x, [])[rank % 2].square().sum().backward(inputs=[x])
    loss_of(model, rank, 1).backward()


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise Boom


RUNS = (
    beside_a_recomputation,
    two_forwards_one_backward,
    recomputed_while_open,
    another_backward_failed,
    penalty_and_a_failed_forward,
    recomputed_against_expectation,
    graph_in_a_recomputation,
    stays_after_backward,
    trained_head_of_one_rank,
    inputs_of_backward,
)


def check(env: RankEnv, shape: tuple[int, ...], reshard: bool | None, run: Callable[[nn.Module, int], None]) -> None:
    """Run by run equal to one device; twice, the second time with what the first one recorded."""
    plain, model = seeded(TwoHeads), _sharded(env, shape, reshard)
    for _ in range(2):
        check_grads(model, plain, run, env.rank, env.world_size)


def _sharded(env: RankEnv, shape: tuple[int, ...], reshard: bool | None) -> nn.Module:
    model = seeded(TwoHeads)
    return shard(model, env.mesh(shape), reshard_after_forward=reshard)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_21_losses_of_different_units(
    request: pytest.FixtureRequest, shape: tuple[int, ...], reshard: bool | None, run: Callable[[nn.Module, int], None]
) -> None:
    pool_for(request, shape).run(check, shape, reshard, run)


def check_stale(env: RankEnv, shape: tuple[int, ...], changed: str) -> None:
    """Stale parameters of a head that only some ranks enter, or of what is behind the heads, are told on all ranks."""
    plain, model = seeded(TwoHeads), _sharded(env, shape, reshard=True)
    for _ in range(2):
        loss = loss_of(model, env.rank)
        with torch.no_grad():
            model.get_parameter(changed).mul_(0.5)
        with pytest.raises(StaleParametersError, match=changed.rpartition(".")[0]):
            loss.backward()
        with torch.no_grad():
            model.get_parameter(changed).mul_(2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_grads(model, plain, beside_a_recomputation, env.rank, env.world_size)


@pytest.mark.parametrize("changed", ["heads.0.weight", "heads.1.weight", "blocks.1.weight"])
def test_rule_21_stale_parameters_are_told_at_one_point(pool4: Pool, changed: str) -> None:
    pool4.run(check_stale, (2, 2), changed)


def check_pending(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Each rank sees what is pending on others: who asks before a `flush` does not leave them alone in it."""
    plain, model = seeded(TwoHeads), _sharded(env, shape, reshard=None)

    def accumulated(model: nn.Module, rank: int) -> None:
        if not isinstance(model, hsdp.HSDPModule):
            loss_of(model, rank).backward()
            return
        with model.no_sync():
            loss_of(model, rank).backward()
        pending = model.pending_gradients()
        elsewhere = {name for name in pending if pending[name] == "on other ranks"}
        assert elsewhere == {f"heads.{1 - rank % 2}.{name}" for name in ("weight", "bias")}
        assert set(pending) == {name for name, _ in model.named_parameters()}
        if {name for name in pending if name.startswith("heads.0")}:
            model.flush()
        assert not model.pending_gradients()

    check_grads(model, plain, accumulated, env.rank, env.world_size)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_21_ranks_see_what_is_pending_on_others(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(check_pending, shape)


class CalledOften(nn.Module):
    """A unit that is called three times, with others before and between; and two modules that are one unit."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.recomputes = kind == "recomputed"  # the middle one of the three calls, reentrantly
        self.stem, self.between, self.first, self.second, self.head = (nn.Linear(DIM, DIM) for _ in range(5))
        self.often = nn.Linear(DIM, DIM)
        self.often.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor, uses: tuple[int, ...]) -> Tensor:
        """`uses`: which of the outputs below go into the result."""
        x = torch.tanh(self.stem(x))
        outs = [torch.tanh(self.often(x)), torch.tanh(self.first(x))]
        middle = torch.tanh(self.between(x))
        outs.append(
            torch.tanh(checkpoint(self.often, middle, use_reentrant=True) if self.recomputes else self.often(middle))
        )
        outs.append(torch.tanh(self.second(x)))
        outs.append(torch.tanh(self.often(x * 2.0)))
        return self.head(sum((outs[use] for use in uses), x))  # type: ignore[no-any-return]


_ALL = (0, 1, 2, 3, 4)
USES: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "then all": [((4,), _ALL), (_ALL, _ALL), (_ALL, _ALL)],
    "in turns": [((0, 1), (2, 3)), ((2, 3), (0, 1)), ((4,), (0,)), ((1, 3), (1,)), (_ALL, (1,)), ((), _ALL), (_ALL, _ALL)],
    "always": [((0, 3), (2, 4, 1))] * 3,
}


def check_calls(env: RankEnv, shape: tuple[int, ...], pattern: str, sums: bool, prefetch: int, kind: str = "") -> None:
    plain, model = seeded(lambda: CalledOften(kind)), seeded(lambda: CalledOften(kind))
    units: list[Any] = [[model.first, model.second], model.often, model.between, model.stem, model]
    for unit in units:
        hsdp.fully_shard(unit, mesh=env.mesh(shape), comm_policy=hsdp.CommPolicy(prefetch=prefetch))
    for k, uses in enumerate(USES[pattern]):

        def run(module: nn.Module, rank: int, k: int = k, uses: tuple[tuple[int, ...], ...] = uses) -> None:
            if sums:  # two micro-batches, of which ranks use other calls, too
                before = USES[pattern][k - 1]
                with model.accumulate(last=False) if module is model else nullcontext():
                    module(floats(rank, k + 50), before[rank % 2]).square().sum().backward()
            module(floats(rank, k), uses[rank % 2]).square().sum().backward()

        check_grads(model, plain, run, env.rank, env.world_size)


@pytest.mark.parametrize(("sums", "prefetch"), [(False, 0), (False, 1), (True, 0)])
@pytest.mark.parametrize("pattern", USES)
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)], ids=mesh_id)
def test_rule_21_losses_of_different_calls_of_a_unit(
    request: pytest.FixtureRequest, shape: tuple[int, ...], pattern: str, sums: bool, prefetch: int
) -> None:
    pool_for(request, shape).run(check_calls, shape, pattern, sums, prefetch)


@pytest.mark.parametrize("pattern", USES)
def test_rule_21_a_recomputation_does_not_stand_for_another_call(pool2: Pool, pattern: str) -> None:
    pool2.run(check_calls, (2, 1), pattern, False, 1, "recomputed")


@pytest.mark.parametrize("pattern", USES)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_21_losses_of_different_calls_of_a_frozen_unit(
    request: pytest.FixtureRequest, shape: tuple[int, ...], pattern: str
) -> None:
    pool_for(request, shape).run(check_calls, shape, pattern, False, 1, "frozen")


class CalledTwice(nn.Module):
    """A block of three layers, one of them frozen, runs twice behind the others; the loss may leave out either."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.between, self.base, self.up, self.down = (nn.Linear(DIM, DIM) for _ in range(5))
        self.base.requires_grad_(False)

    def block(self, x: Tensor) -> Tensor:
        return self.base(x) + torch.tanh(self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, uses: tuple[int, ...]) -> Tensor:
        x = torch.tanh(self.between(torch.tanh(self.stem(x))))
        outs = self.block(x), self.block(2.0 * x)
        return sum((outs[use] for use in uses), x)


TWICE: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((0, 1), (0,)),
    ((), (1,)),
    ((0, 1), (0, 1)),
    ((0,), (1,)),
    ((1,), ()),
    ((0,), ()),
    ((), (0, 1)),
]
"""Which calls go into the losses of even and odd ranks, step by step."""


def check_called_twice(env: RankEnv, shape: tuple[int, ...], prefetch: int) -> None:
    plain, model = seeded(CalledTwice), seeded(CalledTwice)
    for unit in (model.stem, model.between, model.base, model.up, model.down, model):
        hsdp.fully_shard(unit, mesh=env.mesh(shape), comm_policy=hsdp.CommPolicy(prefetch=prefetch))
    for k, uses in enumerate(TWICE):

        def run(module: nn.Module, rank: int, k: int = k, uses: tuple[tuple[int, ...], ...] = uses) -> None:
            module(floats(rank, k), uses[rank % 2]).square().sum().backward()

        check_grads(model, plain, run, env.rank, env.world_size)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_21_a_rank_enters_units_for_an_earlier_call_than_others(
    request: pytest.FixtureRequest, shape: tuple[int, ...], prefetch: int
) -> None:
    pool_for(request, shape).run(check_called_twice, shape, prefetch)


def check_two_forwards(env: RankEnv, shape: tuple[int, ...], prefetch: int) -> None:
    """Of two forwards that one backward answers, ranks use other calls in each, and in some none at all."""
    plain, model = seeded(CalledOften), seeded(CalledOften)
    for unit in (model.often, model.between, model.stem, model):
        hsdp.fully_shard(unit, mesh=env.mesh(shape), comm_policy=hsdp.CommPolicy(prefetch=prefetch))
    pattern = USES["in turns"]
    for k, uses in enumerate(pattern):

        def run(module: nn.Module, rank: int, k: int = k, uses: tuple[tuple[int, ...], ...] = uses) -> None:
            later = pattern[(k + 3) % len(pattern)]
            outs = module(floats(rank, k), uses[rank % 2]) + module(floats(rank, k + 50), later[(rank + 1) % 2])
            outs.square().sum().backward()

        check_grads(model, plain, run, env.rank, env.world_size)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)], ids=mesh_id)
def test_rule_21_losses_of_different_calls_in_two_forwards(
    request: pytest.FixtureRequest, shape: tuple[int, ...], prefetch: int
) -> None:
    pool_for(request, shape).run(check_two_forwards, shape, prefetch)

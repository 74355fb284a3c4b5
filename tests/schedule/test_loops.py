"""What loops do to a model: early optimizers, raw gradients, collectives of accumulation, list units, roots in roots."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp

import hsdp
from tests.support.counting import CollectiveCounter
from tests.support.deep import DIM, Deep, collectives, floats, loss_of, seeded, step
from tests.support.models import Transformer
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_grads, check_rest, mesh_id, shard
from tests.support.twin import assert_same, full_grads

# -- optimizers made too early --------------------------------------------------------------------------------------


def check_early_optimizer(env: RankEnv) -> None:
    model = seeded(Deep)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, env.mesh(2))
    step(model, env.rank)
    message = r"SGD\.step: the optimizer was made before fully_shard and holds .*'weight' of unit 'blocks\.0'"
    for _ in range(2):
        with pytest.raises(hsdp.StateError, match=message):
            early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_optimizer_made_before_sharding_is_refused_by_parameter(pool2: Pool) -> None:
    pool2.run(check_early_optimizer)


class MakesItsOwn(Deep):
    """A model that makes its optimizer in its first forward."""

    optimizer: torch.optim.Optimizer | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return super().forward(x)


def check_optimizer_of_a_forward(env: RankEnv) -> None:
    model = seeded(MakesItsOwn)
    hsdp.fully_shard(model, mesh=env.mesh(2))
    step(model, env.rank)
    assert model.optimizer is not None
    with pytest.raises(hsdp.StateError, match=r"inside of a forward, .*'blocks\.0\.weight' of unit"):
        model.optimizer.step()


def test_an_optimizer_made_in_a_forward_is_refused_by_parameter(pool2: Pool) -> None:
    pool2.run(check_optimizer_of_a_forward)


def check_optimizer_of_full_parameters(env: RankEnv) -> None:
    model = shard(seeded(Deep), env.mesh(2))
    with hsdp.full_params(model):
        inside = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, env.rank)
    with pytest.raises(hsdp.StateError, match=r"full parameters were shown, .*'weight' of unit 'blocks\.0'"):
        inside.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    # A plain model that takes them over is trained by them.
    plain = seeded(Deep)
    with hsdp.full_params(model):
        plain.load_state_dict(dict(model.named_parameters()), assign=True)
    step(plain, env.rank)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()


def test_an_optimizer_made_of_full_parameters_is_refused_by_parameter(pool2: Pool) -> None:
    pool2.run(check_optimizer_of_full_parameters)


# -- one policy of accumulation for a step -------------------------------------------------------------------------


def check_accumulation_policy(env: RankEnv) -> None:
    """The module that `accumulate` is called on decides for the units below it."""
    model = seeded(Deep)
    for block in model.blocks:  # type: ignore[union-attr]
        hsdp.fully_shard(block, mesh=env.mesh((2, 2)))  # type: ignore[arg-type]
    local = hsdp.CommPolicy(accumulate="local")
    hsdp.fully_shard(model, mesh=env.mesh((2, 2)), comm_policy=local)
    results = []
    for part in (model, model.blocks[0]):  # type: ignore[index]
        with part.accumulate(last=False):  # type: ignore[operator,union-attr]
            step(model, env.rank)
        results.append(model.pending_gradients())  # type: ignore[operator]
        model.zero_grad()
    assert set(results[0].values()) == {"on this rank"}
    assert set(results[1].values()) == {"in the shard group"}
    assert {name.rpartition(".")[0] for name in results[1]} == {"blocks.0"}


def test_accumulate_takes_the_policy_of_its_own_module_for_all_units_below(pool4: Pool) -> None:
    pool4.run(check_accumulation_policy)


# -- raw gradients --------------------------------------------------------------------------------------------------


def check_raw_gradients(env: RankEnv) -> None:
    """Inside `no_sync` they are this rank's own, in no way scaled, under the module's names; nothing is communicated."""
    plain, model = seeded(Deep), seeded(Deep)
    blocks: Any = model.blocks
    hsdp.fully_shard([blocks[0], blocks[1]], mesh=env.mesh(2))
    hsdp.fully_shard(blocks[2], mesh=env.mesh(2))
    hsdp.fully_shard(model, mesh=env.mesh(2))
    model.set_gradient_scaling_factor(7.0)  # type: ignore[operator]
    step(model, env.rank)
    kept = full_grads(model)
    with collectives() as log, model.no_sync():  # type: ignore[operator]
        step(model, env.rank, 1)
    assert not any(entry.startswith(("reduce_scatter", "all_reduce")) for entry in log)
    step(plain, env.rank, 1)
    assert_same(dict(model.local_gradients()), full_grads(plain))  # type: ignore[operator]
    assert_same(dict(blocks[2].local_gradients()), full_grads(plain.blocks[2]))  # type: ignore[index]
    assert set(model.pending_gradients()) == {name for name, _ in plain.named_parameters()}  # type: ignore[operator]
    assert_same(full_grads(model), kept)  # what was there before shows as before
    model.zero_grad()
    assert not model.local_gradients(), "zero_grad drops them"  # type: ignore[operator]
    model.set_gradient_scaling_factor(1.0)  # type: ignore[operator]
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def check_lists_called_unevenly(env: RankEnv) -> None:
    """A unit of two modules, one of which runs once more than the other, or alone: its forward ends all the same."""
    plain, model = seeded(Deep), seeded(Deep)
    blocks: Any = model.blocks
    hsdp.fully_shard([blocks[0], blocks[1]], mesh=env.mesh(2))
    hsdp.fully_shard(model, mesh=env.mesh(2))
    with torch.no_grad():
        for net in (plain, model):
            net.blocks.append(net.blocks[1])
        assert torch.equal(model(floats(env.rank)), plain(floats(env.rank)))
        model.flush()  # type: ignore[operator]
        check_rest(model)
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)
    for net in (plain, model):
        net.zero_grad()
        del net.blocks[1:]
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def test_a_unit_of_several_modules_ends_its_forward_whichever_run(pool2: Pool) -> None:
    pool2.run(check_lists_called_unevenly)


def test_raw_local_gradients_can_be_looked_at(pool2: Pool) -> None:
    pool2.run(check_raw_gradients)


# -- collectives of an accumulation, beside FSDP2 -------------------------------------------------------------------


def _counts(library: Any, reshard: bool, how: str, env: RankEnv) -> dict[str, int]:
    model: Any = Transformer(layers=3)
    for module in (*model.blocks, model):
        library.fully_shard(module, mesh=env.mesh((2, 4)), reshard_after_forward=reshard)
    tokens = torch.ones(1, 4, dtype=torch.int64)

    def accumulate() -> dict[str, int]:
        with CollectiveCounter() as counter:
            for micro in range(3):
                last = micro == 2
                if how == "no sync" and library is fsdp:
                    model.set_requires_gradient_sync(last)
                elif how == "scatter only":
                    model.set_requires_all_reduce(last)
                inside = model.no_sync() if how == "no sync" and library is hsdp and not last else nullcontext()
                with inside:
                    model(tokens).sum().backward()
        model.zero_grad()
        return counter.counts()

    accumulate()  # so that the order is known
    return accumulate()


@pytest.mark.parametrize("how", ["each", "scatter only", "no sync"])
@pytest.mark.parametrize("reshard", [True, False])
def test_an_accumulation_takes_no_more_collectives_than_fsdp2(reshard: bool, how: str) -> None:
    counts = []
    for library in (hsdp, fsdp):
        with fake_world(8) as env:
            counts.append(_counts(library, reshard, how, env))
    ours, theirs = counts
    assert set(ours) <= set(theirs)
    assert all(ours[kind] <= theirs[kind] for kind in ours), (ours, theirs)
    units, passes = 4, {"each": (3, 3), "scatter only": (3, 1), "no sync": (1, 1)}[how]
    assert (ours["reduce_scatter"], ours["all_reduce"]) == (units * passes[0], units * passes[1])


# -- apply ----------------------------------------------------------------------------------------------------------


def check_apply(env: RankEnv) -> None:
    """`apply` is that of `nn.Module` on whole parameters, on the root and on a child, and gives back the module."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    blocks: Any = model.blocks

    def halve(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            assert type(param) is nn.Parameter
            param.data.mul_(0.5)

    assert model.apply(halve) is model
    assert blocks[1].apply(halve) is blocks[1]
    plain.apply(halve)
    plain.blocks[1].apply(halve)  # type: ignore[index]
    torch.testing.assert_close(model(floats(env.rank)), plain(floats(env.rank)), rtol=1e-11, atol=1e-11)


def test_apply_runs_on_whole_parameters(pool2: Pool) -> None:
    pool2.run(check_apply)


# -- units of lists, roots inside roots -----------------------------------------------------------------------------


class Parts(nn.Module):
    """Runs the parts that `walk` names; a and b are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(DIM, DIM) for _ in range(3))
        self.walk = "abc"

    def forward(self, x: Tensor) -> Tensor:
        for name in self.walk:
            x = torch.tanh(self.get_submodule(name)(x))
        return x


def check_part_of_a_list(env: RankEnv, shape: tuple[int, ...], reshard: bool | None) -> None:
    plain, model = seeded(Parts), seeded(Parts)
    options: dict[str, Any] = {"mesh": env.mesh(shape), "reshard_after_forward": reshard}
    hsdp.fully_shard([model.a, model.b], **options)
    hsdp.fully_shard(model, **options)
    for walk in ("abc", "ac", "bc", "c", "bac", "aab", "a", "abc"):
        model.walk = plain.walk = walk  # type: ignore[assignment]
        check_grads(model, plain, step, env.rank, env.world_size)
        with torch.no_grad():
            model(floats(env.rank))
        check_rest(model)


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_a_forward_may_run_a_part_of_a_list_unit(pool2: Pool, shape: tuple[int, ...], reshard: bool | None) -> None:
    pool2.run(check_part_of_a_list, shape, reshard)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Deep(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def check_nested_roots(env: RankEnv, shape: tuple[int, ...]) -> None:
    """A model that was a root, with units of its own, becomes a part of another, and is used alone in between."""
    plain, model = seeded(Outer), seeded(Outer)
    shard(model.inner, env.mesh(shape))  # type: ignore[arg-type]
    check_grads(model.inner, plain.inner, step, env.rank, env.world_size)  # type: ignore[arg-type]
    hsdp.fully_shard(model, mesh=env.mesh(shape))

    def both(one: Any, rank: int) -> None:
        step(one.inner, rank)
        whole, part = loss_of(one, rank, 1), loss_of(one.inner, rank, 2)
        part.backward()
        whole.backward()
        one.inner.blocks[1](floats(rank)).sum().backward()
        step(one, rank, 3)

    for _ in range(2):
        check_grads(model, plain, both, env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_a_root_inside_a_root(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(check_nested_roots, shape)


# -- parameters in no unit ------------------------------------------------------------------------------------------


def check_added(env: RankEnv, how: str) -> None:
    """Ranks would drift apart where a step changes parameters of which nobody sums gradients."""
    model: Any = shard(seeded(Deep), env.mesh(2))
    model.last.register_parameter("late", nn.Parameter(torch.ones(DIM, dtype=torch.float64), how != "frozen"))
    if how != "unused":
        model.last.register_forward_hook(lambda last, args, out: out * last.late)
    optimizer = torch.optim.SGD([model.last.late] if how == "alone" else model.parameters(), lr=0.1)
    before = model.last.late.detach().clone()
    for _ in range(2):
        step(model, env.rank)
        if how in ("frozen", "unused"):
            optimizer.step()
        else:
            with pytest.raises(hsdp.StateError, match=r"SGD.step: 1 parameter\(s\) were .*: 'last\.late'\. .*no unit"):
                optimizer.step()
        assert torch.equal(model.last.late, before)
    if how == "frozen":
        model.last.late.requires_grad_(True)
        step(model, env.rank)
        with pytest.raises(hsdp.StateError, match=r"'last\.late'"):
            optimizer.step()


@pytest.mark.parametrize("how", ["", "alone", "frozen", "unused"])
def test_parameters_that_were_added_to_units_are_not_stepped(pool2: Pool, how: str) -> None:
    pool2.run(check_added, how)


def check_assigned(env: RankEnv) -> None:
    """Between a load that assigns and the next forward no unit knows the new parameters; an optimizer may step them."""
    model: Any = shard(seeded(Deep), env.mesh(2))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    with model.no_sync():
        step(model, env.rank)
    with pytest.raises(hsdp.StateError, match="not summed"):
        optimizer.step()


def test_a_step_behind_a_load_that_assigns_is_not_the_measure_of_the_next(pool2: Pool) -> None:
    pool2.run(check_assigned)


def check_beside(env: RankEnv, how: str) -> None:
    """`how`: what is in no unit; "ignored" parameters are known to be summed by their users."""
    model: Any = seeded(Deep)
    if how == "no root":
        for block in model.blocks:
            hsdp.fully_shard(block, mesh=env.mesh(2))
    else:
        shard(model, env.mesh(2), ignored_params=[model.last.bias] if how == "ignored" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(model, env.rank)
            optimizer.step()
    texts = [str(one.message) for one in caught if "hsdp" in str(one.message)]
    assert len(texts) == (how == "no root"), texts
    named = r"SGD steps 2 .* in no unit: one of shape \(6, 6\), one of shape \(6,\)"
    assert not texts or re.search(named, texts[0]), texts
    assert not texts or caught[0].filename == __file__, "the warning points at the user's own line"


@pytest.mark.parametrize("how", ["", "ignored", "no root"])
def test_parameters_that_nobody_sums_are_told_once(pool2: Pool, how: str) -> None:
    pool2.run(check_beside, how)

"""Methods that are called at odd moments: beside another thread, with sums pending, behind what failed."""

from __future__ import annotations

import threading
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import Shard

import hsdp
from hsdp import fully_shard
from hsdp.comm import work
from tests.support.deep import DIM, Deep, floats, mean_grads, seeded, step
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import shard
from tests.support.twin import assert_same, full_grads

# -- other threads -----------------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Waits inside its forward until somebody has tried to come in; `generate` is a second way in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.begun, self.tried = threading.Event(), threading.Event()

    def forward(self, x: Tensor, waits: bool = True) -> Tensor:
        out: Tensor = self.layer(x)
        if waits:
            self.begun.set()
            assert self.tried.wait(30), "nobody came"
        return out

    def generate(self, x: Tensor) -> Tensor:
        return self(x, waits=False)  # type: ignore[no-any-return]


def check_threads(env: RankEnv) -> None:
    model: Any = fully_shard(seeded(Slow), mesh=env.mesh((2,)))
    hsdp.register_forward_method(model, "generate")
    errors: list[str] = []

    def come_in() -> None:
        assert model.begun.wait(30)
        for way in (model, model.forward, model.generate):
            try:
                way(floats(env.rank))
            except hsdp.StateError as error:
                errors.append(str(error))
        model.tried.set()

    thread = threading.Thread(target=come_in)
    thread.start()
    model(floats(env.rank)).sum().backward()
    thread.join(30)
    assert len(errors) == 3, errors
    assert all("another thread" in error for error in errors), errors
    model.generate(floats(env.rank)).sum().backward()


def test_every_way_in_is_refused_beside_a_forward_in_another_thread(pool2: Pool) -> None:
    pool2.run(check_threads)


class _Patched(nn.Linear):
    pass


def check_patched_class(env: RankEnv) -> None:
    """Who replaces a method of a class after `fully_shard` (a notebook that reloads, a library) finds it replaced."""
    model: Any = fully_shard(_Patched(4, 4), mesh=env.mesh((2,)))
    x = torch.ones(2, 4)
    before = model(x).detach()
    _Patched.forward = lambda self, x: 2.0 * nn.Linear.forward(self, x)  # type: ignore[method-assign,assignment]
    try:
        torch.testing.assert_close(model(x).detach(), 2.0 * before, rtol=0, atol=0)
        torch.testing.assert_close(model.forward(x).detach(), 2.0 * before, rtol=0, atol=0)
    finally:
        del _Patched.forward


def test_a_class_whose_forward_is_replaced_later(pool2: Pool) -> None:
    pool2.run(check_patched_class)


class _WithNames(nn.Linear):
    """Has a method, or a layer, with the name of one of hsdp's."""

    def flush(self) -> None:
        """Nothing that has to do with gradients."""


def test_what_a_method_of_hsdp_would_hide_is_refused() -> None:
    with_layer = nn.Sequential(nn.Linear(4, 4))
    with_layer.accumulate = nn.Linear(4, 4)
    with fake_world(2) as env:
        for model, name in ((_WithNames(4, 4), "flush"), (with_layer, "accumulate")):
            with pytest.raises(ValueError, match=f"its own '{name}' would be hidden .* rename it"):
                fully_shard(model, mesh=env.mesh((2,)))
        fully_shard(nn.Sequential(_WithNames(4, 4)), mesh=env.mesh((2,)))  # the module that holds it


# -- settings ------------------------------------------------------------------------------------------------------------


def check_reshard(env: RankEnv) -> None:
    model: Any = shard(seeded(Deep), env.mesh((4,)), reshard_after_forward=2)
    units = [block._hsdp_state.unit for block in model.blocks]
    for reshards, kept in ((None, True), (True, False)):
        if reshards is not None:
            model.set_reshard_after_forward(reshards)
        loss = model(floats(env.rank)).sum()
        assert [unit._part_version is not None for unit in units] == [kept] * len(units)
        loss.backward()


def test_parts_are_not_kept_once_units_reshard_after_forward(pool4: Pool) -> None:
    pool4.run(check_reshard)


def check_separate_group(env: RankEnv) -> None:
    model: Any = fully_shard(nn.Linear(64, 64), mesh=env.mesh((2,)))
    model.set_separate_reduce_scatter_group()
    model(torch.ones(2, 64)).sum().backward()
    (unit,) = model._units()
    assert unit.scatter_comm is not unit.shard_comm
    assert unit.shard_comm.host_memory is not None
    assert unit.scatter_comm.host_memory is not None


def test_a_separate_group_shares_memory_too(pool2: Pool) -> None:
    pool2.run(check_separate_group)


def _gathers(*, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool) -> Any:
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def check_setter_that_fails(env: RankEnv) -> None:
    """With users' collectives this parameter would be padded: its pending gradient has the layout without."""
    model: Any = fully_shard(nn.Linear(1 << 20, 1, bias=False), mesh=env.mesh((2,)))
    x = torch.ones(1, 1 << 20)
    with model.no_sync():
        model(x).sum().backward()
    with pytest.raises(hsdp.StateError, match=r"^set_custom_all_gather: unit .* has gradients"):
        model.set_custom_all_gather(_gathers)
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), x)


def test_a_collective_that_is_refused_is_not_set(pool2: Pool) -> None:
    pool2.run(check_setter_that_fails)


# -- companions ----------------------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Experts with a mesh of their own, by the placement function."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Linear(DIM, DIM, bias=False)
        torch.manual_seed(seed)
        self.router = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.router(x))  # type: ignore[no-any-return]


needs_routes = pytest.mark.skipif(
    not hasattr(fsdp_common, "ShardPlacementResult"), reason="this torch has no ShardPlacementResult"
)


def _route(env: RankEnv, block: nn.Module, **options: Any) -> None:
    experts = set(block.experts.parameters())  # type: ignore[union-attr]
    here = fsdp_common.FSDPMeshInfo(env.mesh((2,)), shard_mesh_dim=0)
    there = fsdp_common.HSDPMeshInfo(env.mesh((2, 1)), shard_mesh_dim=1, replicate_mesh_dim=0)
    fully_shard(
        block,
        mesh=env.mesh((2,)),
        shard_placement_fn=lambda param: fsdp_common.ShardPlacementResult(Shard(0), there if param in experts else here),
        **options,
    )


def check_companion_unshards(env: RankEnv) -> None:
    """Functions on unsharded parameters, with steps between."""
    block: Any = Routed(0)
    _route(env, block)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for k in range(3):
        block.unshard()
        x = floats(env.rank, k).float()
        out = (x @ block.router.weight.t() + block.router.bias) @ block.experts.weight.t()
        out.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        block.reshard()


@needs_routes
def test_a_module_opens_its_companions_too(pool2: Pool) -> None:
    pool2.run(check_companion_unshards)


def check_companion_stays(env: RankEnv) -> None:
    block = Routed(env.rank)
    with pytest.raises(hsdp.DivergenceError, match="router"):
        _route(env, block, replica_policy="check")
    assert type(block) is Routed
    assert type(block.experts) is nn.Linear
    assert type(block.experts.weight) is nn.Parameter


@needs_routes
def test_what_is_refused_leaves_companions_as_they_were(pool2: Pool) -> None:
    pool2.run(check_companion_stays)


# -- sums that are pending, and what fails beside them ---------------------------------------------------------------------


def _pend(model: Any, rank: int, how: str) -> None:
    """One micro-batch whose sums stay on the rank, or in the shard group."""
    model.set_requires_grad_sync(how != "local")
    model.set_requires_all_reduce(how == "local")
    step(model, rank)
    model.set_requires_grad_sync(True)
    model.set_requires_all_reduce(True)


def check_reset(env: RankEnv, how: str) -> None:
    model: Any = shard(seeded(Deep), env.mesh((2, 1)))
    _pend(model, env.rank, how)
    assert model.pending_gradients()
    model.reset_iter_state()
    assert set(model.pending_gradients().values()) == {"lost with a backward that failed"}
    model.zero_grad()
    step(model, env.rank, 1)
    assert_same(full_grads(model), mean_grads(seeded(Deep), lambda plain, rank: step(plain, rank, 1), env.world_size))


@pytest.mark.parametrize("how", ["local", "deferred"])
def test_resetting_the_iteration_drops_pending_sums(pool2: Pool, how: str) -> None:
    pool2.run(check_reset, how)


class BoomError(Exception):
    """What a user's code raises, and catches."""


def _boom(*args: object, **kwargs: object) -> None:
    raise BoomError


def check_failed_grad(env: RankEnv, how: str) -> None:
    """An `autograd.grad` takes no gradients of weights: what failed in it is no reason to lose sums."""
    model: Any = shard(seeded(Deep), env.mesh((2, 1)))
    _pend(model, env.rank, how)
    x = floats(env.rank, 5)
    data = x * 1.0
    data.register_hook(_boom)
    with pytest.raises(BoomError):
        torch.autograd.grad(model(data).sum(), x)
    with pytest.warns(UserWarning, match=r"an autograd\.grad: no parameter's gradient is lost"):
        step(model, env.rank, 1)

    def both(plain: nn.Module, rank: int) -> None:
        step(plain, rank)
        step(plain, rank, 1)

    assert_same(full_grads(model), mean_grads(seeded(Deep), both, env.world_size))


@pytest.mark.parametrize("how", ["local", "deferred"])
def test_a_failed_grad_leaves_pending_sums(pool2: Pool, how: str) -> None:
    pool2.run(check_failed_grad, how)


class FailsOnce:
    """An all-reduce over replicas whose call number `at` raises, on all ranks."""

    def __init__(self) -> None:
        self.calls, self.at = 0, -1

    def __call__(self, *, tensor: Tensor, group: Any, op: Any, async_op: bool) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise MemoryError("no room for a buffer of the user's")
        return dist.all_reduce(tensor, op, group, async_op=async_op)


def check_lost_reduction(env: RankEnv, bucketed: bool) -> None:
    """A reduction that runs past its backward cannot be started: nobody takes the gradients for complete."""
    reduces = FailsOnce()
    policy = hsdp.CommPolicy(all_reduce_bucket_bytes=1 << 20 if bucketed else 0)
    model: Any = shard(seeded(Deep), env.mesh((2, 1)), comm_policy=policy)
    model.set_replica_reduce(reduces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_is_last_backward(False)
    step(model, env.rank)
    reduces.at = reduces.calls + 1
    with pytest.raises(MemoryError):
        optimizer.step()
    for act in (optimizer.step, lambda: step(model, env.rank, 1), lambda: hsdp.clip_grad_norm_(model, 1.0)):
        with pytest.raises(hsdp.StateError, match="incomplete"):
            act()
    model.set_is_last_backward(True)
    model.zero_grad()
    step(model, env.rank, 2)
    assert_same(full_grads(model), mean_grads(seeded(Deep), lambda plain, rank: step(plain, rank, 2), env.world_size))
    optimizer.step()
    assert not any(unit.gradients.in_flight for unit in model._units())


@pytest.mark.parametrize("bucketed", [False, True], ids=["", "bucketed"])
def test_a_reduction_that_could_not_be_started_is_missed(pool2: Pool, bucketed: bool) -> None:
    pool2.run(check_lost_reduction, bucketed)


# -- lifetimes -------------------------------------------------------------------------------------------------------------


def test_what_has_not_ended_is_kept_though_more_comes_meanwhile() -> None:
    """To ask whether one has ended may free another one, which comes to be kept then."""

    def asked() -> bool:
        if all(used != "late" for _, used in work._kept.values()):
            work._keep_until(lambda: False, "late")
        return False

    kept: dict[int, Any] = {-3: (lambda: True, "ended"), -2: (asked, "asked"), -1: (lambda: False, "under way")}
    with mock.patch.object(work, "_kept", kept):
        work._keep_until(lambda: False, "new")
    assert {used for _, used in kept.values()} == {"asked", "under way", "late", "new"}


def check_kept(env: RankEnv) -> None:
    """Buffers of a collective that nobody waits for go when it has ended, with the next collective."""
    model: Any = shard(seeded(Deep), env.mesh((2,)))
    with mock.patch.object(work, "_kept", {-1: (lambda: True, "ended")}):
        step(model, env.rank)
        assert not work._kept


def test_kept_buffers_go_with_the_next_collective(pool2: Pool) -> None:
    pool2.run(check_kept)


# -- policies --------------------------------------------------------------------------------------------------------------


def check_unheeded(env: RankEnv) -> None:
    policy, mesh = hsdp.CommPolicy(all_reduce_bucket_bytes=1 << 20, prefetch=2), env.mesh((2,))
    model = seeded(Deep)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, comm_policy=policy)
    fully_shard(model, mesh=mesh)
    message = r"CommPolicy\(all_reduce_bucket_bytes=1048576\) of unit 'blocks.0' has no effect.*'Deep \(root\)'"
    with pytest.warns(UserWarning, match=message):
        step(model, env.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, env.rank)  # once
        step(shard(seeded(Deep), mesh, comm_policy=policy), env.rank)


def test_a_units_policy_that_the_root_overrules_is_told_of(pool2: Pool) -> None:
    pool2.run(check_unheeded)


# -- graphs of gradients -----------------------------------------------------------------------------------------------


def check_other_root(env: RankEnv) -> None:
    """What a graph of gradients reads stays, when a unit of it runs as a root of its own, or is resharded then."""
    model: Any = shard(seeded(Deep), env.mesh((2,)), reshard_after_forward=True)
    plain = seeded(Deep)
    given = {}
    for one in (model, plain):
        one.requires_grad_(False)
        x = floats(env.rank, 5).requires_grad_()
        loss = one(x).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        one.blocks[0](floats(env.rank, 6))
        if one is model:
            model.blocks[0].reshard()
        (loss + grad.square().sum()).backward()
        given[one] = x.grad
    torch.testing.assert_close(given[model], given[plain], rtol=1e-12, atol=1e-12)


def test_a_graph_of_gradients_outlives_a_forward_of_a_unit_alone(pool2: Pool) -> None:
    pool2.run(check_other_root)


# -- several backwards of one forward --------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.blocks[0](x).square().mean(), self.blocks[1](x).square().mean()


def check_second_backward(env: RankEnv) -> None:
    """Ranks whose second backward uses a head that was stepped since are told alike, and so are the others."""
    model: Any = shard(seeded(TwoHeads), env.mesh((2,)))
    optimizer = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
    for k in range(2):
        a, b = model(floats(env.rank, k))
        (a + b).backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(hsdp.StaleParametersError):
            (b if env.rank else a).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.zero_grad()
            sum(model(floats(env.rank, k))).backward()
        model.zero_grad()


def test_a_head_that_was_stepped_between_two_backwards_is_stale_for_all(pool2: Pool) -> None:
    pool2.run(check_second_backward)


# -- gradients from before ---------------------------------------------------------------------------------------------


def check_gradients_from_before(env: RankEnv) -> None:
    model = seeded(Deep)
    step(model, env.rank)
    for block in model.blocks:
        block.zero_grad()
        fully_shard(block, mesh=env.mesh((2,)))
    with pytest.warns(UserWarning, match=r"fully_shard\(Deep\): 2 parameters \('last.weight', ...\) had a gradient"):
        fully_shard(model, mesh=env.mesh((2,)))
    assert all(param.grad is None for param in model.parameters())


def test_fully_shard_tells_of_gradients_that_it_drops(pool2: Pool) -> None:
    pool2.run(check_gradients_from_before)


# -- prefetch lists ----------------------------------------------------------------------------------------------------


def check_list_across_roots(env: RankEnv) -> None:
    """A list may name a unit of the root that runs next: its forward sees the weights as they are when it begins."""
    first: Any
    second: Any
    first, second = (shard(seeded(Deep), env.mesh((2,))) for _ in range(2))
    first.set_modules_to_forward_prefetch([second.blocks[0]])
    plain = [seeded(Deep) for _ in range(2)]
    for k in range(3):
        h = first(floats(env.rank, k))
        for param in (*second.parameters(), *plain[1].parameters()):
            param.data.mul_(1.5)
        torch.testing.assert_close(second(h), plain[1](plain[0](floats(env.rank, k))), rtol=1e-11, atol=1e-11)


def test_a_prefetch_list_reaches_into_another_root(pool2: Pool) -> None:
    pool2.run(check_list_across_roots)


def check_empty_list(env: RankEnv) -> None:
    """As in FSDP2, an empty list is none: units are gathered ahead in their order again."""
    model: Any = shard(seeded(Deep), env.mesh((2,)))
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[3]])
    model.blocks[0].set_modules_to_forward_prefetch([])
    ahead: list[str] = []
    step(model, env.rank)
    model.blocks[0].register_forward_hook(
        lambda *_: ahead.extend(unit.residency.value for unit in (m._hsdp_state.unit for m in model.blocks[1:]))
    )
    step(model, env.rank)
    assert ahead == ["gathering", "sharded", "sharded"]


def test_an_empty_prefetch_list_is_none(pool2: Pool) -> None:
    pool2.run(check_empty_list)

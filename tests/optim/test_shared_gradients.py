"""Gradients of which replicas have shares: what is shown, what every optimizer makes of it, what is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hsdp
from hsdp.optim import local
from tests.optim.test_local import CASE
from tests.optim.test_replicas import InRankOrder
from tests.support.counting import CollectiveCounter, by_sockets
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, mesh_id, pool_for, shard
from tests.support.twin import assert_same, full, full_grads, full_params

SHAPES = [(2, 1), (2, 2), (4, 1)]


def both(env: RankEnv, shape: tuple[int, ...], **options: Any) -> tuple[Any, Any]:
    """The same model twice: replicas have shares of the gradients of the first one."""
    mine, theirs = (shard(CASE.model(), env.mesh(shape), **options) for _ in range(2))
    theirs.set_replica_reduce(InRankOrder())
    local(torch.optim.SGD(mine.parameters(), lr=0.1), over_replicas=True)
    return mine, theirs


def same_grads(mine: nn.Module, theirs: nn.Module, what: str = "") -> None:
    """Equal to the bit."""
    expected = full_grads(theirs)
    for name, grad in full_grads(mine).items():
        other = expected[name]
        assert (grad is None) == (other is None), f"{name} {what}"
        assert grad is None or torch.equal(grad, other), f"{name} {what}: {(grad - other).abs().max()}"  # type: ignore[arg-type,operator]


def same_params(mine: nn.Module, theirs: nn.Module, what: str = "") -> None:
    """Equal to the bit, on each rank by itself."""
    for (name, param), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(param.to_local(), other.to_local()), f"{name} {what}"  # type: ignore[attr-defined]


def shared(param: Any) -> bool:
    """Whether its gradient is sharded over both axes of the mesh."""
    grad = param.grad
    return isinstance(grad, DTensor) and not any(placement.is_replicate() for placement in grad.placements)


def _shown(env: RankEnv, shape: tuple[int, ...]) -> None:
    mine, theirs = both(env, shape)
    for step in range(2):  # the second one is added
        for model in (mine, theirs):
            CASE.loss(model, CASE.batch(step, env.rank)).backward()
        same_grads(mine, theirs, f"in step {step}")
    ranks = shape[0] * shape[1]
    for name, param in mine.named_parameters():
        assert shared(param) == (param.shape[0] >= ranks), f"{name}: {param.grad.placements}"
    grads = [param.grad.to_local() for param in mine.parameters() if shared(param)]
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in grads}
    whole = sum(param.to_local().nbytes for param in mine.parameters())
    assert sum(held.values()) < 1.3 * whole / shape[0], "a rank holds a replica's part of the gradients"
    check_rest(mine)


@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
def test_gradients_are_sharded_over_both_axes(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_shown, shape)


def _no_replicas(env: RankEnv) -> None:
    for shape in ((4,), (1, 4)):
        model = shard(CASE.model(), env.mesh(shape))
        optimizer = local(torch.optim.SGD(model.parameters(), lr=0.1), over_replicas=True)
        CASE.loss(model, CASE.batch(0, env.rank)).backward()
        assert all(param.grad.placements == param.placements for param in model.parameters())  # type: ignore[union-attr,attr-defined]
        optimizer.step()


def test_without_replicas_nothing_is_shared(pool4: Pool) -> None:
    pool4.run(_no_replicas)


ACCUMULATIONS = ("reduce_scatter", "local", "zeroed", "zeroed in place", "overlapping", "flush")


def _accumulates(env: RankEnv, shape: tuple[int, ...], how: str) -> None:
    policy = hsdp.CommPolicy(accumulate="local" if how == "local" else "reduce_scatter")
    mine, theirs = both(env, shape, comm_policy=policy)
    for model in (mine, theirs):
        for micro in range(4):
            model.set_is_last_backward(how != "overlapping")
            with model.accumulate(last=micro == 3 and how != "flush"):
                CASE.loss(model, CASE.batch(0, env.rank, micro)).backward()
            if micro == 1 and how.startswith("zeroed"):
                model.zero_grad(set_to_none=how == "zeroed")
        if how == "flush":
            model.flush()
        model.set_is_last_backward(True)
        CASE.loss(model, CASE.batch(1, env.rank)).backward()
    same_grads(mine, theirs)
    assert any(map(shared, mine.parameters()))


@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
@pytest.mark.parametrize("how", ACCUMULATIONS)
def test_accumulation(request: pytest.FixtureRequest, shape: tuple[int, ...], how: str) -> None:
    pool_for(request, shape).run(_accumulates, shape, how)


STOCK = {
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW for-loop": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "local": lambda params: local(torch.optim.Adam(params, lr=0.01)),
    "Muon": lambda params: hsdp.optim.Muon([p for p in params if p.ndim == 2], lr=0.01),
}


def _stock(env: RankEnv, shape: tuple[int, ...], name: str) -> None:
    """Optimizers that know of no shares step whole gradients: nobody steps what was not summed."""
    models = both(env, shape)
    optimizers = [STOCK[name](list(model.parameters())) for model in models]
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            CASE.loss(model, CASE.batch(step, env.rank)).backward()
            group = env.mesh(shape).get_group(0)
            with CollectiveCounter() as counter:
                optimizer.step()
            if model is models[0] and name != "Muon":
                units = len(model._units())
                assert len(counter.select("all_gather", group)) <= 2 * units, "as one for each unit"
                assert not any(shared(param) for param in model.parameters())
            optimizer.zero_grad(set_to_none=step > 0)
        same_params(*models, f"in step {step}")


@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
@pytest.mark.parametrize("name", STOCK)
def test_an_optimizer_that_knows_of_no_shares_is_right(
    request: pytest.FixtureRequest, shape: tuple[int, ...], name: str
) -> None:
    pool_for(request, shape).run(_stock, shape, name)


def _norms(env: RankEnv, shape: tuple[int, ...]) -> None:
    for clip in (hsdp.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        mine, theirs = both(env, shape)
        norms = []
        for model in (mine, theirs):
            CASE.loss(model, CASE.batch(0, env.rank)).backward()
            norms.append(full(clip(list(model.parameters()), 0.01)))
        torch.testing.assert_close(*norms, rtol=1e-14, atol=0)
        grads = full_grads(mine)
        for name, grad in full_grads(theirs).items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-13, atol=1e-17)


@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
def test_norms_are_those_over_both_axes(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_norms, shape)


class Odd(nn.Module):
    """Its first gradients are whole on all replicas: fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.ones(1, 8))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.few) * self.scale


def _few_rows(env: RankEnv, shape: tuple[int, ...]) -> None:
    """What is not shared out is summed over replicas all the same, and stepped by all of them or in shares."""
    torch.manual_seed(0)
    mine: Any = Odd().double()
    theirs: Any = hsdp.fully_shard(copy.deepcopy(mine), mesh=env.mesh(shape))
    hsdp.fully_shard(mine, mesh=env.mesh(shape))
    theirs.set_replica_reduce(InRankOrder())
    optimizers = [local(torch.optim.AdamW(m.parameters(), lr=0.01), over_replicas=m is mine) for m in (mine, theirs)]
    for step in range(2):
        x = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + env.rank))
        for model in (mine, theirs):
            model(x).square().mean().backward()
        assert shared(mine.inner.weight) and not shared(mine.few) and not shared(mine.scale)
        assert_same(full_grads(mine), full_grads(theirs), 1e-13, 1e-15)  # gloo's all-reduce has another order
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(dict(full_params(mine)), dict(full_params(theirs)), 1e-13, 1e-15)


@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
def test_few_rows_are_whole_on_all_replicas(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_few_rows, shape)


def _scaler(env: RankEnv, shape: tuple[int, ...]) -> None:
    """An overflow in one replica's share makes all ranks skip that step and no other."""
    torch.manual_seed(0)
    model: Any = hsdp.fully_shard(Odd(), mesh=env.mesh(shape))
    optimizer = local(torch.optim.SGD(model.parameters(), lr=0.1), over_replicas=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(3):
        before = full_params(model)
        scaler.scale(model(torch.ones(2, 8)).square().mean()).backward()
        assert shared(model.inner.weight) and not shared(model.few)
        if step == 1 and env.rank == 0:
            model.inner.weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(value, before[name]) for name, value in full_params(model).items())
        assert changed == (step != 1), f"step {step}"
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=mesh_id)
def test_a_gradient_scaler_skips_on_all_ranks_or_on_none(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(_scaler, shape)


def _penalties(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Gradients that autograd computes of the sharded parameters themselves; hooks see what is shown."""
    mine, theirs = both(env, shape)
    seen: list[Any] = []
    mine.blocks[0].up.weight.register_hook(lambda grad: seen.append(grad.placements) or grad * 2)
    theirs.blocks[0].up.weight.register_hook(lambda grad: grad * 2)
    for step in range(2):
        for model in (mine, theirs):
            penalty = sum(param.square().sum().full_tensor() for param in model.parameters())
            (CASE.loss(model, CASE.batch(step, env.rank)) + penalty).backward()
    expected = full_grads(theirs)
    for name, grad in full_grads(mine).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-14, atol=1e-14, msg=name)
    assert any(not any(p.is_replicate() for p in placements) for placements in seen), "a hook sees this rank's share"


@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
def test_penalties_and_hooks(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_penalties, shape)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("as planned")


def _fails(env: RankEnv, shape: tuple[int, ...]) -> None:
    mine, theirs = both(env, shape)
    for model in (mine, theirs):
        CASE.loss(model, CASE.batch(0, env.rank)).backward()
    handle = mine.blocks[0].register_forward_pre_hook(lambda module, args: (Failing.apply(args[0]),))
    with pytest.raises(RuntimeError, match="as planned"):
        CASE.loss(mine, CASE.batch(1, env.rank)).backward()
    handle.remove()
    same_grads(mine, theirs, "behind a backward that failed")
    for model in (mine, theirs):
        CASE.loss(model, CASE.batch(2, env.rank)).backward()
    same_grads(mine, theirs)


@pytest.mark.filterwarnings("ignore:hsdp. a backward pass failed")
@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
def test_a_backward_that_failed_leaves_nothing(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_fails, shape)


def _kinds(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Frozen parameters, some that are kept whole, other dims, low precision, offloaded shards, packing and buckets."""
    low = hsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, dict[str, Any]] = {
        "replicate_params": {"keep": True},
        "dim 1": {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
        "low": {"mp_policy": low},
        "offload": {"offload_policy": hsdp.CPUOffloadPolicy()},
        "packed": {"comm_policy": hsdp.CommPolicy(fusion="packed", all_reduce_bucket_bytes=1 << 20)},
        "direct": {"comm_policy": hsdp.CommPolicy(fusion="direct", reduce_scatter_bucket_bytes=1 << 20)},
    }
    for what, chosen in options.items():
        models = []
        for _ in range(2):
            model = CASE.model() if what != "low" else CASE.model().float()
            own = dict(chosen)
            if own.pop("keep", False):
                own["replicate_params"] = [param for param in model.parameters() if param.ndim == 1]
            shard(model, env.mesh(shape), **own)
            models.append(model)
        mine, theirs = models
        theirs.set_replica_reduce(InRankOrder())  # type: ignore[operator]
        optimizers = [
            local(torch.optim.AdamW(model.parameters(), lr=0.01), over_replicas=model is mine) for model in models
        ]
        for step in range(3):
            for model in models:
                next(iter(model.parameters())).requires_grad_(step != 1)
                CASE.loss(model, CASE.batch(step, env.rank)).backward()
                assert model is theirs or any(map(shared, model.parameters())), what
            same_grads(mine, theirs, what)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            same_params(mine, theirs, f"{what} in step {step}")
        check_rest(mine)


@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
def test_policies_and_kinds_of_parameters(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_kinds, shape)


def _tensor_parallel(env: RankEnv) -> None:
    mesh = env.mesh((2, 1, 2), ("replicate", "shard", "tp"))
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        models.append(hsdp.fully_shard(model, mesh=mesh["replicate", "shard"]))
    mine, theirs = models
    theirs.set_replica_reduce(InRankOrder())
    optimizers = [local(torch.optim.AdamW(m.parameters(), lr=0.01), over_replicas=m is mine) for m in models]
    for step in range(2):
        x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step + env.rank // 2))
        for model in models:
            model(x).square().sum().backward()
        assert any(not p.grad.placements[0].is_replicate() for p in mine.parameters())
        same_grads(mine, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_params(mine, theirs)


def test_inside_of_tensor_parallelism(pool4: Pool) -> None:
    pool4.run(_tensor_parallel)


@by_sockets
def _bytes(env: RankEnv, shape: tuple[int, int]) -> None:
    """Over the replicate axis: those of the all-reduce, (R - 1) / R of the shards each way, with even rows."""
    replicas, shards = shape
    sent = {}
    for over in (False, True):
        torch.manual_seed(0)
        blocks = [nn.Linear(64, 64, bias=False) for _ in range(3)]
        for block in blocks:
            hsdp.fully_shard(block, mesh=env.mesh(shape))
        model: Any = hsdp.fully_shard(nn.Sequential(*blocks), mesh=env.mesh(shape))
        optimizer = local(torch.optim.SGD(model.parameters(), lr=0.1), over_replicas=over)
        with CollectiveCounter() as counter:
            for micro in range(3):
                with model.accumulate(last=micro == 2):
                    model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        group = env.mesh(shape).get_group(0)
        sent[over] = counter.total(group=group).wire_bytes
        way = (replicas - 1) / replicas * 3 * 64 * 64 * 4 / shards
        flags = 3 * 4  # one for each block; with shares one for each and replica, one way
        flags *= replicas - 1 if over else 2 * (replicas - 1) / replicas
        assert sent[over] == pytest.approx(2 * way + flags, rel=1e-12)
    assert sent[True] <= sent[False] * 1.001


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (2, 1)], ids=mesh_id)
def test_bytes_are_those_of_the_all_reduce(request: pytest.FixtureRequest, shape: tuple[int, int]) -> None:
    pool_for(request, shape).run(_bytes, shape)


def _refusals(env: RankEnv) -> None:
    mine, _ = both(env, (2, 2))
    for refused in (lambda: mine.set_replica_reduce(InRankOrder()), lambda: mine.set_all_reduce_hook(lambda tensor: None)):
        with pytest.raises(hsdp.StateError, match="before the optimizer is made"):
            refused()
    mine.set_replica_reduce(None)
    # Sums of their own way stay as they are; the step is shared out all the same.
    for prepare in (
        lambda model: model.set_replica_reduce(hsdp.CompressedAllReduce()),
        lambda model: [unit.set_all_reduce_hook(lambda tensor: None) for unit in (model, *model.blocks)],
    ):
        own: Any = shard(CASE.model(), env.mesh((2, 2)))
        prepare(own)
        optimizer = local(torch.optim.SGD(own.parameters(), lr=0.1), over_replicas=True)
        CASE.loss(own, CASE.batch(0, env.rank)).backward()
        assert not any(map(shared, own.parameters()))
        optimizer.step()
    pending: Any = shard(CASE.model(), env.mesh((2, 2)))
    with pending.no_sync():
        CASE.loss(pending, CASE.batch(0, env.rank)).backward()
    with pytest.raises(hsdp.StateError, match="were not summed over all ranks"):
        local(torch.optim.SGD(pending.parameters(), lr=0.1), over_replicas=True)
    # A gradient from before, which all replicas have, is cut where others are added.
    first, second = (shard(CASE.model(), env.mesh((2, 2))) for _ in range(2))
    for model in (first, second):
        CASE.loss(model, CASE.batch(0, env.rank)).backward()
    local(torch.optim.SGD(first.parameters(), lr=0.1), over_replicas=True)
    for model in (first, second):
        CASE.loss(model, CASE.batch(1, env.rank)).backward()
    assert any(map(shared, first.parameters()))
    same_grads(first, second)


def test_what_is_refused_and_what_stays(pool4: Pool) -> None:
    pool4.run(_refusals)


def _one_rank_alone(env: RankEnv) -> None:
    model: Any = shard(CASE.model(), env.mesh((2, 1)))
    local(torch.optim.SGD(model.parameters(), lr=0.1), over_replicas=env.rank == 0)
    CASE.loss(model, CASE.batch(0, env.rank)).backward()


def test_one_rank_that_shares_alone_is_told(pool2: Pool) -> None:
    assert [one.error for one in pool2.run_raw(_one_rank_alone)] == ["DivergenceError"] * 2


def _by_hand(env: RankEnv, shape: tuple[int, ...]) -> None:
    mine, theirs = (shard(CASE.model(), env.mesh(shape)) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, theirs)]
    local(optimizers[0], over_replicas=True)
    for step in range(3):
        for model, optimizer in zip((mine, theirs), optimizers, strict=True):
            CASE.loss(model, CASE.batch(step, env.rank)).backward()
            for param in model.parameters():
                if param.grad is not None:
                    param.grad = param.grad + 0.1 * param.detach()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_params(mine), full_params(theirs))


@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
def test_gradients_that_users_compute_with_are_cut_again(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_by_hand, shape)


def _replicated(env: RankEnv, shape: tuple[int, ...], kind: str) -> None:
    mine, theirs = (shard(CASE.model(), env.mesh(shape)) for _ in range(2))
    for model in (mine, theirs):
        matrices = [param for param in model.parameters() if param.ndim == 2]
        optimizer: Any = local(torch.optim.SGD(matrices, lr=0.1)) if kind == "local" else hsdp.optim.Muon(matrices, lr=0.1)
        CASE.loss(model, CASE.batch(0, env.rank)).backward()
        for param in matrices if model is mine else ():
            assert isinstance(param.grad, DTensor)
            param.grad = param.grad.redistribute(placements=[Replicate()] * len(shape))
        optimizer.step()
    same_params(mine, theirs)


@pytest.mark.parametrize("kind", ["local", "muon"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_gradients_that_are_whole_on_every_rank_are_cut(
    request: pytest.FixtureRequest, shape: tuple[int, ...], kind: str
) -> None:
    pool_for(request, shape).run(_replicated, shape, kind)

"""16 bits on the wire and fp32 in the sums: less error than bf16, half the bytes of fp32, the same bits on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

import hsdp
from hsdp.comm.compressed import add_in_order
from tests.support.counting import CollectiveCounter, by_sockets
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest
from tests.support.twin import full_grads

SIZE = 1 << 14
REDUCTIONS = ("all_to_all", "reduce_scatter", "all_reduce")


def _values(rank: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float32)


def _error(actual: Tensor, exact: Tensor) -> float:
    """Relative, in the mean square, in float64."""
    return float((actual.double() - exact).norm() / exact.norm())


class _Named:
    name = "test"


def _errors(env: RankEnv) -> None:
    """Of one reduction each, by the backend in bf16 and by hsdp's with bf16 on the wire."""
    ranks, group = env.world_size, dist.group.WORLD
    exact = sum(_values(rank).double() for rank in range(ranks))
    assert isinstance(exact, Tensor)
    mine = exact.chunk(ranks)[env.rank]
    theirs = torch.empty(SIZE // ranks, dtype=torch.bfloat16)
    dist.reduce_scatter(theirs, list(_values(env.rank).bfloat16().chunk(ranks)))
    ours = torch.empty(SIZE // ranks)
    hsdp.CompressedReduceScatter()(ours, _values(env.rank), group, dist.ReduceOp.SUM)  # type: ignore[arg-type]
    assert _error(ours, mine) < _error(theirs, mine) / 1.5

    theirs = _values(env.rank).bfloat16()
    dist.all_reduce(theirs)
    model: Any = hsdp.fully_shard(nn.Linear(2, 2), mesh=env.mesh((ranks, 1)))
    comm = model._units()[0].replicate_comm
    ours = _values(env.rank)
    landed: list[str] = []
    comm_work = hsdp.CompressedAllReduce().start(_Named(), 1, [ours[:999], ours[999:]], comm, lambda: landed.append("yes"))
    assert not comm_work.done(), "no poll may start the second half"
    comm_work.wait()
    assert comm_work.done() and landed == ["yes"]
    assert _error(ours, exact) < _error(theirs, exact) / 1.15
    everybody = [torch.empty_like(ours) for _ in range(ranks)]
    dist.all_gather(everybody, ours)
    assert all(torch.equal(ours, other) for other in everybody), "replicas must not drift apart"


def test_the_error_is_smaller_than_that_of_the_backend_in_bf16(pool4: Pool) -> None:
    pool4.run(_errors)


def test_the_error_does_not_grow_with_the_number_of_ranks() -> None:
    # A reduction in bf16 rounds the running sum at every hop: 64 of them, one after the other, as a ring has it.
    for ranks, factor in ((4, 1.5), (16, 2.5), (64, 5.0)):
        values = torch.stack([_values(rank) for rank in range(ranks)])
        exact = values.double().sum(0)
        ring = values[0].bfloat16()
        for value in values[1:]:
            ring = ring + value.bfloat16()
        ours = add_in_order(values.bfloat16().flatten(), ranks)
        assert _error(ours, exact) < _error(ring, exact) / factor
        assert _error(ours, exact) < 2**-9


def test_values_that_are_bf16_already_lose_nothing() -> None:
    values = torch.stack([_values(rank).bfloat16() for rank in range(8)])
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    assert torch.equal(add_in_order(values.flatten(), 8), total)


def _model(env: RankEnv, shape: tuple[int, ...], compressed: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for module in (*model, model):
        hsdp.fully_shard(module, mesh=env.mesh(shape), **options)
    if compressed:
        model.set_replica_reduce(hsdp.CompressedAllReduce())
        for module in (*model, model):
            module.set_custom_reduce_scatter(hsdp.CompressedReduceScatter())
    return model


def _step(model: Any, rank: int) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(_values(rank, 640).view(10, 64)).square().sum().backward()
    return full_grads(model)


@by_sockets
def _trains(env: RankEnv, shape: tuple[int, ...], policy: hsdp.CommPolicy) -> None:
    plain, model = (_model(env, shape, compressed, comm_policy=policy) for compressed in (False, True))
    counters, grads = [], []
    for each in (plain, model):
        _step(each, env.rank)
        with CollectiveCounter() as counter:
            grads.append(_step(each, env.rank))
        counters.append(counter)
    exact, rounded = grads
    assert exact.keys() == rounded.keys()
    for name, grad in exact.items():
        other = rounded[name]
        assert grad is not None and other is not None
        assert 0 < _error(other, grad.double()) < 2**-7, name
    # Of the gathers only those of sums are reductions: weights (and what this test looks at) are gathered by both.
    weights = counters[0].total("all_gather").wire_bytes
    fp32, ours = (sum(counter.total(kind).wire_bytes for kind in REDUCTIONS) for counter in counters)
    ours += counters[1].total("all_gather").wire_bytes - weights
    assert 0.49 < ours / fp32 < 0.52, "half of fp32's bytes"
    check_rest(model)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)])
@pytest.mark.parametrize("bucket", [0, 1 << 20])
def test_training_sends_half_the_bytes_of_fp32(pool4: Pool, shape: tuple[int, ...], bucket: int) -> None:
    pool4.run(_trains, shape, hsdp.CommPolicy(all_reduce_bucket_bytes=bucket))


def _under_fsdp2(env: RankEnv) -> None:
    grads = []
    for custom in (None, hsdp.CompressedReduceScatter()):
        torch.manual_seed(0)
        model: Any = nn.Linear(64, 64)
        fsdp.fully_shard(model, mesh=env.mesh((4,)))
        model.set_force_sum_reduction_for_comms(True)
        if custom is not None:
            model.set_custom_reduce_scatter(custom)
        grads.append(_step(model, env.rank))
    for name, grad in grads[0].items():
        assert grad is not None and grads[1][name] is not None
        assert 0 < _error(grads[1][name], grad.double()) < 2**-8, name  # type: ignore[arg-type]


def test_fsdp2_takes_it_too(pool4: Pool) -> None:
    pool4.run(_under_fsdp2)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CompressedAllReduce\(wire_dtype=torch.int8\)"):
        hsdp.CompressedAllReduce(torch.int8)
    with pytest.raises(ValueError, match="set_force_sum_reduction_for_comms"):
        hsdp.CompressedReduceScatter()(torch.zeros(1), torch.zeros(2), None, dist.ReduceOp.AVG)  # type: ignore[arg-type]

"""Rule 24: nothing grows with the steps or, transiently, with the layers; all-reduced buffers land when they are done."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hsdp
from hsdp.comm.work import outstanding
from hsdp.params.ownership import _managed
from hsdp.schedule.pipeline import ReductionPipeline
from hsdp.unit.unsharded import SHARDED
from tests.support.deep import Deep, never_done, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import shard


def _census() -> Counter[str]:
    gc.collect()
    kinds = Counter(type(one).__name__ for one in gc.get_objects())
    return Counter({kind: count for kind, count in kinds.items() if kind not in ("Counter", "frame", "cell")})


def check_steps(env: RankEnv, shape: tuple[int, ...]) -> None:
    model = shard(seeded(Deep), env.mesh(shape))
    # Not Adam: on DTensors its scalars, others in each step, stay in caches of torch 2.11 for good.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    store: Any = dist.distributed_c10d._get_default_store()
    seen: list[tuple[Counter[str], int]] = []
    for k in range(20):
        with model.accumulate(last=k % 2 == 1):  # type: ignore[operator]
            step(model, env.rank, k % 2)
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
        if k in (7, 13, 19):  # the first time torch and the census itself fill caches
            dist.barrier()  # nobody is about to write to the store
            seen.append((_census(), store.num_keys()))
            dist.barrier()
    _, (before, keys_before), (after, keys_after) = seen
    grown = {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind]}
    assert sum(grown.values()) <= 3, f"objects left by six more steps: {grown}"
    assert keys_after <= keys_before, f"{keys_after - keys_before} keys more in the store"
    assert not outstanding()


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_rule_24_nothing_grows_with_the_steps(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(check_steps, shape)


def check_moves(env: RankEnv) -> None:
    model = shard(seeded(Deep), env.mesh(2))
    seen: list[tuple[Counter[str], int]] = []
    for k in range(20):
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        model.float().double()
        step(model, env.rank)
        model.zero_grad()
        if k in (7, 13, 19):
            seen.append((_census(), len(_managed)))
    _, (before, managed_before), (after, managed_after) = seen
    grown = {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind]}
    assert sum(grown.values()) <= 3, f"objects left by six more moves: {grown}"
    assert managed_after == managed_before, f"{managed_after - managed_before} parameters more in the registry"


def test_rule_24_nothing_grows_with_moves(pool2: Pool) -> None:
    pool2.run(check_moves)


def _peaks(env: RankEnv, layers: int, policy: hsdp.CommPolicy) -> tuple[int, ...]:
    """What there was most of at a time: reductions with whole gradients, reductions, bytes of whole gradients, units
    with whole parameters.
    """
    submit = ReductionPipeline.submit
    peaks = [0, 0, 0, 0]

    def watching(pipeline: ReductionPipeline, reduction: Any) -> None:
        submit(pipeline, reduction)
        alive = pipeline.items()
        inputs = [sum(t.nbytes for part in one.parts for t in part.inputs) for one in alive]
        whole = sum(unit.residency is not SHARDED for unit in model._units())  # type: ignore[operator]
        for at, now in enumerate((sum(map(bool, inputs)), len(pipeline), sum(inputs), whole)):
            peaks[at] = max(peaks[at], now)

    model = shard(seeded(lambda: Deep(layers=layers)), env.mesh((2, 2)), comm_policy=policy)
    step(model, env.rank)  # with an order, units are gathered ahead
    with mock.patch.object(ReductionPipeline, "submit", watching):
        step(model, env.rank)
    return tuple(peaks)


def check_layers(env: RankEnv, policy: hsdp.CommPolicy) -> None:
    with never_done():
        few, many = _peaks(env, 10, policy), _peaks(env, 20, policy)
    scatters, reduces = policy.max_inflight_reduce_scatters, policy.max_inflight_all_reduces
    assert few == many
    assert many[0] == scatters
    assert reduces <= many[1] <= scatters + reduces, many
    assert many[3] <= 1 + 2 + policy.prefetch, "the root, the unit at hand, the one before it, those gathered ahead"


POLICIES = [
    hsdp.CommPolicy(),
    hsdp.CommPolicy(max_inflight_reduce_scatters=2, max_inflight_all_reduces=1),
    hsdp.CommPolicy(max_inflight_reduce_scatters=1, max_inflight_all_reduces=6),
]


@pytest.mark.parametrize("policy", POLICIES, ids=["default", "2-1", "1-6"])
def test_rule_24_the_queue_does_not_grow_with_the_layers(pool4: Pool, policy: hsdp.CommPolicy) -> None:
    pool4.run(check_layers, policy)


def check_landing(env: RankEnv, shape: tuple[int, ...], waiting: int) -> None:
    """What has landed follows from the queue's bound and from nothing else: as many on all ranks, however fast."""
    landed: list[int] = []
    with never_done():
        model = shard(
            seeded(lambda: Deep(layers=8)), env.mesh(shape), comm_policy=hsdp.CommPolicy(max_inflight_all_reduces=2)
        )

        params = list(model.parameters())  # the sharded ones, whatever is whole meanwhile

        def watch(grad: Tensor) -> None:
            landed.append(sum(param.grad is not None for param in params))

        for block in model.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(lambda module, args, out: out.register_hook(watch) and None)
        step(model, env.rank)
    # Two parameters a unit. The root and blocks 7 to 1 are submitted by then; one of them is being reduce-scattered.
    assert landed == [2 * max(0, at - waiting) for at in range(1, 9)], landed


@pytest.mark.parametrize(("shape", "waiting"), [((4,), 2), ((2, 2), 3)], ids=["shards", "replicas"])
def test_rule_24_sums_land_at_fixed_points(pool4: Pool, shape: tuple[int, ...], waiting: int) -> None:
    pool4.run(check_landing, shape, waiting)

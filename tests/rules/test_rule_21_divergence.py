"""Rule 21: ranks that disagree are told so; ranks that agree pay nothing for it; a lost rank ends the others in time.

`tests/soak/test_divergence.py` has the ways to disagree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from hsdp import CommPolicy, CompressedAllReduce, CompressedReduceScatter
from hsdp.clip import clip_grad_norm_
from hsdp.comm import divergence
from hsdp.comm.divergence import DivergenceGuard
from hsdp.optim import Muon, local
from tests.support.deep import Deep, loss_of, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, shard


@contextmanager
def _counted() -> Iterator[list[int]]:
    """How often ranks ask, in a list of one number."""
    ask, asked = DivergenceGuard._ask, [0]

    def counting(divergence_guard: DivergenceGuard, *args: Any) -> Any:
        asked[0] += 1
        return ask(divergence_guard, *args)

    with mock.patch.object(DivergenceGuard, "_ask", counting):
        yield asked


def check_steady_loop(env: RankEnv, shape: tuple[int, ...], loop: str = "steps") -> None:
    counts = []
    with _counted() as asked:
        # Groups of its own: what other models did on a group before makes its ranks ask more often.
        mesh = env.mesh((2, 2), (f"replicas of {shape} {loop}", f"shards of {shape} {loop}"))
        model = shard(seeded(Deep), mesh if len(shape) == 2 else mesh[f"shards of {shape} {loop}"])
        optimizer = OPTIMIZERS.get(loop, _sgd)(model, len(shape) > 1)
        for k in range(10):
            asked[0] = 0
            LOOPS[loop](model, optimizer, env.rank, k)
            optimizer.zero_grad()
            counts.append(asked[0])
    assert counts[0] > 0, "the first step is not known to anybody: this test shows nothing"
    assert counts[-2:] == [0, 0], f"asked {counts} times"
    assert max(counts[3:]) <= 4, f"asked {counts} times: more than where an evaluation begins and ends"


def check_many_models(env: RankEnv) -> None:
    """Models one after the other on one group: what was known of those before leaves room."""
    mesh = env.mesh((2,), ("shards of many models",))
    counts = []
    with mock.patch.object(divergence, "_MOST_STATES", 100), _counted() as asked:
        for _ in range(8):
            model = shard(seeded(Deep), mesh)
            optimizer = _sgd(model, False)
            for k in range(5):
                asked[0] = 0
                step(model, env.rank, k)
                optimizer.step()
                optimizer.zero_grad()
            counts.append(asked[0])
    assert counts == [0] * 8, f"the last step of each model asked {counts} times"
    guard = DivergenceGuard.among(mesh.get_group())
    assert guard is not None and len(guard._follows) + len(guard._branches) <= 100


def test_rule_21_models_of_before_leave_room(pool2: Pool) -> None:
    pool2.run(check_many_models)


def _accumulating(model: Any, optimizer: torch.optim.Optimizer, rank: int, k: int) -> None:
    for micro in range(3):
        with model.accumulate(last=micro == 2):
            step(model, rank, 3 * k + micro)
    clip_grad_norm_(model, 1.0)
    optimizer.step()


def _evaluating(model: Any, optimizer: torch.optim.Optimizer, rank: int, k: int) -> None:
    step(model, rank, k)
    optimizer.step()
    if k in (2, 4):
        with torch.no_grad():
            for batch in range(3):
                loss_of(model, rank, batch)


def _stepping(model: Any, optimizer: torch.optim.Optimizer, rank: int, k: int) -> None:
    step(model, rank, k)
    optimizer.step()


def _sgd(model: Any, replicas: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _muon(model: Any, replicas: bool) -> torch.optim.Optimizer:
    by_kind = [[param for param in model.parameters() if (param.ndim == 2) is matrices] for matrices in (True, False)]
    return Muon([{"params": by_kind[0]}, {"params": by_kind[1], "algorithm": "adamw"}], over_replicas=replicas)


OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "exchanges matrices": _muon,
    "gathers shares": lambda model, replicas: local(_sgd(model, replicas), over_replicas=replicas),
}

LOOPS: dict[str, Callable[[Any, torch.optim.Optimizer, int, int], None]] = {
    "steps": _stepping,
    "accumulates and clips": _accumulating,
    "evaluates": _evaluating,
    "exchanges matrices": _stepping,
    "gathers shares": _stepping,
    "never steps": lambda model, optimizer, rank, k: step(model, rank, k),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_21_a_steady_loop_asks_nobody(pool4: Pool, shape: tuple[int, ...], loop: str) -> None:
    pool4.run(check_steady_loop, shape, loop)


def lose_a_rank(env: RankEnv, shape: tuple[int, ...]) -> None:
    model = shard(seeded(Deep), env.mesh(shape))
    step(model, env.rank)
    if env.rank == env.world_size - 1:
        os._exit(7)
    for k in range(2):
        step(model, env.rank, k)


def test_rule_21_a_lost_rank_ends_the_others_in_time(pool4: Pool) -> None:
    *others, lost = pool4.run_raw(lose_a_rank, (2, 2), group_timeout=3.0, timeout=30.0)
    assert lost.error == "Died"
    for one in others:
        assert one.error in ("CollectiveError", "DivergenceError"), one
        assert "unit" in one.message
        assert one.seconds < 3.0 + 5.0


def _chain(env: RankEnv, shape: tuple[int, ...], **options: Any) -> Any:
    return shard(seeded(lambda: Deep(layers=2)), env.mesh(shape), **options)


def calls_alike_models_in_another_order(env: RankEnv, shape: tuple[int, ...]) -> None:
    """A student and its teacher, say: their units have the same names and shapes."""
    models = [_chain(env, shape), _chain(env, shape)]
    for k in range(4):
        for model in models if k < 3 or env.rank == 0 else models[::-1]:
            step(model, env.rank, k)


def calls_other_children(env: RankEnv, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        _chain(env, shape).blocks[env.rank](torch.ones(3, 6).double())


def steps_another_model(env: RankEnv, shape: tuple[int, ...]) -> None:
    models = [_chain(env, shape), _chain(env, shape)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for k in range(4):
        for model in models:
            step(model, env.rank, k)
        for optimizer in optimizers if k < 2 else [optimizers[env.rank]]:
            optimizer.step()


def clips_another_model(env: RankEnv, shape: tuple[int, ...]) -> None:
    models = [_chain(env, shape), _chain(env, shape)]
    for k in range(4):
        for model in models:
            step(model, env.rank, k)
        for model in models if k < 2 else [models[env.rank]]:
            clip_grad_norm_(model, 1.0)


def reduces_by_a_collective_of_its_own(env: RankEnv, shape: tuple[int, ...]) -> None:
    model = _chain(env, shape, comm_policy=CommPolicy(shared_memory=False))
    step(model, env.rank)
    if env.rank == 0 and len(shape) == 1:
        model.set_custom_reduce_scatter(CompressedReduceScatter())
    elif env.rank == 0:
        model.set_replica_reduce(CompressedAllReduce())
    step(model, env.rank, 1)


ALIKE: list[Callable[[RankEnv, tuple[int, ...]], None]] = [
    calls_alike_models_in_another_order,
    calls_other_children,
    steps_another_model,
    clips_another_model,
    reduces_by_a_collective_of_its_own,
]


@pytest.mark.parametrize(
    ("does", "shape"),
    # One shard rank gathers nothing.
    [(does, shape) for does in ALIKE for shape in ((2,), (2, 1)) if (does, shape) != (calls_other_children, (2, 1))],
    ids=lambda part: mesh_id(part) if isinstance(part, tuple) else part.__name__,
)
def test_rule_21_what_looks_alike_is_told_apart(
    pool2: Pool, does: Callable[[RankEnv, tuple[int, ...]], None], shape: tuple[int, ...]
) -> None:
    for one in pool2.run_raw(does, shape, group_timeout=8.0, timeout=60.0):
        assert one.error == "DivergenceError", one
        assert "unit" in one.message or "clip_grad_norm_" in one.message

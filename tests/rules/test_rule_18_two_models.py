"""Rule 18: models alive together, interleaved, nested, in threads: they never touch each other's queue, order or flags."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hsdp.comm.questions import Questions
from hsdp.schedule.pipeline import ReductionPipeline
from tests.rules.test_rule_20_failures import fail
from tests.support.deep import Deep, floats, loss_of, mean_grads, never_done, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, mesh_id, shard
from tests.support.twin import assert_same, full_grads, full_params

T = TypeVar("T")


class Pair(nn.Module):
    """Two models that are not one: each becomes a root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Deep(layers=3)
        self.second = Deep(layers=2)


def _interleaved(pair: Pair, rank: int) -> None:
    one, other = loss_of(pair.first, rank), loss_of(pair.second, rank)
    one.backward()
    other.backward()


def _crossed(pair: Pair, rank: int) -> None:
    one, other = loss_of(pair.first, rank), loss_of(pair.second, rank)
    other.backward()
    again = loss_of(pair.second, rank, 1)
    one.backward()
    again.backward()


def _one_graph(pair: Pair, rank: int) -> None:
    pair.second(pair.first(floats(rank))).square().sum().backward()


def _nested(pair: Pair, rank: int) -> None:
    """A whole iteration of the second model inside a backward of the first."""
    hidden = pair.first.blocks[0](floats(rank))
    hidden.register_hook(lambda grad: _with_grad(lambda: step(pair.second, rank)))
    loss = pair.first(hidden).square().sum()
    loss.backward()


def _forward_in_backward(pair: Pair, rank: int) -> None:
    """A forward of the second model inside a backward of the first; its own backward comes later."""
    losses: list[Tensor] = []
    out = pair.first(floats(rank))
    out.register_hook(lambda grad: losses.append(_with_grad(lambda: loss_of(pair.second, rank))))
    out.square().sum().backward()
    losses[0].backward()


def _with_grad(make: Callable[[], T]) -> T:
    with torch.enable_grad():  # hooks run without
        return make()


def _gan(pair: Pair, rank: int) -> None:
    generator, critic = pair.first, pair.second
    for k in range(2):
        fake = generator(floats(rank, k))
        (critic(fake.detach()).square().sum() - critic(floats(rank, 7)).sum()).backward()
        critic.zero_grad()  # as after its step
        critic(fake).square().sum().backward()
        if k == 0:
            critic.zero_grad()


def _distillation(pair: Pair, rank: int) -> None:
    with torch.no_grad():
        taught = pair.second(floats(rank))
    (pair.first(floats(rank)) - taught).square().sum().backward()


WAYS: dict[str, Callable[[Pair, int], None]] = {
    "interleaved": _interleaved,
    "crossed": _crossed,
    "one graph": _one_graph,
    "nested": _nested,
    "forward in a backward": _forward_in_backward,
    "GAN": _gan,
    "distillation": _distillation,
}


def check_pair(env: RankEnv, way: str, shape: tuple[int, ...]) -> None:
    plain, pair = seeded(Pair), seeded(Pair)
    shard(pair.first, env.mesh(shape))  # type: ignore[arg-type]
    shard(pair.second, env.mesh(shape))  # type: ignore[arg-type]
    expected = mean_grads(plain, WAYS[way], env.world_size)  # type: ignore[arg-type]
    for _ in range(2):
        pair.zero_grad()
        WAYS[way](pair, env.rank)  # type: ignore[arg-type]
        assert_same(full_grads(pair), expected)
        check_rest(pair.first)  # type: ignore[arg-type]
        check_rest(pair.second)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
@pytest.mark.parametrize("way", WAYS)
def test_rule_18_two_models_do_not_touch_each_other(pool2: Pool, way: str, shape: tuple[int, ...]) -> None:
    pool2.run(check_pair, way, shape)


def check_settings_stay_apart(env: RankEnv) -> None:
    plain, pair = seeded(Pair), seeded(Pair)
    first, second = (shard(model, env.mesh((2, 1))) for model in (pair.first, pair.second))  # type: ignore[arg-type]
    first.set_requires_all_reduce(False)  # type: ignore[operator]
    first.set_gradient_scaling_factor(3.0)  # type: ignore[operator]
    _interleaved(pair, env.rank)  # type: ignore[arg-type]
    assert first.pending_gradients()  # type: ignore[operator]
    assert not second.pending_gradients()  # type: ignore[operator]
    first.flush()  # type: ignore[operator]
    means = mean_grads(plain, _interleaved, env.world_size)  # type: ignore[arg-type]
    expected = {n: 3 * g if n.startswith("first") else g for n, g in means.items() if g is not None}
    assert_same(full_grads(pair), expected)


def test_rule_18_settings_of_one_model_are_not_the_others(pool2: Pool) -> None:
    pool2.run(check_settings_stay_apart)


def check_failure_stays_apart(env: RankEnv) -> None:
    """What one model has under way survives the failure, and the recovery, of another."""
    pair = seeded(Pair)
    first, second = (shard(model, env.mesh(2)) for model in (pair.first, pair.second))  # type: ignore[arg-type]
    second.set_is_last_backward(False)  # type: ignore[operator]
    with never_done():
        step(second, env.rank)
        fail(first, env.rank)
        step(first, env.rank)
    second.flush()  # type: ignore[operator]
    assert_same(full_grads(pair), mean_grads(seeded(Pair), _interleaved, env.world_size))  # type: ignore[arg-type]


def test_rule_18_a_failure_of_one_model_is_not_the_others(pool2: Pool) -> None:
    pool2.run(check_failure_stays_apart)


def check_threads(env: RankEnv) -> None:
    """One model per thread, on groups of their own, trains as it would alone."""
    mesh = env.mesh((2, 2), ("row", "column"))
    models = [shard(seeded(Deep), mesh[axis]) for axis in ("row", "column")]
    errors: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            # On both axes this rank's data are those of its place on it: the two models stay equal to their twins.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            rank = next(model.parameters()).device_mesh.get_local_rank()  # type: ignore[attr-defined]
            for k in range(4):
                step(model, rank, k)
                optimizer.step()
                optimizer.zero_grad()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    plain = seeded(Deep)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for k in range(4):
        grads = mean_grads(plain, lambda m, rank, k=k: step(m, rank, k), 2)  # type: ignore[misc]
        for name, param in plain.named_parameters():
            param.grad = grads[name]
        optimizer.step()
    for model in models:
        assert_same(dict(full_params(model)), dict(full_params(plain)))


def test_rule_18_one_thread_each(pool4: Pool) -> None:
    pool4.run(check_threads, group_timeout=6)


def check_threads_in_another_order(env: RankEnv) -> None:
    """Models that one thread has built ask the other ranks from threads of their own, in another order on each rank."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models = [shard(seeded(Deep), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))) for group in groups]
    for model in 3 * models:  # a rank that leaves a known path asks in the store
        step(model, env.rank)
    asks, leave = threading.Event(), Questions.leave
    errors: list[BaseException] = []

    def leaving(self: Questions, is_last: bool, answer: Any) -> None:
        asks.set()  # it has said what it is about to do, and may have to wait for the other rank
        leave(self, is_last, answer)

    def evaluate(number: int) -> None:
        if number != env.rank:
            asks.wait(5)  # the other model, for the other rank, which has come with this one
        try:
            with torch.no_grad():
                models[number](floats(env.rank))  # without gradients: nobody has done that before, so the ranks ask
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=evaluate, args=(number,)) for number in range(2)]
    with mock.patch.object(Questions, "leave", leaving):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    assert asks.is_set(), "not asked in the store"
    assert not errors, errors


def test_rule_18_models_of_one_thread_run_in_two(pool2: Pool) -> None:
    pool2.run(check_threads_in_another_order, group_timeout=6)


def check_deleted(env: RankEnv) -> None:
    """Without the garbage collector's help: what is left of a model after `del` is nothing."""
    step(shard(seeded(Deep), env.mesh((2, 1))), env.rank)  # what torch imports at first use leaves cycles
    gc.collect()
    gc.disable()
    try:
        model = shard(seeded(Deep), env.mesh((2, 1)))
        optimizer = torch.optim.AdamW(model.parameters())
        for k in range(2):
            with model.accumulate(last=k == 1):  # type: ignore[operator]
                step(model, env.rank, k)
        optimizer.step()
        units = [weakref.ref(unit) for unit in model._units()]  # type: ignore[operator]
        params = [weakref.ref(param) for param in model.parameters()]
        pipelines = len(ReductionPipeline.live)
        del model, optimizer
        left = [ref for ref in (*units, *params) if ref() is not None]
        assert not left, [type(ref()) for ref in left]
        assert len(ReductionPipeline.live) == pipelines - 1
    finally:
        gc.enable()


def test_rule_18_del_frees_everything(pool2: Pool) -> None:
    pool2.run(check_deleted)

"""Rule 20: after an exception nothing of the failed iteration is left, and the next one is that of a fresh model.

`tests/schedule/test_fault_injection.py` raises at every point of an iteration in turn; here is what a user meets around it.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hsdp
from hsdp.comm.work import outstanding
from hsdp.unit.dtype_group import DtypeGroup
from tests.support.deep import DIM, Deep, floats, loss_of, mean_grads, only_sharded, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded, shard
from tests.support.twin import assert_same, full_grads, full_params


class BoomError(Exception):
    """What the tests raise."""


@contextmanager
def failing_backward(model: nn.Module, at: int = 1, times: int = 1) -> Iterator[None]:
    """The backward of block `at` fails, the first `times` times, for forwards that run inside."""
    left = [times]

    def explode(grad: Tensor) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise BoomError

    def watch(module: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(explode)

    handle = model.blocks[at].register_forward_hook(watch)  # type: ignore[index,union-attr]
    try:
        yield
    finally:
        handle.remove()


def fail(model: nn.Module, rank: int) -> None:
    """One iteration whose backward fails half-way."""
    with failing_backward(model), pytest.raises(BoomError):
        step(model, rank, 5)


def check_failed_forward(env: RankEnv, error: type[BaseException]) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    expected = mean_grads(plain, step, env.world_size)
    before = full_params(model)

    def explode(module: nn.Module, args: object) -> None:
        raise error

    for at in (*model.blocks, model):  # type: ignore[misc]
        handle = at.register_forward_pre_hook(explode)
        with pytest.raises(error):
            step(model, env.rank, 5)
        handle.remove()
        check_sharded(model)
        check_rest(model)
        assert_same(dict(full_params(model)), dict(before), 0.0, 0.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model, env.rank)
        assert not [one for one in caught if "hsdp" in str(one.message)], "a failed forward drops nothing: no warning"
        assert_same(full_grads(model), expected)
        model.zero_grad()


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
def test_rule_20_a_failed_forward_leaves_nothing(pool2: Pool, error: type[BaseException]) -> None:
    pool2.run(check_failed_forward, error)


def check_failed_backward(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape))
    expected = mean_grads(plain, step, env.world_size)
    before = full_params(model)
    for _ in range(2):
        fail(model, env.rank)
        check_sharded(model)
        assert_same(dict(full_params(model)), dict(before), 0.0, 0.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # No zero_grad: gradients that the failed backward made before it failed must not be there either.
            step(model, env.rank)
        assert len([one for one in caught if "hsdp" in str(one.message)]) == 1
        assert_same(full_grads(model), expected)
        check_rest(model)
        model.zero_grad()


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_rule_20_a_failed_backward_leaves_nothing_and_warns_once(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(check_failed_backward, shape)


def check_failed_between(env: RankEnv, level: str) -> None:
    """Sums of earlier micro-batches outlive a failed forward."""

    def run(model: nn.Module, rank: int) -> None:
        only_sharded(model, "set_requires_grad_sync", level != "local")
        only_sharded(model, "set_requires_all_reduce", level != "scatter")
        step(model, rank)
        handle = model.blocks[2].register_forward_hook(_explode)  # type: ignore[index,union-attr]
        with pytest.raises(BoomError):
            step(model, rank, 5)
        handle.remove()
        only_sharded(model, "set_requires_grad_sync", True)
        only_sharded(model, "set_requires_all_reduce", True)
        step(model, rank, 1)

    model = shard(seeded(Deep), env.mesh((2, 1)))
    run(model, env.rank)
    assert_same(full_grads(model), mean_grads(seeded(Deep), run, env.world_size))


def _explode(module: nn.Module, args: object, out: Tensor) -> None:
    raise BoomError


@pytest.mark.parametrize("level", ["local", "scatter", "full"])
def test_rule_20_pending_sums_outlive_a_failed_forward(pool2: Pool, level: str) -> None:
    pool2.run(check_failed_between, level)


def _same_graph_again(model: nn.Module, rank: int) -> None:
    with failing_backward(model):
        loss = loss_of(model, rank)
    with pytest.raises(BoomError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()


def _other_graph(model: nn.Module, rank: int) -> None:
    with failing_backward(model):
        failing = loss_of(model, rank)
    loss = loss_of(model, rank, 1)
    with pytest.raises(BoomError):
        failing.backward()
    model.zero_grad()
    loss.backward()


RETRIES: dict[str, Callable[[nn.Module, int], None]] = {"same graph": _same_graph_again, "another graph": _other_graph}


def check_retry(env: RankEnv, how: str) -> None:
    model = shard(seeded(Deep), env.mesh(2))
    expected = mean_grads(seeded(Deep), RETRIES[how], env.world_size)
    refusal = None
    try:
        RETRIES[how](model, env.rank)
    except hsdp.HSDPError as error:
        refusal = str(error)
    if refusal is None:
        assert_same(full_grads(model), expected)
        check_rest(model)
    else:
        assert "forward" in refusal, refusal


@pytest.mark.parametrize("how", RETRIES)
def test_rule_20_a_backward_after_a_failed_one_is_right_or_refused(pool2: Pool, how: str) -> None:
    pool2.run(check_retry, how)


def check_stale(env: RankEnv) -> None:
    """A step between a forward and its backward is refused by name, and does no harm beyond that."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=True) for m in (model, plain)]
    step(model, env.rank)
    grads = mean_grads(plain, step, env.world_size)
    for name, param in plain.named_parameters():
        param.grad = grads[name]
    loss = loss_of(model, env.rank, 1)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(hsdp.StaleParametersError, match=r"unit '(blocks\.3|Deep \(root\))'"):
        loss.backward()
    step(model, env.rank)
    assert_same(full_grads(model), mean_grads(plain, step, env.world_size))


def test_rule_20_a_step_between_forward_and_backward_is_refused(pool2: Pool) -> None:
    pool2.run(check_stale)


def check_warnings_as_errors(env: RankEnv) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    fail(model, env.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            step(model, env.rank)
        step(model, env.rank)
    assert_same(full_grads(model), mean_grads(plain, step, env.world_size))


def test_rule_20_recovery_survives_warnings_as_errors(pool2: Pool) -> None:
    pool2.run(check_warnings_as_errors)


def check_nothing_held(env: RankEnv) -> None:
    """A gather whose unpacking fails is not remembered; a model that is deleted after a failure is gone."""
    before = set(outstanding())  # of other tests, whose models may not be collected yet
    model = shard(seeded(Deep), env.mesh(2))
    step(model, env.rank)
    assemble = DtypeGroup.assemble
    calls = [0]

    def explode(group: DtypeGroup) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise BoomError
        assemble(group)

    with mock.patch.object(DtypeGroup, "assemble", explode), pytest.raises(BoomError):
        step(model, env.rank)
    assert before.issuperset(outstanding()), [work.name for work in outstanding()]
    fail(model, env.rank)
    units = [weakref.ref(unit) for unit in model._units()]  # type: ignore[operator]
    del model
    gc.collect()
    assert not any(ref() for ref in units)
    assert before.issuperset(outstanding()), [work.name for work in outstanding()]


def test_rule_20_nothing_of_a_failed_iteration_is_held(pool2: Pool) -> None:
    pool2.run(check_nothing_held)


def check_inference_after(env: RankEnv) -> None:
    """What comes after a failed backward need not be training."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    fail(model, env.rank)
    with torch.no_grad():
        torch.testing.assert_close(model(floats(env.rank)), plain(floats(env.rank)), rtol=1e-11, atol=1e-11)
    check_rest(model)
    assert all(param.grad is None for param in model.parameters())
    step(model, env.rank)
    assert_same(full_grads(model), mean_grads(plain, step, env.world_size))


def test_rule_20_inference_works_after_a_failed_backward(pool2: Pool) -> None:
    pool2.run(check_inference_after)


class Fallback(nn.Module):
    """A row of units, one of which raises at first: the row catches that and calls it in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Fails() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            try:
                x = block(x, index == 1)
            except ValueError:
                x = block(x, False) * 0.5
        return x


class Fails(nn.Module):
    """A unit that raises in the middle of its forward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, fail: bool) -> Tensor:
        x = torch.tanh(self.up(x))
        if fail:
            raise ValueError("planted")
        out: Tensor = self.down(x)
        return out


def check_fallback(env: RankEnv, reshard: bool | None) -> None:
    plain, model = seeded(Fallback), shard(seeded(Fallback), env.mesh(2), reshard_after_forward=reshard)
    for _ in range(3):
        check_grads(model, plain, step, env.rank, env.world_size)
        check_rest(model)
        model.zero_grad()
        plain.zero_grad()
    model.flush()  # type: ignore[operator]


@pytest.mark.parametrize("reshard", [True, None, False])
def test_rule_20_a_forward_may_catch_what_a_unit_raises(pool2: Pool, reshard: bool | None) -> None:
    pool2.run(check_fallback, reshard)

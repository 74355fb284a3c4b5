"""After a failure anywhere, users see sharded and unchanged parameters at once, and the next iteration is a fresh one."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hsdp
from hsdp.buffers.flat_buffer import FlatBuffer
from hsdp.comm import host_memory
from hsdp.comm.groups import timeout_of
from hsdp.unit.unit import Unit
from tests.support.fragile import PLACES, Fragile, Fuse, fail
from tests.support.graphs import floats, loss, step
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_grads, check_rest, check_sharded, mesh_id, pool_for, shard
from tests.support.twin import assert_same, full_grads, full_params


def _hsdp_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "hsdp" in str(one.message)]


def _unchanged(model: nn.Module, plain: nn.Module, params: dict[str, nn.Parameter]) -> None:
    check_sharded(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in params.items()}
    before = {name: param.detach() for name, param in plain.named_parameters()}
    assert_same(dict(full_params(model)), dict(before), 0, 0)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert_same(dict(state), dict(before), 0, 0)


def _recovers(env: RankEnv, where: str, shape: tuple[int, ...], keep: bool | None, warm: bool) -> None:
    for error in (ValueError, KeyboardInterrupt):
        plain = Fragile().double()
        model = shard(copy.deepcopy(plain), env.mesh(shape), reshard_after_forward=keep)
        params = dict(model.named_parameters())
        if warm:
            for k in range(2):
                step(model, env.rank, k)
            model.zero_grad()
        fail(where, error, lambda: step(model, env.rank, 5))
        _unchanged(model, plain, params)
        # Without zero_grad: nothing of the failed iteration may be in the sums.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model, env.rank)
        assert len(_hsdp_warnings(caught)) == (1 if "forward" not in where else 0), _hsdp_warnings(caught)
        grads = full_grads(model)
        plain.zero_grad()
        for rank in range(env.world_size):
            step(plain, rank)
        means = {name: p.grad / env.world_size for name, p in plain.named_parameters() if p.grad is not None}
        assert_same(grads, dict(means))
        check_rest(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_grads(model, plain, step, env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("where", PLACES)
def test_after_an_error_parameters_are_sharded_and_the_next_iteration_is_fresh(pool2: Pool, where: str) -> None:
    pool2.run(_recovers, where, (2,), None, True)


@pytest.mark.parametrize("where", ["forward of 2", "backward of 0", "backward of 1", "backward before 1"])
@pytest.mark.parametrize(
    ("shape", "keep", "warm"),
    [((2, 2), None, True), ((2, 2), True, False), ((2,), True, True), ((2,), False, False), ((2, 1), None, True)],
    ids=lambda value: mesh_id(value) if isinstance(value, tuple) else str(value),
)
def test_on_every_mesh_cold_and_warm(
    request: pytest.FixtureRequest, where: str, shape: tuple[int, ...], keep: bool | None, warm: bool
) -> None:
    pool_for(request, shape).run(_recovers, where, shape, keep, warm)


def _forward_failure_leaves_nothing(env: RankEnv) -> None:
    model = shard(Fragile().double(), env.mesh(2), reshard_after_forward=False)
    for where in PLACES[:5]:
        fail(where, ValueError, lambda: loss(model, env.rank))
        check_rest(model)
        with torch.no_grad():
            fail(where, ValueError, lambda: loss(model, env.rank))
        check_rest(model)


def test_a_failed_forward_frees_its_memory_at_once(pool2: Pool) -> None:
    pool2.run(_forward_failure_leaves_nothing)


def _no_room_for_gathers(env: RankEnv, parts: int | bool) -> int:
    def block() -> nn.Module:  # parameters that are gathered directly, and others that are packed
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)).double()

    model = nn.Sequential(block(), block())
    policy = hsdp.CommPolicy(fusion="direct")
    hsdp.shard_units(model, "*", mesh=env.mesh(4), reshard_after_forward=parts, comm_policy=policy)
    batch = torch.ones(2, 8, dtype=torch.float64)
    alloc, failed = FlatBuffer.alloc, 0
    for at in itertools.count():
        left = iter(range(at))

        def allocates(self: FlatBuffer, left: Iterator[int] = left) -> None:
            if self.held != self.nbytes and next(left, None) is None:
                raise torch.OutOfMemoryError
            alloc(self)

        try:
            with mock.patch.object(FlatBuffer, "alloc", allocates):
                model(batch).sum().backward()
        except torch.OutOfMemoryError:
            failed += 1
        else:
            return failed
        with warnings.catch_warnings(record=True):
            for runtime in model._runtimes():  # type: ignore[operator]
                runtime.recover()
        check_rest(model)
    raise AssertionError("an iteration allocates so often, and no more")


@pytest.mark.parametrize("parts", [True, 2], ids=["whole", "parts"])
def test_a_gather_without_room_leaves_no_memory(pool4: Pool, parts: int | bool) -> None:
    assert min(pool4.run(_no_room_for_gathers, parts)) >= 10


def _fails_while_recomputing(env: RankEnv, reentrant: bool) -> None:
    plain = Fragile(reentrant).double()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    params = dict(model.named_parameters())
    for index in (1, 0):
        fail(f"recomputation of {index}", ValueError, lambda: step(model, env.rank))
        _unchanged(model, plain, params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_grads(model, plain, step, env.rank, env.world_size)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_error_in_a_recomputation(pool2: Pool, reentrant: bool) -> None:
    pool2.run(_fails_while_recomputing, reentrant)


# -- what else may follow a failure ---------------------------------------------------------------------------------


def _setup(env: RankEnv) -> tuple[nn.Module, nn.Module]:
    plain = Fragile().double()
    return shard(copy.deepcopy(plain), env.mesh(2)), plain


def _right_or_refused(model: nn.Module, plain: nn.Module, run: Callable[[nn.Module, int], Any], env: RankEnv) -> None:
    with contextlib.suppress(hsdp.StateError):
        check_grads(model, plain, run, env.rank, env.world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def _other_backward(env: RankEnv) -> None:
    model, plain = _setup(env)

    def run(m: nn.Module, rank: int) -> None:
        first, second = loss(m, rank), loss(m, rank, 1)
        if m is model:
            fail("backward of 1", ValueError, first.backward)
        second.backward()

    _right_or_refused(model, plain, run, env)


def test_a_backward_of_another_graph_after_a_failed_one(pool2: Pool) -> None:
    pool2.run(_other_backward)


def _again(env: RankEnv) -> None:
    model, plain = _setup(env)

    def run(m: nn.Module, rank: int) -> None:
        value = loss(m, rank)
        if m is model:
            fail("backward of 1", ValueError, lambda: value.backward(retain_graph=True))
        value.backward()

    _right_or_refused(model, plain, run, env)


def test_the_same_backward_again_after_it_failed(pool2: Pool) -> None:
    pool2.run(_again)


def _backward_after_forward_failed(env: RankEnv) -> None:
    model, plain = _setup(env)

    def run(m: nn.Module, rank: int) -> None:
        value = loss(m, rank)
        if m is model:
            fail("forward of 1", ValueError, lambda: loss(m, rank, 1))
        value.backward()

    for _ in range(2):
        check_grads(model, plain, run, env.rank, env.world_size)
    check_rest(model)


def test_a_backward_whose_next_forward_failed(pool2: Pool) -> None:
    pool2.run(_backward_after_forward_failed)


def _child_after_failure(env: RankEnv) -> None:
    model, plain = _setup(env)

    def run(m: nn.Module, rank: int) -> None:
        blocks: Any = m.blocks
        if m is model:
            fail("backward of 0", ValueError, lambda: step(m, rank))
            m.zero_grad()
        blocks[1](floats(rank)).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            check_grads(model, plain, run, env.rank, env.world_size)
        check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def test_a_child_used_alone_after_its_root_failed(pool2: Pool) -> None:
    pool2.run(_child_after_failure)


def _evaluate_after_failure(env: RankEnv) -> None:
    model, plain = _setup(env)
    fail("backward of 1", ValueError, lambda: step(model, env.rank))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(loss(model, env.rank), loss(plain, env.rank), rtol=1e-12, atol=0)
    check_rest(model)
    model.load_state_dict(state)
    check_grads(model, plain, step, env.rank, env.world_size)


def test_evaluation_and_loading_after_a_failure(pool2: Pool) -> None:
    pool2.run(_evaluate_after_failure)


def _accumulate_after_failure(env: RankEnv, setter: str) -> None:
    model, plain = _setup(env)

    def run(m: nn.Module, rank: int) -> None:
        for k in range(3):
            if m is model:
                getattr(m, setter)(k == 2)
            step(m, rank, k)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for where in ("backward of 1", "forward of 1"):
            getattr(model, setter)(False)
            step(model, env.rank)
            fail(where, ValueError, lambda: step(model, env.rank, 1))
            model.zero_grad()
            check_grads(model, plain, run, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("setter", ["set_requires_grad_sync", "set_requires_all_reduce"])
def test_an_accumulation_begun_anew_after_a_failure(pool2: Pool, setter: str) -> None:
    pool2.run(_accumulate_after_failure, setter)


def _fail_in_a_users_hook(env: RankEnv) -> None:
    model, plain = _setup(env)
    params = dict(model.named_parameters())
    blocks: Any = model.blocks
    hooks = {
        "pre": blocks[1].register_forward_pre_hook(lambda *_: Fuse.at("pre")),
        "post": blocks[1].register_forward_hook(lambda *_: Fuse.at("post")),
        "full": blocks[1].register_full_backward_hook(lambda *_: Fuse.at("full")),
        "param": blocks[1].up.weight.register_post_accumulate_grad_hook(lambda _: Fuse.at("param")),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for where in hooks:
            fail(where, ValueError, lambda: step(model, env.rank))
            _unchanged(model, plain, params)
            check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def test_an_error_in_a_hook_of_the_user(pool2: Pool) -> None:
    pool2.run(_fail_in_a_users_hook)


def _delete_after_failure(env: RankEnv, where: str) -> None:
    model, _ = _setup(env)
    for k in range(2):
        step(model, env.rank, k)
    fail(where, ValueError, partial(step, model, env.rank))
    watched = [weakref.ref(model), *(weakref.ref(unit) for unit in model._units())]
    del model
    gc.collect()  # the traceback of the error held the frames
    assert not [ref() for ref in watched if ref() is not None], "an iteration that failed keeps its model alive"


@pytest.mark.parametrize("where", ["forward of 0", "backward of 2", "backward before 1"])
def test_a_model_that_failed_can_be_deleted(pool2: Pool, where: str) -> None:
    pool2.run(_delete_after_failure, where)


def check_patience(env: RankEnv) -> None:
    """A group made with a longer timeout than the default group's: so does `init_device_mesh`, whatever was asked for."""
    patient = dist.new_group(timeout=timedelta(minutes=30))
    assert patient is not None
    assert timeout_of(patient, torch.device("cpu")) == timeout_of(dist.group.WORLD, torch.device("cpu")) < 1000


def test_ranks_wait_no_longer_than_the_default_group_would(pool2: Pool) -> None:
    pool2.run(check_patience)


def _interrupted_unshard(env: RankEnv) -> None:
    plain = Fragile().double()
    model: Any = shard(copy.deepcopy(plain), env.mesh(2))
    for wait in (lambda: model.unshard(async_op=True).wait(), model.unshard, lambda: step(model, env.rank)):
        with mock.patch.object(host_memory, "_quietly", side_effect=MemoryError), pytest.raises(MemoryError):
            wait()
        check_rest(model)
        check_grads(model, plain, step, env.rank, env.world_size)
        check_rest(model)


def test_a_gather_whose_results_were_not_put_down_is_made_anew(pool2: Pool) -> None:
    pool2.run(_interrupted_unshard)


def test_a_module_that_is_half_sharded_is_said_to_be() -> None:
    with fake_world(2) as env:
        module = nn.Linear(4, 4)
        for method, told in (("trial_gather", 0), ("_arrange", 1)):
            with (
                warnings.catch_warnings(record=True) as caught,
                mock.patch.object(Unit, method, side_effect=MemoryError),
                pytest.raises(MemoryError),
            ):
                warnings.simplefilter("always")
                hsdp.fully_shard(module, mesh=env.mesh(2))
            assert len(_hsdp_warnings(caught)) == told, _hsdp_warnings(caught)

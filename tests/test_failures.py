"""After a failure anywhere, users see sharded and unchanged parameters at once, and the next iteration is a fresh one."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hsdp
from tests.graphs import Layer, Net, floats, loss, step
from tests.rig import Pool, RankEnv
from tests.sharded import check_grads, check_rest, check_sharded, mesh_id, pool_for, shard
from tests.twin import assert_same, full_grads, full_params


class Fuse:
    """Where to fail next; blows once."""

    where: str | None = None
    error: type[BaseException] = ValueError

    @classmethod
    def at(cls, where: str) -> None:
        """Blows if this is the place."""
        if cls.where == where:
            cls.where = None
            raise cls.error("boom")


class _Mined(torch.autograd.Function):
    """Does nothing forward; backward is a place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Fuse.at(ctx.where)
        return grad, None


def _mined(x: Tensor, where: str) -> Tensor:
    return _Mined.apply(x, where)  # type: ignore[no-any-return,no-untyped-call]


class FragileLayer(Layer):
    """Has places in its forward and, between its parameters' uses, in its backward."""

    index = 0
    recomputed = False

    def forward(self, x: Tensor) -> Tensor:
        Fuse.at(f"forward of {self.index}, first")
        y = self.norm(x)
        Fuse.at(f"forward of {self.index}")
        y = _mined(torch.relu(self.up(y)), f"backward of {self.index}")
        if torch._C._current_graph_task_id() != -1:
            Fuse.at(f"recomputation of {self.index}")
        return _mined(x, f"backward of {self.index}, last") + self.down(y) * self.scale  # type: ignore[no-any-return]


class Fragile(Net):
    """Fails where the fuse says."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__(FragileLayer)
        self.use_reentrant = use_reentrant
        for index, block in enumerate(self.blocks):
            block.index = index  # type: ignore[assignment]

    def walk(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = _mined(x, f"backward before {index}")
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
            Fuse.at(f"forward after {index}")
        x.register_hook(lambda grad: Fuse.at("hook on a tensor"))
        return x


PLACES = [
    "forward of 0, first",
    "forward of 0",
    "forward of 2",
    "forward after 0",
    "forward after 2",
    "backward of 0",
    "backward of 1",
    "backward of 2",
    "backward of 0, last",
    "backward of 1, last",
    "backward before 0",
    "backward before 1",
    "backward before 2",
    "hook on a tensor",
]


def _fail(where: str, error: type[BaseException], act: Callable[[], object]) -> None:
    Fuse.where, Fuse.error = where, error
    with pytest.raises(error, match="boom"):
        act()
    assert Fuse.where is None


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
        _fail(where, error, lambda: step(model, env.rank, 5))
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
        _fail(where, ValueError, lambda: loss(model, env.rank))
        check_rest(model)
        with torch.no_grad():
            _fail(where, ValueError, lambda: loss(model, env.rank))
        check_rest(model)


def test_a_failed_forward_frees_its_memory_at_once(pool2: Pool) -> None:
    pool2.run(_forward_failure_leaves_nothing)


def _fails_while_recomputing(env: RankEnv, reentrant: bool) -> None:
    plain = Fragile(reentrant).double()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    params = dict(model.named_parameters())
    for index in (1, 0):
        _fail(f"recomputation of {index}", ValueError, lambda: step(model, env.rank))
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
    try:
        check_grads(model, plain, run, env.rank, env.world_size)
    except hsdp.HSDPError as error:
        assert "backward" in str(error), error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def _other_backward(env: RankEnv) -> None:
    model, plain = _setup(env)

    def run(m: nn.Module, rank: int) -> None:
        first, second = loss(m, rank), loss(m, rank, 1)
        if m is model:
            _fail("backward of 1", ValueError, first.backward)
        second.backward()

    _right_or_refused(model, plain, run, env)


def test_a_backward_of_another_graph_after_a_failed_one(pool2: Pool) -> None:
    pool2.run(_other_backward)


def _again(env: RankEnv) -> None:
    model, plain = _setup(env)

    def run(m: nn.Module, rank: int) -> None:
        value = loss(m, rank)
        if m is model:
            _fail("backward of 1", ValueError, lambda: value.backward(retain_graph=True))
        value.backward()

    _right_or_refused(model, plain, run, env)


def test_the_same_backward_again_after_it_failed(pool2: Pool) -> None:
    pool2.run(_again)


def _backward_after_forward_failed(env: RankEnv) -> None:
    model, plain = _setup(env)

    def run(m: nn.Module, rank: int) -> None:
        value = loss(m, rank)
        if m is model:
            _fail("forward of 1", ValueError, lambda: loss(m, rank, 1))
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
            _fail("backward of 0", ValueError, lambda: step(m, rank))
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
    _fail("backward of 1", ValueError, lambda: step(model, env.rank))
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
            _fail(where, ValueError, lambda: step(model, env.rank, 1))
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
            _fail(where, ValueError, lambda: step(model, env.rank))
            _unchanged(model, plain, params)
            check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def test_an_error_in_a_hook_of_the_user(pool2: Pool) -> None:
    pool2.run(_fail_in_a_users_hook)


# -- one rank only --------------------------------------------------------------------------------------------------


def _fail_alone(env: RankEnv, where: str, shape: tuple[int, ...], warm: bool) -> str:
    model = shard(Fragile().double(), env.mesh(shape))
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    for k in range(2 * warm):
        step(model, env.rank, k)
    start = time.monotonic()
    if env.rank == 1:
        _fail(where, ValueError, lambda: step(model, env.rank))
        text = "boom"
    else:
        with pytest.raises(hsdp.HSDPError) as caught:
            step(model, env.rank)
            # The failed rank's last reduction may have come through: the next iteration is the latest to notice.
            step(model, env.rank, 1)
        text = f"{type(caught.value).__name__}: {caught.value}"
    assert time.monotonic() - start < 12, "it took much longer than the group's timeout of 2 s"
    check_sharded(model)
    for name, param in model.named_parameters():
        assert torch.equal(param.to_local(), before[name]), name  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
@pytest.mark.parametrize(("where", "warm"), [("forward of 1", True), ("backward of 1", False), ("backward of 1", True)])
def test_an_error_on_one_rank_ends_the_others_within_the_timeout(
    request: pytest.FixtureRequest, where: str, warm: bool, shape: tuple[int, ...]
) -> None:
    pool = pool_for(request, shape)
    outcomes = pool.run_raw(_fail_alone, where, shape, warm, group_timeout=2)
    for outcome in outcomes:
        # The run itself ended well; groups that are out of step afterwards are what it is about.
        assert outcome.ok or outcome.error in ("RuntimeError", "DistBackendError"), outcome.message + outcome.traceback
        if outcome.ok and outcome.rank != 1:
            assert "unit '" in outcome.value
            assert "rank" in outcome.value


def _die(env: RankEnv) -> str:
    model = shard(Fragile().double(), env.mesh(2))
    step(model, env.rank)
    if env.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hsdp.HSDPError) as caught:
        step(model, env.rank)
        step(model, env.rank)
    check_sharded(model)
    return str(caught.value)


def test_a_lost_rank_ends_the_others_within_the_timeout() -> None:
    with Pool(2, group_timeout=3) as pool:
        outcomes = pool.run_raw(_die, timeout=40)
    assert outcomes[1].error == "Died"
    assert outcomes[0].ok, outcomes[0].message + outcomes[0].traceback
    assert "unit '" in outcomes[0].value

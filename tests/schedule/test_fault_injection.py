"""An exception at every hook and every collective of an iteration in turn: right after it users see what was before, and
the next iteration is that of a fresh model.

Each point is a method of the engine, or a hook of the user's. An iteration calls it so many times; for each n, one more
iteration runs in which the n-th call raises, on all ranks. Then the parameters change, and one more iteration must give
the gradients of those: with anything left of the failed one it would not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import hsdp
from hsdp.comm.collectives import Comm
from hsdp.comm.work import CommWork
from hsdp.schedule.module_hooks import ModuleHooks
from hsdp.schedule.pipeline import ReductionPipeline
from hsdp.schedule.runtime import Runtime
from hsdp.unit.dtype_group import DtypeGroup
from hsdp.unit.gradients import Gradients
from hsdp.unit.unit import Unit
from tests.support.deep import Deep, mean_grads, never_done, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, check_sharded, shard
from tests.support.twin import full_params


class InjectedError(Exception):
    """What is raised."""


class Hooks:
    """The user's hooks on each block; each calls its namesake, which is a point too."""

    @staticmethod
    def forward_pre(module: nn.Module, args: Any) -> None:
        """Before a block's forward, in a recomputation too."""

    @staticmethod
    def forward(module: nn.Module, args: Any, out: Tensor) -> None:
        """After a block's forward."""
        if out.requires_grad:
            out.register_hook(lambda grad: Hooks.tensor(grad))

    @staticmethod
    def tensor(grad: Tensor) -> None:
        """At the gradient of a block's output."""

    @staticmethod
    def landed(param: Tensor) -> None:
        """At the gradient of a sharded parameter."""

    @staticmethod
    def register(model: nn.Module) -> None:
        """Registers all of them."""
        for block in model.blocks:  # type: ignore[union-attr]
            block.register_forward_pre_hook(lambda *args: Hooks.forward_pre(*args))
            block.register_forward_hook(lambda *args: Hooks.forward(*args))
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: Hooks.landed(param))


USER = [(Hooks, name) for name in ("forward_pre", "forward", "tensor", "landed")]
FORWARD = [
    (ModuleHooks, "run"),
    (ModuleHooks, "after_forward"),
    (Unit, "end_call"),
    (Runtime, "enter_forward"),
    (Runtime, "leave_forward"),
    (Runtime, "end_forward"),
]
GATHER = [
    (Unit, "launch"),
    (Unit, "show"),
    (Unit, "finish"),
    (Unit, "reshard"),
    (DtypeGroup, "assemble"),
    (Comm, "all_gather"),
    (CommWork, "wait"),
]
BACKWARD = [
    (Runtime, "enter_backward"),
    (Runtime, "completed"),
    (Runtime, "drain"),
    (Runtime, "_end_task"),
    (Unit, "begin_task"),
    (Unit, "_all_arrived"),
]
REDUCE = [
    (Gradients, "take"),
    (Gradients, "land"),
    (ReductionPipeline, "_start_all_reduce"),
    (ReductionPipeline, "submit"),
    (ReductionPipeline, "_release"),
    (Comm, "reduce_scatter"),
    (Comm, "all_reduce"),
]
POINTS: dict[str, tuple[type, str]] = {
    f"{owner.__name__}.{name}": (owner, name) for owner, name in (*USER, *FORWARD, *GATHER, *BACKWARD, *REDUCE)
}


NEVER_BEHIND = {"Comm", "Runtime._end_task"}
"""Points behind which nothing can raise: a collective that nobody has yet, the end of it all."""


@contextmanager
def raising(point: str, at: int, behind: bool = False) -> Iterator[list[int]]:
    """The `at`-th call of a point raises, instead of doing its work or behind it (0: none does).

    Yields [the number of calls].
    """
    owner, name = POINTS[point]
    original: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def injected(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        mine = calls[0] == at
        result = original(*args, **kwargs) if behind or not mine else None
        if mine:
            raise InjectedError(f"{point}, call {at}")
        return result

    wrapped = staticmethod(injected) if owner is Hooks else injected
    with mock.patch.object(owner, name, wrapped):
        yield calls


class Subject:
    """A sharded model that is driven through failures, and what is right after each.

    Attributes:
        before: the whole parameters during an iteration that fails; the next one runs with other ones.
    """

    def __init__(self, env: RankEnv, shape: tuple[int, ...], recompute: bool | None) -> None:
        self.rank = env.rank
        plain = seeded(lambda: Deep(recompute))
        self.model = shard(seeded(lambda: Deep(recompute)), env.mesh(shape))
        Hooks.register(self.model)
        self.before = full_params(self.model)
        self._locals = {name: self._local(param).clone() for name, param in self.model.named_parameters()}
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(0.75)
        self._grads = {
            name: distribute_tensor(grad, param.device_mesh, param.placements).to_local()  # type: ignore[attr-defined]
            for (name, param), grad in zip(
                self.model.named_parameters(), mean_grads(plain, step, env.world_size).values(), strict=True
            )
            if grad is not None
        }
        self.run()

    def run(self) -> None:
        """One iteration. Nothing lands by luck of timing: the ranks' n-th calls are the same."""
        with never_done():
            step(self.model, self.rank)

    def count(self, point: str) -> int:
        """How often an iteration calls a point."""
        with raising(point, 0) as calls:
            self.run()
        return calls[0]

    def fail(self, point: str, at: int, behind: bool) -> None:
        """One iteration in which a call raises; checks what the user sees then."""
        self._set(1.0)
        self.model.zero_grad()
        try:
            with raising(point, at, behind):
                self.run()
        except InjectedError:
            self.check_unchanged()
        else:
            raise AssertionError("the error was swallowed, or the call was not made")

    def check_unchanged(self) -> None:
        """Parameters and state_dict are the sharded ones, with the values of before; looks at this rank alone."""
        check_sharded(self.model)
        state = self.model.state_dict()
        for name, param in self.model.named_parameters():
            assert torch.equal(self._local(param), self._locals[name]), f"parameter {name} changed"
            assert torch.equal(self._local(state[name]), self._locals[name]), f"{name} of state_dict() changed"

    def check_whole(self) -> None:
        """The same of the whole parameters, which all ranks gather."""
        for name, whole in full_params(self.model).items():
            assert torch.equal(whole, self.before[name]), f"whole parameter {name} changed"

    def recover(self) -> None:
        """The next iteration, with other parameters and without zero_grad, is that of a fresh model."""
        self._set(0.75)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.run()
        assert sum("hsdp" in str(one.message) for one in told) <= 1, [str(one.message) for one in told]
        for name, param in self.model.named_parameters():
            assert param.grad is not None, f"{name} has no gradient"
            torch.testing.assert_close(self._local(param.grad), self._grads[name], rtol=1e-11, atol=1e-11)
        check_rest(self.model)

    def _set(self, factor: float) -> None:
        for name, param in self.model.named_parameters():
            self._local(param).copy_(self._locals[name] * factor)

    @staticmethod
    def _local(tensor: Any) -> Tensor:
        assert isinstance(tensor, DTensor), type(tensor)
        return tensor.detach().to_local()


def inject(
    env: RankEnv,
    shape: tuple[int, ...],
    recompute: bool | None,
    points: Sequence[str],
    stride: int,
    behind: bool = False,
) -> dict[str, int]:
    """Every `stride`-th call of each point raises, one per iteration; returns how many did."""
    subject = Subject(env, shape, recompute)
    done, wrong = {}, []
    for index, point in enumerate(points):
        calls = subject.count(point)
        chosen = range(min(1 + index % stride, calls), calls + 1, stride) if calls else range(0)
        for at in chosen:
            try:
                subject.fail(point, at, behind)
                if at < stride + 2:  # slow: a collective for each parameter
                    subject.check_whole()
                subject.recover()
            except Exception as error:
                wrong.append(f"call {at} of {point} raised, then {type(error).__name__}: {error}".partition("\n")[0])
                subject = Subject(env, shape, recompute)
        done[point] = len(chosen)
    assert not wrong, "\n".join(wrong)
    return done


RECOMPUTE = {"plain": None, "recompute": False, "reentrant": True}
THEMES = {"user": USER, "forward": FORWARD, "gather": GATHER, "backward": BACKWARD, "reduce": REDUCE}


def _names(theme: str) -> list[str]:
    return [f"{owner.__name__}.{name}" for owner, name in THEMES[theme]]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("theme", THEMES)
def test_an_error_at_any_point_leaves_nothing_behind(pool2: Pool, theme: str, recompute: str) -> None:
    stride = 2 if recompute == "reentrant" else 1
    done = pool2.run(inject, (2,), RECOMPUTE[recompute], _names(theme), stride, timeout=120.0)[0]
    assert all(count for point, count in done.items() if point != "Comm.all_reduce"), done


@pytest.mark.parametrize("recompute", ["plain", "recompute"])
@pytest.mark.parametrize("theme", THEMES)
def test_an_error_at_any_point_on_two_axes_leaves_nothing_behind(pool4: Pool, theme: str, recompute: str) -> None:
    done = pool4.run(inject, (2, 2), RECOMPUTE[recompute], _names(theme), 4, timeout=120.0)[0]
    assert all(done.values()), done


@pytest.mark.parametrize("recompute", ["plain", "reentrant"])
def test_points_behind_their_work(pool2: Pool, recompute: str) -> None:
    points = [name for name in POINTS if not {name, name.partition(".")[0]} & NEVER_BEHIND]
    done = pool2.run(inject, (2,), RECOMPUTE[recompute], points, 4, True, timeout=120.0)[0]
    assert all(done.values()), done


# -- on one rank only -----------------------------------------------------------------------------------------------

ALONE: list[tuple[str, int, bool | None]] = [
    ("Hooks.forward", 2, None),
    ("Comm.all_gather", 3, None),
    ("Unit._all_arrived", 2, None),
    ("Comm.reduce_scatter", 2, False),
    ("Runtime._end_task", 1, None),
]
GROUP_TIMEOUT = 2.0
SLACK = 6.0  # for the second axis, which waits for ranks that wait, and for a busy machine


def fail_alone(env: RankEnv, shape: tuple[int, ...], recompute: bool | None, point: str, at: int, who: int) -> None:
    """The call raises on one rank; every rank raises, and looks at what it sees then."""
    subject = Subject(env, shape, recompute)
    subject.model.zero_grad()
    subject._set(1.0)
    try:
        with raising(point, at if env.rank == who else 0):
            for _ in range(2):  # a rank that needs nobody any more in this iteration does in the next
                subject.run()
    except Exception:
        subject.check_unchanged()
        raise


def _check_alone(pool: Pool, shape: tuple[int, ...], case: tuple[str, int, bool | None], who: int) -> None:
    point, at, recompute = case
    outcomes = pool.run_raw(
        fail_alone, shape, recompute, point, at, who, group_timeout=GROUP_TIMEOUT, timeout=GROUP_TIMEOUT + 30.0
    )
    for one in outcomes:
        if one.rank == who:
            assert one.error == "InjectedError", one
        else:
            assert one.error in (hsdp.CollectiveError.__name__, hsdp.DivergenceError.__name__), one
            assert "of unit '" in one.message
            assert one.seconds < 2 * GROUP_TIMEOUT + SLACK


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case[0])
def test_an_error_on_one_rank_alone_ends_the_others_in_time(pool2: Pool, case: tuple[str, int, bool | None]) -> None:
    _check_alone(pool2, (2,), case, 1)


@pytest.mark.parametrize("case", [("Comm.all_reduce", 2, None), ("Hooks.tensor", 3, True)], ids=lambda case: case[0])
def test_one_rank_of_two_axes_alone(pool4: Pool, case: tuple[str, int, bool | None]) -> None:
    _check_alone(pool4, (2, 2), case, 2)

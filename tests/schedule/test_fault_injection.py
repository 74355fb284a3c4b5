"""An exception at every hook and every collective of an iteration in turn: right after it users see what was before, and
the next iteration is that of a fresh model.

Each point is a method of the engine, or a hook of the user's. An iteration calls it so many times; for each n, one more
iteration runs in which the n-th call raises, on all ranks. Then the parameters change, and one more iteration must give
the gradients of those: with anything left of the failed one it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

import hsdp
from hsdp.comm.collectives import Comm
from hsdp.comm.work import CommWork
from hsdp.schedule.module_hooks import ModuleHooks
from hsdp.schedule.pipeline import ReductionPipeline
from hsdp.schedule.runtime import Runtime
from hsdp.unit.dtype_group import DtypeGroup
from hsdp.unit.gradients import Gradients
from hsdp.unit.rollback import Undo
from hsdp.unit.unit import Unit
from hsdp.unit.write_guard import WriteGuard
from tests.support.failing import Hooks, InjectedError, Subject
from tests.support.rig import Pool, RankEnv

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
    (WriteGuard, "opened"),
    (Comm, "all_gather"),
    (CommWork, "wait"),
]
BACKWARD = [
    (Runtime, "enter_backward"),
    (Runtime, "_end_visit"),
    (Runtime, "drain"),
    (Runtime, "_end_task"),
    (Unit, "begin_task"),
    (Unit, "_all_arrived"),
]
REDUCE = [
    (Gradients, "take"),
    (Gradients, "land"),
    (Gradients, "commit"),
    (Undo, "note_assigned"),
    (ReductionPipeline, "_start_all_reduce"),
    (ReductionPipeline, "submit"),
    (ReductionPipeline, "_release"),
    (Comm, "reduce_scatter"),
    (Comm, "all_reduce"),
]
POINTS: dict[str, tuple[type, str]] = {
    f"{owner.__name__}.{name}": (owner, name) for owner, name in (*USER, *FORWARD, *GATHER, *BACKWARD, *REDUCE)
}


KEEPS = {"Gradients.commit"}
"""Points at which a backward is over in some units: its gradients stay in all of them."""

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
        subject.start()
        with raising(point, 0) as called:
            subject.run()
        calls = called[0]
        chosen = range(min(1 + index % stride, calls), calls + 1, stride) if calls else range(0)
        for at in chosen:
            try:
                assert subject.fail(raising(point, at, behind)), "the error was swallowed, or the call was not made"
                if at < stride + 2:  # slow: a collective for each parameter
                    subject.check_whole()
                if point in KEEPS and subject.kept():
                    subject.start()
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
    subject.start()
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

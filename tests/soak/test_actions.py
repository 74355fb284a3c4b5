"""2,000 random programs of user actions against the twin, in float64; `tests.soak.actions` runs more."""

from __future__ import annotations

import pytest

from tests.soak.actions.models import Part
from tests.soak.actions.programs import FEATURES, SHAPES, Action, Program, draw, smaller
from tests.soak.actions.soak import run_all, table
from tests.support.rig import Pool

pytestmark = pytest.mark.beside


@pytest.mark.parametrize(("ranks", "mesh", "count"), [(2, "1d", 1550), (2, "2d", 420), (4, "1d", 10), (4, "2d", 20)])
def test_programs_end_equal_or_with_a_name(request: pytest.FixtureRequest, ranks: int, mesh: str, count: int) -> None:
    _check(request.getfixturevalue(f"pool{ranks}"), SHAPES[mesh][ranks], count)


@pytest.mark.parametrize(("ranks", "mesh", "count"), [(2, "1d", 12), (4, "2d", 4)])
def test_programs_on_the_emulated_device(request: pytest.FixtureRequest, ranks: int, mesh: str, count: int) -> None:
    """With delays, and without races."""
    _check(request.getfixturevalue(f"device{ranks}"), SHAPES[mesh][ranks], count)


def test_programs_that_found_something_on_the_emulated_device(device2: Pool) -> None:
    """Recomputations, a task that fails inside of one, gathers beside an optimizer's step or a graph of gradients."""
    _run(device2, [draw(seed, (2,)) for seed in ("e:1", "e:34", "e:87", "e:158", "f:157", "f:203", "c2:1")])


def test_a_program_whose_sums_wait_while_they_are_on_their_way(pool2: Pool) -> None:
    """Behind a backward that waits for nothing: who took no sums for pending would miss them in the gradients."""
    _run(pool2, [draw("11-28:2744", (2,))])


def test_a_forward_that_raises_between_a_forward_and_its_backward(pool2: Pool) -> None:
    """A gradient inside of `torch.func.grad` is none of the backwards that forwards await: units keep their turns."""
    parts = Part("chain", "whole"), Part("chain", "")
    waits = ("transform", 4, "grad"), ("forward", 2, {"heads": ("both", "second")}, "call", ""), ("backward", (4,), {})
    actions = *waits, ("forward", 0, {"edits": {1: "raise"}}, "call", ""), ("backward", (2,), {})
    _run(pool2, [Program("left", (2, 1), parts, actions, heads_are_units=True)])


def test_the_first_reader_of_stepped_shards_is_a_transform(pool2: Pool) -> None:
    """Parts of other replicas land in the middle of it."""
    step = ("forward", 3, {}, "call", ""), ("backward", (3,), {}), ("step",)
    actions = *step, ("transform", 4, "jvp"), ("backward", (4,), {}), ("step",), ("transform", 4, "per sample")
    _run(pool2, [Program("stepped", (2, 1), (Part("linear", "whole"),), actions, local="over replicas")])


@pytest.mark.parametrize("kind", ["grad", "jvp", "per sample grad"])
def test_a_frozen_parameter_is_heeded_inside_of_a_transform(pool2: Pool, kind: str) -> None:
    """Between a forward and its backward: what is made for it must not be the transform's."""
    first, toggle = ("forward", 1, {}, "call", ""), ("toggle", 5, False)
    actions = first, toggle, ("transform", 4, kind), ("backward", (1,), {}), ("backward", (4,), {})
    _run(pool2, [Program("frozen", (2,), (Part("linear", "whole"),), actions)])


def _check(pool: Pool, shape: tuple[int, ...], count: int) -> None:
    _run(pool, [draw(f"ci:{number}", shape) for number in range(count)])


def _run(pool: Pool, programs: list[Program]) -> None:
    tally = run_all(pool, programs, stop_at=4)
    assert not tally.failures, f"{table(tally, len(programs))}\n" + "\n".join(
        f"{program}\n{told}" for found in tally.failed.values() for program, told in found
    )


def test_a_seed_tells_its_program() -> None:
    assert draw("0:1", (2,)) == draw("0:1", (2,))
    assert draw("0:1", (2,)) != draw("0:2", (2,))


def test_programs_have_all_actions() -> None:
    drawn: list[Action] = [action for number in range(2000) for action in draw(f"all:{number}", (2,)).actions]
    kinds = {action[0] for action in drawn}
    assert len(kinds) == 44, sorted(kinds)


def test_switches_leave_features_out() -> None:
    plain = [draw(f"plain:{number}", (2,), frozenset(FEATURES)) for number in range(300)]
    kinds = {action[0] for program in plain for action in program.actions}
    assert kinds <= {"forward", "backward", "zero", "step", "clip", "flush", "eval", "peek"}
    hows = [action[2] for program in plain for action in program.actions if action[0] in ("forward", "backward")]
    assert not any(hows)


def test_shrinking_ends() -> None:
    program = draw("0:3", (2,))
    for _ in range(1000):
        program = next(smaller(program), program)
    assert program.actions == ()
    assert not list(smaller(program))

"""One rank of many differs, is late, or dies: who is told what, after how long, for how many store operations.

The ranks are simulated (`tests/support/many_ranks.py`): the guard's code is real, time, store and process group are not.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.support.many_ranks import Failure, Outcome, Where, fail
from tests.support.simulated import Client, Clock, Server

TIMEOUT = 20.0
QUESTION = 2
"""Store operations of a rank in a question in the store about which all agree."""

ALARM, REPORT = 8, 40
"""Store operations that a rank adds when it is told of a failure, and that the one adds which writes the report."""

_LATE = re.compile(r"rank\(s\) (\[[^]]*\])( and [0-9,]+ more)? did not come to the same point within 20 s")


def the_message(outcomes: list[Outcome]) -> str:
    """That which all ranks are told."""
    messages = Counter((one.error, one.message) for one in outcomes)
    assert len(messages) == 1, messages
    ((error, message),) = messages
    assert error == "DivergenceError", message
    assert "unit 'blocks." in message
    lists = re.findall(r"\[([0-9, ]*)\]", message)
    assert all(len(listed.split(",")) <= 12 for listed in lists), message
    return message


def named_late(outcomes: list[Outcome]) -> list[int]:
    """The ranks that did not come, as all are told."""
    found = _LATE.search(the_message(outcomes))
    assert found is not None, outcomes[0].message
    return [int(rank) for rank in found[1].strip("[]").split(",")]


def check_operations(outcomes: list[Outcome], usual: int) -> None:
    """`usual`: those of a rank when nothing fails."""
    counts = sorted(one.calls.total() for one in outcomes)
    assert counts[-1] <= usual + ALARM + REPORT, counts[-3:]
    assert counts[-2] <= usual + ALARM, counts[-3:]


def check_seconds(outcomes: list[Outcome], most: float) -> None:
    """At most so many from when a rank came to the point until it was told."""
    seconds = [one.ended - one.came for one in outcomes]
    assert max(seconds) <= most, max(seconds)


@pytest.mark.parametrize("world", [4, 64, 1024])
def test_a_rank_that_differs_at_the_first_question(world: int) -> None:
    outcomes = fail(world, Failure("differs", ranks=(world // 2,)), TIMEOUT)
    message = the_message(outcomes)
    assert f"rank(s) [{world // 2}]: broadcast of unit 'blocks.0'" in message
    assert world == 4 or f"11] and {world - 13:,} more: set-up of unit 'blocks.0'" in message
    check_seconds(outcomes, 2.0)
    check_operations(outcomes, QUESTION)


@pytest.mark.parametrize("world", [4, 64, 1024])
def test_a_rank_that_is_late_for_the_first_question(world: int) -> None:
    outcomes = fail(world, Failure("late", ranks=(world // 2,), seconds=60.0), TIMEOUT)
    assert named_late(outcomes) == [world // 2]
    check_seconds(outcomes, TIMEOUT + 2.0)
    assert outcomes[world // 2].ended <= 61.0
    check_operations(outcomes, QUESTION)


@pytest.mark.parametrize("world", [4, 64, 1024])
def test_a_rank_that_is_dead_at_the_first_question(world: int) -> None:
    outcomes = fail(world, Failure("dead", ranks=(world // 2,)), TIMEOUT)
    assert len(outcomes) == world - 1
    assert named_late(outcomes) == [world // 2]
    check_seconds(outcomes, TIMEOUT + 2.0)
    check_operations(outcomes, QUESTION)


def test_a_rank_that_is_late_but_in_time_costs_the_time_alone() -> None:
    outcomes = fail(64, Failure("late", ranks=(7,), seconds=60.0), timeout=600.0)
    assert {one.error for one in outcomes} == {""}
    assert {one.calls.total() for one in outcomes} == {QUESTION}
    assert max(one.ended for one in outcomes) < 60.1


@pytest.mark.parametrize("how", ["late", "dead"])
def test_a_rank_that_others_wait_for_in_a_question_in_the_group(how: str) -> None:
    outcomes = fail(64, Failure(how, "asked in the group", (40,)), TIMEOUT)  # type: ignore[arg-type]
    assert named_late(outcomes) == [40]
    check_seconds(outcomes, TIMEOUT)
    check_operations(outcomes, int(3 * TIMEOUT))  # once per second ranks that wait look at gate, votes and failures


@pytest.mark.parametrize("where", ["asked in the group", "known collective"])
def test_a_rank_that_differs_later(where: Where) -> None:
    outcomes = fail(64, Failure("differs", where, (40,)), TIMEOUT)
    message = the_message(outcomes)
    assert "rank(s) [40]: broadcast of unit 'blocks.1'" in message
    assert "11] and 51 more: all-gather of unit 'blocks.1'" in message
    check_seconds(outcomes, 2.0)


@pytest.mark.parametrize("seed", range(60))
def test_those_are_named_that_came_when_others_had_given_up(seed: int) -> None:
    """One or two ranks come a moment after others gave up, while those write their lines; some machines are busy."""
    rng = random.Random(seed)
    world, busy = rng.choice((4, 8, 16)), rng.choice((0.0, 0.02))
    late = tuple(sorted(rng.sample(range(world), rng.choice((1, 2)))))
    where: Where = rng.choice(("first question", "asked in the group"))
    gives_up = TIMEOUT if where == "first question" else 0.9 * TIMEOUT
    failure = Failure("late", where, late, gives_up + rng.uniform(0.5, 2.0))
    outcomes = fail(world, failure, TIMEOUT, away=(lambda: rng.expovariate(1.0 / busy)) if busy else None)
    assert named_late(outcomes) == list(late)


def test_the_simulated_store_answers_as_torch_s_do() -> None:
    rng = random.Random(0)
    clock, real = Clock(), dist.HashStore()

    def compare() -> None:
        simulated = Client("", Server(clock, 1e-3), clock, Counter(), None)
        for _ in range(400):
            key = rng.choice("abcd") + rng.choice(("text", "sum"))
            text, amount = rng.choice(("x", "yy")), rng.randrange(3)
            method, *arguments = rng.choice(
                [("add", key, amount), ("check", [key]), ("delete_key", key)]
                if key.endswith("sum")
                else [
                    ("append", key, text),
                    ("check", [key]),
                    ("compare_set", key, rng.choice(("", "x")), text),
                    ("delete_key", key),
                    ("get", key),
                    ("set", key, text),
                    ("wait", [key], timedelta(milliseconds=1)),
                ]
            )
            if method == "get" and not real.check([key]):
                continue
            answers = []
            for store in (simulated, real):
                try:
                    answers.append(getattr(store, method)(*arguments))
                except dist.DistStoreError:
                    answers.append("time-out")
            assert answers[0] == answers[1], (method, arguments)

    clock.run([compare])
    assert clock.now > 0.3

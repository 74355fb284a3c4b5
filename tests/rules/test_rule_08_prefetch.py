"""Rule 8: prefetch depth bounds units that are gathered and unused; another order drops to none and is recorded anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import hsdp
from hsdp.unit.unit import Unit
from hsdp.unit.unsharded import GATHERING
from tests.rules.test_rule_14_accumulation import Choosy
from tests.support.deep import floats, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, shard


@contextmanager
def ahead() -> Iterator[list[tuple[str, ...]]]:
    """Whenever a unit is opened: the names of those that are gathered and unused then, its own not among them."""
    log: list[tuple[str, ...]] = []
    waiting: dict[str, None] = {}
    launch, show = Unit.launch, Unit.show

    def launched(unit: Unit, *args: Any, **kwargs: Any) -> None:
        waiting[unit.name] = None
        launch(unit, *args, **kwargs)

    def shown(unit: Unit, registered: bool = False) -> None:
        show(unit, registered)
        waiting.pop(unit.name, None)
        log.append(tuple(waiting))

    with mock.patch.object(Unit, "launch", launched), mock.patch.object(Unit, "show", shown):
        yield log


def check_bound(env: RankEnv, window: int) -> None:
    options = {"reshard_after_forward": True, "comm_policy": hsdp.CommPolicy(prefetch=window)}
    model = shard(seeded(Choosy), env.mesh(2), **options)
    for known in (False, True):
        with ahead() as log:
            out = model(floats(env.rank))
        depths = [len(names) for names in log]
        # The root, a, b, c: at the end of the order there is less to gather.
        assert depths == ([min(window, left) for left in (3, 2, 1, 0)] if known else [0] * 4), log
        with ahead() as log:
            out.sum().backward()
        assert max(len(names) for names in log) == min(window, 3), log
    check_rest(model)


@pytest.mark.parametrize("window", [0, 1, 2, 9])
def test_rule_08_no_more_units_wait_than_the_window_allows(pool2: Pool, window: int) -> None:
    pool2.run(check_bound, window)


def check_other_order(env: RankEnv) -> None:
    plain, model = seeded(Choosy), shard(seeded(Choosy), env.mesh(2))
    units = {unit.name: unit for unit in model._units()}  # type: ignore[operator]

    def run(walk: str) -> list[tuple[str, ...]]:
        with ahead() as log:
            out = model(floats(env.rank), walk)
        torch.testing.assert_close(out, plain(floats(env.rank), walk), rtol=1e-11, atol=1e-11)
        assert all(unit.residency is not GATHERING for unit in units.values()), "a gather that nobody waits for"
        out.sum().backward()
        check_rest(model)
        return log

    run("abc")
    assert run("abc") == [("blocks.0",), ("blocks.1",), ("blocks.2",), ()]
    # The root still expects a: c comes, the pass has left the order, and nothing more is gathered ahead.
    assert run("cba") == [("blocks.0",), ("blocks.0",), ("blocks.0",), ()]
    assert run("cba") == [("blocks.2",), ("blocks.1",), ("blocks.0",), ()]
    assert run("c") == [("blocks.2",), ("blocks.1",)], "b was gathered in vain"
    assert run("c") == [("blocks.2",), ()]


def test_rule_08_another_order_is_noticed_and_recorded(pool2: Pool) -> None:
    pool2.run(check_other_order)

"""A failure on one rank only: the others raise within the group's timeout, and their parameters stay what they were."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import hsdp
from tests.support.fragile import Fragile, fail
from tests.support.graphs import step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_sharded, mesh_id, pool_for, shard


class Finished(Exception):  # noqa: N818  (no error)
    """How a run ends whose groups are out of step on purpose: the rig then makes new ones."""


def _fail_alone(env: RankEnv, where: str, shape: tuple[int, ...], warm: bool) -> None:
    model = shard(Fragile().double(), env.mesh(shape))
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    for k in range(2 * warm):
        step(model, env.rank, k)
    start = time.monotonic()
    if env.rank == 1:
        fail(where, ValueError, lambda: step(model, env.rank))
        text = "boom"
    else:
        with pytest.raises(hsdp.HSDPError) as caught:
            step(model, env.rank)
            # The failed rank's last reduction may have come through: the next iteration is the latest to notice.
            step(model, env.rank, 1)
        text = f"{type(caught.value).__name__}: {caught.value}"
    assert time.monotonic() - start < 30, "it took much longer than the timeout of the group, 4 s"
    check_sharded(model)
    for name, param in model.named_parameters():
        assert torch.equal(param.to_local(), before[name]), name
    raise Finished(text)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
@pytest.mark.parametrize(("where", "warm"), [("forward of 1", True), ("backward of 1", False), ("backward of 1", True)])
def test_an_error_on_one_rank_ends_the_others_within_the_timeout(
    request: pytest.FixtureRequest, where: str, warm: bool, shape: tuple[int, ...]
) -> None:
    pool = pool_for(request, shape)
    for outcome in pool.run_raw(_fail_alone, where, shape, warm, group_timeout=4):
        assert outcome.error == "Finished", f"{outcome.error}: {outcome.message}\n{outcome.traceback}"
        if outcome.rank != 1:
            assert "unit '" in outcome.message
            assert "rank" in outcome.message


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

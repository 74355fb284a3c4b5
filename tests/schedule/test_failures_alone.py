"""A failure on one rank only: the others raise within the group's timeout, and their parameters stay what they were."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import Tensor, nn

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


def _full_params(model: nn.Module, alone: bool) -> None:
    with hsdp.full_params(model, writeback="rank0", rank0_only=True):
        if alone:
            raise KeyError("boom")


def _wrong_replacement(model: nn.Module, alone: bool) -> None:
    with hsdp.full_params(model, writeback="rank0"):
        if alone:
            del model.get_submodule("0").weight


def _gathered_apply(model: nn.Module, alone: bool) -> None:
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        if alone:
            raise KeyError("boom")

    hsdp.gathered_apply(model, init)


def _init_sharded(model: nn.Module, alone: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for module in (*model, model):
        hsdp.fully_shard(module)
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        if alone and len(seen) == 2:
            raise KeyError("boom")
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    hsdp.init_sharded(model, init)


def _forgotten_buffer(model: nn.Module, alone: bool) -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(4)
    hsdp.fully_shard(model)

    def init(module: nn.BatchNorm1d) -> None:
        nn.init.ones_(module.weight)
        nn.init.ones_(module.bias)
        module.num_batches_tracked.fill_(1)
        module.running_var.fill_(1)
        if not alone:
            module.running_mean.fill_(1)

    hsdp.init_sharded(model, init)  # type: ignore[arg-type]


def _whole_matrix(model: nn.Module, alone: bool) -> None:
    @hsdp.optim.whole_matrix(lr=0.1)
    def update(matrices: Tensor, *, eps: float = 0.0) -> Tensor:
        if alone:
            raise KeyError("boom")
        return matrices

    model(torch.ones(3, 4).double()).sum().backward()
    update([param for param in model.parameters() if param.ndim == 2]).step()


RUNS = (_full_params, _wrong_replacement, _gathered_apply, _init_sharded, _forgotten_buffer, _whole_matrix)
BETWEEN = {run.__name__.lstrip("_"): run for run in RUNS}


def _fail_between(env: RankEnv, what: str, rank: int) -> None:
    model = shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double(), env.mesh((env.world_size,)))
    start = time.monotonic()
    with pytest.raises((hsdp.HSDPError, KeyError, AttributeError)) as caught:
        BETWEEN[what](model, env.rank == rank)
    assert isinstance(caught.value, hsdp.DivergenceError) == (env.rank != rank), caught.value
    assert time.monotonic() - start < 20, "the others waited for the group's timeout, 40 s"
    check_sharded(model)
    raise Finished(str(caught.value))


@pytest.mark.parametrize(("what", "rank"), [(what, int(what == "gathered_apply")) for what in BETWEEN])
def test_an_error_on_one_rank_between_passes_ends_the_others_at_once(pool2: Pool, what: str, rank: int) -> None:
    for outcome in pool2.run_raw(_fail_between, what, rank, group_timeout=40):
        assert outcome.error == "Finished", f"{outcome.error}: {outcome.message}\n{outcome.traceback}"


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

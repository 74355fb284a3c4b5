"""Starting up and staying alike cost each rank a few store operations, for any number of units and ranks."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from hsdp.comm import work
from hsdp.comm.questions import Alarm, Answer, Questions, Tally, Votes
from hsdp.errors import CollectiveError
from tests.support.cluster import Cluster
from tests.support.counted_store import CountedStore, counted
from tests.support.deep import DIM, floats
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import mesh_id, shard

WRAPPING, PASS = 10, 4
"""Store operations per rank, at most: in `fully_shard` of a whole model, and in a pass that is not known yet."""


class Backwards(nn.Module):
    """Runs its units in another order than they are registered in; `skip` one of them, as long as it is not None."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(units))
        self.skip: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index in reversed(range(len(self.blocks))):
            if index != self.skip:
                x = torch.tanh(self.blocks[index](x))
        return x


def count(rank: int, mesh: DeviceMesh, store: CountedStore, units: int) -> list[tuple[str, int]]:
    """The store operations of this rank in a loop that is new to it, changes, evaluates, and changes back."""
    torch.manual_seed(0)
    model = Backwards(units).double()
    for block in model.blocks:
        hsdp.fully_shard(block, mesh=mesh)
    hsdp.fully_shard(model, mesh=mesh)
    found = [("fully_shard", store.taken())]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for k in range(8):
        model.skip = units // 2 if k in (4, 5) else None
        loss = model(floats(rank)).square().sum()
        found.append((f"forward {k}", store.taken()))
        loss.backward()
        found.append((f"backward {k}", store.taken()))
        if k == 6:
            with torch.no_grad():
                model(floats(rank))
            found.append((f"evaluation {k}", store.taken()))
        optimizer.step()
        optimizer.zero_grad()
        found.append((f"step {k}", store.taken()))
    return found


def count_here(env: RankEnv, shape: tuple[int, ...], units: int) -> list[tuple[str, int]]:
    # Ranks that wait for a second look around in the store: not here, where the machine may be busy.
    with mock.patch.object(work, "_TICK", timedelta(seconds=60)), counted() as store:
        if len(shape) == 2:
            mesh = env.mesh(shape, tuple(f"axis {axis} of {units}" for axis in range(2)))
        else:  # a group that nobody used before
            mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        return count(env.rank, mesh, store, units)


def check(found: list[tuple[str, int]]) -> None:
    over = [(what, taken) for what, taken in found if taken > (WRAPPING if what == "fully_shard" else PASS)]
    assert not over, found
    assert dict(found)["fully_shard"] > 0, "nothing was asked: this test shows nothing"
    assert not any(taken for what, taken in found if what.endswith("3")), found


@pytest.mark.parametrize("units", [3, 24])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_store_operations_of_four_ranks(pool4: Pool, shape: tuple[int, ...], units: int) -> None:
    for found in pool4.run(count_here, shape, units):
        check(found)


@pytest.mark.parametrize("rank", [0, 1023])
@pytest.mark.parametrize("shape", [(1024,), (16, 64)], ids=mesh_id)
def test_store_operations_among_1024_simulated_ranks(shape: tuple[int, ...], rank: int) -> None:
    cluster = Cluster()
    with fake_world(1024, rank) as env, cluster.guarded() as store:
        check(count(rank, env.mesh(shape), store, 12))
    assert cluster.in_store
    assert cluster.in_group


@pytest.mark.parametrize("size", [2, 3, 4, 1000, 1024, 65536])
def test_a_tally_sees_the_first_difference(size: int) -> None:
    """In a first question and in a later one; the number stays within 63 bits."""
    tally = Tally(size)
    answers = [Answer(0, 2047, "", key) for key in range(500)]
    most = max(tally.vote(answer, 1) for answer in answers)
    assert size * most < 1 << 63
    vote, other = (tally.vote(answers[key], 8) for key in (7, 8))
    assert vote != other
    for came in {1, size // 2, size - 1}:
        total = size * most + came * (vote - most)
        assert tally.read(total, 8, most) == Votes(came, vote)
        assert tally.read(total + other - most, 8, most).vote != other
        assert tally.read(total + other - most, 8, most).vote != vote
    assert tally.read(size * most, 8, most) == Votes(0, None)


def test_a_vote_tells_whether_its_op_is_ahead() -> None:
    tally = Tally(1024)
    for number in (1, 600, 1023, 1024, 5000):
        vote = tally.vote(Answer(0, number, "", 77), 3)
        assert [tally.ahead(vote, other) for other in (number - 1, number, number + 500)] == [1, 0, -500]


def test_messages_list_a_dozen_ranks() -> None:
    questions = Questions(None, True, 0, range(1024), 60.0)
    lines = [Answer(rank, 7, "all-gather of unit 'a'", 1 + (rank == 1000)) for rank in range(1024)]
    differ = questions._compose(lines, Alarm())
    silent = questions._compose(lines[:1000], Alarm(came=1000))
    assert "rank(s) [1000]: all-gather of unit 'a'" in differ
    assert "11] and 1,011 more: " in differ
    assert "11] and 988 more are about to start all-gather of unit 'a', and rank(s) [1000, 1001" in silent
    assert "1011] and 12 more did not come" in silent
    assert max(len(differ), len(silent)) < 700


def _loses_the_store(env: RankEnv) -> None:
    model = shard(nn.Linear(4, 4), env.mesh(2))
    guard = model._hsdp_state.unit.shard_comm.divergence_guard
    gone = dist.DistNetworkError("Connection reset by peer")
    with (
        mock.patch.object(guard, "_in_group", False),
        mock.patch.object(type(guard._questions), "ask", side_effect=gone),
        pytest.raises(CollectiveError, match=r"about all-gather of unit 'Linear.*store does not answer \(Connection"),
    ):
        model(torch.ones(1, 4))
    model(torch.ones(1, 4)).sum().backward()


def test_a_store_that_is_gone_is_an_error_of_a_collective(pool2: Pool) -> None:
    pool2.run(_loses_the_store)


def _waits_without_the_store(env: RankEnv) -> None:
    model = shard(nn.Linear(4, 4), env.mesh(2), comm_policy=hsdp.CommPolicy(shared_memory=False))
    guard = model._hsdp_state.unit.shard_comm.divergence_guard
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
    gone = dist.DistNetworkError("Connection reset by peer")
    with (
        mock.patch.object(work, "_TICK", timedelta(seconds=0.1)),
        mock.patch.object(type(guard._questions), "asks", side_effect=gone) as looked,
    ):
        if env.rank:
            time.sleep(0.5)
        model(torch.ones(1, 4)).sum().backward()
    assert looked.called or env.rank, "nobody waited"


def test_a_known_collective_ends_well_though_the_store_is_gone(pool2: Pool) -> None:
    """The rank that holds the store has ended, and others, whose collectives do without it, are not done."""
    pool2.run(_waits_without_the_store)

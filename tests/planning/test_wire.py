"""Published models move hardly more than the fewest bytes by default: as planned, and as the calls of collectives are."""

from __future__ import annotations

import pytest

from benchmarks.wire import MODELS, RANKS, broadcast_sends, counted, planned

MOST = 1.02
CASES = [(name, ranks) for name in MODELS for ranks in RANKS]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_plans_move_the_fewest_bytes(name: str, ranks: int, backend: str) -> None:
    found = planned(name, ranks, backend)
    assert 1 <= found.mean <= MOST
    # Around a ring nobody sends a tensor more than once.
    assert found.most_got <= MOST * ranks / (ranks - 1)
    assert backend == "gloo" or found.most_sent <= MOST * ranks / (ranks - 1)


def test_padding_would_move_many_times_as_many() -> None:
    assert planned("mixtral-8x7b", 64, "nccl").padded > 7.5
    assert planned("mixtral-8x7b", 12, "gloo").padded > 1.4


@pytest.mark.parametrize(("name", "ranks"), [("mixtral-8x7b", 12), ("gpt-oss-20b", 12), ("llama3-8b", 8)])
def test_calls_are_as_planned(name: str, ranks: int) -> None:
    calls, plan = counted(name, ranks)
    assert calls == pytest.approx(plan, rel=1e-6)
    assert 1 <= calls <= MOST


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("shards", [2, 3, 12, 64])
def test_broadcasts_reach_every_rank_once(shards: int, backend: str) -> None:
    for root in range(shards):
        assert sum(broadcast_sends(root, shards, backend)) == shards - 1

"""Rule 21: ranks that disagree are told so; ranks that agree pay nothing for it; a lost rank ends the others in time.

`tests/test_divergence.py` has the ways to disagree.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

from hsdp.agreement import Agreement
from tests.rig import Pool, RankEnv
from tests.rules.support import Deep, seeded, step
from tests.sharded import mesh_id, shard


def check_steady_loop(env: RankEnv, shape: tuple[int, ...]) -> None:
    ask, asked = Agreement._ask, [0]

    def counting(agreement: Agreement, *args: Any) -> None:
        asked[0] += 1
        ask(agreement, *args)

    counts = []
    with mock.patch.object(Agreement, "_ask", counting):
        # Groups of its own: what other models did on a group before makes its ranks ask more often.
        mesh = env.mesh((2, 2), (f"replicas of {shape}", f"shards of {shape}"))
        model = shard(seeded(Deep), mesh if len(shape) == 2 else mesh[f"shards of {shape}"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(6):
            asked[0] = 0
            step(model, env.rank, k)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(asked[0])
    assert counts[0] > 0, "the first step is not known to anybody: this test shows nothing"
    assert counts[-2:] == [0, 0], f"asked {counts} times"


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_21_a_steady_loop_asks_nobody(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_steady_loop, shape)


def lose_a_rank(env: RankEnv, shape: tuple[int, ...]) -> None:
    model = shard(seeded(Deep), env.mesh(shape))
    step(model, env.rank)
    if env.rank == env.world_size - 1:
        os._exit(7)
    for k in range(2):
        step(model, env.rank, k)


def test_rule_21_a_lost_rank_ends_the_others_in_time(pool4: Pool) -> None:
    *others, lost = pool4.run_raw(lose_a_rank, (2, 2), group_timeout=3.0, timeout=30.0)
    assert lost.error == "Died"
    for one in others:
        assert one.error in ("CollectiveError", "DivergenceError"), one
        assert "unit" in one.message
        assert one.seconds < 3.0 + 5.0

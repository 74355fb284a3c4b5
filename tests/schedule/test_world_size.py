"""What a step costs the host does not depend on the number of ranks."""

from __future__ import annotations

import pytest

from tests.support.host_calls import calls_per_step

UNITS = 4
WORLDS = (8, 512, 8192)


@pytest.mark.parametrize("replicas", [1, 4])
def test_host_cost_of_a_step_is_the_same_for_any_world_size(replicas: int) -> None:
    found = [calls_per_step(world, replicas, UNITS) for world in WORLDS]
    assert min(found) > 50 * UNITS, "this test shows nothing"
    assert max(found) <= 1.03 * min(found), dict(zip(WORLDS, found, strict=True))

"""What one replica gives to another, without the group between them."""

from __future__ import annotations

from hsdp.elastic.healing import HealedState
from tests.checkpoint import models as cm
from tests.checkpoint.nested import Nested, check_shards, same, states
from tests.support.rig import Pool
from tests.support.worker import RankEnv


def give_nested(env: RankEnv) -> None:
    model, other = (cm.build(env.mesh((1, 2)), seed) for seed in (0, 1))
    optimizer, fresh = Nested(model.parameters()), Nested(other.parameters())
    cm.train(model, optimizer, range(2), env.rank, env.world_size)
    giver, taker = HealedState(model, optimizer), HealedState(other, fresh)
    giver.note()
    taker.note()
    taker.give(giver.take())
    assert same(states(other, fresh), states(model, optimizer))
    check_shards(other, fresh)
    later = [cm.train(m, o, range(2, 4), env.rank, env.world_size) for m, o in ((model, optimizer), (other, fresh))]
    assert later[0] == later[1]


def test_nested_state_is_given_as_it_is(pool2: Pool) -> None:
    pool2.run(give_nested)

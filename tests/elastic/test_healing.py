"""What one replica gives to another, without the group between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hsdp
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


class Centred(nn.Module):
    """A running mean that each forward assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out - self.mean


def give_new_buffers(env: RankEnv) -> None:
    models = [hsdp.fully_shard(Centred(), mesh=env.mesh(2)) for _ in range(2)]
    states = [HealedState(model, torch.optim.SGD(model.parameters())) for model in models]
    x = torch.ones(3, 4)
    for _ in range(3):
        models[0](x)
    for model, state in zip(models, states, strict=True):
        state.note()
        model(x)  # the state is handed over behind the backward of a step
    states[1].give(states[0].take())
    assert torch.equal(models[0].mean, models[1].mean)


def test_buffers_that_a_forward_assigned_are_given(pool2: Pool) -> None:
    pool2.run(give_new_buffers)

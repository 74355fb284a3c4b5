"""What one replica gives to another, without the group between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from hsdp.elastic.healing import HealedState
from tests.checkpoint import models as cm
from tests.checkpoint.nested import Nested, check_shards, same, states
from tests.checkpoint.test_hooks import Averaging
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


class Cached(nn.Module):
    """Makes a table as long as its longest input so far, and counts forwards in a buffer that the first one registers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(1.0, len(x) + 1)
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(()))
        self.seen += 1
        return self.linear(x) * self.table[: len(x), None]


def give_made_buffers(env: RankEnv, *rows: int) -> None:
    """The giver has run `rows[0]`, the one that joins `rows[1]`, in the step in which it does."""
    model, other = (hsdp.fully_shard(Cached(), mesh=env.mesh(2)) for _ in range(2))
    giver, taker = (HealedState(one, torch.optim.SGD(one.parameters())) for one in (model, other))
    for _ in range(3):
        model(torch.ones(rows[0], 4))
    giver.note()
    taker.note()
    other(torch.ones(rows[1], 4))
    taker.give(giver.take())
    assert torch.equal(model.table, other.table) and model.seen == other.seen == 3
    assert torch.equal(model(torch.ones(6, 4)), other(torch.ones(6, 4)))
    assert len(giver.take()["buffers"]["table"]) == 6, "given as they are now"


@pytest.mark.parametrize("rows", [(5, 3), (3, 5), (4, 4)])
def test_buffers_that_forwards_make_are_given(pool2: Pool, rows: tuple[int, int]) -> None:
    pool2.run(give_made_buffers, *rows)


class OnShards(torch.optim.Optimizer):
    """Momentum on local tensors, which keeps plain tensors beside a rank's rows."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state, grad = self.state[param], param.grad.to_local()
            state["sum"] = state.get("sum", torch.zeros_like(grad)) * 0.9 + grad
            state["largest"] = state["sum"].abs().amax().reshape(1) if len(grad) else torch.zeros(1)
            param.to_local().sub_(state["sum"], alpha=0.1)


def give_local_state(env: RankEnv, shards: int, rows: int) -> None:
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = hsdp.fully_shard(nn.Linear(4, rows), mesh=env.mesh((2 // shards, shards)))
        optimizer = OnShards(model.parameters())
        found.append((model, optimizer, HealedState(model, optimizer)))

    def step(which: int) -> None:
        model, optimizer, _ = found[which]
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    for _, _, held in found:
        held.note()
    found[1][2].give(found[0][2].take())
    for which in range(2):
        step(which)
    for one, other in zip(*(model.parameters() for model, _, _ in found), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
        for key in ("sum", "largest"):
            mine, theirs = found[0][1].state[one][key], found[1][1].state[other][key]
            assert type(mine) is type(theirs) is Tensor and torch.equal(mine, theirs)


@pytest.mark.parametrize(("shards", "rows"), [(2, 6), (2, 5), (2, 1), (1, 6)])
def test_plain_states_of_shards_stay_plain(pool2: Pool, shards: int, rows: int) -> None:
    pool2.run(give_local_state, shards, rows)


def give_settings(env: RankEnv) -> None:
    """A loop that keeps groups, and a learning rate in a tensor, sets them behind the healing as before it."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = hsdp.fully_shard(nn.Linear(4, 6), mesh=env.mesh(2))
        rate = torch.tensor(0.1 + seed)
        groups = [{"params": [model.weight], "lr": rate}, {"params": [model.bias], "lr": 0.2 + seed}]
        optimizer = torch.optim.SGD(groups)
        found.append((model, optimizer, rate, optimizer.param_groups[1], HealedState(model, optimizer)))
    for *_, held in found:
        held.note()
    found[1][-1].give(found[0][-1].take())
    assert all(float(rate) == float(torch.tensor(0.1)) and group["lr"] == 0.2 for _, _, rate, group, _ in found)
    for model, optimizer, rate, group, held in found:
        rate.fill_(0.5)
        group["lr"] = 0.6
        held.note()
        held.check_settings()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        assert [float(one["lr"]) for one in optimizer.param_groups] == [0.5, 0.6]
    for one, other in zip(*(model.parameters() for model, *_ in found), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


def test_a_loop_may_hold_groups(pool2: Pool) -> None:
    pool2.run(give_settings)


def give_additions(env: RankEnv) -> None:
    models = [hsdp.fully_shard(nn.Linear(4, 6), mesh=env.mesh(2)) for _ in range(2)]
    optimizers = [Averaging(model.parameters()) for model in models]
    held = [HealedState(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    optimizers[0].mean = {"count": 3}
    for one in held:
        one.note()
    held[1].give(held[0].take())
    assert optimizers[1].mean == {"count": 3}


def test_what_an_optimizer_adds_to_its_state_dict_is_given(pool2: Pool) -> None:
    pool2.run(give_additions)

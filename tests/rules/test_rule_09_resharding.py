"""Rule 9: resharding frees the memory though autograd holds views; weights changed before the backward are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.support.deep import DIM, floats, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, shard


class Viewing(nn.Module):
    """Uses views of its weight; autograd saves them for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * DIM, DIM))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2)
        self.seen += [self.weight, first]
        return torch.tanh(torch.tanh(x @ first) @ second.t())


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Viewing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def check_freed(env: RankEnv) -> None:
    plain, model = seeded(Views), shard(seeded(Views), env.mesh(2), reshard_after_forward=True)
    blocks: Any = model.blocks
    for _ in range(2):
        x = floats(env.rank)
        loss = model(x).square().sum()
        for block in blocks:
            assert [tensor.untyped_storage().size() for tensor in block.seen] == [0, 0], "resharded and still there"
            block.seen.clear()
        loss.backward()  # gathers into the same memory: no version counter may notice
        assert x.grad is not None
        model.zero_grad()
    check_grads(model, plain, step, env.rank, env.world_size)


def test_rule_09_resharding_frees_what_autograd_holds_views_of(pool2: Pool) -> None:
    pool2.run(check_freed)


def check_changed(env: RankEnv, how: str) -> None:
    plain, model = seeded(Views), shard(seeded(Views), env.mesh(2))
    blocks: Any = model.blocks
    optimizer = torch.optim.AdamW(blocks[1].parameters(), lr=0.0, weight_decay=0.0)
    step(model, env.rank)
    loss = model(floats(env.rank)).square().sum()
    if how == "step":
        optimizer.step()
    elif how == "load":
        blocks[1].load_state_dict(blocks[1].state_dict())
    else:
        with hsdp.full_params(blocks[1], writeback="local"):
            pass
    with pytest.raises(hsdp.StaleParametersError, match=r"unit 'blocks\.1'.*between a forward and its backward"):
        loss.backward()
    check_grads(model, plain, step, env.rank, env.world_size)


@pytest.mark.parametrize("how", ["step", "load", "full_params"])
def test_rule_09_weights_changed_before_the_backward_are_refused_by_unit(pool2: Pool, how: str) -> None:
    pool2.run(check_changed, how)


class Logged(nn.Linear):
    """Notes its weight as a NumPy array, as whoever logs histograms does: torch never resizes that storage again."""

    def forward(self, x: Tensor) -> Tensor:
        self.norm = float((self.weight.detach().numpy() ** 2).sum())
        return super().forward(x)


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Logged(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def check_numpy(env: RankEnv) -> None:
    plain, model = seeded(Logging), shard(seeded(Logging), env.mesh(2), reshard_after_forward=True)
    for _ in range(2):
        check_grads(model, plain, step, env.rank, env.world_size)
    blocks: Any = (model.blocks, plain.blocks)
    assert [one.norm for one in blocks[0]] == pytest.approx([one.norm for one in blocks[1]])


def test_rule_09_a_numpy_array_of_a_whole_parameter_keeps_its_memory(pool2: Pool) -> None:
    pool2.run(check_numpy)

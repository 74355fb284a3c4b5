"""`check_replicas`: ranks that drifted apart in the middle of a run are named, on every rank, and nobody else is."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
from hsdp.optim import local
from hsdp.weights import gather
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id

MESHES = [(4,), (2, 2), (4, 1)]


def _model(env: RankEnv, shape: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))
    whole = {model[1].weight} if len(shape) == 1 else None
    hsdp.fully_shard(model[0], mesh=env.mesh(shape))
    hsdp.fully_shard(model, mesh=env.mesh(shape), replicate_params=whole)
    return model


def _train(env: RankEnv, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + env.rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _flip(tensor: Tensor) -> None:
    """One bit of one element."""
    tensor.detach().view(torch.int32).view(-1)[0] ^= 1


def _error(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(hsdp.DivergenceError) as caught:
        hsdp.check_replicas(model, *args, **kwargs)
    return str(caught.value)


def _drift(env: RankEnv, shape: tuple[int, ...]) -> list[str]:
    """The last rank's bits are flipped, one after the other and back; returns what was said of each."""
    model = _model(env, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _train(env, model, optimizer)
    hsdp.check_replicas(model, optimizer)
    mine = env.rank == env.world_size - 1
    said = []
    param = model[1].weight if len(shape) == 1 else model[0].weight
    for place in (param, optimizer.state[param]["exp_avg"], optimizer.state[param]["step"]):
        local_part = place.to_local() if isinstance(place, torch.distributed.tensor.DTensor) else place
        if mine:
            _flip(local_part)
        said.append(_error(model, optimizer))
        if mine:
            _flip(local_part)
        hsdp.check_replicas(model, optimizer)
    # Running means are each rank's own, and counted only if somebody asks.
    assert "running_mean" in _error(model, buffers=True)
    hsdp.sync_module_states(model)
    hsdp.check_replicas(model, optimizer, buffers=True)
    _train(env, model, optimizer)
    return said


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_a_flipped_bit_is_told_on_every_rank(pool4: Pool, shape: tuple[int, ...]) -> None:
    results = pool4.run(_drift, shape)
    assert all(said == results[0] for said in results), "all ranks raise, and say the same"
    name = "1.weight" if len(shape) == 1 else "0.weight"
    for said, what in zip(results[0], (name, f"exp_avg of {name}", f"step of {name}"), strict=True):
        who = re.search(r"do not: (.*?)\. A device", said)[1]  # type: ignore[index]
        if shape == (2, 2):
            assert who == f"'{what}' between ranks [1, 3]"
        else:
            assert who == f"'{what}' on rank(s) [3], not as on 3 of ranks [0, 1, 2, 3]", who


def _other_rate(env: RankEnv) -> str:
    model = _model(env, (2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if env.rank == 2 else 0.1)
    _train(env, model, optimizer)
    return _error(model, optimizer)


def test_a_learning_rate_that_differs_shows_in_all_parameters_of_that_rank(pool4: Pool) -> None:
    for said in pool4.run(_other_rate):
        assert "'0.weight' between ranks [0, 2]" in said and "[1, 3]" not in said


def _other_states(env: RankEnv) -> str:
    model = _model(env, (4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    _train(env, model, optimizer)
    if env.rank == 1:
        optimizer.state[model[0].bias].pop("exp_avg_sq")
    return _error(model, optimizer)


def test_states_that_a_rank_lacks_are_told(pool4: Pool) -> None:
    for said in pool4.run(_other_states):
        assert "ranks [0, 1, 2, 3] hold different sets of values: 23, 24, 24, 24" in said, said


def _shared_states(env: RankEnv) -> None:
    model = _model(env, (2, 2))
    optimizer = local(torch.optim.AdamW(model.parameters(), lr=0.1), over_replicas=True)
    _train(env, model, optimizer)
    hsdp.check_replicas(model, optimizer)


def test_states_that_replicas_share_out_have_no_counterparts(pool4: Pool) -> None:
    pool4.run(_shared_states)


def _two_meshes(env: RankEnv) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    hsdp.fully_shard(model[0], mesh=env.mesh((4,)))
    hsdp.fully_shard(model, mesh=env.mesh((2, 2)))
    hsdp.check_replicas(model)
    if env.rank == 2:
        _flip(model[1].weight.to_local())
    return _error(model)


def test_all_ranks_learn_of_it_whatever_mesh_it_was_found_on(pool4: Pool) -> None:
    assert all("'1.weight' between ranks [0, 2]" in said for said in pool4.run(_two_meshes))


def _not_everybody(env: RankEnv) -> None:
    model = _model(env, (2, 2))
    hsdp.check_replicas(model)
    if env.rank == 0:
        model(torch.ones(5, 6))
    else:
        hsdp.check_replicas(model)


def test_a_rank_that_does_something_else_meanwhile_is_named(pool4: Pool) -> None:
    for outcome in pool4.run_raw(_not_everybody, group_timeout=5.0):
        assert not outcome.ok and "DivergenceError" in str(outcome.error), outcome


def _refused(env: RankEnv) -> None:
    with pytest.raises(ValueError, match="check_replicas"):
        hsdp.check_replicas(nn.Linear(2, 2))
    model = _model(env, (2,))

    def inside(module: nn.Module, args: Any, output: Tensor) -> None:
        hsdp.check_replicas(model)

    model[0].register_forward_hook(inside)
    with pytest.raises(hsdp.StateError, match="check_replicas"):
        model(torch.ones(5, 6))


def test_it_is_for_sharded_models_between_steps(pool2: Pool) -> None:
    pool2.run(_refused)


class RingSum:
    """A reduce-scatter that adds as a ring does: what a rank gets begins at the rank behind it, so bits differ by rank."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = list(received.view(group.size(), -1))
        first = group.rank() + 1
        output_tensor.copy_(sum(parts[first:] + parts[:first]))  # type: ignore[arg-type]


class Scaled(nn.Module):
    """A layer with a learned scale, of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


def _scalars(env: RankEnv, shape: tuple[int, ...]) -> str:
    torch.manual_seed(0)
    model: Any = hsdp.fully_shard(Scaled(), mesh=env.mesh(shape))
    model.set_custom_reduce_scatter(RingSum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _train(env, model, optimizer, steps=20)
    held = model.scale.to_local().detach()
    everywhere = [torch.empty_like(held) for _ in range(env.world_size)]
    dist.all_gather(everywhere, held)
    assert len({float(one) for one in everywhere}) == 1, everywhere
    hsdp.check_replicas(model, optimizer)
    if env.rank == 1:
        _flip(held)
    return _error(model, optimizer)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_scalars_stay_the_same_on_all_ranks_whatever_the_order_of_sums(pool4: Pool, shape: tuple[int, ...]) -> None:
    for said in pool4.run(_scalars, shape):
        assert "'scale' " in said, said


def _writes_back_without_memory(env: RankEnv) -> None:
    model = _model(env, (2, 1))
    sent = gather.broadcast

    def no_room(what: str, tensor: Tensor, unit: Any, *comms: Any) -> None:
        if unit.replicate_comm in comms:
            raise MemoryError
        sent(what, tensor, unit, *comms)

    with (
        mock.patch.object(gather, "broadcast", no_room),
        pytest.raises(MemoryError),
        hsdp.full_params(model, writeback="rank0"),
        torch.no_grad(),
    ):
        for param in model.parameters():
            param.mul_(2.0)
    hsdp.check_replicas(model)


def test_a_write_back_that_finds_no_memory_leaves_replicas_equal(pool2: Pool) -> None:
    pool2.run(_writes_back_without_memory)

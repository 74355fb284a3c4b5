"""Rule 6: moving dtype or device after sharding rebuilds the buffers, or is refused; never stale aliases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import hsdp
from tests.support.deep import Deep, floats, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded, shard


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def _assign_in_float(model: nn.Module) -> None:
    model.load_state_dict({name: value.float() * 0.5 for name, value in model.state_dict().items()}, assign=True)


MOVES: dict[str, Callable[[Any], object]] = {
    "to": lambda model: model.to(torch.float32),
    "half": lambda model: model.half(),
    "half, of a block": lambda model: model.blocks[1].half().double(),
    "bfloat16": lambda model: model.bfloat16(),
    "assign": _assign,
    "assign in another dtype": _assign_in_float,
    "to_empty": lambda model: [p.data.fill_(0.25) for p in model.to_empty(device="cpu").parameters()],
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 0.5}


def check_move(env: RankEnv, name: str) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    for one in (plain, model):
        for param in one.parameters():
            param.mark = True  # type: ignore[attr-defined]

    def step(one: nn.Module, rank: int) -> None:
        one(floats(rank).to(one.last.weight.dtype)).square().mean().backward()  # type: ignore[union-attr,arg-type]

    step(model, env.rank)
    for one in (model, plain):
        one.zero_grad()
        MOVES[name](one)
    dtypes = {param.dtype for param in plain.parameters()}
    assert {param.dtype for param in model.parameters()} == dtypes
    assert [hasattr(p, "mark") for p in model.parameters()] == [hasattr(p, "mark") for p in plain.parameters()]
    check_sharded(model)
    tolerance = TOLERANCE[next(iter(dtypes))]
    check_grads(model, plain, step, env.rank, env.world_size, tolerance)
    with torch.no_grad():
        for param in (*model.parameters(), *plain.parameters()):
            param.mul_(0.5)  # the buffers are those of the parameters that the user sees
    check_grads(model, plain, step, env.rank, env.world_size, tolerance)
    check_rest(model)


@pytest.mark.parametrize("name", MOVES)
def test_rule_06_what_is_moved_trains_on(pool2: Pool, name: str) -> None:
    pool2.run(check_move, name)


def check_refused(env: RankEnv) -> None:
    model = shard(seeded(Deep), env.mesh(2))
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    expected = model(floats(env.rank)).detach()
    held = dict(model.named_parameters())
    model.load_state_dict(state, assign=True)
    with pytest.raises(hsdp.StateError, match=r"'last.weight' of unit .* was replaced by .*not a sharded"):
        model(floats(env.rank))
    model.load_state_dict(held, assign=True)
    assert torch.equal(model(floats(env.rank)), expected)


def test_rule_06_whole_tensors_in_place_of_shards_are_refused_by_name(pool2: Pool) -> None:
    pool2.run(check_refused)


def check_list_on_meta(env: RankEnv) -> None:
    """A unit of several modules is built anew when the last of them has followed."""
    with torch.device("meta"):
        model: Any = Deep(layers=3).double()
    mesh = env.mesh(2)
    hsdp.fully_shard([model.blocks[2], model.last], mesh=mesh)
    hsdp.fully_shard(model, mesh=mesh)
    model.blocks[2].to_empty(device="cpu")
    with pytest.raises(hsdp.StateError, match=r"parameters on several devices \['cpu', 'meta'\]; move them together"):
        hsdp.sync_module_states(model.blocks[2])
    model.to_empty(device="cpu")
    plain = seeded(lambda: Deep(layers=3))
    for (name, param), source in zip(model.named_parameters(), plain.parameters(), strict=True):
        param.data.copy_(distribute_tensor(source.detach(), param.device_mesh, param.placements))
        assert not param.is_meta, name
    run = lambda one, rank: one(floats(rank)).square().mean().backward()  # noqa: E731
    check_sharded(model)
    check_grads(model, plain, run, env.rank, env.world_size)
    check_rest(model)


def test_rule_06_a_unit_of_several_modules_leaves_the_meta_device(pool2: Pool) -> None:
    pool2.run(check_list_on_meta)


def check_pending(env: RankEnv, level: str) -> None:
    """Sums that wait for later micro-batches would go with the buffers: moving is refused until they are summed."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh((2, 2)))
    run = lambda one, rank: one(floats(rank)).square().mean().backward()  # noqa: E731
    model.set_requires_all_reduce(level == "local")
    with model.no_sync() if level == "local" else nullcontext():
        run(model, env.rank)
    model.set_requires_all_reduce(True)
    with pytest.raises(hsdp.StateError, match=r"moving or casting the model: unit .* not summed over all ranks"):
        model.float()
    assert {param.dtype for param in model.parameters()} == {torch.float64}, "it was refused before anything changed"
    name, param = "last.weight", model.get_parameter("last.weight")
    model.load_state_dict({name: param.detach().clone()}, assign=True, strict=False)
    with pytest.raises(hsdp.StateError, match=r"moved, cast or replaced: unit .* not summed over all ranks \(last.bias\)"):
        run(model, env.rank)
    # A parameter that replaces another has no gradient: nothing is pending for it.
    model.load_state_dict({name: param.detach() for name, param in model.named_parameters()}, assign=True)
    check_grads(model, plain, run, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("level", ["local", "scatter"])
def test_rule_06_moving_with_pending_sums_is_refused(pool4: Pool, level: str) -> None:
    pool4.run(check_pending, level)


def check_swapped(env: RankEnv) -> None:
    """`torch.utils.swap_tensors` keeps the object and replaces what is in it: of another shape it is refused by name."""
    model = shard(seeded(Deep), env.mesh(2))
    weight: Any = model.last.weight
    expected = model(floats(env.rank)).detach()
    row = torch.zeros(1, weight.shape[1], dtype=weight.dtype)  # which torch would copy into all rows
    for told in ({}, {"shape": weight.shape, "stride": weight.stride()}):
        other = nn.Parameter(DTensor.from_local(row, weight.device_mesh, weight.placements, run_check=False, **told))
        torch.utils.swap_tensors(weight, other)
        with pytest.raises(hsdp.StateError, match=r"'last.weight' of unit .* was replaced by .*it must keep shape"):
            model(floats(env.rank))
        torch.utils.swap_tensors(weight, other)
    assert torch.equal(model(floats(env.rank)), expected)


def test_rule_06_a_parameter_swapped_for_another_shape_is_refused(pool2: Pool) -> None:
    pool2.run(check_swapped)

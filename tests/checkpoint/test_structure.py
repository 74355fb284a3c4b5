"""Nested settings, extra states and states: what others read of them, what is refused, and what is kept."""

from __future__ import annotations

import collections
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from hsdp import checkpoint, fully_shard
from hsdp.checkpoint import CheckpointError
from hsdp.checkpoint.structure import put_together, take_apart
from tests.checkpoint import models as cm
from tests.checkpoint.nested import Nested, same, states, whole
from tests.checkpoint.test_torch import by_fsdp2, by_hsdp
from tests.support.rig import Pool
from tests.support.twin import full
from tests.support.worker import RankEnv

# -- settings and extra states -----------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "dict": {"warmup": 10, "more": {"a.b": 1}},
    "empty": {},
    "ints": {0: "a", 1: {"x": ()}},
    "tensors": [torch.ones(2), (torch.zeros(1), None)],
    "dicts": [{"a": 1}, {}, []],
}


def adamw(model: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first], **settings}, {"params": rest, **settings}])


def settings_and_back(env: RankEnv, directory: str) -> None:
    model = cm.build(env.mesh((1, 2)))
    optimizer = adamw(model, SETTINGS)
    cm.train(model, optimizer, range(1), env.rank, env.world_size)
    checkpoint.save(directory, model, optimizer, step=1)
    own = {key: value for key, value in SETTINGS.items() if key != "dict"}
    other = cm.build(env.mesh((2, 1)), seed=1)
    for fresh in (adamw(other, {**own, "dict": {}}), torch.optim.AdamW([{"params": list(other.parameters()), **SETTINGS}])):
        checkpoint.load(directory, other, fresh)
        for group in fresh.param_groups:
            assert same({key: group[key] for key in SETTINGS}, SETTINGS)
    cm.train(other, fresh, range(1), env.rank, env.world_size)


def test_settings_of_groups_may_be_nested(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(settings_and_back, str(tmp_path))


class Extra(nn.Module):
    """A layer with an extra state: what `held` is."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


EXTRAS: dict[str, Any] = {
    "mixed": {1: 2.0, "a": (1, 2), 3: {4: torch.ones(2)}, "e": {}, "l": [1, {2: 3}, []], "t": (torch.ones(1),)},
    "ints": {0: torch.ones(2), 1: torch.zeros(2)},
    "empty": {},
    "ordered": collections.OrderedDict(b=torch.ones(1), a=[]),
    "list": [{}, [torch.ones(1)]],
    "none": None,
    "number": 3,
}


def extra_and_back(env: RankEnv, directory: str, name: str) -> None:
    model = fully_shard(Extra(EXTRAS[name]), mesh=env.mesh((1, 2)))
    checkpoint.save(directory, model, step=1)
    other = fully_shard(Extra({"own": 1}), mesh=env.mesh((2, 1)))
    checkpoint.load(directory, other)
    assert same(other.held, EXTRAS[name])
    shard = model.layer.weight.detach()
    model.held = {"kept": [shard], 1: (shard,)}
    kept = (shard + 1).detach()
    model.held = {"kept": [kept], 1: (kept,)}
    checkpoint.save(directory, model, step=2)
    model.held = {"kept": [shard], 1: None}
    checkpoint.load(directory, model)
    assert type(model.held["kept"][0]) is DTensor and model.held["kept"][0].placements == shard.placements
    assert same(whole(model.held), {"kept": [full(kept)], 1: (full(kept),)})
    model.held = {"kept": [shard], 1: (shard,)}
    gathered = checkpoint.full_state_dict(model, rank0_only=False)["_extra_state"]
    assert same(gathered, {"kept": [full(shard)], 1: (full(shard),)})


@pytest.mark.parametrize("name", EXTRAS)
def test_extra_states_keep_their_keys_and_containers(pool2: Pool, tmp_path: Path, name: str) -> None:
    pool2.run(extra_and_back, str(tmp_path), name)
    outer = nn.Sequential(Extra({"own": 1}))
    checkpoint.load(tmp_path / "step-000001", outer, strict=False, rename=lambda name: f"0.{name}")
    assert same(outer[0].held, EXTRAS[name])


# -- other readers, earlier writers ------------------------------------------------------------------------------------


def read_by_torch(env: RankEnv, directory: str) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=env.mesh((1, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made_up = {
        param: {"h": [param.detach() + 1, param.detach() + 2], 0: {1: param.detach() + 3}} for param in model.parameters()
    }
    optimizer.state.update(made_up)
    path = checkpoint.save(directory, model, optimizer, step=1).path
    expected = states(model, optimizer)
    for held in made_up.values():
        for tensor in (*held["h"], held[0][1]):  # type: ignore[misc,index]
            tensor.zero_()
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=str(path))
    assert same({name: whole(held) for name, held in state["optimizer"]["state"].items()}, expected)


def test_torch_reads_nested_state(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(read_by_torch, str(tmp_path))


def save_by_fsdp2(env: RankEnv, directory: str) -> dict[str, Any]:
    model = by_fsdp2(env, (1, 2))
    settings = {"sched": {"warmup": 10, "at": [1, 2]}, "scales": [torch.ones(2), {"a": 1}]}
    optimizer = Nested([{"params": list(model.parameters()), **settings}])
    for param in model.parameters():
        made_up = [param.detach() + i for i in range(4)]
        optimizer.state[param] = {"h": made_up[:2], "d": {"a": [{"b": made_up[2]}, 3]}, "m": made_up[3]}
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=directory
    )
    return states(model, optimizer)


def load_by_hsdp(env: RankEnv, directory: str, expected: dict[str, Any]) -> None:
    model = by_hsdp(env, (2, 1), seed=1)
    fresh = Nested([{"params": list(model.parameters()), "sched": {}, "scales": []}])
    checkpoint.load(directory, model, fresh)
    found = states(model, fresh)
    assert found.keys() == expected.keys()
    for name, held in expected.items():
        assert all(same(found[name][key], held[key]) for key in held), name
    assert all(type(fresh.state[param]["h"][1]) is DTensor for param in fresh.state)
    group = fresh.param_groups[0]
    assert group["sched"] == {"warmup": 10, "at": [1, 2]}
    assert same(group["scales"], [torch.ones(2), {"a": 1}])


def test_nested_state_of_fsdp2_is_read(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(load_by_hsdp, str(tmp_path), pool2.run(save_by_fsdp2, str(tmp_path))[0])


def test_what_earlier_versions_saved_loads_as_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsdp.checkpoint.saving.listed", lambda state: {})
    model = Extra({"a": {1: torch.ones(1)}})
    optimizer = Nested(model.parameters())
    optimizer.state[model.layer.weight] = {"a": {"b": torch.ones(4, 4)}, "c": [1]}
    checkpoint.save(tmp_path, model, optimizer, step=1)
    other = Extra({})
    fresh = Nested(other.parameters())
    checkpoint.load(tmp_path, other, fresh)
    assert same(dict(fresh.state[other.layer.weight]), {"c": [1], "a": {"b": torch.ones(4, 4)}})
    assert same(other.held, {"a": {"1": torch.ones(1)}})


# -- what is refused, and what is kept ---------------------------------------------------------------------------------


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def refusals(env: RankEnv, directory: str) -> list[str]:
    model = fully_shard(nn.Linear(4, 4), mesh=env.mesh((1, 2)))
    weight = model.weight
    messages = []
    shard = weight.detach()
    for held in (
        {"a": {1: shard, "1": shard}},
        {"a": MappingProxyType({"x": 1})},
        {"a": [Holder(shard)]},
        {"a": {"b": frozenset([shard])}},
        {"a": [shard] * (1 + env.rank)},
        {"a": {shard[0, 0]: 1}},
    ):
        optimizer = Nested(model.parameters())
        optimizer.state[weight] = held
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(directory, model, optimizer, step=1)
        messages.append(str(caught.value))
    for group in ({"x": shard}, {"x": [shard]}):
        optimizer = Nested([{"params": list(model.parameters()), **group}])
        for refuse in (
            lambda: checkpoint.save(directory, model, optimizer, step=1),
            lambda: checkpoint.full_optimizer_state_dict(model, optimizer),
        ):
            with pytest.raises(CheckpointError) as caught:
                refuse()
            messages.append(str(caught.value))
    optimizer = Nested(model.parameters())
    optimizer.state[weight] = {"a": [Holder(shard)]}
    with pytest.raises(CheckpointError, match="holds sharded tensors"):
        checkpoint.full_optimizer_state_dict(model, optimizer)
    return messages


def test_what_could_not_come_back_is_refused_when_it_is_saved(pool2: Pool, tmp_path: Path) -> None:
    twice, mapping, held, frozen, ranks, key, *groups = pool2.run(refusals, str(tmp_path))[0]
    assert "the optimizer's state of 'weight' has two entries that would both be saved as 'a.1'" in twice
    assert "'a' is a builtins.mappingproxy, which could not be made again at a load" in mapping
    assert "that holds sharded tensors, which are found in dicts, lists, tuples and deques only" in held
    assert "['b'] is a builtins.frozenset that holds sharded tensors" in frozen
    assert "what is saved as 'optimizer.state.weight' has other containers, or of other lengths, on one rank" in ranks
    assert "the optimizer's state of 'weight': a key of 'a' is a tensor, which would be another one after a load" in key
    for told in groups:
        assert "'x' of the optimizer's group 0 has a sharded tensor" in told
    assert list(tmp_path.glob("step-*")) == []


def partial_sum(env: RankEnv, directory: str) -> None:
    """A sum that is still in parts: the sum is what is saved."""
    model = fully_shard(nn.Linear(4, 4), mesh=env.mesh((1, 2)))
    optimizer = Nested(model.parameters())
    parts = DTensor.from_local(torch.full((4,), 1.0 + env.rank), env.mesh((1, 2)), [Partial("avg"), Partial()])
    optimizer.state[model.bias] = {"sums": [parts]}
    checkpoint.save(directory, model, optimizer, step=1)
    for fresh in (Nested(model.parameters()), optimizer):
        checkpoint.load(directory, model, fresh)
        assert full(fresh.state[model.bias]["sums"][0]).tolist() == [3.0] * 4


def test_state_of_no_parameter_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    """It has no name in a checkpoint: it was left out, and a run that went on began without it."""
    model = nn.Linear(4, 4)
    optimizer = Nested(model.parameters())
    optimizer.state["steps"] = {"n": 3}
    for refuse in (
        lambda: checkpoint.save(tmp_path, model, optimizer, step=1),
        lambda: checkpoint.full_optimizer_state_dict(model, optimizer),
    ):
        with pytest.raises(CheckpointError, match=r"the optimizer keeps state under 'steps', which is no parameter"):
            refuse()
    optimizer.state["steps"] = {}  # a defaultdict makes one when it is asked
    checkpoint.save(tmp_path, model, optimizer, step=1)


def test_a_partial_sum_is_saved_as_the_sum(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(partial_sum, str(tmp_path))


def test_nested_state_keeps_its_dtype(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = Nested(model.parameters())
    held = {"a": [torch.full((4, 4), 1 / 3)], "b": ({"c": torch.full((), 1 / 3)},)}
    optimizer.state[model.weight] = held
    checkpoint.save(tmp_path, model, optimizer, step=1)
    fresh = Nested(model.parameters())
    checkpoint.load(tmp_path, model, fresh)
    assert same(dict(fresh.state[model.weight]), held)
    checkpoint.load_full_optimizer_state_dict(model, fresh, checkpoint.full_optimizer_state_dict(model, optimizer))
    assert same(dict(fresh.state[model.weight]), held)


def test_values_in_an_optimizers_state_come_back_as_they_were(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(4, 4)
    optimizer = Nested(model.parameters())
    counts = collections.defaultdict(list, {1: [torch.ones(1)]})
    held = {
        "a": ["x", range(3), {2}, b"y"],
        "b": counts,
        "c": torch.Size([1]),
        "d": (None, True),
        "e": collections.Counter("a"),
    }
    optimizer.state[model.weight] = {**held, "f": [numpy.arange(3)]}
    checkpoint.save(tmp_path, model, optimizer, step=1)
    whole_state = checkpoint.full_optimizer_state_dict(model, optimizer)
    for load in (
        lambda: checkpoint.load(tmp_path, model, fresh),
        lambda: checkpoint.load_full_optimizer_state_dict(model, fresh, whole_state),
    ):
        fresh = Nested(model.parameters())
        load()
        found = dict(fresh.state[model.weight])
        assert found.pop("f")[0].tolist() == [0, 1, 2]
        assert same(found, held)


@pytest.mark.parametrize("damage", [{"h": "h.1"}, {"h": 3}, {}, "h", {"h": ["h"], "i": {"x": "y"}}])
def test_a_damaged_structure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    from hsdp.checkpoint import saving
    from hsdp.checkpoint.objects import pack

    take = saving.listed

    def damaged(state: dict[str, Any]) -> dict[str, bytes]:
        return {**take(state), "optimizer.state.weight": pack(damage, "it")}

    monkeypatch.setattr(saving, "listed", damaged)
    model = nn.Linear(4, 4)
    optimizer = Nested(model.parameters())
    optimizer.state[model.weight] = {"h": [torch.ones(4, 4)]}
    checkpoint.save(tmp_path, model, optimizer, step=1)
    with pytest.raises(CheckpointError, match=r"the structure of 'optimizer\.state\.weight'"):
        checkpoint.load(tmp_path, model, Nested(model.parameters()))


def test_taken_apart_and_put_together() -> None:
    value: dict[Any, Any] = {"h": [torch.ones(1), 2], 0: (torch.ones(2),), "e": {}, "v": [1, (2,)], "t": (1,)}
    apart = take_apart(value, "it")
    assert list(apart.leaves) == ["h.0", "h.1", "0.0", "v", "t"]
    assert apart.skeleton == {"h": ["h.0", "h.1"], 0: ("0.0",), "e": {}, "v": "v", "t": "t"}
    assert same(put_together(apart.skeleton, apart.leaves), value)
    assert same(apart.listed, {**value, 0: [value[0][0]]})
    assert not apart.is_flat and take_apart({"exp_avg": torch.ones(1), "step": 1}, "it").is_flat
    within: list[Any] = [torch.ones(1)]
    within.append(within)
    with pytest.raises(CheckpointError, match="nested more than"):
        take_apart({"h": within}, "it")

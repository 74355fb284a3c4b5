"""Whole state dicts: the right values, to and from one rank, and no more memory than one tensor on the way."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hsdp import DataParallelMeshDims, checkpoint, fully_shard
from hsdp.checkpoint import CheckpointError
from hsdp.errors import StaleParametersError
from tests.checkpoint import models as cm
from tests.support.rig import Pool, run_procs
from tests.support.worker import RankEnv

MIB = 1 << 20


def out_and_in(env: RankEnv, shape: cm.Shape, src: int) -> None:
    """Whole out of one model, into another with other weights; compared with DTensor's own gathering."""
    model = cm.build(env.mesh(shape))
    optimizer = cm.adamw_amsgrad(model)
    cm.train(model, optimizer, range(2), env.rank, env.world_size)
    expected = cm.whole_state(model, optimizer)

    state = checkpoint.full_state_dict(model)
    optim_state = checkpoint.full_optimizer_state_dict(model, optimizer)
    assert bool(state) == bool(optim_state) == (env.rank == 0)
    if env.rank == 0:
        cm.assert_equal(state, {name: expected[name] for name in state})
        assert set(state) == set(model.state_dict())
        assert state["head.weight"] is state["embedding.weight"]  # tied
        found = {f"state.{n}.{k}": v for n, entries in optim_state["state"].items() for k, v in entries.items()}
        cm.assert_equal(found, {name: value for name, value in expected.items() if name.startswith("state.")})

    everywhere = checkpoint.full_state_dict(model, rank0_only=False)
    cm.assert_equal(everywhere, {name: expected[name] for name in everywhere})
    streamed = {name: value for name, value in checkpoint.iter_full_state_dict(model) if value is not None}
    assert len(streamed) == (len(everywhere) if env.rank == 0 else 0)
    for value in everywhere.values():
        value.zero_()  # copies: the model does not notice
    cm.assert_equal(cm.whole_state(model, optimizer), expected)

    other = cm.build(env.mesh(shape), seed=3)
    fresh = cm.adamw_amsgrad(other)
    state = checkpoint.full_state_dict(model, rank0_only=False) if src else state
    checkpoint.load_full_state_dict(other, state if env.rank == src else None, src)
    checkpoint.load_full_optimizer_state_dict(other, fresh, optim_state)
    cm.assert_equal(cm.whole_state(other, fresh), expected)
    later = [cm.train(m, o, range(2, 4), env.rank, env.world_size) for m, o in ((model, optimizer), (other, fresh))]
    assert later[0] == later[1]


@pytest.mark.parametrize(("shape", "src"), [((2, 2), 0), ((1, 4), 0), ((4, 1), 0), ((2, 2), 3), ((1, 4), 2)])
def test_whole_out_and_in(pool4: Pool, shape: cm.Shape, src: int) -> None:
    pool4.run(out_and_in, shape, src)


def sharded_on_dim_1(env: RankEnv) -> None:
    """Rows of other ranks do not lie in one piece there."""
    from torch.distributed.tensor.placement_types import Shard

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Linear(5, 3).double()
        return fully_shard(model, mesh=env.mesh((2, 2)), shard_placement_fn=lambda p: Shard(p.ndim - 1))

    model, other = build(0), build(1)
    state = checkpoint.full_state_dict(model)
    checkpoint.load_full_state_dict(other, state)
    torch.manual_seed(0)
    cm.assert_equal(cm.whole_state(other), dict(nn.Linear(5, 3).double().state_dict()))


def test_sharded_on_another_dim(pool4: Pool) -> None:
    pool4.run(sharded_on_dim_1)


def _transposed(env: RankEnv) -> None:
    model = fully_shard(nn.Linear(1, env.world_size, bias=False), mesh=env.mesh((1, env.world_size)))
    whole = torch.arange(env.world_size, dtype=torch.float32).view(1, -1).t()
    checkpoint.load_full_state_dict(model, {"weight": whole})
    assert torch.equal(checkpoint.full_state_dict(model, rank0_only=False)["weight"], whole)


def test_rows_of_one_element_may_have_any_stride(pool2: Pool) -> None:
    pool2.run(_transposed)


def beside_tensor_parallelism(env: RankEnv, directory: str) -> None:
    """The first parameter lives on this rank's data-parallel ranks alone, others are cut by tensor parallelism alone."""
    mesh = env.mesh((2, 2), ("replicate", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="replicate"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = checkpoint.full_state_dict(model)
    full_state = checkpoint.full_optimizer_state_dict(model, optimizer)
    assert bool(state) == bool(full_state) == (env.rank == 0)
    checkpoint.save_safetensors(directory, model)
    if env.rank == 0:
        cm.assert_equal(state, expected)
        other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        checkpoint.load_safetensors(directory, other, process_group=dist.new_group([0], use_local_synchronization=True))
        cm.assert_equal(other.state_dict(), expected)


def test_one_rank_gets_all_where_parameters_live_on_meshes_of_different_ranks(pool4: Pool, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    pool4.run(beside_tensor_parallelism, str(tmp_path))


def test_one_process_without_a_group() -> None:
    model, other = cm.build(None), cm.build(None, seed=1)
    optimizer, fresh = cm.two_groups(model), cm.two_groups(other)
    cm.train(model, optimizer, range(2))
    checkpoint.load_full_state_dict(other, checkpoint.full_state_dict(model))
    checkpoint.load_full_optimizer_state_dict(other, fresh, checkpoint.full_optimizer_state_dict(model, optimizer))
    cm.assert_equal(cm.whole_state(other, fresh), cm.whole_state(model, optimizer))


def refuse_misfits(env: RankEnv) -> list[str]:
    model = cm.build(env.mesh((1, 2)))
    before = cm.whole_state(model)
    state = checkpoint.full_state_dict(model)
    messages = []
    for spoil in (
        lambda s: s.pop("blocks.1.up.weight"),
        lambda s: s.update(more=torch.zeros(1)),
        lambda s: s.update(temperature=torch.zeros(2)),
        lambda s: s.update(temperature=torch.zeros(())),
    ):
        bad = dict(state)
        if env.rank == 0:
            spoil(bad)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load_full_state_dict(model, bad)
        messages.append(str(caught.value))
        cm.assert_equal(cm.whole_state(model), before)
    return messages


def test_misfits_are_named_on_every_rank_before_anything_changes(pool2: Pool) -> None:
    first, second = pool2.run(refuse_misfits)
    assert first == second
    assert "the model has 'blocks.1.up.weight', which the state does not have" in first[0]
    assert "the state has 'more', which the model does not have" in first[1]
    assert "'temperature' is torch.float32 of shape (2,) in the state, torch.float64 of shape ()" in first[2]
    assert "'temperature' is torch.float32 of shape () in the state" in first[3]


def stale_backward(env: RankEnv) -> None:
    model = cm.build(env.mesh((1, 2)))
    state = checkpoint.full_state_dict(model)
    loss = model(torch.zeros(1, 2, dtype=torch.int64)).sum()
    checkpoint.load_full_state_dict(model, state)
    with pytest.raises(StaleParametersError):
        loss.backward()


def test_loading_between_a_forward_and_its_backward_is_noticed(pool2: Pool) -> None:
    pool2.run(stale_backward)


def stale_part(env: RankEnv, directory: str, into: str) -> None:
    """What is loaded is a module inside a unit: the unit around it is stale as a whole."""
    model = cm.build(env.mesh((1, 2)))
    part = model.get_submodule("blocks.0.up")
    state = checkpoint.full_state_dict(part)
    checkpoint.save_safetensors(directory, part)
    loss = model(torch.zeros(1, 2, dtype=torch.int64)).sum()
    if into == "safetensors":
        checkpoint.load_safetensors(directory, part)
    else:
        checkpoint.load_full_state_dict(part, state)
    with pytest.raises(StaleParametersError, match=r"blocks\.0"):
        loss.backward()


@pytest.mark.parametrize("into", ["state dict", "safetensors"])
def test_loading_into_a_module_inside_a_unit_is_noticed(pool2: Pool, tmp_path: Path, into: str) -> None:
    pool2.run(stale_part, str(tmp_path), into)


# -- memory ------------------------------------------------------------------------------------------------------------

M_MMAP_THRESHOLD = -3  # of <malloc.h>
NUM_TENSORS, ROWS, COLUMNS = 8, 2048, 1024  # 8 MiB each in float32, 64 MiB in all


class Peak:
    """The most host memory that the process held inside the `with`, beyond what it held before; in bytes."""

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = self._read("VmHWM") - self._before

    def _read(self, field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"the system does not tell {field}")


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((ROWS, COLUMNS), float(i)) for i in range(NUM_TENSORS))

    def forward(self) -> None: ...


class OneByOne(Mapping[str, torch.Tensor]):
    """A state whose tensors are made when they are asked for, as those of a file that is read lazily."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.full((ROWS, COLUMNS), float(name.partition(".")[2]) + 0.5)

    def __iter__(self) -> Iterator[str]:
        return (f"weights.{i}" for i in range(NUM_TENSORS))

    def __len__(self) -> int:
        return NUM_TENSORS


def measure(env: RankEnv, directory: str) -> dict[str, float]:
    """Peaks in MiB above the shard (16 MiB on each of 4 ranks)."""
    # Large blocks come from the system and go back to it at once: the figure is what is held, not what malloc caches.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    model = fully_shard(Many(), mesh=env.mesh((1, 4)))
    checkpoint.load_full_state_dict(model, checkpoint.full_state_dict(model))  # whatever is allocated once
    peaks: dict[str, float] = {}
    with Peak() as peak:
        for _, whole in checkpoint.iter_full_state_dict(model):
            del whole  # before the next one is gathered
    peaks["stream"] = peak.bytes / MIB
    with Peak() as peak:
        state: Any = checkpoint.full_state_dict(model)
    peaks["full"] = peak.bytes / MIB
    del state
    with Peak() as peak:
        checkpoint.load_full_state_dict(model, OneByOne())
    peaks["load"] = peak.bytes / MIB
    with Peak() as peak:
        checkpoint.save_safetensors(directory, model)
    peaks["safetensors"] = peak.bytes / MIB
    assert model.weights[3].to_local()[0, 0] == 3.5
    with Peak() as peak:
        checkpoint.save(f"{directory}/sharded", model, step=1)
    peaks["save"] = peak.bytes / MIB
    with Peak() as peak:
        checkpoint.load(f"{directory}/sharded", model)
    peaks["load sharded"] = peak.bytes / MIB
    return peaks


def test_peak_memory_is_one_tensor_on_the_rank_that_gathers_and_nothing_on_the_others(tmp_path: Path) -> None:
    tensor, total, slack = 8.0, 64.0, 2.0
    ranks = run_procs(measure, 4, str(tmp_path))
    first, others = ranks[0], ranks[1:]
    # Formula, above the shard: streaming, one whole tensor; the whole dict, all of them (the last is one of them).
    assert tensor - slack < first["stream"] < tensor + slack, ranks
    assert total - slack < first["full"] < total + slack, ranks
    assert tensor - slack < first["load"] < tensor + slack, ranks
    assert tensor - slack < first["safetensors"] < tensor + slack, ranks
    for other in others:
        assert all(other[key] < slack for key in ("stream", "full", "load", "safetensors")), ranks
    # Shards: saving copies one piece at a time (2 MiB), loading reads from the file into the shard itself.
    for rank in ranks:
        assert rank["save"] < 2 * 2.0 + slack, ranks
        assert rank["load sharded"] < slack, ranks


def _refused(env: RankEnv) -> None:
    plain = nn.Linear(4, 4)
    plain(torch.ones(1, 4)).sum().backward()
    stepped = torch.optim.AdamW(plain.parameters())
    stepped.step()
    model = fully_shard(nn.Linear(4, 4), mesh=env.mesh(2))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"numbers in the place of parameters' names.*full_optimizer_state_dict"):
        checkpoint.load_full_optimizer_state_dict(model, optimizer, stepped.state_dict())


def test_numbered_state_is_refused_with_the_way_to_name_it(pool2: Pool) -> None:
    pool2.run(_refused)


@pytest.mark.parametrize("function", ["load", "load_full_state_dict", "load_safetensors"])
def test_an_expanded_buffer_is_refused_before_anything_is_loaded(tmp_path: Path, function: str) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.full((1,), 3.0).expand(4))
    checkpoint.save(tmp_path / "own", model, step=1)
    checkpoint.save_safetensors(tmp_path / "safetensors", model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = model.weight.detach().zero_().clone()

    def load() -> None:
        if function == "load":
            checkpoint.load(tmp_path / "own", model)
        elif function == "load_safetensors":
            checkpoint.load_safetensors(tmp_path / "safetensors", model)
        else:
            checkpoint.load_full_state_dict(model, state)

    with pytest.raises(CheckpointError, match=r"'scale' cannot be loaded: .* give the model a copy of it"):
        load()
    assert torch.equal(model.weight, before)
    model.scale = model.scale.contiguous()
    load()
    assert torch.equal(model.weight, state["weight"])


def _tied(env: RankEnv) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=env.mesh(2))
    values = {"0.weight": torch.ones(3, 3), "1.weight": torch.full((3, 3), 2.0)}
    with pytest.raises(CheckpointError, match=r"different values for '0\.weight' and '1\.weight', which are one parameter"):
        checkpoint.load_full_state_dict(model, values)
    checkpoint.load_full_state_dict(model, dict.fromkeys(values, values["1.weight"]))
    assert model[1].weight.full_tensor().eq(2.0).all()


def test_different_values_for_tied_weights_are_refused(pool2: Pool) -> None:
    pool2.run(_tied)

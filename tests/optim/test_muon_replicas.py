"""`hsdp.optim.Muon(over_replicas=True)`: torch's numbers, with 1/R of the momentum and fewer bytes between replicas."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard

import hsdp
from hsdp.comm.collectives import Comm
from hsdp.optim import Muon
from tests.optim.test_muon import (
    CASE,
    TP_CASE,
    TP_NAMES,
    Polar,
    expected,
    groups,
    kind,
    muon,
    parallelize,
    shard,
    steps,
)
from tests.optim.test_replicas import InRankOrder
from tests.optim.test_shared_gradients import shared
from tests.support.counting import CollectiveCounter, by_sockets
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, pool_for
from tests.support.twin import assert_same, full_params

SHAPES = [(2, 1), (1, 4), (2, 2), (4, 1)]


def momenta(optimizer: Muon) -> dict[Any, Any]:
    """The momentum of each matrix parameter that was stepped."""
    return {p: entries["momentum_buffer"] for p, entries in optimizer.state.items() if "momentum_buffer" in entries}


def _trains(env: RankEnv, shape: tuple[int, ...], twin: dict[str, Tensor], options: dict[str, Any]) -> None:
    model = shard(CASE.model(), env.mesh(shape))
    optimizer = muon(model.parameters(), over_replicas=True, **options)
    steps(model, CASE, optimizer, env.rank)  # with accumulation and clipping; replicas are bitwise equal after each
    assert_same(dict(full_params(model)), dict(twin), 1e-12, 1e-12)
    held = momenta(optimizer)
    assert len(held) > 5
    for param, value in held.items():
        assert isinstance(value, DTensor) and value.shape == param.shape
        assert value.placements[0].is_replicate() == (shape[0] == 1), "replicas have shares of momentum"
        assert value.to_local().untyped_storage().nbytes() == value.to_local().nbytes, "in memory of its own"
    # A rank's rows are cut by torch.chunk's rule, and may be one, which one replica has. All ranks together have all once.
    count = torch.tensor([sum(v.to_local().numel() for v in held.values())])
    dist.all_reduce(count)
    whole_on_shards = next((p.numel() for p in held if p is model.last.weight), 0) * (shape[1] - 1)
    assert count.item() == sum(param.numel() for param in held) + whole_on_shards


SETTINGS: list[dict[str, Any]] = [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}]


@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
def test_equals_torch_on_one_device(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool = pool_for(request, shape)
    options = SETTINGS[shape[0] % 4 // 2]
    pool.run(_trains, shape, expected(pool.world_size, **options), options)


def _sharded_on_columns(env: RankEnv, shape: tuple[int, ...], twin: dict[str, Tensor]) -> None:
    model = shard(CASE.model(), env.mesh(shape), shard_placement_fn=lambda param: Shard(param.ndim - 1))
    steps(model, CASE, muon(model.parameters(), over_replicas=True), env.rank)
    assert_same(dict(full_params(model)), dict(twin), 1e-12, 1e-12)


def test_shards_of_columns_and_shares_of_rows(pool4: Pool) -> None:
    pool4.run(_sharded_on_columns, (2, 2), expected(4))


def _tensor_parallel(env: RankEnv, twin: dict[str, Tensor]) -> None:
    model: Any = TP_CASE.model()
    mesh = env.mesh((2, 1, 2), TP_NAMES)
    parallelize(model, mesh["tp"], "tensor")
    for block in model.blocks:
        hsdp.fully_shard(block, mesh=mesh["replicate", "shard"])
    hsdp.fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = muon(model.parameters(), over_replicas=True)
    steps(model, TP_CASE, optimizer, env.rank // 2)
    assert_same(dict(full_params(model)), dict(twin), 1e-12, 1e-12)
    assert any(not value.placements[0].is_replicate() for value in momenta(optimizer).values())


def test_inside_of_tensor_parallelism(pool4: Pool) -> None:
    pool4.run(_tensor_parallel, expected(2, TP_CASE))


def _polar(env: RankEnv) -> None:
    models = [shard(CASE.model(), env.mesh((2, 2))) for _ in range(2)]
    for model in models:
        optimizer = Polar(groups(model.parameters()), lr=0.02, momentum=0.9, over_replicas=model is models[1])
        steps(model, CASE, optimizer, env.rank)
    assert_same(dict(full_params(models[1])), dict(full_params(models[0])), 1e-11, 1e-11)
    assert any(not value.placements[0].is_replicate() for value in momenta(optimizer).values())


def test_optimizers_made_of_a_function_have_it_too(pool4: Pool) -> None:
    pool4.run(_polar)


def _summed_otherwise(env: RankEnv) -> None:
    """Gradients that all replicas have whole, by a reduction of users, are cut; who knows of no shares gets them whole."""
    models = [shard(CASE.model(), env.mesh((2, 2))) for _ in range(3)]
    for model in models[:2]:
        model.set_replica_reduce(InRankOrder())
    Muon([{"params": [models[2].few.weight]}], over_replicas=True)  # has shares, and steps nothing here
    for model in models:
        steps(model, CASE, muon(model.parameters(), over_replicas=model is models[0]), env.rank)
        assert not any(map(shared, model.parameters()))
    for model in models[1:]:
        assert_same(dict(full_params(model)), dict(full_params(models[0])), 1e-12, 1e-12)


def test_gradients_of_all_kinds_are_cut_or_gathered(pool4: Pool) -> None:
    pool4.run(_summed_otherwise)


class Matrices(nn.Module):
    """Square matrices, as a block each; experts beside them."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.experts = nn.Parameter(torch.randn(8, 32, 64) / 8) if experts else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.experts is None else torch.einsum("bi,eoi->beo", x, self.experts)


def across(shape: tuple[int, int], env: RankEnv, experts: bool, over_replicas: bool) -> tuple[float, dict[Any, Any]]:
    """Bytes that all ranks together send to other replicas in a step, and its momenta."""
    torch.manual_seed(0)
    model: Any = Matrices(experts)
    for module in (*model.blocks, model):
        hsdp.fully_shard(module, mesh=env.mesh(shape))
    params = [{"params": list(model.blocks.parameters())}]
    if experts:
        params.append({"params": [model.experts], "matrices": "stacked"})
        model.blocks.requires_grad_(False)
    optimizer = Muon(params, ns_dtype=None, over_replicas=over_replicas)
    sent = 0
    exchange = Comm.exchange_parts

    def watched(comm: Comm, owner: Any, key: int, out: Tensor, counts: list[int], given: Tensor, sizes: list[int]) -> Any:
        nonlocal sent
        sent += 4 * sum(n for to, n in enumerate(sizes) if comm.rank // shape[1] != to // shape[1])
        known = len(counter.calls)
        work = exchange(comm, owner, key, out, counts, given, sizes)
        del counter.calls[known:]  # with one shard rank its group is that of the replicas
        return work

    with CollectiveCounter() as counter, mock.patch.object(Comm, "exchange_parts", watched):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    total = torch.tensor([sent + counter.total(group=env.mesh(shape).get_group(0)).wire_bytes], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item(), momenta(optimizer)


@by_sockets
def _counts(env: RankEnv, shape: tuple[int, int]) -> None:
    replicas, shards = shape
    for experts in (False, True):
        elements = 8 * 32 * 64 if experts else 4 * 64 * 64
        # Sums need R - 1 messages for each element, and so do updates; flags of used parameters come on top.
        least = 2 * (replicas - 1) * elements * 4
        before, whole = across(shape, env, experts, over_replicas=False)
        now, shares = across(shape, env, experts, over_replicas=True)
        assert before == pytest.approx(1.5 * least, rel=0.01)
        # What is no owner's replica's share goes to that replica; experts lie whole where they are owned.
        assert now == pytest.approx((1 if experts else 1 + 1 / (2 * replicas)) * least, rel=0.01)
        held = [sum(v.to_local().numel() for v in momenta.values()) for momenta in (whole, shares)]
        assert held == [elements // shards, elements // shards // replicas], "1/R of the momentum"


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 1)], ids=mesh_id)
def test_shares_send_and_hold_less(request: pytest.FixtureRequest, shape: tuple[int, int]) -> None:
    pool_for(request, shape).run(_counts, shape)


def _round_trips(env: RankEnv, folder: str) -> None:
    def fresh(shape: tuple[int, ...], over: bool) -> tuple[Any, Muon]:
        model = shard(CASE.model(), env.mesh(shape))
        return model, muon(model.parameters(), over_replicas=over)

    for first, then in (((2, 2), True), ((2, 2), False)):
        model, optimizer = fresh(first, then)
        steps(model, CASE, optimizer, env.rank, count=1)
        own = copy.deepcopy(optimizer.state_dict())
        theirs = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        where = Path(folder, str(then))
        hsdp.checkpoint.save(str(where), model, optimizer, step=1)
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        steps(model, CASE, optimizer, env.rank, first=1, count=1)
        wanted = full_params(model)
        for how, shape, over in (
            ("own", (2, 2), then),
            ("own", (2, 2), True),
            ("torch", (2, 2), then),
            ("hsdp", (2, 2), not then),
            ("hsdp", (4, 1), True),
            ("hsdp", (1, 4), True),
        ):
            other, loaded = fresh(shape, over)
            if how == "own":
                loaded.load_state_dict(copy.deepcopy(own))
            elif how == "torch":
                options = StateDictOptions(strict=False)  # a parameter that was never stepped has no state
                set_optimizer_state_dict(other, loaded, copy.deepcopy(theirs), options=options)
            if how == "hsdp":
                hsdp.checkpoint.load(where / "step-000001", other, loaded)
            else:
                with torch.no_grad():
                    for name, param in other.named_parameters():
                        param.copy_(weights[name])
            steps(other, CASE, loaded, env.rank, first=1, count=1)
            assert_same(dict(full_params(other)), dict(wanted), 1e-12, 1e-12)


def test_checkpoints_go_onto_any_mesh_with_and_without_shares(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(_round_trips, str(tmp_path))


def _refuses(env: RankEnv) -> None:
    model = shard(CASE.model(), env.mesh((2, 2)))
    with model.no_sync():
        CASE.loss(model, CASE.batch(0, env.rank)).backward()
    with pytest.raises(hsdp.StateError, match=r"Muon\(over_replicas=True\)"):
        muon(model.parameters(), over_replicas=True)
    # Nor does an optimizer keep a group that it refused.
    other = shard(CASE.model(), env.mesh((2, 2)))
    optimizer = muon(other.parameters(), over_replicas=True)
    groups = list(optimizer.param_groups)
    with pytest.raises(hsdp.StateError, match=r"Muon\(over_replicas=True\)"):
        optimizer.add_param_group({"params": [next(p for p in model.parameters() if p.ndim == 2)]})
    assert optimizer.param_groups == groups
    # States of shares are not those of whole shards: a loud error, and nothing has changed.
    models = [shard(CASE.model(), env.mesh((2, 2))) for _ in range(2)]
    shared, whole = (muon(m.parameters(), over_replicas=m is models[0]) for m in models)
    steps(models[0], CASE, shared, env.rank, count=1)
    whole.load_state_dict(copy.deepcopy(shared.state_dict()))
    CASE.loss(models[1], CASE.batch(0, env.rank)).backward()
    before = full_params(models[1])
    with pytest.raises(hsdp.StateError, match="load it with placements"):
        whole.step()
    assert_same(dict(full_params(models[1])), dict(before), 0, 0)


def test_sums_that_wait_and_states_of_shares_are_refused(pool4: Pool) -> None:
    pool4.run(_refuses)


def _stepped_alone(env: RankEnv) -> None:
    """Ranks of which one has no gradient for a matrix, and one that shares alone, are told."""
    model = shard(CASE.model(), env.mesh((2, 1)))
    optimizer = muon(model.parameters(), over_replicas=True)
    CASE.loss(model, CASE.batch(0, env.rank)).backward()
    if env.rank == 1:
        next(p for p in model.parameters() if kind(p) == "fused").grad = None
    optimizer.step()


def test_a_replica_that_steps_other_matrices_is_told() -> None:
    with Pool(2) as pool:  # its groups are of no use afterwards
        assert [one.error for one in pool.run_raw(_stepped_alone)] == ["DivergenceError"] * 2

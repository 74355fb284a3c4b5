"""`hsdp.optim.local(over_replicas=True)`: the step of each replica by itself, bit for bit, with 1/R of its states."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

import hsdp
from hsdp.comm.collectives import Comm
from hsdp.optim import local
from tests.optim.test_local import CASE, KINDS, _groups
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_sharded, mesh_id, pool_for, shard
from tests.support.twin import Twin, adamw, assert_close_to_twin, full_params, train, twin_of


class InRankOrder:
    """An all-reduce over replicas that adds in the order in which a reduce-scatter on gloo does: bits can be compared."""

    def __call__(self, tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        torch.sum(torch.stack(parts), 0, out=tensor)


def _step(env: RankEnv, model: Any, optimizer: torch.optim.Optimizer, step: int, order: float = 2.0) -> None:
    for micro in range(2):
        with model.accumulate(last=micro == 1):
            CASE.loss(model, CASE.batch(step, env.rank, micro)).backward()
    if step == 1:  # parameters without a gradient are not stepped
        for param in list(model.parameters())[::3]:
            param.grad = None
    hsdp.clip_grad_norm_(model, 0.5, order)
    optimizer.step()
    optimizer.zero_grad()


def _equals_repeated(env: RankEnv, shape: tuple[int, ...], flat: bool, name: str) -> None:
    models = [shard(CASE.model(), env.mesh(shape)) for _ in range(2)]
    models[0].set_replica_reduce(InRankOrder())  # type: ignore[operator]
    repeated = local(KINDS[name](_groups(models[0])))
    shared = local(KINDS[name](_groups(models[1])), flat=flat, over_replicas=True)
    for step in range(3):
        # Of order inf: a sum of squares over both axes has another order than one over shards, and so other bits.
        _step(env, models[0], repeated, step, math.inf)
        _step(env, models[1], shared, step, math.inf)
        for (label, mine), theirs in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            _same(mine.to_local(), theirs.to_local(), name, f"differs in step {step}: {label}")
    check_sharded(models[1])
    a, b = shared.state_dict()["state"], repeated.state_dict()["state"]
    assert a.keys() == b.keys()
    for number, entries in b.items():
        for entry, value in entries.items():
            mine = a[number][entry]
            assert type(mine) is type(value)
            full = [x.full_tensor() if isinstance(x, DTensor) else x for x in (mine, value)]
            _same(*full, name, f"differs: {entry} of parameter {number}")


def _same(mine: Tensor, theirs: Tensor, name: str, what: str) -> None:
    """Equal to the bit; but PyTorch's fused CPU kernels round the last elements of a tensor otherwise than others."""
    if "fused" in name:
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-15, msg=f"{name} {what}")
    else:
        assert torch.equal(mine, theirs), f"{name} {what}"


@pytest.mark.parametrize("flat", [False, True], ids=["views", "flat"])
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 1)], ids=mesh_id)
@pytest.mark.parametrize("name", KINDS)
def test_equals_the_repeated_step_bit_for_bit(
    request: pytest.FixtureRequest, shape: tuple[int, ...], flat: bool, name: str
) -> None:
    pool_for(request, shape).run(_equals_repeated, shape, flat, name)


def equals_repeated(env: RankEnv, shape: tuple[int, ...], flat: bool = False) -> None:
    """Every kind."""
    for name in KINDS:
        _equals_repeated(env, shape, flat, name)


def _equals_twin(env: RankEnv, shape: tuple[int, ...], twin: Twin) -> None:
    model = shard(CASE.model(), env.mesh(shape))
    train(model, CASE, env.rank, 3, local(adamw(model.parameters()), over_replicas=True), accumulate=2)
    assert_close_to_twin(model, twin, grads=True)
    for name, param in model.named_parameters():
        mine: Any = param.detach()
        parts = [torch.empty_like(mine.to_local()) for _ in range(shape[0])]
        dist.all_gather(parts, mine.to_local().contiguous(), group=env.mesh(shape).get_group(0))
        assert all(torch.equal(parts[0], part) for part in parts), f"replicas differ: {name}"


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=mesh_id)
def test_equals_the_twin(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(_equals_twin, shape, twin_of(CASE, 4, 3, adamw, 2))


def _counts(env: RankEnv) -> None:
    model = hsdp.fully_shard(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64, bias=False)), mesh=env.mesh((2, 2)))
    optimizer: Any = local(torch.optim.AdamW(model.parameters()), over_replicas=True)
    gathered: list[int] = []
    gather = Comm.all_gather

    def watched(comm: Comm, owner: Any, key: int, outputs: list[Tensor], inputs: list[Tensor], finish: Any) -> Any:
        gathered.append(sum(x.nbytes for x in inputs))
        return gather(comm, owner, key, outputs, inputs, finish)

    model(torch.ones(2, 64)).sum().backward()
    with mock.patch.object(Comm, "all_gather", watched):
        optimizer.step()
    shards = sum(p.to_local().nbytes for p in model.parameters())
    assert gathered == [shards // 2], "each rank sends what it stepped to the other replica, once"
    moments = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, DTensor)]
    held = sum(value.to_local().untyped_storage().nbytes() for value in moments)
    assert abs(held / (2 * shards) - 1 / 2) <= 0.02, "a rank holds half of the states of its shards"


def test_states_and_bytes_are_one_replica_s_part(pool4: Pool) -> None:
    pool4.run(_counts)


def _round_trips(env: RankEnv, folder: str) -> None:
    def fresh(shape: tuple[int, ...], over_replicas: bool, flat: bool = True) -> tuple[Any, torch.optim.Optimizer]:
        model = shard(CASE.model(), env.mesh(shape))
        return model, local(torch.optim.AdamW(_groups(model), lr=0.01), flat=flat, over_replicas=over_replicas)

    model, optimizer = fresh((2, 2), True)
    _step(env, model, optimizer, 0)
    own = copy.deepcopy(optimizer.state_dict())
    theirs = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    hsdp.checkpoint.save(folder, model, optimizer, step=1)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    _step(env, model, optimizer, 2)
    expected = full_params(model)
    for how, shape, over in (
        ("own", (2, 2), True),
        ("torch", (2, 2), True),
        ("hsdp", (2, 2), True),
        ("hsdp", (4, 1), True),
        ("hsdp", (1, 4), True),
        ("hsdp", (2, 2), False),
    ):
        other, loaded = fresh(shape, over)
        if how == "hsdp":
            hsdp.checkpoint.load(Path(folder, "step-000001"), other, loaded)
        else:
            if how == "own":
                loaded.load_state_dict(copy.deepcopy(own))
            else:
                set_optimizer_state_dict(other, loaded, copy.deepcopy(theirs))
            with torch.no_grad():
                for name, param in other.named_parameters():
                    param.copy_(weights[name])
        _step(env, other, loaded, 2)
        for name, value in full_params(other).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-14, msg=f"{how} onto {shape}: {name}")


def test_checkpoints_go_onto_any_mesh(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(_round_trips, str(tmp_path))


def _flat(env: RankEnv) -> None:
    blocks = [nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))) for _ in range(2)]
    for block in blocks:
        hsdp.fully_shard(block, mesh=env.mesh((2, 2)))
    model: Any = hsdp.fully_shard(nn.Sequential(*blocks), mesh=env.mesh((2, 2)))
    optimizer: Any = local(torch.optim.AdamW(model.parameters()), flat=True, over_replicas=True)
    copied: list[int] = []
    copy_ = torch._foreach_copy_
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        copied.clear()
        with mock.patch("torch._foreach_copy_", lambda to, values: (copied.append(len(to)), copy_(to, values))):
            optimizer.step()
        assert copied == [3, 3, 3, 3], "shares go to the copies and come back; gradients lie side by side"
        optimizer.zero_grad()
    targets = [target for group in optimizer._hsdp_stepper._groups for target in group]
    assert [len(target.members) for target in targets] == [3, 3], "one for each unit"
    assert not any(target.memory.held for target in targets), "copies take memory in a step alone"
    moments = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, DTensor)]
    assert sum(value.to_local().numel() for value in moments) == 2 * 6 * 16 * 16 // 4, "states are of shares alone"


def test_flat_copies_are_few_and_leave_nothing(pool4: Pool) -> None:
    pool4.run(_flat)


def _whole(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Gradients as users may set them: whole shards, each in memory of its own; places in it differ between replicas."""
    models = [hsdp.fully_shard(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)), mesh=env.mesh(shape)) for _ in range(2)]
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        mine.detach().copy_(theirs.detach())
    optimizers = [
        local(torch.optim.SGD(_groups(model), lr=0.1, momentum=0.9), flat=flat, over_replicas=flat)
        for model, flat in zip(models, (True, False), strict=True)
    ]
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            for at, param in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + at)
                whole = torch.randn(param.shape, generator=generator, dtype=param.dtype)
                param.grad = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)  # type: ignore[attr-defined]
            optimizer.step()
        for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())  # type: ignore[operator]


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=mesh_id)
def test_flat_copies_of_gradients_that_users_set(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(_whole, shape)


def _fails(env: RankEnv) -> None:
    """A step that raised has left the parameters as they were, and the next one is right."""
    models = [shard(CASE.model(), env.mesh((2, 1))) for _ in range(2)]
    optimizers = [local(torch.optim.SGD(m.parameters(), lr=0.1), flat=True, over_replicas=True) for m in models]
    for model in models:
        CASE.loss(model, CASE.batch(0, env.rank)).backward()
    lr = optimizers[0].param_groups[0]["lr"]
    optimizers[0].param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        optimizers[0].step()
    optimizers[0].param_groups[0]["lr"] = lr
    for optimizer in optimizers:
        optimizer.step()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())  # type: ignore[operator]


def test_a_flat_step_that_raises_changes_nothing(pool2: Pool) -> None:
    pool2.run(_fails)


def _fails_halfway(env: RankEnv) -> None:
    """A step that raises on all ranks when it has stepped some of the parameters, as one does that finds no more memory."""
    model = shard(CASE.model(), env.mesh((2, 1)))
    params = list(model.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    optimizer = local(torch.optim.SGD(groups, lr=0.1), over_replicas=True)
    CASE.loss(model, CASE.batch(0, env.rank)).backward()
    before = params[0].to_local().clone()  # type: ignore[attr-defined]
    optimizer.param_groups[1]["lr"] = "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    assert not torch.equal(before, params[0].to_local()), "nothing was stepped"  # type: ignore[attr-defined]
    for name, param in model.named_parameters():
        held = param.to_local().clone()  # type: ignore[operator]
        parts = [torch.empty_like(held) for _ in range(2)]
        dist.all_gather(parts, held)
        assert torch.equal(*parts), f"replicas differ in {name}"


def test_replicas_stay_equal_behind_a_step_that_raises(pool2: Pool) -> None:
    pool2.run(_fails_halfway)


def _on_unsorted_replicas(env: RankEnv) -> None:
    """Checkpoints would have each replica's share of the states under the rows of another's."""
    model = shard(CASE.model(), DeviceMesh("cpu", torch.tensor([[1], [0]])))
    whole = local(adamw(model.parameters()))  # without shares the order of replicas does not count
    _step(env, model, whole, 0)
    message = r"over_replicas=True\), unit '.*': along the replicate axis of the mesh \[\[1\], \[0\]\] .* sort them"
    with pytest.raises(ValueError, match=message):
        local(adamw(model.parameters()), over_replicas=True)
    with pytest.raises(ValueError, match=message):
        hsdp.optim.Muon([param for param in model.parameters() if param.ndim == 2], over_replicas=True)
    check_sharded(model)


def test_shares_of_replicas_whose_ranks_do_not_ascend_are_refused(pool2: Pool) -> None:
    pool2.run(_on_unsorted_replicas)

"""Units that only some ranks have, as with expert parallelism: ranks of different ones may run different ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import hsdp
from hsdp.schedule.gather_order import GatherOrders, RankSet, RankSets
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id
from tests.support.twin import full

DIM, EXPERTS = 6, 3
ALL, SOME = frozenset(range(4)), frozenset((0, 2))


class Layer(nn.Module):
    """A dense layer, and this rank's experts by their numbers among all of them; those without rows are skipped."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM, dtype=torch.float64)
        numbers = range(EXPERTS * ep, EXPERTS * (ep + 1))
        self.experts = nn.ModuleDict({str(n): nn.Linear(DIM, DIM, dtype=torch.float64) for n in numbers})

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        x = self.dense(x).tanh()
        for at, expert in enumerate(self.experts.values()):
            if not skipped >> at & 1:
                x = x + expert(x) / EXPERTS
        return x


class Model(nn.Module):
    """Layers of experts between two dense ones."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(2))
        self.layers = nn.ModuleList(Layer(ep) for _ in range(3))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, skipped)
        return self.last(x)  # type: ignore[no-any-return]


def _trained(env: RankEnv, sharded: Any, replicas: int) -> dict[str, Tensor]:
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_dp", "ep"))
    shape, names = ((4,), ("dp",)) if replicas == 1 else ((2, 2), ("replicate", "shard"))
    dense, ep = init_device_mesh("cpu", shape, mesh_dim_names=names), sparse.get_local_rank("ep")
    torch.manual_seed(0)
    model: Any = Model(ep)
    for layer in model.layers:
        for expert in layer.experts.values():
            sharded(expert, mesh=sparse["expert_dp"])
        sharded(layer, mesh=dense)
    sharded(model, mesh=dense)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Of every two ranks that share experts each skips the same ones; the others skip other ones, or none.
    for step, skipped in enumerate(((0, 0), (0, 0), (1, 4), (3, 0), (0, 2), (7, 0), (0, 0))):
        torch.manual_seed(10 * step + env.rank)
        with torch.no_grad():
            model(torch.ones(5, DIM, dtype=torch.float64), skipped[1 - ep])
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(torch.randn(5, DIM, dtype=torch.float64), skipped[ep]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.full_tensor() for name, param in model.named_parameters()}


def _as_fsdp2(env: RankEnv, replicas: int) -> None:
    expected, found = _trained(env, fsdp.fully_shard, replicas), _trained(env, hsdp.fully_shard, replicas)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_that_run_different_experts_train_as_with_fsdp2(pool4: Pool, replicas: int) -> None:
    pool4.run(_as_fsdp2, replicas)


def _scaled(env: RankEnv, dense_shape: tuple[int, ...], expert_ranks: str, dense_first: bool) -> None:
    """Some ranks' experts overflow in the second step, and none of them have gradients in the third."""
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))[expert_ranks]
    dense, ep = env.mesh(dense_shape), env.rank % 2 if expert_ranks == "rows" else env.rank // 2
    torch.manual_seed(0)
    model: Any = Layer(ep)
    for expert in model.experts.values():
        hsdp.fully_shard(expert, mesh=sparse)
    hsdp.fully_shard(model, mesh=dense)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params if dense_first else params[::-1], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    stepped = []
    for step in range(4):
        before = [full(param) for param in params]
        scaler.scale(model(torch.ones(5, DIM, dtype=torch.float64), 7 * ep * (step == 2)).square().mean()).backward()
        if step == 1 and ep == 1:
            model.get_parameter(f"experts.{EXPERTS}.weight").grad.to_local().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stepped.append(not torch.equal(full(params[0]), before[0]))
    assert stepped == [True, False, True, True], stepped
    assert scaler.get_scale() == 512.0, scaler.get_scale()


@pytest.mark.parametrize("dense_first", [True, False])
@pytest.mark.parametrize("expert_ranks", ["rows", "columns"])
@pytest.mark.parametrize("dense_shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_an_overflow_of_some_ranks_experts_skips_the_step_of_all(
    pool4: Pool, dense_shape: tuple[int, ...], expert_ranks: str, dense_first: bool
) -> None:
    pool4.run(_scaled, dense_shape, expert_ranks, dense_first)


def _scaled_on_turned_axes(env: RankEnv) -> None:
    """The axes' names tell which shards: the first, against torch's order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model: Any = torch.nn.Linear(4, 4)
    hsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=hsdp.DataParallelMeshDims(shard="a", replicate="b"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        before = full(model.weight)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if step == 0 and env.rank == 2:
            model.weight.grad.to_local().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(full(model.weight), before) == (step == 0)
    assert scaler.get_scale() == 4.0


def test_ranks_skip_steps_together_on_axes_in_another_order(pool4: Pool) -> None:
    pool4.run(_scaled_on_turned_axes)


def _clipped(env: RankEnv, different: bool) -> None:
    """Experts that differ between ranks, or copies of them."""
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "rows"))["rows"]
    torch.manual_seed(0)
    model: Any = Layer(env.rank // 2 if different else 0)
    for expert in model.experts.values():
        with torch.no_grad():
            expert.weight.mul_(1 + different * (env.rank // 2))
        hsdp.fully_shard(expert, mesh=sparse)
    hsdp.fully_shard(model, mesh=env.mesh(4))
    for place in range(2):
        model(torch.full((5, DIM), place + 1.0, dtype=torch.float64), 0).square().mean().backward()
        before = [full(param.grad) for param in model.parameters()]
        if not different:
            norm = hsdp.clip_grad_norm_(model, 1e-3)
            want = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in before]))
            torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
            continue
        with pytest.raises(hsdp.StateError, match=r"ranks have norms from .* to .* that of '.*' .* in a call of their own"):
            hsdp.clip_grad_norm_(model, 1e-3)
        assert all(torch.equal(full(param.grad), grad) for param, grad in zip(model.parameters(), before, strict=True))
        dense, experts = [*model.dense.parameters()], [*model.experts.parameters()]
        assert hsdp.clip_grad_norm_(dense, 1e-3) > 1e-3
        assert hsdp.clip_grad_norm_(experts, 1e-3) > 1e-3


@pytest.mark.parametrize("different", [True, False])
def test_norms_over_experts_that_differ_between_ranks_are_refused(pool4: Pool, different: bool) -> None:
    pool4.run(_clipped, different)


def _hardly_different(env: RankEnv) -> None:
    """Experts whose part of the norm is too small to tell them from copies: all ranks scale by one number nevertheless."""
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "rows"))["rows"]
    torch.manual_seed(0)
    model: Any = Layer(env.rank // 2)
    for expert in model.experts.values():
        hsdp.fully_shard(expert, mesh=sparse)
    hsdp.fully_shard(model, mesh=env.mesh(4))
    model(torch.ones(5, DIM, dtype=torch.float64), 0).square().mean().backward()
    for param in model.experts.parameters():
        if param.grad is not None:
            param.grad.to_local().fill_(1e-6 * (1 + env.rank // 2))
    norm = hsdp.clip_grad_norm_(model, 1e-3).item()
    norms: list[Any] = [None] * 4
    dist.all_gather_object(norms, norm)
    assert len(set(norms)) == 1, norms


def test_norms_that_differ_by_little_are_made_equal(pool4: Pool) -> None:
    pool4.run(_hardly_different)


class Place:
    """A unit, as orders of gathers know it."""

    whole_bytes = 1

    def __init__(self, name: str, mesh_ranks: RankSet) -> None:
        self.name, self.mesh_ranks, self.key = name, mesh_ranks, hash(name)


def _ahead(orders: GatherOrders[Any], places: list[Place]) -> list[str]:
    """What is gathered ahead at each place of a pass."""
    orders.begin()
    told = ["".join(other.name for other in orders.enter(place, 1)) for place in places]
    orders.end()
    return told


def test_what_all_gather_does_not_depend_on_what_some_have() -> None:
    a, b, c = (Place(name, ALL) for name in "ABC")
    e, f = (Place(name, SOME) for name in "ef")
    orders: GatherOrders[Any] = GatherOrders()
    orders.serve(RankSets([ALL, SOME]))
    assert _ahead(orders, [a, e, b, f, c]) == [""] * 5, "nothing is known yet"
    identities = orders.identity(ALL), orders.identity(SOME)
    assert _ahead(orders, [a, e, b, f, c]) == ["Be", "", "Cf", "", ""]
    assert _ahead(orders, [a, e, b, c]) == ["Be", "", "Cf", ""], "those who have f have left their order there"
    assert orders.identity(ALL) == identities[0] and orders.identity(SOME) != identities[1]
    assert _ahead(orders, [a, b, f, c]) == ["Be", "C", "", ""]

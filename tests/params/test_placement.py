"""`least_padding`: few experts on many ranks, without padding and without a copy."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import hsdp
import hsdp.checkpoint
from hsdp.params.placement import mergeable
from tests.support.models import Case, mse
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_rest, mesh_id
from tests.support.twin import Twin, adamw, assert_close_to_twin, assert_same, full_params, sgd, train, twin_of


class Experts(nn.Module):
    """Soft mixture: every expert sees every token, weighted by a router."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, dim) / dim)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / dim)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / hidden)
        self.bias = nn.Parameter(torch.zeros(experts, 3))

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ self.router.T).softmax(-1)
        hidden = torch.tanh(torch.einsum("nd,edh->enh", x, self.up))
        outputs = torch.einsum("enh,ehd->end", hidden, self.down) * self.bias.exp().mean(-1)[:, None, None]
        return x + torch.einsum("end,ne->nd", outputs, weights)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(2, 8, 16) for _ in range(2))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    return x, y


CASE = Case("experts", Net, draw, mse, torch.float64)


@pytest.mark.parametrize(
    ("shape", "shards", "expected"),
    [
        ((64, 3), 64, Shard(0)),
        ((8, 128, 64), 8, Shard(0)),
        ((8, 128, 64), 64, (Shard(0), Shard(1))),
        ((8, 128), 64, (Shard(0), Shard(1))),
        ((8, 12, 64), 64, Shard(2)),  # 12 rows do not fall into 8 parts
        ((100, 128, 64), 64, Shard(1)),
        ((100,), 64, Shard(0)),
        ((), 64, Shard(0)),
        ((0, 4), 4, Shard(0)),
        ((3, 5), 4, Shard(0)),
    ],
)
def test_the_dim_with_the_least_padding_is_chosen(shape: tuple[int, ...], shards: int, expected: Any) -> None:
    assert hsdp.least_padding(torch.empty(shape), shards) == expected


def test_merged_dims_cut_no_row_across() -> None:
    assert mergeable((8, 16, 3), 64) and not mergeable((8, 12), 64) and not mergeable((12, 16), 8)


def build(env: RankEnv, shape: tuple[int, ...], **options: Any) -> nn.Module:
    model = CASE.model()
    for module in (*model.blocks, model):  # type: ignore[misc]
        hsdp.fully_shard(module, **{"mesh": env.mesh(shape), "shard_placement_fn": hsdp.least_padding, **options})
    return model


def check_training(env: RankEnv, shape: tuple[int, ...], fusion: Any, twin: Twin, named: bool = True) -> None:
    options: dict[str, Any] = {"comm_policy": hsdp.CommPolicy(fusion=fusion)}
    if not named:
        options["mesh"] = init_device_mesh("cpu", shape)
    model = build(env, shape, **options)
    losses = train(model, CASE, env.rank, len(twin.losses), sgd(model.parameters()))
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)
    check_rest(model)


@pytest.mark.parametrize("fusion", ["direct", "packed"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4)], ids=mesh_id)
def test_training_equals_the_twin(pool4: Pool, shape: tuple[int, ...], fusion: str) -> None:
    pool4.run(check_training, shape, fusion, twin_of(CASE, 4, 3, sgd))


@pytest.mark.parametrize("shape", [(4,), (1, 4)], ids=mesh_id)
def test_a_mesh_needs_no_names(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_training, shape, "direct", twin_of(CASE, 4, 3, sgd), False)


def check_placed(env: RankEnv) -> None:
    model = build(env, (1, 4), comm_policy=hsdp.CommPolicy(fusion="direct"))
    up = model.blocks[0].up  # type: ignore[index,union-attr]
    assert isinstance(up, DTensor) and up.placements == (Replicate(), Shard(0), Shard(1))
    assert up.to_local().shape == (1, 4, 16) and up.device_mesh.shape == (1, 2, 2)
    row, part = divmod(env.rank, 2)
    whole = CASE.model().blocks[0].up  # type: ignore[index,union-attr]
    assert torch.equal(up.to_local(), whole[row : row + 1, 4 * part : 4 * part + 4])  # type: ignore[index]
    described = hsdp.describe(model)
    line = next(line for line in described.splitlines() if " up " in line)
    assert "Shard(0, 1)" in line and "gathered direct, reduced direct" in line, described
    assert model.blocks[0].bias.placements[1:] == (Shard(1),)  # type: ignore[index,union-attr]


def test_each_rank_holds_part_of_one_expert(pool4: Pool) -> None:
    pool4.run(check_placed)


def check_doors(env: RankEnv, directory: str, twin: Twin) -> None:
    """Clipping, whole parameters, checkpoints and initialisation know such parameters."""
    model = build(env, (4,))
    mse(model, CASE.batch(0, env.rank)).backward()
    norm = hsdp.clip_grad_norm_(model, 1e9)
    total = torch.stack([g.norm() for g in twin.grads.values() if g is not None]).norm()
    torch.testing.assert_close(norm, total, rtol=1e-11, atol=1e-11)
    optimizer = adamw(model.parameters())
    optimizer.step()
    want = full_params(model)
    with hsdp.full_params(model, writeback="local"), torch.no_grad():
        assert_same(dict(model.named_parameters()), want, 0, 0)
        for param in model.parameters():
            param.mul_(2)
    doubled = {name: 2 * value for name, value in want.items()}
    assert_same(full_params(model), doubled, 0, 0)
    hsdp.checkpoint.save(directory, model, optimizer, step=1)
    full_state = hsdp.checkpoint.full_state_dict(model)
    other = hsdp.fully_shard(CASE.model(), mesh=env.mesh((2, 2)))
    hsdp.checkpoint.load(directory, other, adamw(other.parameters()))
    assert_same(full_params(other), doubled, 0, 0)
    again = build(env, (4,))
    hsdp.checkpoint.load_full_state_dict(again, full_state if env.rank == 0 else {})
    assert_same(full_params(again), doubled, 0, 0)
    hsdp.checkpoint.load(directory, again, adamw(again.parameters()))
    assert_same(full_params(again), doubled, 0, 0)


def test_merged_dims_pass_through_every_side_door(pool4: Pool, tmp_path: Any) -> None:
    pool4.run(check_doors, str(tmp_path), twin_of(CASE, 4, 1, sgd))


def check_errors(env: RankEnv) -> None:
    tuple_ = lambda param: (Shard(0), Shard(1))  # noqa: E731
    with pytest.raises(ValueError, match=r"'weight' of shape \(3, 4\) it returned .* cut into 4 equal parts"):
        hsdp.fully_shard(nn.Linear(4, 3, bias=False), mesh=env.mesh((4,)), shard_placement_fn=tuple_)
    other = lambda param: (Shard(0), Shard(2))  # noqa: E731
    with pytest.raises(ValueError, match=r"the only tuple is \(Shard\(0\), Shard\(1\)\)"):
        hsdp.fully_shard(Experts(2, 8, 8), mesh=env.mesh((4,)), shard_placement_fn=other)


def test_wrong_tuples_are_refused(pool4: Pool) -> None:
    pool4.run(check_errors)


def _named(param: Tensor, *, shards: int = 0) -> Shard:
    return Shard(shards - 4)


def _with_default(param: Tensor, dim: int = 0) -> Shard:
    return Shard(dim)


def _bound(param: Tensor, _experts: frozenset[int] = frozenset()) -> Shard | None:
    return Shard(1) if id(param) in _experts else None


FUNCTIONS: dict[str, tuple[Any, int]] = {
    "a second argument": (lambda param, count: Shard(count - 3), 1),
    "a named one": (_named, 0),
    "a default of its own": (_with_default, 0),
    "a loop's variable": (_bound, 0),
    "a partial": (functools.partial(_with_default, dim=1), 1),
    "any arguments": (lambda *told: Shard(len(told)), 1),
    "any keywords": (lambda param, **told: Shard(len(told)), 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_who_asks_for_the_number_of_shards_gets_it(name: str) -> None:
    choose, dim = FUNCTIONS[name]
    with fake_world(4) as env:
        model = hsdp.fully_shard(nn.Linear(8, 8, bias=False), mesh=env.mesh((4,)), shard_placement_fn=choose)
        assert model.weight.placements == (Shard(dim),)

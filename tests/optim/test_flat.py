"""`optim.local`, flat and not, where parameters are scalars, few, moved between groups, or handed to another optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, Optimizer

import hsdp
from hsdp.optim import local
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id
from tests.support.twin import full

DIM = 6
Make = Callable[[Any], list[Optimizer]]


class Scaled(nn.Module):
    """Two layers and a scalar, behind which a shard buffer has padding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.a = nn.Linear(DIM, 33)
        self.b = nn.Linear(33, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x))) * self.scale
        return out


class FewRows(nn.Module):
    """A parameter that one rank of two holds none of, behind one that both hold."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Parameter(torch.randn(2, DIM))
        self.one = nn.Parameter(torch.randn(1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.two.prod(0) * self.one.prod(0)


class Both:
    """A sharded model and its twin, which trains on the mean of the ranks' gradients."""

    def __init__(self, env: RankEnv, shape: tuple[int, ...], build: type[nn.Module], **options: Any) -> None:
        torch.manual_seed(0)
        self.twin: Any = build().double()
        self.model: Any = hsdp.fully_shard(copy.deepcopy(self.twin), mesh=env.mesh(shape), **options)
        self.env = env

    def step(self, k: int, ours: list[Optimizer], theirs: list[Optimizer]) -> None:
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(100 * self.env.rank + k)).double()
        for model in (self.model, self.twin):
            model(x).square().sum().backward()
        for param in self.twin.parameters():
            dist.all_reduce(param.grad)
            param.grad /= self.env.world_size
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        for (name, mine), param in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(full(mine), param.detach(), rtol=0, atol=1e-12, msg=name)


def check_scalar(env: RankEnv, shape: tuple[int, ...], flat: bool) -> None:
    """Replicas have shares of gradients, which then lie closer than the parameters do."""
    both = Both(env, shape, Scaled)
    ours: list[Optimizer] = [local(SGD(both.model.parameters(), lr=0.01), flat=flat, over_replicas=True)]
    for k in range(2):
        both.step(k, ours, [SGD(both.twin.parameters(), lr=0.01)])
    both.check()


def check_two_optimizers(env: RankEnv, shape: tuple[int, ...], flat: bool) -> None:
    """Of one unit: one of them has shares, the other steps what all replicas have."""
    both = Both(env, shape, Scaled)
    made = []
    for model, mine in ((both.model, True), (both.twin, False)):
        optimizers = [
            SGD([p for p in model.parameters() if (p.ndim == 2) == matrices], lr=0.01) for matrices in (True, False)
        ]
        if mine:
            local(optimizers[0], flat=not flat, over_replicas=True)
            local(optimizers[1], flat=flat)
        made.append(optimizers)
    for k in range(2):
        both.step(k, *made)
    both.check()


@pytest.mark.parametrize("flat", [False, True], ids=["views", "flat"])
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=mesh_id)
@pytest.mark.parametrize("check", [check_scalar, check_two_optimizers])
def test_gaps_between_parameters_are_no_gaps_between_shares(
    request: pytest.FixtureRequest, check: Any, shape: tuple[int, ...], flat: bool
) -> None:
    request.getfixturevalue("pool2" if shape == (2, 1) else "pool4").run(check, shape, flat)


def check_regrouped(env: RankEnv, flat: bool) -> None:
    """The last parameter of one group becomes the first of the next: all groups together list what they did."""
    both = Both(env, (2,), Scaled)
    made: list[list[Optimizer]] = []
    for model in (both.model, both.twin):
        groups = [{"params": [model.a.weight, model.b.weight], "lr": 0.01}, {"params": [model.a.bias], "lr": 0.0}]
        made.append([SGD(groups)])
    local(made[0][0], flat=flat)
    for k in range(4):
        if k == 2:
            for (optimizer,) in made:
                first, second = optimizer.param_groups
                second["params"].insert(0, first["params"].pop())
        both.step(k, *made)
    both.check()


@pytest.mark.parametrize("flat", [False, True], ids=["views", "flat"])
def test_a_parameter_goes_from_one_group_to_the_next(pool2: Pool, flat: bool) -> None:
    pool2.run(check_regrouped, flat)


def check_handed_over(env: RankEnv, flat: bool) -> None:
    """A stock optimizer takes the state over: each parameter counts its own steps."""
    both = Both(env, (2,), Scaled)
    ours, theirs = local(Adam(both.model.parameters(), lr=0.01), flat=flat), Adam(both.twin.parameters(), lr=0.01)
    for k in range(4):
        if k == 2:
            stock = Adam(both.model.parameters(), lr=0.01)
            stock.load_state_dict(ours.state_dict())
            ours = stock
        both.step(k, [ours], [theirs])
    both.check()
    assert [float(entries["step"]) for entries in ours.state.values()] == [4.0] * 5


@pytest.mark.parametrize("flat", [False, True], ids=["views", "flat"])
def test_another_optimizer_goes_on_with_its_state(pool2: Pool, flat: bool) -> None:
    pool2.run(check_handed_over, flat)


def check_gathered(env: RankEnv, flat: bool) -> None:
    """torch gathers states in the order in which they lie in `optimizer.state`: ranks must have one."""
    both = Both(env, (1, 2), FewRows)
    ours, theirs = local(Adam(both.model.parameters(), lr=0.01), flat=flat), Adam(both.twin.parameters(), lr=0.01)
    for k in range(2):
        both.step(k, [ours], [theirs])
    names = {param: name for name, param in both.model.named_parameters()}
    assert [names[param] for param in ours.state] == ["two", "one"]
    gathered: Any = get_optimizer_state_dict(both.model, ours, options=StateDictOptions(full_state_dict=True))
    for name, param in both.twin.named_parameters():
        for entry in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(gathered["state"][name][entry], theirs.state[param][entry], rtol=0, atol=1e-12)


@pytest.mark.parametrize("flat", [False, True], ids=["views", "flat"])
def test_torch_gathers_its_state(pool2: Pool, flat: bool) -> None:
    pool2.run(check_gathered, flat)


def check_plain_beside(env: RankEnv, flat: bool) -> None:
    """A plain parameter, which the user reduces."""
    torch.manual_seed(0)
    both = Both(env, (2,), Scaled)
    extra = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    ours = local(SGD([*both.model.parameters(), extra[0]], lr=0.01), flat=flat)
    theirs = SGD([*both.twin.parameters(), extra[1]], lr=0.01)
    for k in range(2):
        for one in extra:
            one.grad = torch.full((3,), 1.0 + k, dtype=torch.float64)
        both.step(k, [ours], [theirs])
    both.check()
    assert torch.equal(extra[0], extra[1])


@pytest.mark.filterwarnings("ignore:hsdp. SGD steps 1 parameter")
@pytest.mark.parametrize("flat", [False, True], ids=["views", "flat"])
def test_plain_parameters_may_be_stepped_beside(pool2: Pool, flat: bool) -> None:
    pool2.run(check_plain_beside, flat)


def _two_alike(env: RankEnv) -> list[Any]:
    torch.manual_seed(0)
    model = Scaled().double()
    return [hsdp.fully_shard(one, mesh=env.mesh(2)) for one in (model, copy.deepcopy(model))]


def _side_by_side(env: RankEnv) -> None:
    """A user keeps the gradients in one tensor, without the gaps that there are between parameters."""
    models = _two_alike(env)
    optimizers = []
    for model in models:
        params = list(model.parameters())
        optimizers.append(SGD([{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "lr": 0.01}]))
    local(optimizers[0], flat=True)
    for k in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            params: list[Any] = list(model.parameters())
            values = [torch.randn(p.to_local().shape, generator=torch.Generator().manual_seed(k)).double() for p in params]
            whole = torch.cat([value.reshape(-1) for value in values])
            for param, value in zip(params, whole.split([value.numel() for value in values]), strict=True):
                grad = DTensor.from_local(
                    value.view(param.to_local().shape),
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )
                param.grad = grad
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())  # type: ignore[operator]


class Counting(Optimizer):
    """Counts steps in a tensor of a name that no optimizer of torch's uses."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                count = self.state[param].setdefault("t", torch.zeros(()))
                count += 1
                param.add_(param.grad, alpha=-0.1 / count.item())


def _own_counts(env: RankEnv) -> None:
    models = _two_alike(env)
    optimizers = [Counting(model.parameters()) for model in models]
    local(optimizers[0], flat=True, elementwise=True)
    for k in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            for at, param in enumerate(model.parameters()):
                used = (k, at) not in ((0, 1), (1, 2))
                param.grad = torch.ones_like(param) if used else None
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=0, atol=1e-15)  # type: ignore[operator]


@pytest.mark.parametrize("case", [_side_by_side, _own_counts], ids=["gradients", "counts"])
def test_flat_takes_nothing_for_its_own_that_is_a_users(pool2: Pool, case: Any) -> None:
    pool2.run(case)


def check_order_of_entries(env: RankEnv) -> None:
    """A checkpoint of another library lists each parameter's entries in an order of its own."""
    torch.manual_seed(0)
    model: Any = hsdp.fully_shard(FewRows(), mesh=env.mesh(2))
    params = [model.one, model.two]  # of the first one a rank holds nothing
    stepped = Adam(params, lr=0.1)
    model(torch.ones(DIM)).sum().backward()
    stepped.step()
    state = stepped.state_dict()
    state["state"][0] = dict(reversed(state["state"][0].items()))
    flat = local(Adam(params, lr=0.1), flat=True)
    flat.load_state_dict(state)
    model(torch.ones(DIM)).sum().backward()
    flat.step()
    orders = [list(flat.state[param]) for param in params]
    found: list[Any] = [None] * env.world_size
    dist.all_gather_object(found, orders)
    assert found[0] == found[1], "a loop over entries calls one full_tensor() on all ranks"


def test_entries_of_loaded_states_have_one_order_on_all_ranks(pool2: Pool) -> None:
    pool2.run(check_order_of_entries)

"""Rule 30: gradients that reach sharded parameters from outside the model add up with pending sums, whatever is pending,
and every way of zeroing clears both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import hsdp
from tests.support.deep import Deep, mean_grads, only_sharded, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, mesh_id, shard
from tests.support.twin import assert_same, full_grads

MESHES: list[tuple[int, ...]] = [(4,), (2, 2)]
PENDING = {"local": (False, True), "scatter": (True, False)}


def penalise(model: nn.Module) -> None:
    """An L2 penalty: its gradients come by autograd, straight to the sharded parameters."""
    total = sum((param.square().sum() for param in model.parameters()), torch.zeros((), dtype=torch.float64))
    total.backward()


def noise(model: nn.Module) -> None:
    """As of gradient noise: added in place, to gradients that may not be there yet."""
    for at, param in enumerate(model.parameters()):
        value = torch.full(param.shape, 0.1 * (at + 1), dtype=param.dtype)
        if isinstance(param, DTensor):
            value = distribute_tensor(value, param.device_mesh, param.placements)
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.add_(value, alpha=0.5)


def foreach_noise(model: nn.Module) -> None:
    grads = [param.grad for param in model.parameters()]
    torch._foreach_add_(grads, 0.25)


def decay(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.addcmul_(param.detach(), param.detach(), value=0.3)


ADDITIONS = {"penalty": penalise, "noise": noise, "foreach noise": foreach_noise, "decay": decay}


def level(model: nn.Module, name: str) -> None:
    sync, all_reduce = PENDING.get(name, (True, True))
    only_sharded(model, "set_requires_grad_sync", sync)
    only_sharded(model, "set_requires_all_reduce", all_reduce)


def check_added(env: RankEnv, pending: str, how: str, shape: tuple[int, ...], first: bool) -> None:
    """What is added beside pending sums stays, with a gradient there before (`first`) and without."""

    def run(model: nn.Module, rank: int) -> None:
        if first:
            level(model, "full")
            step(model, rank, 7)
        level(model, pending)
        step(model, rank, 0)
        ADDITIONS[how](model)
        level(model, "full")
        step(model, rank, 1)
        ADDITIONS[how](model)

    model = shard(seeded(Deep), env.mesh(shape))
    run(model, env.rank)
    assert_same(full_grads(model), mean_grads(seeded(Deep), run, env.world_size))
    check_rest(model)


@pytest.mark.parametrize("first", [False, True], ids=["fresh", "on top"])
@pytest.mark.parametrize("how", ADDITIONS)
@pytest.mark.parametrize("pending", PENDING)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_30_additions_survive(pool4: Pool, pending: str, how: str, first: bool, shape: tuple[int, ...]) -> None:
    pool4.run(check_added, pending, how, shape, first)


def _grads(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters() if param.grad is not None]


ZEROS: dict[str, Callable[[nn.Module], object]] = {
    "data.zero_": lambda model: [grad.data.zero_() for grad in _grads(model)],
    "detach.zero_": lambda model: [grad.detach().zero_() for grad in _grads(model)],
    "mul_(0)": lambda model: [grad.mul_(0) for grad in _grads(model)],
    "mul_(0.0) of data": lambda model: [grad.data.mul_(0.0) for grad in _grads(model)],
    "foreach_mul_": lambda model: torch._foreach_mul_(_grads(model), 0.0),
    "foreach_zero_": lambda model: torch._foreach_zero_(_grads(model)),
    "fill_": lambda model: [grad.fill_(0.0) for grad in _grads(model)],
    "copy_": lambda model: [grad.copy_(torch.zeros_like(grad)) for grad in _grads(model)],
    "zeros_like": lambda model: [setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters()],
    "zero_grad": lambda model: model.zero_grad(set_to_none=False),
    "local zero_": lambda model: [
        (grad.to_local() if isinstance(grad, DTensor) else grad).zero_() for grad in _grads(model)
    ],
    "view zero_": lambda model: [
        (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1).zero_() for grad in _grads(model)
    ],
    "its own alias": lambda model: [setattr(p, "grad", p.grad.detach().zero_()) for p in model.parameters()],  # type: ignore[union-attr]
}


def check_zeroed(env: RankEnv, pending: str, how: str, shape: tuple[int, ...]) -> None:
    def run(model: nn.Module, rank: int) -> None:
        level(model, "full")
        step(model, rank, 7)
        level(model, pending)
        step(model, rank, 0)
        ZEROS[how](model)
        penalise(model)
        level(model, "full")
        step(model, rank, 1)

    model = shard(seeded(Deep), env.mesh(shape))
    run(model, env.rank)
    assert_same(full_grads(model), mean_grads(seeded(Deep), run, env.world_size))


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
@pytest.mark.parametrize("pending", PENDING)
@pytest.mark.parametrize("how", ZEROS)
def test_rule_30_every_way_of_zeroing_clears_pending_sums(
    pool4: Pool, how: str, pending: str, shape: tuple[int, ...]
) -> None:
    pool4.run(check_zeroed, pending, how, shape)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda grad: grad.mul_(0.5),
    "foreach mul_": lambda grad: torch._foreach_mul_([grad], 0.5),
    "div_ of data": lambda grad: grad.data.div_(2),
    "clamp_": lambda grad: grad.clamp_(-1, 1),
    "part": lambda grad: grad.to_local()[:1].zero_(),  # type: ignore[operator]
    "part of a view": lambda grad: grad.to_local().view(-1)[:2].fill_(0.0),  # type: ignore[operator]
    "itself": lambda grad: grad.add_(grad),
    "out": lambda grad: torch.add(grad.to_local(), 1, out=grad.to_local()),  # type: ignore[operator]
    "copysign_": lambda grad: grad.to_local().copysign_(grad.to_local().detach()),  # type: ignore[operator]
}


COMPUTED: dict[str, Callable[[list[Any]], object]] = {
    "clipping": lambda grads: nn.utils.clip_grads_with_norm_(_params_of(grads), 0.5, nn.utils.get_total_norm(grads)),
    "clipping, one by one": lambda grads: [grad.mul_((0.5 / (grad.norm() + 1e-6)).clamp(max=1.0)) for grad in grads],
    "copy_": lambda grads: [grad.copy_(grad.clamp(-1, 1)) for grad in grads],
    "an item": lambda grads: [grad.to_local().__setitem__(slice(None), grad.to_local() * 0.5) for grad in grads],
    "copy_ of data": lambda grads: [grad.data.copy_(grad.data.sign()) for grad in grads],
    "foreach copy_": lambda grads: torch._foreach_copy_(
        [grad.to_local() for grad in grads], torch._foreach_mul([grad.to_local() for grad in grads], 0.5)
    ),
    "fill_": lambda grads: [grad.to_local().fill_(grad.to_local().mean()) for grad in grads],
    "sub_": lambda grads: [grad.sub_(grad * 0.5) for grad in grads],
    "add_": lambda grads: [grad.add_(grad.sign() * 0.1) for grad in grads],
}


def _params_of(grads: list[Any]) -> list[Any]:
    params = [nn.Parameter(grad.new_empty(grad.shape)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


class Zeroing(Deep):
    """A model whose forward begins a step by itself when it is told to, or ends one in the middle."""

    before: bool | None = None
    behind: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            self.zero_grad(set_to_none=self.before)
        out = super().forward(x)
        if self.behind is not None:
            self.zero_grad(set_to_none=self.behind)
        return out


def check_zeroed_inside(env: RankEnv, pending: str, at: str, to_none: bool, shape: tuple[int, ...]) -> None:
    def run(model: nn.Module, rank: int) -> None:
        level(model, pending)
        step(model, rank, 0)
        step(model, rank, 1)
        level(model, "full")
        setattr(model, at, to_none)
        step(model, rank, 2)
        setattr(model, at, None)
        step(model, rank, 3)

    model = shard(seeded(Zeroing), env.mesh(shape))
    run(model, env.rank)
    assert_same(full_grads(model), mean_grads(seeded(Zeroing), run, env.world_size))
    check_rest(model)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("at", ["before", "behind"])
@pytest.mark.parametrize("pending", ["full", *PENDING])
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_30_zero_grad_inside_the_forward_clears_pending_sums(
    pool4: Pool, pending: str, at: str, to_none: bool, shape: tuple[int, ...]
) -> None:
    pool4.run(check_zeroed_inside, pending, at, to_none, shape)


def check_refused(env: RankEnv, shape: tuple[int, ...], pending: str) -> None:
    model = shard(seeded(Deep), env.mesh(shape))
    level(model, "full")
    step(model, env.rank, 7)
    level(model, pending)
    step(model, env.rank, 0)
    grad: Any = model.blocks[0].weight.grad  # type: ignore[index,union-attr]
    for how, change in REFUSED.items():
        if how.startswith("part") and grad.to_local().shape[0] < 2:
            continue  # on this rank that is all of it
        with pytest.raises(hsdp.StateError, match=r"parameter 'weight'.*flush\(\) or zero_grad\(\)"):
            change(grad)
            print(how)
    grad.mul_(1.0)  # what changes nothing is no harm
    float(grad.to_local().norm())
    level(model, "full")
    step(model, env.rank, 1)
    expected = mean_grads(seeded(Deep), partial(_three_steps), env.world_size)
    assert_same(full_grads(model), expected)
    grad.mul_(0.5)


def _three_steps(model: nn.Module, rank: int) -> None:
    for k in (7, 0, 1):
        step(model, rank, k)


@pytest.mark.parametrize("pending", PENDING)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_30_what_pending_sums_cannot_follow_is_refused(pool4: Pool, pending: str, shape: tuple[int, ...]) -> None:
    pool4.run(check_refused, shape, pending)


def check_computed(env: RankEnv, how: str, pending: str) -> None:
    """What is computed from gradients without what is pending does not come back as their change."""
    model = shard(seeded(Deep), env.mesh((2, 1)))
    level(model, pending)
    step(model, env.rank, 0)
    with pytest.raises(hsdp.StateError, match=r"of parameter '.*flush\(\) or zero_grad\(\)"):
        COMPUTED[how]([param.grad for param in model.parameters() if param.grad is not None])
    model.zero_grad()
    step(model, env.rank, 1)
    grads: list[Any] = [param.grad for param in model.parameters() if param.grad is not None]
    for grad in grads:
        float(grad.norm() + grad.to_local().norm())  # to log it, also where a rank has one element
        grad.add_(torch.ones_like(grad)).sub_(torch.ones_like(grad))
        grad.zero_()
    level(model, "full")
    step(model, env.rank, 2)
    assert_same(full_grads(model), mean_grads(seeded(Deep), lambda twin, rank: step(twin, rank, 2), env.world_size))


@pytest.mark.parametrize("pending", PENDING)
@pytest.mark.parametrize("how", COMPUTED)
def test_rule_30_what_is_computed_without_pending_sums_is_refused(pool2: Pool, how: str, pending: str) -> None:
    pool2.run(check_computed, how, pending)


def check_logged(env: RankEnv) -> None:
    """A norm may be logged before something is added, also where the part of one rank alone has as many elements."""
    model: Any = hsdp.fully_shard(nn.Linear(4, 3), mesh=env.mesh(2))
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    for param in model.parameters():
        float(param.grad.norm() + param.grad.to_local().sum())
        param.grad.add_(torch.ones_like(param.grad))
    model(torch.ones(2, 4)).sum().backward()
    for param in model.parameters():
        assert torch.equal(param.grad.full_tensor(), torch.full_like(param.grad.full_tensor(), 5.0))


def test_rule_30_norms_may_be_logged(pool2: Pool) -> None:
    pool2.run(check_logged)


def check_replaced(env: RankEnv, pending: str) -> None:
    """A gradient that is computed from what has landed so far lacks what is pending: refused, not lost."""
    model = shard(seeded(Deep), env.mesh((2, 1)))
    level(model, pending)
    step(model, env.rank, 0)
    weight: Any = model.blocks[0].weight  # type: ignore[index,union-attr]
    weight.grad = weight.grad + 1
    with pytest.raises(hsdp.StateError, match=r"gradient of parameter 'weight' was replaced"):
        model.pending_gradients()  # type: ignore[operator]


@pytest.mark.parametrize("pending", PENDING)
def test_rule_30_a_gradient_computed_without_pending_sums_is_refused(pool2: Pool, pending: str) -> None:
    pool2.run(check_replaced, pending)


def check_gathered_in_one(env: RankEnv, order: str) -> None:
    """A reduction adds to gradients that users have put into memory of their own, whatever it looks like."""

    def run(model: nn.Module, rank: int) -> None:
        for micro in range(2):
            x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + micro))
            model(x).square().mean().backward()
            params: list[Any] = list(model.parameters())
            if micro == 0 and isinstance(params[0], DTensor):
                locals_ = [param.grad.to_local() for param in params]
                flat = torch.cat([(local.t() if order == "transposed" else local).reshape(-1) for local in locals_])
                pieces = flat.split([local.numel() for local in locals_])
                for param, piece, local in zip(params, pieces, locals_, strict=True):
                    lies = piece.view(local.t().shape).t() if order == "transposed" else piece.view(local.shape)
                    assert torch.equal(lies, local)
                    param.grad = DTensor.from_local(
                        lies, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
                    )

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2)))

    model = seeded(make)
    for unit in (*model, model):  # type: ignore[misc]
        hsdp.fully_shard(unit, mesh=env.mesh(2))
    run(model, env.rank)
    assert_same(full_grads(model), mean_grads(seeded(make), run, env.world_size))


@pytest.mark.parametrize("order", ["side by side", "transposed"])
def test_rule_30_gradients_in_memory_of_the_users(pool2: Pool, order: str) -> None:
    pool2.run(check_gathered_in_one, order)


class Narrow(nn.Module):
    """Parameters with fewer rows than ranks, and scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.narrow = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.narrow(x) * self.scale  # type: ignore[no-any-return]


def check_narrow(env: RankEnv, order: str, shape: tuple[int, ...]) -> None:
    def run(model: nn.Module, rank: int) -> None:
        for word in order.split():
            if word == "penalty":
                penalise(model)
            else:
                level(model, word)
                step(model, rank)

    model = shard(seeded(Narrow), env.mesh(shape))
    if order.startswith("penalty"):
        run(model, env.rank)
        assert_same(full_grads(model), mean_grads(seeded(Narrow), run, env.world_size))
    else:
        with pytest.raises(RuntimeError, match="placement"):  # DTensor's own, in autograd's addition: FSDP2 has it too
            run(model, env.rank)


@pytest.mark.parametrize("order", ["penalty full", "penalty local full", "penalty scatter full", "full penalty"])
def test_rule_30_fewer_rows_than_ranks(pool4: Pool, order: str) -> None:
    pool4.run(check_narrow, order, (4,))

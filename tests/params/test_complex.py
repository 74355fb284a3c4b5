"""Complex weights, as Fourier neural operators have them, train as on one device: their sums travel as pairs of reals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
import hsdp.checkpoint
from hsdp.optim import local
from tests.support.models import Case, mse
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, mesh_id, pool_for, shard
from tests.support.twin import Twin, adamw, assert_close_to_twin, assert_same, full_params, sgd, train, twin_of

WIDTH, LENGTH = 6, 10


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: `[rows, WIDTH, LENGTH]` in and out, its lowest modes mixed in the spectrum."""

    def __init__(self, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, modes, dtype=torch.complex128) / WIDTH)
        self.shift = nn.Parameter(torch.randn(modes, dtype=torch.complex128))
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.beside = nn.Linear(LENGTH, LENGTH).double()

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)[..., : self.modes]
        spectrum = torch.einsum("nim,iom->nom", spectrum, self.weight.conj()) + self.shift
        return torch.tanh(torch.fft.irfft(spectrum, n=LENGTH) + self.beside(x))


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Spectral(modes) for modes in (5, 1, 4))
        self.scale = nn.Parameter(torch.tensor([1.0 + 0.5j], dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).abs()


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 3, WIDTH, LENGTH, generator=generator, dtype=torch.float64)
    return x, y


CASE = Case("operator", Operator, draw, mse, dtype=None)


class OfReals:
    """Users' collectives: they are never handed a complex tensor."""

    exact = True

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        assert not input_tensor.is_complex() and not output_tensor.is_complex()
        dist.all_reduce(input_tensor, op, group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()].view_as(output_tensor))


class SumOfReals:
    exact = True

    def __call__(self, tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        assert not tensor.is_complex()
        return dist.all_reduce(tensor, op, group, async_op)


def _by_users(model: Any) -> None:
    model.set_custom_reduce_scatter(OfReals())
    model.set_replica_reduce(SumOfReals())


Way = tuple[dict[str, Any], Callable[[Any], None], Callable[[Any], Any]]


def _as_it_is(model: Any) -> None:
    pass


def _compresses(model: Any) -> None:
    model.set_replica_reduce(hsdp.CompressedAllReduce(torch.float64))


WAYS: dict[str, Way] = {
    "direct": ({"comm_policy": hsdp.CommPolicy(fusion="direct")}, _as_it_is, sgd),
    "packed": ({"comm_policy": hsdp.CommPolicy(fusion="packed")}, _as_it_is, sgd),
    "in a tree": ({"comm_policy": hsdp.CommPolicy(reduction="tree")}, _as_it_is, sgd),
    "least padding": ({"shard_placement_fn": hsdp.least_padding}, _as_it_is, sgd),
    "other dtype beside": ({"mp_policy": hsdp.MixedPrecisionPolicy(reduce_dtype=torch.float64)}, _as_it_is, sgd),
    "offloaded": ({"offload_policy": hsdp.CPUOffloadPolicy(pin_memory=False)}, _as_it_is, sgd),
    "users' collectives": ({}, _by_users, sgd),
    "compressed": ({}, _compresses, sgd),
    "local": ({}, _as_it_is, lambda params: local(adamw(params))),
    "flat": ({}, _as_it_is, lambda params: local(adamw(params), flat=True)),
    "over replicas": ({}, _as_it_is, lambda params: local(adamw(params), over_replicas=True)),
}
ADAMW = ("local", "flat", "over replicas")


def _trains(env: RankEnv, shape: tuple[int, ...], way: str, accumulate: int, twin: Twin) -> None:
    options, prepare, make_optimizer = WAYS[way]
    model: Any = shard(CASE.model(), env.mesh(shape), **options)
    prepare(model)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with model.accumulate(last=micro == accumulate - 1):
                loss = CASE.loss(model, CASE.batch(step, env.rank, micro))
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    torch.testing.assert_close(torch.stack(losses).view(3, -1), twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)
    check_rest(model)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2), (4,)], ids=mesh_id)
def test_training_equals_the_twin(
    request: pytest.FixtureRequest, shape: tuple[int, ...], way: str, accumulate: int
) -> None:
    twin = twin_of(CASE, math.prod(shape), 3, adamw if way in ADAMW else sgd, accumulate)
    pool_for(request, shape).run(_trains, shape, way, accumulate, twin)


def _whole_in_each_unit(env: RankEnv, twin: Twin) -> None:
    model = CASE.model()
    kept = [block.shift for block in model.blocks]  # type: ignore[union-attr]
    shard(model, env.mesh((2, 1)), replicate_params=kept)
    train(model, CASE, env.rank, 3, sgd(model.parameters()))
    assert_close_to_twin(model, twin, grads=True)


def test_replicated_parameters(pool2: Pool) -> None:
    pool2.run(_whole_in_each_unit, twin_of(CASE, 2, 3, sgd))


def _is_refused(env: RankEnv) -> None:
    model: Any = hsdp.fully_shard(Spectral(5), mesh=env.mesh((2,)))
    x, _ = CASE.batch(0, env.rank)
    model.shift.requires_grad_(False)
    optimizer = adamw(model.parameters())
    model(x).square().mean().backward()
    optimizer.step()  # frozen ones, and those that are not used, it leaves alone
    optimizer.zero_grad()
    model.shift.requires_grad_(True)
    model(x).square().mean().backward()
    before = full_params(model)
    with pytest.raises(hsdp.StateError, match=r"AdamW.step: .*'shift'.* \(5,\) .*hsdp\.optim\.local"):
        optimizer.step()
    assert_same(full_params(model), before, 0, 0)
    local(optimizer).step()
    assert not torch.equal(full_params(model)["shift"], before["shift"])
    adamw([model.weight, model.beside.weight]).step()
    sgd(model.parameters()).step()


def test_steps_that_torch_would_make_on_copies_are_refused(pool2: Pool) -> None:
    pool2.run(_is_refused)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).abs().sum()


def _is_cast_behind_a_step(env: RankEnv) -> None:
    model: Any = hsdp.fully_shard(Waves(), mesh=env.mesh((2,)))
    optimizers = [make(model.parameters()) for make in (sgd, adamw)]
    model(torch.ones(5)).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    model.to(torch.complex128)
    assert model.weight.dtype is torch.complex128
    model(torch.ones(5)).backward()
    optimizers[0].step()
    with pytest.raises(hsdp.StateError, match=r"AdamW.step: .*'weight'.* \(5,\) "):
        optimizers[1].step()


def test_models_are_cast_behind_a_step(pool2: Pool) -> None:
    """torch swaps what is sharded, and refuses to where anybody refers to it weakly."""
    pool2.run(_is_cast_behind_a_step)


def _is_not_cast(env: RankEnv) -> None:
    policy = hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = hsdp.fully_shard(Mixed(), mesh=env.mesh((2,)), mp_policy=policy)
    x = torch.randn(4, 8)
    model(x).float().square().mean().backward()
    assert model.seen == (torch.complex64, torch.bfloat16)
    assert model.table.grad.dtype is torch.complex64 and model.weight.grad.dtype is torch.float32


class Mixed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.table = nn.Parameter(torch.randn(5, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.table.dtype, self.weight.dtype
        return super().forward(x) * self.table.abs().sum(0)


def test_a_precision_policy_leaves_them_as_they_are(pool2: Pool) -> None:
    pool2.run(_is_not_cast)


class Rotation(nn.Module):
    """The parts of a complex number: the memory of the second one's gradient holds its negative, by torch's lazy bit.

    Both gradients lie in one memory, of which the first one to go is a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.re, self.im = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (0.3, 0.7))

    def forward(self, x: Tensor, conjugate: bool) -> Tensor:
        turn = torch.complex(self.re, self.im)
        return ((turn.conj() if conjugate else turn) * x).imag.sum()


def _sums_negatives(env: RankEnv, shape: tuple[int, ...], op: Any, conjugates: tuple[bool, ...]) -> None:
    x = torch.tensor(1.0 + 2.0j, dtype=torch.complex128)
    plain = Rotation()
    assert torch.autograd.grad(plain(x, True), plain.im)[0].is_neg(), "torch makes it otherwise: write another model"
    model: Any = hsdp.fully_shard(Rotation(), mesh=env.mesh(shape))
    model.set_reduce_op_type(op)
    for _ in range(2):  # the second adds to gradients that are there
        model((env.rank + 1) * x, conjugates[env.rank]).backward()
    sign = [-1.0 if conjugate else 1.0 for conjugate in conjugates]
    share = 2 if op == "avg" else 1
    assert float(model.re.grad.full_tensor()) == 2 * (2.0 + 4.0) / share
    assert float(model.im.grad.full_tensor()) == 2 * (sign[0] + 2 * sign[1]) / share


@pytest.mark.parametrize("conjugates", [(True, True), (True, False)], ids=["all", "the first rank"])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_gradients_whose_memory_holds_their_negatives(
    pool2: Pool, shape: tuple[int, ...], op: Any, conjugates: tuple[bool, ...]
) -> None:
    pool2.run(_sums_negatives, shape, op, conjugates)


def _goes_on(env: RankEnv, directory: Path, twin: Twin) -> None:
    """A clipped step on one mesh, and the next two on another, equal the twin's; whole values can be seen and written."""
    models: list[Any] = [shard(CASE.model(), env.mesh(shape)) for shape in ((4,), (2, 2))]
    optimizers = [local(adamw(model.parameters())) for model in models]
    CASE.loss(models[0], CASE.batch(0, env.rank)).backward()
    norm = hsdp.clip_grad_norm_(models[0], 1e9)
    whole = [param.grad.full_tensor() for param in models[0].parameters() if param.grad is not None]
    torch.testing.assert_close(norm, torch.stack([grad.norm() for grad in whole]).norm())
    optimizers[0].step()
    hsdp.checkpoint.save(directory, models[0], optimizers[0], step=1)
    hsdp.checkpoint.load(directory, models[1], optimizers[1])
    with hsdp.full_params(models[1], writeback="local"), torch.no_grad():
        assert_same(dict(models[1].named_parameters()), full_params(models[0]), 0, 0)
    train(models[1], CASE, env.rank, 2, optimizers[1], first_step=1)
    assert_close_to_twin(models[1], twin, grads=True)


def test_checkpoints_and_norms(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(_goes_on, tmp_path, twin_of(CASE, 4, 3, adamw))

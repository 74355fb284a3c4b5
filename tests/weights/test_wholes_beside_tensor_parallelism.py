"""Parameters of tensor parallelism that are lent whole: DTensors yet, which init functions and users' code write to."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hsdp
from hsdp.params.operators import is_watched
from tests.support.rig import Pool, RankEnv
from tests.support.twin import assert_same, full_params

NAMES = ("replicate", "shard", "tp")


class Net(nn.Module):
    """A vocabulary and features in parts, of which one row, that of padding, is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 8, padding_idx=0)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.emb(x))))  # type: ignore[no-any-return]


def model_of(env: RankEnv, device: str = "cpu") -> Net:
    """Sharded, with tensor parallelism inside."""
    mesh = env.mesh((1, 2, 2), NAMES)
    torch.manual_seed(0)
    with torch.device(device):
        model = Net().double()
    plan = {"emb": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    hsdp.fully_shard(model.up, mesh=mesh["shard"])
    hsdp.fully_shard(model, mesh=mesh["shard"])
    return model


def applied(fn: Callable[[nn.Module], object]) -> Net:
    """What one process has of it."""
    torch.manual_seed(0)
    plain = Net().double()
    torch.manual_seed(1)
    plain.apply(fn)
    return plain


def _reset(module: Any) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@torch.no_grad()
def _edit(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param[0].mul_(3.0)
        param[:3].normal_()
        for at, piece in enumerate(param.chunk(2)):
            piece.add_(at)
        param[torch.arange(param.shape[0]) % 3 == 1] = 0.5
        param[-1] = param[1] * 2.0


WRITES = {"reset": _reset, "edit": _edit}


def _apply(env: RankEnv, how: str, write: str) -> None:
    model = model_of(env, "meta" if how == "init_sharded" else "cpu")
    torch.manual_seed(1)
    hsdp.init_sharded(model) if how == "init_sharded" else hsdp.gathered_apply(model, WRITES[write])
    assert_same(full_params(model), dict(applied(WRITES[write]).named_parameters()))


@pytest.mark.parametrize(
    ("how", "write"), [("init_sharded", "reset"), ("gathered_apply", "reset"), ("gathered_apply", "edit")]
)
def test_parts_of_lent_parameters_are_written_to(pool4: Pool, how: str, write: str) -> None:
    pool4.run(_apply, how, write)


DRAWS: dict[str, Callable[[Any], object]] = {
    "exponential_": lambda p: p.exponential_(2.0),
    "random_": lambda p: p.random_(0, 5),
    "log_normal_": lambda p: p.log_normal_(),
    "cauchy_": lambda p: p.cauchy_(),
    "geometric_": lambda p: p.geometric_(0.3),
    "bernoulli_ by a tensor": lambda p: p.bernoulli_(torch.full_like(p, 0.5)),
    "bernoulli": lambda p: p.copy_(torch.bernoulli(p.sigmoid())),
    "poisson": lambda p: p.copy_(torch.poisson(p.abs())),
    "normal": lambda p: p.copy_(torch.normal(p, 1.0)),
    "normal, spread": lambda p: p.copy_(torch.normal(0.0, p.abs())),
    "randint_like": lambda p: p.copy_(torch.randint_like(p, 9)),
    "rand_like": lambda p: p.copy_(torch.rand_like(p, dtype=torch.float32)),
    "into": lambda p: torch.bernoulli(p.sigmoid(), out=p),
    "dropout": lambda p: p.copy_(nn.functional.dropout(p, 0.5, training=True)),
    "a part": lambda p: p[:3].exponential_(),
    "columns": lambda p: p[..., 1:3].normal_(),
    "transposed": lambda p: p.t().normal_(),
    "sparse_": lambda p: nn.init.sparse_(p, 0.3) if p.ndim > 1 else None,
}


def _draw(env: RankEnv) -> None:
    for name, draw in DRAWS.items():

        def fn(module: nn.Module, draw: Callable[[Any], object] = draw) -> None:
            for param in module.parameters(recurse=False):
                with torch.no_grad():
                    draw(param)
                    param.mul_(torch.rand(()).item())  # generators are where one process's is

        model = model_of(env)
        torch.manual_seed(1)
        hsdp.gathered_apply(model, fn)
        try:
            assert_same(full_params(model), dict(applied(fn).named_parameters()))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def test_whatever_is_drawn_is_what_one_process_draws(pool4: Pool) -> None:
    pool4.run(_draw)


def _twins(env: RankEnv) -> tuple[Net, Net]:
    return applied(lambda module: None), model_of(env)


def _in_full_params(env: RankEnv) -> None:
    plain, model = _twins(env)
    with hsdp.full_params(model, writeback="local"), torch.no_grad():
        for m in (plain, model):
            m.emb.weight[3] = 7.0
            m.up.weight[:4].zero_()
            m.up.weight[[5, 6]] = 1.0
            m.down.weight.t()[2:9].mul_(2.0)
        with pytest.warns(UserWarning, match="gives this rank's part of it"):
            assert model.up.weight.norm().item() < plain.up.weight.norm().item()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            norm: Any = model.up.weight.norm()
            model.up.weight.div_(norm.full_tensor().item())
            plain.up.weight.div_(plain.up.weight.norm().item())
    assert_same(full_params(model), dict(plain.named_parameters()))


def test_parts_are_written_to_inside_of_full_params(pool4: Pool) -> None:
    pool4.run(_in_full_params)


def _drawn_in_full_params(env: RankEnv) -> None:
    """Each rank draws, all alike: what is initialised again there is what one process has."""
    plain, model = _twins(env)
    with hsdp.full_params(model, writeback="local"), torch.no_grad():
        for m in (plain, model):
            torch.manual_seed(3)
            m.emb.reset_parameters()
            m.up.weight.exponential_()
            m.down.bias.normal_()
    assert_same(full_params(model), dict(plain.named_parameters()))


def test_draws_inside_of_full_params_are_those_of_one_process(pool4: Pool) -> None:
    pool4.run(_drawn_in_full_params)


def _until_hidden(env: RankEnv) -> None:
    """Outside, DTensors on the mesh of tensor parallelism are the user's: activations."""
    model = model_of(env)
    with hsdp.full_params(model.up):
        weight = model.up.weight
        with pytest.raises(ZeroDivisionError), hsdp.full_params(model.emb):
            raise ZeroDivisionError
        assert isinstance(weight, DTensor) and is_watched(weight)
    assert not is_watched(weight)
    with pytest.raises(ZeroDivisionError):
        hsdp.gathered_apply(model, lambda module: 1 // 0)
    assert not is_watched(weight)


def test_operators_on_the_mesh_of_tensor_parallelism_are_torch_s_again(pool4: Pool) -> None:
    pool4.run(_until_hidden)

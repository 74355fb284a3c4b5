"""Frozen parameters of any dtype: sharded and gathered as the bytes that they are, beside adapters that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hsdp
from hsdp import checkpoint
from hsdp.offload import CPUOffloadPolicy
from tests.support.models import Case, mse
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, check_sharded, mesh_id, pool_for, shard
from tests.support.twin import Twin, assert_close_to_twin, sgd, train, twin_of

DTYPES = [
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.uint16, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2),
]


# -- adapters over an int8 base -----------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 codes (out, in) times a scale per row (out, 1), and an adapter of rank 2."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        weight = torch.randn(num_out, num_in)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.codes = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, num_in))
        self.up = nn.Parameter(torch.randn(num_out, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.to(x.dtype) * self.scale
        return F.linear(x, weight) + F.linear(F.linear(x, self.down), self.up)


class Adapted(nn.Module):
    """Two adapted layers; 7 rows do not fall into equal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Int8Linear(16, 7), Int8Linear(7, 16)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)


CASE = Case("adapted", Adapted, _batch, mse)


def check_adapters(env: RankEnv, shape: tuple[int, ...], twin: Twin, options: dict[str, Any]) -> None:
    plain = CASE.model()
    model: Any = shard(plain, env.mesh(shape), **options)
    losses = train(model, CASE, env.rank, len(twin.losses), sgd(model.parameters()))
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin)
    check_rest(model)
    check_sharded(model)
    for block in model.blocks:
        rows = len(block.codes)
        assert block.codes.dtype == torch.int8 and block.codes.to_local().dtype == torch.int8
        assert len(block.codes.to_local()) <= -(-rows // shape[-1])


@pytest.mark.parametrize("options", [{}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}], ids=["", "offloaded"])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=mesh_id)
def test_adapters_over_an_int8_base_train_as_the_twins_do(
    shape: tuple[int, ...], options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    pool_for(request, shape).run(check_adapters, shape, twin_of(CASE, pool_for(request, shape).world_size, 3), options)


# -- every dtype --------------------------------------------------------------------------------------------------------


class Tables(nn.Module):
    """A frozen table (5, 8) of each dtype, and a scalar of it; a forward tells their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(1)
        for dtype in DTYPES:
            data = torch.randint(0, 2 if dtype is torch.bool else 100, (5, 8 * dtype.itemsize), generator=generator)
            table = data.to(torch.uint8).view(dtype)
            self.register_parameter(_name(dtype), nn.Parameter(table, requires_grad=False))
            self.register_parameter(f"{_name(dtype)}_scalar", nn.Parameter(table[1, 1].clone(), requires_grad=False))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, tuple[torch.dtype, Tensor]]]:
        seen = {name: (getattr(self, name).dtype, _bytes(getattr(self, name))) for name in _names()}
        return self.inner(x), seen


def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _names() -> list[str]:
    return [name for dtype in DTYPES for name in (_name(dtype), f"{_name(dtype)}_scalar")]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def check_dtypes(env: RankEnv, shape: tuple[int, ...], fusion: Any, directory: Path) -> None:
    plain = Tables()
    policy = hsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if env.rank:  # ranks that disagree take the first one's
        plain.int8.data.zero_(), plain.complex64.data.zero_()
    model: Any = hsdp.fully_shard(plain, mesh=env.mesh(shape), mp_policy=policy, comm_policy=hsdp.CommPolicy(fusion))
    expected = dict(Tables().named_parameters())
    y, seen = model(torch.randn(2, 3))
    y.sum().backward()
    for name, (dtype, data) in seen.items():
        assert dtype == expected[name].dtype, name
        assert torch.equal(data, _bytes(expected[name])), f"{name}: {data} and not {_bytes(expected[name])}"
    with hsdp.full_params(model, cast=torch.float16):
        for name in _names():
            assert torch.equal(_bytes(getattr(model, name)), _bytes(expected[name])), name
    path = checkpoint.save(directory, model, step=1).wait()
    for name in _names():
        local = model.get_parameter(name).to_local()
        if local.numel():
            local.view(-1).view(torch.uint8).zero_()
    checkpoint.load(path, model)
    whole = checkpoint.full_state_dict(model, rank0_only=False)
    for name in _names():
        assert torch.equal(_bytes(whole[name]), _bytes(expected[name])), f"{name} behind a checkpoint"
    check_rest(model)


@pytest.mark.parametrize("fusion", ["packed", "direct"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_frozen_parameters_of_every_dtype_arrive_bit_by_bit(
    pool4: Pool, shape: tuple[int, ...], fusion: str, tmp_path: Path
) -> None:
    pool4.run(check_dtypes, shape, fusion, tmp_path)


def check_from_meta(env: RankEnv) -> None:
    with torch.device("meta"):
        model: Any = Adapted().double()
    for block in model.blocks:
        hsdp.fully_shard(block, mesh=env.mesh(2))
    hsdp.fully_shard(model, mesh=env.mesh(2))
    model.to_empty(device="cpu")
    checkpoint.load_full_state_dict(model, CASE.model().state_dict() if env.rank == 0 else {})
    whole = checkpoint.full_state_dict(model, rank0_only=False)
    for name, value in CASE.model().state_dict().items():
        assert torch.equal(whole[name], value), name


def test_an_int8_base_is_loaded_into_a_model_from_meta(pool2: Pool) -> None:
    pool2.run(check_from_meta)


def check_thawed(env: RankEnv) -> None:
    model: Any = Tables()
    hsdp.fully_shard(model, mesh=env.mesh(2))
    model.float8_e4m3fn.requires_grad_(True)
    with pytest.raises(hsdp.StateError, match=r"'float8_e4m3fn' has dtype torch.float8_e4m3fn and wants gradients"):
        model(torch.randn(2, 3))
    model.float8_e4m3fn.requires_grad_(False)
    model(torch.randn(2, 3))[0].sum().backward()


def test_such_a_parameter_stays_frozen(pool2: Pool) -> None:
    pool2.run(check_thawed)

"""Writes to parts of tensors that are cut on two dims: a part along the one is shared by ranks along the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hsdp
from tests.params.test_operators import WRITES
from tests.support.rig import Pool, RankEnv
from tests.support.share import dealt
from tests.support.twin import assert_same, full_grads, full_params

NAMES = ("replicate", "shard", "tp")
HIDDEN = (8, 7, 5)


class _Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, hidden, bias=False)
        self.down = nn.Linear(hidden, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def _against(param: nn.Parameter) -> Shard:
    """On the dim that tensor parallelism does not cut."""
    return Shard(1 if param.shape[1] == 6 else 0)


def _write_all(env: RankEnv, hidden: int) -> None:
    mesh = env.mesh((1, 2, 2), NAMES)
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name, write in dealt(WRITES.items(), HIDDEN.index(hidden), len(HIDDEN)):
        if name == "flat":
            continue  # torch flattens none that is cut on the second dim
        plain, model = _Net(hidden).double(), _Net(hidden).double()
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        hsdp.fully_shard(model, mesh=mesh["shard"], shard_placement_fn=_against)
        assert {str(p.placements) for p in model.parameters()} == {str((Shard(0), Shard(1))), str((Shard(1), Shard(0)))}  # type: ignore[attr-defined]
        try:
            for m in (plain, model):
                m(x).square().mean().backward()
                for param in m.parameters():
                    with torch.no_grad():
                        write(param)
                    write(param.grad)
            assert_same(full_params(model), dict(plain.named_parameters()))
            assert_same(full_grads(model), {name: param.grad for name, param in plain.named_parameters()})
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("hidden", HIDDEN)
def test_writes_to_parts_beside_tensor_parallelism_are_those_of_one_device(pool4: Pool, hidden: int) -> None:
    pool4.run(_write_all, hidden)


def _least_padding(env: RankEnv) -> None:
    """Fewer rows than ranks: the first two dims are cut as one."""
    plain, model = (nn.Linear(8, 2, bias=False).double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    hsdp.fully_shard(model, mesh=env.mesh(4, ("shard",)), shard_placement_fn=hsdp.least_padding)
    for one in (plain, model):
        weight: Any = one.weight
        with torch.no_grad():
            weight[0].mul_(3.0)
            weight[1][2:5] = 4.0
            weight[:, 3].zero_()
            weight[1, 7] = 9.0
    assert_same(full_params(model), dict(plain.named_parameters()))


def test_writes_to_parts_of_dims_that_are_cut_as_one_reach_the_shards(pool4: Pool) -> None:
    pool4.run(_least_padding)

"""`CommPolicy(reduction="tree")`: the same bits of gradients, norms and weights on every split of as many data ranks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
import hsdp.checkpoint
from hsdp.comm.tree import fold
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest
from tests.support.twin import full_grads

TREE = hsdp.CommPolicy(reduction="tree")
BF16 = torch.bfloat16
PRECISIONS = {
    "fp32": hsdp.MixedPrecisionPolicy(),
    "bf16 with fp32 sums": hsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "bf16": hsdp.MixedPrecisionPolicy(param_dtype=BF16),
}
SHAPES: dict[int, list[tuple[int, ...]]] = {2: [(1, 2), (2, 1)], 4: [(1, 4), (2, 2), (4, 1)], 8: [(1, 8), (2, 4), (8, 1)]}


class Net(nn.Module):
    """Uneven rows, a large weight, one that only some ranks use, one that none does, and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24)) for _ in range(3))
        self.uneven = nn.Linear(24, 11)
        self.sometimes = nn.Linear(24, 11, bias=False)
        self.never = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x))
        y = self.uneven(x)
        return y + self.sometimes(x) if extra else y


def build(mesh: DeviceMesh, policy: hsdp.CommPolicy = TREE, **options: Any) -> Any:
    """The net, sharded; the same on every rank and mesh."""
    torch.manual_seed(0)
    net: Any = Net()
    for block in net.blocks:
        hsdp.fully_shard(block, mesh=mesh, comm_policy=policy, **options)
    replicated = [net.norm.weight, net.norm.bias]
    return hsdp.fully_shard(net, mesh=mesh, comm_policy=policy, replicate_params=replicated, **options)


def backward(net: Any, rank: int, step: int, micro: int = 0) -> None:
    """One backward of a data rank's own batch, whose gradients are of very different sizes."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    x, y = (torch.randn(6, size, generator=generator) for size in (24, 11))
    loss = F.mse_loss(net(x, extra=(rank + step) % 3 == 0).float(), y)
    (loss * 10.0 ** ((rank * 7 + step) % 4 - 2)).backward()


def bits(values: dict[str, Tensor | None]) -> dict[str, str]:
    """A digest of each tensor's bits."""
    return {
        name: "none" if value is None else hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in values.items()
    }


def train(net: Any, rank: int, steps: range, optimizer: Any, micro_batches: int = 1) -> list[Any]:
    """What each step shows: digests of gradients, the norm before clipping; the weights' digests at the end."""
    seen: list[Any] = []
    for step in steps:
        for micro in range(micro_batches):
            with net.accumulate(last=micro == micro_batches - 1):
                backward(net, rank, step, micro)
        seen.append(bits(full_grads(net)))
        seen.append(hsdp.clip_grad_norm_(net, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    check_rest(net)
    seen.append(bits({name: value.full_tensor() for name, value in net.state_dict().items()}))
    return seen


def adamw(net: Any) -> Any:
    """As jobs have it, on plain local tensors."""
    return hsdp.optim.local(torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, foreach=True))


def same(runs: dict[Any, list[Any]]) -> None:
    """All runs saw the same; the first difference is told."""
    (first, expected), *others = runs.items()
    for shape, seen in others:
        assert len(seen) == len(expected)
        for at, (mine, theirs) in enumerate(zip(seen, expected, strict=True)):
            names = [name for name in mine if mine[name] != theirs[name]] if isinstance(mine, dict) else [mine, theirs]
            assert mine == theirs, f"{shape} and {first} differ at entry {at}: {names}"


def check_training(env: RankEnv, precision: str, policy: hsdp.CommPolicy, steps: int, micro_batches: int = 1) -> None:
    """On every shape of as many ranks the same bits in every step."""
    runs: dict[Any, list[Any]] = {}
    for shape in SHAPES[env.world_size]:
        net = build(env.mesh(shape), policy, mp_policy=PRECISIONS[precision])
        runs[shape] = train(net, env.rank, range(steps), adamw(net), micro_batches)
    same(runs)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_20_steps_give_the_same_bits_on_every_split_of_4_ranks(pool4: Pool, precision: str) -> None:
    pool4.run(check_training, precision, TREE, 20)

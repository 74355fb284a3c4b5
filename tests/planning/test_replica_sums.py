"""What `plan` says where replicas share the optimizer's step is what the engine does: calls, bytes, states, and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import hsdp
from hsdp import CommPolicy, MixedPrecisionPolicy
from hsdp.optim import local
from tests.planning.test_traffic import Sent, planned
from tests.support.counting import CollectiveCounter, LiveBytes
from tests.support.rig import fake_world
from tests.support.sharded import mesh_id

WORLD = 8
KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
}


class Block(nn.Module):
    """Rows that replicas divide and rows that they do not, few rows, a scalar, and what travels as it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(64, 512)
        self.odd = nn.Linear(512, 33)
        self.few = nn.Linear(33, 3)
        self.back = nn.Linear(3, 64, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.few(self.odd(self.even(x)))) * self.scale  # type: ignore[no-any-return]


def columns(param: nn.Parameter) -> Shard | None:
    """A `shard_placement_fn`."""
    return Shard(1) if param.ndim == 2 else None


@dataclass(frozen=True)
class Setup:
    """How the model is sharded and stepped."""

    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    replicate: str = ""
    freeze: str = ""


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
SETUPS = {
    "fp32": Setup(),
    "bf16": Setup({"mp_policy": BF16}),
    "packed": Setup({"comm_policy": CommPolicy(fusion="packed")}),
    "direct": Setup({"comm_policy": CommPolicy(fusion="direct")}),
    "all-reduce buckets": Setup({"comm_policy": CommPolicy(all_reduce_bucket_bytes=1 << 20)}),
    "micro-batches": Setup(micro_batches=2),
    "in a tree": Setup({"comm_policy": CommPolicy(reduction="tree")}),
    "columns": Setup({"shard_placement_fn": columns}),
    "replicated": Setup(replicate="odd.bias"),
    "frozen": Setup(freeze="odd.weight"),
}


def _step(model: Any, optimizer: torch.optim.Optimizer, micro_batches: int) -> None:
    for left in reversed(range(micro_batches)):
        with model.accumulate(last=left == 0):
            model(torch.ones(1, 64)).float().sum().backward()
    optimizer.step()


def _planned_and_made(setup: Setup, env: Any, shape: tuple[int, int]) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(Block(), Block())
    for name, param in model.named_parameters():
        param.requires_grad_(not (setup.freeze and name.endswith(setup.freeze)))
    replicate = [p for name, p in model.named_parameters() if setup.replicate and name.endswith(setup.replicate)]
    options = {**setup.options, **({"replicate_params": replicate} if replicate else {})}
    hsdp.shard_units(model, "*", mesh=env.mesh(shape), **options)
    plan = hsdp.plan(model, tokens_per_rank=1, micro_batches=setup.micro_batches, over_replicas=True, activations=0)
    params = [param for param in model.parameters() if param.requires_grad]
    return plan, model, local(torch.optim.AdamW(params), over_replicas=True)


def _total(sent: Sent) -> list[int]:
    return [sum(column) for column in zip(*sent.values(), strict=True)]


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8, 1)], ids=mesh_id)
def test_what_travels_between_replicas_is_what_is_planned(shape: tuple[int, int], name: str) -> None:
    setup = SETUPS[name]
    with fake_world(WORLD) as env:
        plan, model, optimizer = _planned_and_made(setup, env, shape)
        for _ in range(2):
            _step(model, optimizer, setup.micro_batches)
            optimizer.zero_grad()
        group = env.mesh(shape).get_group("replicate").group_name
        with CollectiveCounter() as counter:
            _step(model, optimizer, setup.micro_batches)
        found: Sent = {}
        for call in counter.calls:
            if call.group == group:
                key = KINDS[call.kind], "replicate"
                calls, transfers, sent = found.get(key, (0, 0, 0))
                found[key] = calls + 1, transfers + call.transfers, sent + round(call.wire_bytes)
        told = {key: value for key, value in planned(plan).items() if key[1] == "replicate"}
        if name == "in a tree":  # whose all-reduce is an all-to-all and an all-gather
            assert _total(told) == _total(found)
        else:
            assert told == found
        tensors = [
            value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, DTensor)
        ]
        assert plan.memory.peak["optimizer"] == sum(tensor.to_local().nbytes for tensor in tensors)


@pytest.mark.parametrize("name", ["fp32", "bf16", "micro-batches", "frozen"])
def test_memory_of_shares_is_what_is_planned(name: str) -> None:
    setup = SETUPS[name]
    with fake_world(WORLD) as env:
        plan, model, optimizer = _planned_and_made(setup, env, (4, 2))
        for _ in range(2):
            _step(model, optimizer, setup.micro_batches)
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, 64))  # what the optimizer stepped has arrived
        with LiveBytes() as live:
            for left in reversed(range(setup.micro_batches)):
                with model.accumulate(last=left == 0):  # type: ignore[operator]
                    model(torch.ones(1, 64)).float().sum().backward()
        assert live.live == pytest.approx(plan.memory.largest["gradients"], rel=0.001)
        assert live.peak == pytest.approx(plan.memory.communication, rel=0.01)

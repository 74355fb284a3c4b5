"""What `plan` says of collectives is what a step does: calls, transfers and bytes, exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from hsdp import CommPolicy, MixedPrecisionPolicy
from hsdp.planning import Plan
from tests.support.counting import CollectiveCounter, by_sockets
from tests.support.models import MLP, Transformer
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import mesh_id
from tests.support.share import FULL, values_once

Sent = dict[tuple[str, str], tuple[int, int, int]]
"""(kind, axis) -> calls, transfers, bytes sent by a rank."""

KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "reduce-scatter",
    "broadcast": "all-gather",
    "reduce": "reduce-scatter",
}
"""On an axis of replicas all are parts of an all-reduce."""


@dataclass(frozen=True)
class Setup:
    """How a model is sharded and stepped."""

    build: Callable[[], nn.Module] = Transformer
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    freeze: tuple[str, ...] = ()
    units: tuple[str, ...] = ("blocks.*",)
    replicate: tuple[str, ...] = ()


def _tokens(model: nn.Module) -> Tensor:
    return model(torch.ones(1, 4, dtype=torch.int64)).float().sum()


def _floats(model: nn.Module) -> Tensor:
    return model(torch.ones(2, model.blocks[0].in_features)).float().sum()  # type: ignore[index,union-attr]


def _wide() -> nn.Module:
    return MLP((256, 512, 256, 128))


def _huge() -> nn.Module:
    """Its shards are large enough to travel from where they are."""
    return MLP((1024, 2049, 1024))


class Experts(nn.Linear):
    """A linear layer beside the stacked weights of three experts, of four megabytes each."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.experts = nn.Parameter(torch.randn(3, 1024, 1024))
        self.gate = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.gate.sum() + self.experts.sum())


class Complex(nn.Linear):
    """A linear layer with complex weights beside it, of which some are large and some have fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.large = nn.Parameter(torch.randn(1024, 513, dtype=torch.complex64))
        self.small = nn.Parameter(torch.randn(3, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.large.sum() * self.small.sum()).real


class Two(nn.Module):
    """Two blocks of a kind."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(kind(), kind())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


ExpertBlocks, ComplexBlocks = partial(Two, Experts), partial(Two, Complex)


TREE = CommPolicy(reduction="tree")
ALL_BUT_Q = ("embedding", "norm", "head", "blocks.0", *(f"blocks.1.{name}" for name in ("n", "k", "v", "o", "g", "u", "d")))
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
SETUPS = {
    "transformer": Setup(),
    "wide": Setup(_wide),
    "packed": Setup(_wide, {"comm_policy": CommPolicy(fusion="packed")}),
    "direct": Setup(_wide, {"comm_policy": CommPolicy(fusion="direct")}),
    "bf16": Setup(_wide, {"mp_policy": BF16}),
    "bf16 throughout": Setup(options={"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
    "freed": Setup(options={"reshard_after_forward": True}),
    "kept": Setup(options={"reshard_after_forward": False}),
    "kept in parts": Setup(options={"reshard_after_forward": 2}),
    "three micro-batches": Setup(_wide, micro_batches=3),
    "three local micro-batches": Setup(_wide, {"comm_policy": CommPolicy(accumulate="local")}, micro_batches=3),
    "scatter buckets": Setup(_wide, {"comm_policy": CommPolicy(reduce_scatter_bucket_bytes=1 << 20)}),
    "all-reduce buckets": Setup(_wide, {"comm_policy": CommPolicy(all_reduce_bucket_bytes=1 << 18)}),
    "no prefetch": Setup(options={"comm_policy": CommPolicy(prefetch=0)}),
    "a frozen bias": Setup(_wide, freeze=("blocks.1.bias",)),
    "a frozen first block": Setup(_wide, freeze=("blocks.0.weight", "blocks.0.bias")),
    "a trained head": Setup(freeze=("embedding", "blocks")),
    "a trained head and last block": Setup(freeze=("embedding", "blocks.0"), micro_batches=2),
    "frozen blocks in parts": Setup(options={"reshard_after_forward": 2}, freeze=("embedding", "blocks")),
    "nested units": Setup(units=("blocks.*", "blocks.*.q", "head")),
    "one trained layer": Setup(units=("blocks.*", "blocks.1.q"), freeze=ALL_BUT_Q),
    "tree": Setup(_wide, {"comm_policy": TREE}),
    "tree in bf16": Setup(_huge, {"comm_policy": TREE, "mp_policy": BF16}, micro_batches=2),
    "tree in buckets": Setup(_wide, {"comm_policy": replace(TREE, all_reduce_bucket_bytes=1 << 18)}, micro_batches=2),
    "three experts": Setup(ExpertBlocks),
    "three experts in bf16": Setup(ExpertBlocks, {"mp_policy": BF16}, micro_batches=2),
    "three experts packed": Setup(ExpertBlocks, {"comm_policy": CommPolicy(fusion="packed")}),
    "three experts in a tree": Setup(ExpertBlocks, {"comm_policy": TREE}),
    "three experts in parts": Setup(ExpertBlocks, {"reshard_after_forward": 2}),
    "frozen experts": Setup(ExpertBlocks, freeze=("blocks.0.experts", "blocks.1.experts")),
    "complex": Setup(ComplexBlocks, micro_batches=2),
    "complex, packed, in bf16": Setup(ComplexBlocks, {"mp_policy": BF16, "comm_policy": CommPolicy(fusion="packed")}),
    "complex in a tree": Setup(ComplexBlocks, {"comm_policy": TREE}),
    "replicated norms": Setup(replicate=("blocks.0.norm1.weight", "norm.weight")),
}


def build(setup: Setup) -> tuple[nn.Module, dict[str, Any]]:
    """The model, not sharded yet, and the arguments with which it is to be."""
    model = setup.build()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(setup.freeze or "nothing"))
    replicate = {"replicate_params": [model.get_parameter(name) for name in setup.replicate]} if setup.replicate else {}
    return model, setup.options | replicate


def step(model: nn.Module, micro_batches: int) -> None:
    """Forward and backward of every micro-batch."""
    loss = _tokens if hasattr(model, "embedding") else _floats
    for left in reversed(range(micro_batches)):
        with model.accumulate(last=left == 0):  # type: ignore[operator]
            loss(model).backward()


def measured(model: nn.Module, mesh: DeviceMesh, micro_batches: int) -> Sent:
    """What the third step sends: by then the order of units is known."""
    for _ in range(2):
        step(model, micro_batches)
        model.zero_grad()
    with CollectiveCounter() as counter:
        step(model, micro_batches)
    axes = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names or ()}
    found: Sent = {}
    for call in counter.calls:
        axis = axes.get(call.group, "part")
        key = KINDS.get(call.kind, "all-reduce") if axis != "replicate" else "all-reduce", axis
        calls, transfers, sent = found.get(key, (0, 0, 0))
        found[key] = calls + 1, transfers + call.transfers, sent + round(call.wire_bytes)
    return found


def planned(plan: Plan) -> Sent:
    """What the plan says."""
    return {(one.kind, one.axis): (one.calls, one.transfers, round(one.sent)) for one in plan.collectives}


def check(setup: Setup, mesh: DeviceMesh) -> None:
    """Plans before and after sharding are alike, and are what happens."""
    sizes = tuple(mesh.shape)
    model, options = build(setup)
    told: dict[str, Any] = {"tokens_per_rank": 4, "micro_batches": setup.micro_batches}
    before = hsdp.plan(model, mesh=mesh, units=setup.units, **told, **options)
    hsdp.shard_units(model, setup.units, mesh=mesh, **options)
    after = hsdp.plan(model, **told)
    assert before == after
    backend = before.assumptions.backend
    sent = measured(model, mesh, setup.micro_batches)
    assert planned(after) == sent, f"on {sizes}, {backend}"
    by_unit = sum(one.sent for unit in after.by_unit for one in unit)
    assert by_unit == pytest.approx(sum(nbytes for *_, nbytes in sent.values()), abs=len(sent))
    held = {id(unit): sum(group.shard.nbytes for group in unit.dtype_groups) for unit in model._units()}  # type: ignore[operator]
    assert sum(unit.total("shard_bytes") for unit in after.units) == sum(held.values())


# One shard rank has no parts: there the plan refuses them, as `fully_shard` does.
CASES = [(s, name) for s in ((8,), (2, 4), (8, 1), (1, 8)) for name in SETUPS if s[-1] > 1 or not name.endswith("in parts")]


@pytest.mark.parametrize(
    ("shape", "name"), values_once(CASES), ids=lambda part: part if isinstance(part, str) else mesh_id(part)
)
def test_collectives_are_as_planned(shape: tuple[int, ...], name: str) -> None:
    with fake_world(8) as env:
        check(SETUPS[name], env.mesh(shape))


@by_sockets
def check_on_gloo(env: RankEnv, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Several setups, on every rank."""
    for name in names:
        check(SETUPS[name], env.mesh(shape))


def test_sums_of_replicated_parameters_in_a_tree_are_an_all_to_all_and_an_all_gather() -> None:
    """The plan counts both as an all-reduce over shards: bytes by axis are what happens."""
    with fake_world(8) as env:
        mesh = env.mesh((2, 4))
        setup = replace(SETUPS["replicated norms"], options={"comm_policy": TREE})
        model, options = build(setup)
        hsdp.shard_units(model, setup.units, mesh=mesh, **options)
        plan = hsdp.plan(model, tokens_per_rank=4)
        totals: list[dict[str, int]] = []
        for sent in (planned(plan), measured(model, mesh, 1)):
            totals.append({"shard": 0, "replicate": 0})
            for (_, axis), (_, _, nbytes) in sent.items():
                totals[-1][axis] += nbytes
        assert totals[0] == totals[1]


EXPERTS = ("three experts", "three experts in bf16", "three experts in a tree", "three experts in parts")
ON_GLOO = ("transformer", "direct", "bf16", "kept in parts", "three micro-batches", "all-reduce buckets")
IN_TREE = ("tree", "tree in bf16", "complex", "complex in a tree")


@pytest.mark.parametrize(("shape", "first"), [((4,), 0), ((2, 2), 1)], ids=["4", "2x2"])
def test_collectives_are_as_planned_on_gloo(pool4: Pool, shape: tuple[int, ...], first: int) -> None:
    names = (*ON_GLOO, *IN_TREE, *EXPERTS)
    pool4.run(check_on_gloo, shape, names if FULL else names[first::4], timeout=300)

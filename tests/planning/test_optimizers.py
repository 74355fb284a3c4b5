"""What a plan says of an optimizer's step is what the optimizer does: bytes, states; and its time follows from formulas."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hsdp
from hsdp.format import seconds_of
from hsdp.optim import Muon, local
from hsdp.optim.matrices import Bucket, MatrixParam, plan_buckets
from hsdp.optim.replicas import share_of_param
from hsdp.params.local import local_of
from hsdp.planning import Link, Plan, compare
from hsdp.planning.command import main
from hsdp.planning.schedule import Event, Verb, simulate_step
from hsdp.planning.timing import clock
from tests.support.counting import LiveBytes
from tests.support.rig import fake_world
from tests.support.sharded import mesh_id

WORLD = 8
MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]
LINK = Link(fast=1e9, slow=1e8, ranks_per_node=4, latency=0.0, fast_step=0.0, slow_step=0.0)


class Block(nn.Module):
    """As many matrices as there are ranks, as many experts twice, and what is no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 64) for _ in range(4))
        self.back = nn.ModuleList(nn.Linear(64, 32) for _ in range(4))
        self.experts = nn.Parameter(torch.randn(16, 32, 32) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, back in zip(self.layers, self.back, strict=True):
            x = back(layer(x))
        return x @ self.experts.mean(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def groups(model: Any) -> list[dict[str, Any]]:
    """As the plan assumes: matrices of blocks, and all others."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    stacks = [p for p in model.blocks.parameters() if p.ndim == 3]
    others = [p for p in model.parameters() if not any(p is q for q in (*matrices, *stacks))]
    return [
        {"params": matrices},
        {"params": stacks, "matrices": "stacked"},
        {"params": others, "algorithm": "adamw"},
    ]


def plan_of(model: nn.Module, **options: Any) -> Plan:
    return hsdp.plan(model, tokens_per_rank=64, link=LINK, **({"optimizer": "muon"} | options))


def of_kind(plan: Plan, kind: str) -> Any:
    (found,) = [one for one in plan.collectives if one.kind == kind]
    return found


@pytest.mark.parametrize("over_replicas", [False, True], ids=["", "over replicas"])
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_pieces_that_travel_are_those_planned(shape: tuple[int, int], over_replicas: bool) -> None:
    with fake_world(WORLD) as env:
        model: Any = Net()
        for module in (*model.blocks, model):
            hsdp.fully_shard(module, mesh=env.mesh(shape))
        plan = plan_of(model, over_replicas=over_replicas)
        optimizer = Muon(groups(model), over_replicas=over_replicas)
        known: dict[Any, Any] = {}
        pairs = [(p, group) for group in optimizer.param_groups[:2] for p in group["params"]]
        targets = [MatrixParam(p, group, known, share_of_param(p) if over_replicas else None) for p, group in pairs]
        buckets = plan_buckets(targets, tuple(range(WORLD)), optimizer.cost, lambda _: torch.bfloat16, 1 << 40)
    inside = across = 0
    for bucket in buckets:
        for rank in range(WORLD):
            routed = Bucket(bucket.targets, bucket.matrices, bucket.dtype)
            routed.route(rank)
            for piece in (*routed.gives, *routed.returns):
                if piece.peer // shape[1] == rank // shape[1]:
                    inside += 2 * piece.count * (piece.peer != rank)
                else:
                    across += 2 * piece.count
    exchanged = of_kind(plan, "all-to-all")
    assert exchanged.sent * WORLD == pytest.approx(inside + across)
    # Nodes of 4 hold a replica of 4 ranks, two of 2, four of 1, or half of one.
    if shape == (2, 4):
        assert exchanged.fast * WORLD == pytest.approx(inside) and exchanged.slow * WORLD == pytest.approx(across)


@pytest.mark.parametrize("kind", ["elementwise", "muon"])
@pytest.mark.parametrize("over_replicas", [False, True], ids=["", "over replicas"])
def test_states_are_those_planned(kind: str, over_replicas: bool) -> None:
    with fake_world(WORLD) as env:
        model: Any = Net()
        for module in (*model.blocks, model):
            hsdp.fully_shard(module, mesh=env.mesh((2, 4)))
        planned = plan_of(model, optimizer=kind, over_replicas=over_replicas).memory.peak["optimizer"]
        if kind == "muon":
            optimizer: Any = Muon(groups(model), over_replicas=over_replicas)
        else:
            optimizer = local(torch.optim.AdamW(model.parameters()), over_replicas=over_replicas)
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        tensors = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, DTensor)]
        assert planned == pytest.approx(sum(tensor.to_local().nbytes for tensor in tensors), rel=0.01)


def test_time_of_iterations_is_that_of_the_rank_with_most() -> None:
    def seconds(layers: int) -> float:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
        link = Link(fast=1e30, slow=1e30, latency=0.0, fast_step=0.0, slow_step=0.0)
        plan = hsdp.plan(model, mesh=(2, 4), tokens_per_rank=1, optimizer="muon", flops=1e12, bandwidth=1e30, link=link)
        return plan.time.optimizer

    one = 5 * 2 * 3 * 1024**3 / 1e12  # products of X with X^T, of that with itself, and of both
    assert seconds(8) == pytest.approx(one)
    assert seconds(9) == seconds(16) == pytest.approx(2 * one)


@dataclass
class Fixed:
    """Only forwards take time."""

    forward: float
    shared: bool = False

    def compute(self, verb: Verb, unit: int) -> float:
        return self.forward if verb is Verb.FORWARD else 0.0

    def collective(self, event: Event) -> float:
        return 0.0


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("travel", "forward"), [(1.0, 2.0), (2.0, 1.0), (0.0, 1.0)])
def test_stepped_parts_travel_beside_the_next_forward(travel: float, forward: float, device: bool) -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(4)))
    units = hsdp.plan(layers, mesh=(2, 4), tokens_per_rank=1, comm_policy=hsdp.CommPolicy(prefetch=0)).units
    found = clock(simulate_step(units, 1, device), Fixed(forward), device, [travel] * len(units))
    now = travel  # the root's come first, and its own part of forward last
    for at in range(1, len(units)):
        now = max(now, (at + 1) * travel) + forward
    now += forward
    assert found.step == pytest.approx(now)
    assert found.exposed["all-gather"] == pytest.approx(now - len(units) * forward)
    assert found.busy["all-gather"] == pytest.approx(len(units) * travel)


def _layers(**options: Any) -> Plan:
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="meta") for _ in range(8)))
    return hsdp.plan(layers, flops=1e12, link=LINK, **({"mesh": (2, 4), "tokens_per_rank": 50_000} | options))


def test_what_travels_behind_the_step_is_hidden() -> None:
    plan, shared = _layers(), _layers(over_replicas=True)
    assert shared.time.optimizer == pytest.approx(plan.time.optimizer / 2)
    gather = sum(one.seconds for one in shared.collectives if one.axis == "replicate" and one.kind == "all-gather")
    assert shared.time.exposed["all-gather"] - plan.time.exposed["all-gather"] < gather / 4
    told = sum(one.sent for unit in shared.by_unit for one in unit)
    assert told == pytest.approx(sum(one.sent for one in shared.collectives))


def test_waits_for_sums_over_replicas_are_told_where_they_are() -> None:
    plan = _layers(over_replicas=True, optimizer="muon", tokens_per_rank=50, mesh=(8, 1))
    rows = [line for line in str(plan).splitlines() if line.split()[:2] == ["reduce-scatter", "replicate"]]
    assert max(plan.time.exposed, key=plan.time.exposed.__getitem__) == "all-reduce"
    assert len(rows) == 1 and rows[0].endswith(f"  {seconds_of(plan.time.exposed['all-reduce'])}"), rows
    assert "reduce-scatter over replicas is exposed" in plan.bottleneck and "all-reduce" not in plan.bottleneck
    several = str(compare(nn.Linear(64, 64), [(1, 8), (2, 4), (4, 2)], tokens_per_rank=8, over_replicas=True))
    assert "shared out among 2 or 4 replicas" in several


@pytest.mark.parametrize("kind", ["elementwise", "muon"])
def test_advice_says_when_sharing_pays(kind: Any) -> None:
    # Memory so slow that the optimizer's step shows, and enough to compute for its gathers to hide under.
    bound = _layers(optimizer=kind, bandwidth=1e8, tokens_per_rank=20_000)
    found = [one for one in bound.advice if one.options == {"over_replicas": True}]
    name = "Muon" if kind == "muon" else "local"
    assert found and found[0].gain > 1.03 and f"hsdp.optim.{name}(..., over_replicas=True)" in bound.bottleneck
    assert bound.changed(over_replicas=True).time.step < bound.time.step / 1.03
    fast = _layers(optimizer=kind, tokens_per_rank=1_000_000)
    assert not [one for one in fast.advice if "over_replicas" in one.options]


def test_muon_s_bytes_and_memory_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", "--preset", "llama3-8b", "--mesh", "8x8", "--tokens-per-rank", "8192"]
    content = {}
    for options in ((), ("--optimizer", "muon"), ("--optimizer", "muon", "--over-replicas")):
        assert main([*common[1:], *options]) == 0
        content[options] = capsys.readouterr().out
    assert "all-to-all" not in content[()]
    muon, shared = list(content.values())[1:]
    assert "all-to-all" in muon and "Muon for the matrices of blocks" in muon
    assert "shared out among 8 replicas" in shared and "shared out" not in muon
    with pytest.raises(ValueError, match="optimizer='shampoo'"):
        _layers(optimizer="shampoo")


def test_bytes_between_replicas_are_those_of_the_formulas() -> None:
    replicas, shards = 2, 4
    elements = 8 * 1024 * 1024

    def across(**options: Any) -> float:
        plan = _layers(optimizer="muon", mp_policy=hsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32), **options)
        sums = sum(one.sent for one in plan.collectives if one.axis == "replicate")
        return sums + of_kind(plan, "all-to-all").slow  # a node is a replica

    least = elements / shards * (replicas - 1) / replicas * (4 + 2)
    assert across() / least == pytest.approx(10 / 6, rel=1e-3)
    assert across(over_replicas=True) / least == pytest.approx(7 / 6, rel=1e-3)
    assert math.prod((replicas, shards)) == WORLD


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_matrices_without_elements_are_planned(shape: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].extra = nn.ParameterList([nn.Parameter(torch.empty(shape))])
    assert plan_of(model, mesh=(2, 2)).time.optimizer > 0.0


class Pairs(nn.Module):
    """Matrices of two shapes."""

    def __init__(self, width: int, pairs: int) -> None:
        super().__init__()
        made = (nn.Linear(256, width, bias=False), nn.Linear(width, 256, bias=False))
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(made)) for _ in range(pairs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("kind", ["foreach", "muon"])
@pytest.mark.parametrize(
    ("mesh", "width", "pairs"), [((1, 8), 256, 10), ((2, 4), 256, 10), ((2, 4), 768, 10), ((2, 1), 768, 60)]
)
def test_the_memory_of_its_step_is_about_as_planned(
    mesh: tuple[int, int], width: int, pairs: int, kind: str, shares: bool
) -> None:
    shares = shares and mesh[0] > 1
    with fake_world(math.prod(mesh)) as env:
        model = Pairs(width, pairs)
        named: Any = "muon" if kind == "muon" else "elementwise"
        plan = hsdp.plan(model, mesh=mesh, tokens_per_rank=4, optimizer=named, over_replicas=shares)
        hsdp.shard_units(model, "blocks.*", mesh=env.mesh(mesh))
        if kind == "muon":
            optimizer: Any = Muon(model.parameters(), over_replicas=shares)
        else:
            optimizer = local(torch.optim.AdamW(model.parameters(), foreach=True), over_replicas=shares)
        for _ in range(2):
            model(torch.ones(4, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(4, 256)).sum().backward()
        with LiveBytes() as live:
            optimizer.step()
        gradients = sum(local_of(param.grad).numel() * 4 for param in model.parameters())
        measured = plan.memory.persistent + gradients + live.peak
        assert plan.memory.step == pytest.approx(measured, rel=0.1)
        assert plan.memory.most == max(plan.memory.step, plan.memory.total)
        tight = plan.changed(memory=max(plan.memory.total, plan.memory.step) - 1)
        assert not tight.fits and plan.changed(memory=plan.memory.most).fits

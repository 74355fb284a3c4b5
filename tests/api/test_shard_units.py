"""`shard_units`: which modules become units, in which order, and what is refused before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hsdp
from hsdp.api.shard_units import by_numel, shard_units
from hsdp.unit.lookup import unit_of_module
from tests.support.models import MLP, Block, Transformer, make_case
from tests.support.rig import Pool, RankEnv
from tests.support.twin import adamw, assert_close_to_twin, train, twin_of


class Router(nn.Module):
    """Names with dots, containers, modules without parameters, a module within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)  # 32
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 6, bias=False), nn.GELU()), "gate": nn.Linear(4, 2)})
            for _ in range(2)
        )  # 24 + 10 each
        self.mlp = nn.Linear(4, 4)  # 20
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


LINEARS = ["layers.0.mlp.0", "layers.0.gate", "layers.1.mlp.0", "layers.1.gate", "mlp"]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("mlp", ["mlp"]),
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("layers.1.*", ["layers.1.mlp", "layers.1.gate"]),
        ("**.mlp", ["layers.0.mlp", "layers.1.mlp", "mlp"]),
        ("layers.**.?", ["layers.0.mlp.0", "layers.1.mlp.0"]),
        ("layers.[!0].gate", ["layers.1.gate"]),
        ("layers.[0-3].gate", ["layers.0.gate", "layers.1.gate"]),
        (["mlp", "layers.0.gate", "layers.0.*"], ["layers.0.mlp", "layers.0.gate", "mlp"]),
        (nn.Linear, LINEARS),
        ([nn.Sequential, nn.Embedding], ["embed", "layers.0.mlp", "layers.1.mlp"]),
        (lambda m: isinstance(m, nn.Linear) and m.out_features == 2, ["layers.0.gate", "layers.1.gate"]),
        (by_numel(24), ["embed", "layers.0.mlp.0", "layers.1.mlp.0", ""]),  # 43 are left for the model
        (by_numel(25), ["embed", ""]),
        ([by_numel(20), "layers.*.gate"], ["embed", *LINEARS]),  # 3 are left
    ],
)
def test_patterns_choose_modules_children_first(patterns: Any, names: list[str]) -> None:
    model = Router()
    assert shard_units(model, patterns, root=False, dry_run=True) == names
    assert shard_units(model, patterns, dry_run=True) == [name for name in names if name] + [""]
    assert type(model) is Router


def test_a_module_of_the_model_is_a_pattern() -> None:
    model = Router()
    assert shard_units(model, [model.layers[1]["gate"], model.embed], root=False, dry_run=True) == [
        "embed",
        "layers.1.gate",
    ]


def test_by_numel_counts_what_units_below_leave() -> None:
    model = Transformer()
    block = sum(p.numel() for p in model.blocks.parameters()) // 2
    # A block is large enough; without the blocks nothing else is, and the model alone takes the rest.
    assert shard_units(model, by_numel(block), root=False, dry_run=True) == ["blocks.0", "blocks.1"]
    # With the large layers taken out of it a block still has its small ones.
    layers = ["gate", "up", "down"]
    assert shard_units(model, by_numel(2 * 16 * 16 + 1), root=False, dry_run=True) == ["blocks.0", "blocks.1", ""]
    assert shard_units(model, by_numel(2 * 16 * 16), dry_run=True) == [
        "embedding",
        *(name for i in range(2) for name in (*(f"blocks.{i}.{layer}" for layer in layers), f"blocks.{i}")),
        "head",
        "",
    ]


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_what_makes_no_sense_is_refused() -> None:
    model = Router()
    cases: list[tuple[Any, type[Exception], str]] = [
        ("block.*", ValueError, r"pattern 'block\.\*' matches nothing in the model; names are those of"),
        (["mlp", "layers.*"], ValueError, r"pattern 'layers\.\*' matches \['layers\.0', 'layers\.1'\], which have no forw"),
        (["mlp", nn.Conv2d], ValueError, "pattern Conv2d matches nothing"),
        (nn.GELU, ValueError, r"pattern GELU matches \['layers\.0\.mlp\.1', .*leave no parameters"),
        (["layers.0.mlp.0", "layers.0.mlp"], ValueError, r"'layers\.0\.mlp' matches \['layers\.0\.mlp'\], for which units"),
        (nn.Linear(4, 4), ValueError, "pattern an instance of Linear matches nothing"),
        (lambda m: False, ValueError, "<lambda> matches nothing"),
        (by_numel(1000), ValueError, "largest module without a unit has 123 elements"),
        (int, TypeError, "not a type of nn.Module"),
        ([3], TypeError, "pattern 3 is not a glob"),
    ]
    for patterns, error, message in cases:
        with pytest.raises(error, match=message):
            shard_units(model, patterns)
        assert type(model) is Router
    with pytest.raises(TypeError, match="not str"):
        shard_units("model", "mlp")  # type: ignore[arg-type]
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="by_numel"):
            by_numel(bad)  # type: ignore[arg-type]


def test_ties_between_units_are_refused_before_anything_is_sharded() -> None:
    for patterns in (["other", "first"], ["other", "second"], ["other", "first", "second"]):
        for root in (True, False):
            model = Tied()
            with pytest.raises(ValueError, match=r"'first\.weight' of .* is tied to 'second\.weight' of "):
                shard_units(model, patterns, root=root)
            assert type(model.other) is nn.Linear
    assert shard_units(Tied(), "other", dry_run=True) == ["other", ""]


def test_a_dry_run_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    model = Router()
    shard_units(model, "layers.*.mlp", root=False, dry_run=True, ignored_params=[model.scale])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["shard_units", "would", "make", "2", "units", "of", "Router:"]
    assert lines[2] == ["layers.0.mlp", "Sequential", "1", "24", "0.00"]
    assert lines[4] == ["not", "sharded", "7", "72", "0.00"]  # without the ignored one


def _shards(env: RankEnv) -> None:
    model = MLP()
    ignored = model.blocks[2].bias
    reshard = {"reshard_after_forward": False}

    def params() -> Iterator[nn.Parameter]:  # an iterator, and two calls want it
        yield ignored

    assert shard_units(model, "blocks.*", mesh=env.mesh(2), ignored_params=params(), **reshard) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "",
    ]
    for module in (*model.blocks, model):
        unit = unit_of_module(module)
        assert unit is not None
        assert unit.settings.reshard_after_forward is False
    assert {name for name, p in model.named_parameters() if not isinstance(p, DTensor)} == {"blocks.2.bias"}
    with pytest.raises(ValueError, match=r"module 'blocks\.0' \(FSDPLinear\) is to be a unit, but is sharded already"):
        shard_units(model, "blocks.0", root=False)
    with pytest.raises(ValueError, match=r"module 'blocks\.2\.0' .*but lies in 'blocks\.2', which is sharded already"):
        outer = MLP()
        outer.blocks[2] = hsdp.fully_shard(nn.Sequential(nn.Linear(16, 8)), mesh=env.mesh(2))
        shard_units(outer, "blocks.2.0", mesh=env.mesh(2))


def test_units_are_sharded_with_the_arguments_of_fully_shard(pool2: Pool) -> None:
    pool2.run(_shards)


def _trains(env: RankEnv, twin: Any) -> None:
    case = make_case("transformer")
    model = case.model()
    shard_units(model, [Block, "embedding"], mesh=env.mesh(2))
    train(model, case, env.rank, 2, adamw(model.parameters()))
    assert_close_to_twin(model, twin)


def test_a_model_of_shard_units_trains_as_the_twin(pool2: Pool) -> None:
    pool2.run(_trains, twin_of(make_case("transformer"), 2, 2, adamw))

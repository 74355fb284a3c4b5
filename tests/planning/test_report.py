"""Plans as people and programs read them, models of published shapes, the command, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import re
import runpy
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hsdp
from hsdp import CommPolicy
from hsdp.planning import PRESETS, Assumptions, Comparison, Plan, compare, preset
from hsdp.planning.command import main
from tests.support.models import Transformer
from tests.support.rig import fake_world

BILLIONS = {  # as their authors count them
    "llama2-7b": 6.74,
    "llama2-13b": 13.02,
    "llama2-70b": 68.98,
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3-405b": 405.85,
    "olmo2-7b": 7.30,
    "olmo2-13b": 13.72,
    "olmo2-32b": 32.23,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "deepseek-v3": 671.03,
    "mixtral-8x7b": 46.70,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
}
ACTIVE = {
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.2,
    "deepseek-v3": 36.6,
    "mixtral-8x7b": 12.9,
    "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1,
}


def _meta() -> nn.Module:
    with torch.device("meta"):
        return Transformer(vocab=512, dim=256, heads=4, hidden=1024, layers=4)


def _plan(**options: Any) -> Plan:
    return hsdp.plan(_meta(), **({"mesh": (2, 8), "tokens_per_rank": 1000} | options))


def test_a_large_world_is_planned_from_a_laptop() -> None:
    start = time.process_time()
    plan = Plan.of("llama3-70b", preset("llama3-70b"), 8, 64, Assumptions(8192, memory=80 << 30, recompute=True))
    text = str(plan)
    took = time.process_time() - start
    assert took < 10, f"{took:.1f} s"
    assert not dist.is_initialized(), "no process group is needed"
    assert plan.fits
    assert "layers.0..78 (each of 79)" in text, "the last one is another: it is gathered once"
    assert "8 replicas x 64 shards (64 nodes of 8)" in text
    # docs/formulas.md's formulas; flags and padding are next to nothing here.
    gathered, kept = plan.numel, plan.units[0].numel + plan.units[-1].numel
    sent = {one.kind: one.sent for one in plan.collectives}
    assert sent["all-gather"] == pytest.approx((2 * gathered - kept) * 2 * 63 / 64, rel=1e-3)
    assert sent["reduce-scatter"] == pytest.approx(gathered * 4 * 63 / 64, rel=1e-3)
    assert sent["all-reduce"] == pytest.approx(2 * gathered / 64 * 4 * 7 / 8, rel=1e-3)
    assert plan.memory.persistent == pytest.approx(gathered / 64 * 12, rel=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_as_many_parameters_as_their_models(name: str) -> None:
    units = preset(name)
    total = sum(param.numel for unit in units for param in unit.params)
    assert total / 1e9 == pytest.approx(BILLIONS[name], abs=0.005)
    active = sum(param.numel * param.active for unit in units for param in unit.params)
    table = units[0].params[0].numel
    told = ACTIVE.get(name, BILLIONS[name]) * 1e9
    assert active == pytest.approx(told, rel=0.03) or active + table == pytest.approx(told, rel=0.03)
    assert all(unit.parent is not None and unit.parent < at for at, unit in enumerate(units) if at)


def test_presets_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"preset\('llama9'\).*llama3-8b"):
        preset("llama9")


def test_units_are_the_blocks_unless_told() -> None:
    assert [unit.facts.name for unit in _plan().units] == ["Transformer (root)", *(f"blocks.{at}" for at in range(4))]
    plan = _plan(units=["blocks.*", "head"])
    assert plan.units[-1].facts.name == "head"
    assert {unit.facts.parent for unit in plan.units[1:]} == {0}
    nested = _plan(units=["blocks.*", "blocks.*.q"])
    assert [unit.facts.parent for unit in nested.units[:5]] == [None, 0, 1, 0, 3]
    assert sum(unit.numel for unit in nested.units) == _plan().numel == sum(p.numel() for p in _meta().parameters())


def test_lists_of_lists_and_blocks_without_parameters_have_units() -> None:
    stage = nn.Module()  # as in U-Nets: it holds blocks, and has no forward
    stage.block = nn.ModuleList([nn.Linear(4, 4)])
    model = nn.Module()
    model.stages = nn.ModuleList([stage, nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])])
    plan = hsdp.plan(model, mesh=(2, 2), tokens_per_rank=1)
    assert [unit.facts.name for unit in plan.units] == ["Module (root)", "stages.0.block.0", "stages.1.0"]
    for empty in (nn.ReLU(), nn.Sequential(nn.ReLU())):
        plan = hsdp.plan(empty, mesh=(2, 2), tokens_per_rank=1, recompute=True)
        assert plan.numel == plan.time.step == plan.memory.total == 0 and "0 parameters" in str(plan)


def test_ties_and_lookups_cost_what_they_compute() -> None:
    with torch.device("meta"):
        tied, untied = Transformer(tied=True), Transformer()
    plans = [hsdp.plan(model, mesh=4, tokens_per_rank=1, flops=1.0) for model in (tied, untied)]
    assert plans[0].time.compute == plans[1].time.compute  # the lookup is no product, the tied head is one
    assert plans[0].numel < plans[1].numel


def test_a_plan_as_text() -> None:
    text = str(_plan(micro_batches=2, memory=1 << 30))
    for part in ("units", "collectives of a step", "memory of a rank", "time of a step", "blocks.0..2 (each of 3)", "sums"):
        assert part in text
    assert max(map(len, text.splitlines()[:-1])) < 180
    assert "fits in 1 GiB, as far as it is counted" in text
    assumed = text[text.index("assumed") :]
    for part in ("400 Tflop/s", "estimated from the shapes", "sequences of 1,000 tokens", "2 states", "not counted"):
        assert part in assumed, part
    assert "activations: 3 B, as told" in str(_plan(activations=3))


def test_one_of_a_thing_is_one() -> None:
    alone = str(_plan(mesh=(1, 8)))
    assert "on 1 replica x 8 shards (1 node of 8)" in alone and "x 1 micro-batch," in alone
    assert "16 nodes of 8" in str(_plan(mesh=(2, 64), micro_batches=2))
    assert "x 2 micro-batches," in str(_plan(micro_batches=2))


def test_a_plan_as_json_and_csv() -> None:
    plan = _plan()
    content = json.loads(plan.to_json())
    assert content["mesh"] == {"replicas": 2, "shards": 8}
    assert content["memory"]["total"] == plan.memory.total == sum(content["memory"]["peak"].values())
    assert content["bottleneck"] == plan.bottleneck
    rows = list(csv.DictReader(io.StringIO(plan.to_csv())))
    assert [row["unit"] for row in rows] == [unit["name"] for unit in content["units"]]
    for one in plan.collectives:
        key = one.kind.replace("-", "_")
        assert sum(int(row[f"{key}_calls"]) for row in rows) == one.calls
        assert sum(float(row[f"{key}_slow"]) for row in rows) == pytest.approx(one.slow)
    assert sum(int(row["shard_bytes"]) for row in rows) == plan.memory.peak["parameters"]


def test_meshes_side_by_side() -> None:
    comparison = compare(_meta(), [(1, 16), (2, 8), (16, 1)], tokens_per_rank=10, memory=40 << 20)
    best = comparison.best
    assert best is not None and best.fits
    marked = [line for line in str(comparison).splitlines() if line.strip().startswith("*")]
    assert len(marked) == 2 and f"{best.replicas} x {best.shards}" in marked[0]
    assert [line for line in str(comparison).splitlines() if line.strip().startswith("!")]
    assert best.tokens_per_second == max(one.tokens_per_second for one in comparison.plans if one.fits)
    assert json.loads(comparison.to_json())["best"] == comparison.plans.index(best)
    assert len(comparison.to_csv().splitlines()) == 4
    nothing = compare(_meta(), [(1, 16)], tokens_per_rank=10, memory=1)
    assert nothing.best is None and "no mesh fits" in str(nothing)
    assert str(Comparison(())) == "nothing to compare"


def test_padding_is_told() -> None:
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.empty(8, 1024, 1024, device="meta"))
    experts.forward = lambda: None
    assert "88% of the shards" in hsdp.plan(experts, mesh=64, tokens_per_rank=1).bottleneck
    for choose in (hsdp.least_padding, lambda param: torch.distributed.tensor.Shard(1)):
        other = hsdp.plan(experts, mesh=64, tokens_per_rank=1, shard_placement_fn=choose)
        assert "padding" not in other.bottleneck
    few = hsdp.plan(experts, mesh=64, tokens_per_rank=1, shard_placement_fn=hsdp.least_padding)
    assert few.units[0].facts.params[0].merged == 2 and few.changed(mesh=(8, 8)).units[0].facts.params[0].merged == 1


def test_the_command_plans_compares_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--preset", "llama3-8b", "--tokens-per-rank", "2,048"]
    assert main([*small, "--replicate", "8", "--shard", "64"]) == 0
    assert "llama3-8b: 8.03 B parameters in 33 units on 8 replicas x 64 shards" in capsys.readouterr().out
    assert main([*small, "--mesh", "1x8", "2x4", "--memory", "80", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 2
    assert main([*small, "--world", "4", "--memory", "1", "--format", "csv"]) == 1
    assert [row["shards"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["4", "2", "1"]
    assert main([*small, "--world", "4", "--reshard", "2", "--memory", "1e-12", "--format", "csv"]) == 1
    assert [row["shards"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["4", "2"]


WRONG = {
    "": "no mesh: pass --replicate 8 --shard 64",
    "--shard 6 --reshard 4": "--reshard 4 does not divide 6 shard ranks",
    "--world 16 --reshard 3": "--reshard 3 divides the shard ranks of no mesh of 16 ranks",
    "--shard 8 --memory -3": "--memory: expected a number above 0, not -3",
    "--shard 8 --memory nan": "--memory: expected a number above 0, not nan",
    "--shard 8 --activations -1": "--activations: expected a number of at least 0, not -1",
    "--shard 8 --slow 0": "--slow: expected a number above 0, not 0",
    "--shard 8 --prefetch -1": "--prefetch: expected a number of at least 0, not -1",
    "--shard x": "--shard: expected a number, not 'x'",
    "--shard 0": "--shard: expected a number of at least 1, not 0",
    "--mesh 8by2": "--mesh: expected RxS, e.g. 8x64, not '8by2'",
    "--shard 8 --machine abacus": "--machine: invalid choice: 'abacus'",
}


@pytest.mark.parametrize("line", WRONG)
def test_the_command_says_in_a_line_what_is_wrong(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--preset", "llama3-8b", *line.split()])
    output = capsys.readouterr().err
    assert ended.value.code == 2
    assert WRONG[line] in output and len(output.splitlines()) == 1, output
    assert not re.search(r"invalid _|plan\(|Traceback", output), "no names of our functions"


COMMANDS = {
    "plan --preset gpt-oss-20b --shard 8": (0, "gpt-oss-20b: 20.9 B parameters"),
    "--help": (0, "usage: python -m hsdp"),
    "plot": (2, "usage: python -m hsdp"),
}


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> None:
    monkeypatch.setattr(sys, "argv", ["hsdp", *line.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hsdp", run_name="__main__")
    output = capsys.readouterr()
    assert (ended.value.code, (output.out or output.err).startswith(COMMANDS[line][1])) == (COMMANDS[line][0], True), output


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no mesh": ({"mesh": None}, ValueError, r"mesh=\(8, 64\)"),
    "three axes": ({"mesh": (2, 2, 2)}, ValueError, r"expected \(replicas, shards\)"),
    "no ranks": ({"mesh": (2, 0)}, ValueError, r"expected \(replicas, shards\)"),
    "half a rank": ({"mesh": 8.0}, ValueError, r"expected \(replicas, shards\)"),
    "a bandwidth for links": ({"link": 45e9}, TypeError, r"link=45000000000.0\).*Link\(fast"),
    "no tokens": ({"tokens_per_rank": 0}, ValueError, "tokens_per_rank=0"),
    "half a batch": ({"micro_batches": 0.5}, ValueError, "micro_batches=0.5"),
    "no flops": ({"flops": 0}, ValueError, "flops"),
    "parts that do not divide": ({"reshard_after_forward": 3}, ValueError, "'blocks|root.*does not divide 8"),
    "a pattern without a match": ({"units": "layers.*"}, ValueError, "matches nothing"),
    "a policy that is none": ({"mp_policy": torch.bfloat16}, TypeError, "mp_policy=torch.bfloat16"),
    "a word": ({"reshard_after_forward": "yes"}, TypeError, "reshard_after_forward='yes'"),
    "a placement that is none": ({"shard_placement_fn": lambda p: 0}, TypeError, "Shard"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_make_no_sense_are_refused(what: str) -> None:
    options, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        _plan(**options)


def test_all_plans_of_a_comparison_get_what_iterators_have() -> None:
    model, meshes = _meta(), [(2, 8), (1, 16)]
    given: dict[str, list[Any]] = {
        "ignored_params": list(model.embedding.parameters()),  # type: ignore[union-attr,operator]
        "replicate_params": list(model.norm.parameters()),  # type: ignore[union-attr,operator]
        "units": ["blocks.*", "head"],
    }
    once = compare(model, iter(meshes), tokens_per_rank=8, **{name: iter(value) for name, value in given.items()})
    assert once == compare(model, meshes, tokens_per_rank=8, **given)


def test_a_model_must_be_one_and_units_of_a_sharded_one_are_given() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        hsdp.plan("llama3-8b", mesh=8, tokens_per_rank=1)  # type: ignore[arg-type]
    with fake_world(4) as env:
        model = Transformer()
        hsdp.shard_units(model, "blocks.*", mesh=env.mesh(4), root=False)
        with pytest.raises(ValueError, match="none around them"):
            hsdp.plan(model, tokens_per_rank=1)
        hsdp.fully_shard(model, mesh=env.mesh(4))
        with pytest.raises(ValueError, match=r"units=.*sharded already"):
            hsdp.plan(model, tokens_per_rank=1, units="blocks.*")
        elsewhere = hsdp.plan(model, mesh=(8, 64), tokens_per_rank=1, comm_policy=CommPolicy(prefetch=3))
        assert elsewhere.shards == 64 and elsewhere.units[1].facts.comm_policy.prefetch == 3

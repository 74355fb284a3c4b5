"""`python -m hsdp doctor`: it says what it measured and how to tell the planner, and it finds a step that is wrong."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hsdp
from hsdp import debug
from hsdp.__main__ import main
from hsdp.doctor import command as doctor
from hsdp.doctor import measure, thresholds
from hsdp.planning import Link
from hsdp.planning.command import main as plan
from hsdp.policies import CommPolicy
from hsdp.schedule.module_hooks import own_state
from hsdp.weights.full_params import full_params
from tests.support.rig import Pool, RankEnv

CPU = torch.device("cpu")


def _examine(env: RankEnv, hosts: list[str] | None = None) -> list[str]:
    quick = mock.patch.object(measure, "REPEATS", 1)
    named = mock.patch.object(measure, "_hosts", lambda: hosts or ["here"] * env.world_size)
    with quick, named:
        lines, healthy = doctor.examine(CPU)
    assert healthy, lines
    return lines


def _told(lines: list[str]) -> tuple[Link, str]:
    text = "\n".join(lines)
    link = eval(re.search(r"link=hsdp\.planning\.(Link\(.*?\))", text)[1], {"Link": Link})  # type: ignore[index]
    return link, re.search(r"python -m hsdp plan \.\.\. (.*)", text)[1]  # type: ignore[index]


def test_ranks_of_one_node(pool4: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    lines = pool4.run(_examine)[0]
    text = "\n".join(lines)
    assert "4 ranks on 1 node, backend gloo" in text and "on 2 x 2 ranks equal those of one device" in text
    assert "links inside a node, 4 ranks:" in text and "between nodes" not in text and lines[-1] == "all is well"
    link, options = _told(lines)
    assert link.fast == link.slow > 0 and link.ranks_per_node == 4 and 0 < link.latency < 10
    # What it says to set is what the planner takes.
    assert plan(["--preset", "llama3-8b", "--shard", "4", *options.split()]) == 0
    assert "backend gloo" in capsys.readouterr().out
    call = next(line.strip() for line in lines if "hsdp.plan(" in line)
    given = call.replace("...", "nn.Linear(4, 4), mesh=(1, 4), tokens_per_rank=4")
    planned = eval(given, {"hsdp": hsdp, "nn": nn}).assumptions
    assert (planned.backend, planned.machine, planned.link) == ("gloo", "CPU core", link)


def test_ranks_of_two_nodes(pool4: Pool) -> None:
    """Host names stand in for hosts: then links inside of a "node" and between two are measured apart."""
    lines = pool4.run(_examine, ["a", "b", "a", "b"])[0]
    text = "\n".join(lines)
    assert "links inside a node, 2 ranks:" in text and "links between nodes, 2 ranks:" in text
    assert _told(lines)[0].ranks_per_node == 2
    uneven = "\n".join(pool4.run(_examine, ["a", "a", "a", "b"])[0])
    assert "different numbers of ranks [3, 1]" in uneven and "links between nodes," not in uneven


def _slow_memory(env: RankEnv) -> list[str]:
    with mock.patch.object(measure, "_anew", lambda device: 4.8):
        return _examine(env)


def test_memory_that_comes_page_by_page_is_told(pool2: Pool) -> None:
    lines = pool2.run(_slow_memory)[0]
    assert any("4.8 times as long" in line and "THP_MEM_ALLOC_ENABLE=1" in line for line in lines), lines
    assert measure._anew(torch.device("meta")) == 1.0
    assert 0 < pool2.run(_anew)[0] < math.inf


def _anew(env: RankEnv) -> float:
    with mock.patch.object(measure, "REPEATS", 1):
        return measure._anew(CPU)


def _wrong_step(env: RankEnv) -> list[str]:
    with mock.patch.object(measure, "REPEATS", 1), mock.patch.object(doctor, "step_difference", lambda device: 1e-3):
        lines, healthy = doctor.examine(CPU)
    assert not healthy
    return lines


def test_a_wrong_step_is_told(pool2: Pool) -> None:
    lines = pool2.run(_wrong_step)[0]
    assert any("DIFFER FROM those of one device (by 1.0e-03)" in line for line in lines)
    assert lines[-2].startswith("WRONG: a step gives parameters that differ") and lines[-1] == "1 thing to put right"


def _spoiled(env: RankEnv) -> float:
    """One rank's gradients are wrong in the sixth digit, sharded or not; the twins of the others are right."""
    assert doctor.step_difference(CPU) < 1e-14
    model = doctor._model

    def build(device: torch.device) -> nn.Sequential:
        built = model(device)
        if env.rank == 1:
            for layer in built:
                layer.register_forward_hook(lambda layer, args, output: output * (1 + 1e-6))
        return built

    with mock.patch.object(doctor, "_model", build):
        return doctor.step_difference(CPU)


def test_a_step_that_is_a_little_wrong_is_seen(pool2: Pool) -> None:
    assert all(difference > doctor.TOLERANCE for difference in pool2.run(_spoiled))


def _loses_a_parameter(env: RankEnv, rank: int) -> None:
    """The last parameter is not a number: no maximum must drop that."""

    @contextmanager
    def broken(model: nn.Module) -> Iterator[nn.Module]:
        with full_params(model):
            if env.rank == rank:
                list(model.parameters())[-1].fill_(torch.nan)
            yield model

    with mock.patch.object(doctor, "full_params", broken):
        assert doctor.step_difference(torch.device("cpu")) == float("inf")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_gives_no_numbers_is_wrong(pool2: Pool, rank: int) -> None:
    pool2.run(_loses_a_parameter, rank)


def test_a_process_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REPEATS", 1)
    monkeypatch.setattr(debug, "ON", True)
    assert main(["doctor", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert re.match(r"hsdp .*, python 3\.\d+\.\d+, torch 2\.", output)
    assert "hint: one process has no links; torchrun" in output and "hint: HSDP_DEBUG=1 is set" in output
    assert "Link(" not in output and not dist.is_initialized()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x': expected a number"),
        ({"RANK": "0"}, "WORLD_SIZE expected, but not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "the ranks do not meet"),
    ],
)
def test_ranks_that_do_not_meet_are_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str], words: str
) -> None:
    monkeypatch.setattr(doctor, "MEETING", timedelta(seconds=1))
    monkeypatch.setattr(os, "environ", {**os.environ, **environment})
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--device", "cpu"])
    output = capsys.readouterr().err
    assert left.value.code == 2 and words in output and "MASTER_ADDR and MASTER_PORT" in output


@pytest.mark.parametrize(("name", "told"), [("HSDP_DEBUG", "false"), ("HSDP_SLOW", "-1"), ("HSDP_SLOW", "nan")])
def test_odd_values_in_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, told: str) -> None:
    monkeypatch.setenv(name, told)
    with pytest.raises(ValueError, match=f"{name}='{told}': expected"):
        (debug._switch if name == "HSDP_DEBUG" else debug._seconds)(name)


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False), pytest.raises(SystemExit):
        main(["doctor", "--device", "cuda"])
    assert "--device cuda: PyTorch finds no CUDA device" in capsys.readouterr().err


def test_versions_outside_of_the_range_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["torch<2.14,>=2.11", "numpy; extra == 'x'"])
    for version, wrong in (("2.10.1", True), ("2.11.0+cpu", False), ("2.13.2", False), ("2.14.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        line, mistakes = doctor._versions()
        assert line.startswith("hsdp 1.0, ") and bool(mistakes) == wrong, version


def _tuned(env: RankEnv) -> tuple[list[str], list[tuple[bool, bool]]]:
    """What `--tune` says, and which way the weights of each unit went that it timed."""
    ways: list[tuple[bool, bool]] = []
    medians = thresholds._medians

    def noting(actions: list[Any], calls: int, device: torch.device) -> list[float]:
        models = [next(c.cell_contents for c in a.__closure__ if isinstance(c.cell_contents, nn.Module)) for a in actions]
        for model in models:
            pieces = {
                (piece.direct_gather, piece.direct_reduce)
                for group in own_state(model).unit.dtype_groups
                for piece in group.layout.pieces
            }
            assert len(pieces) == 1, "equal weights go the same way"
            ways.append(pieces.pop())
        return medians(actions, calls, device)

    quick = mock.patch.object(measure, "REPEATS", 1), mock.patch.object(thresholds, "ROUNDS", 1)
    few = mock.patch.object(thresholds, "SIZES", (1 << 12, 1 << 14))
    with quick[0], quick[1], few, mock.patch.object(thresholds, "_medians", noting):
        lines, healthy = doctor.examine(CPU, tune=True)
    assert healthy, lines
    return lines, ways


def test_tuning_times_both_ways_and_says_what_to_paste(pool2: Pool) -> None:
    """The policy is that of the table above it, the same on all ranks, and `fully_shard` takes it as it is printed."""
    (lines, ways), (others, _) = pool2.run(_tuned)
    # Gathers packed and direct, then steps with reductions packed and direct, for each size.
    assert ways == 2 * [(False, False), (True, False), (True, False), (True, True)]
    text = next(line for line in lines if "comm_policy=" in line)
    assert text in others
    policy = eval(re.search(r"hsdp\.(CommPolicy\(.*?\))", text)[1], {"CommPolicy": CommPolicy})  # type: ignore[index]
    rows = [re.fullmatch(r" *(\d+) KiB" + 4 * r" +([\d.]+)", line) for line in lines]
    times = [tuple(map(float, row.groups())) for row in rows if row is not None]
    assert [row[0] for row in times] == [4, 16] and all(seconds > 0 for row in times for seconds in row)
    sizes = {1 << 12, 1 << 14, 1 << 15}
    assert {policy.direct_gather_bytes, policy.direct_reduce_bytes} <= sizes
    assert any("by default 262144 and 1048576 with gloo" in line for line in lines)


def test_a_weight_goes_directly_from_where_that_pays_for_all_larger_ones() -> None:
    slower, faster = (1.0, 1.1), (1.0, 0.9)
    assert thresholds.threshold([(4, slower), (16, faster), (64, faster)]) == 16
    assert thresholds.threshold([(4, faster), (16, slower), (64, faster)]) == 64, "a size that pays below one that does not"
    assert thresholds.threshold([(4, faster), (16, faster)]) == 4
    assert thresholds.threshold([(4, faster), (16, slower)]) == 32, "above all that was measured"


def test_shards_lie_inside_of_nodes_where_nodes_are_alike() -> None:
    def rates(*nodes: int) -> measure.Rates:
        return measure.Rates(list(nodes), 1.0, 1.0, 1.0, None, None)

    assert thresholds.shard_ranks(rates(8, 8)) == 8
    assert thresholds.shard_ranks(rates(4)) == 4
    assert thresholds.shard_ranks(rates(3, 1)) == 4, "groups of one size for all"
    assert thresholds.shard_ranks(rates(1, 1)) == 2, "a rank alone has no links"

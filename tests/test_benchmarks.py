"""The benchmarks' machinery, and that each contender still runs; never how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import gpu, gpu_ranks, optimizer, tracing
from benchmarks.harness import Contender, Plan, Rounds, Row, Step, compare, report
from benchmarks.step import Sizes, build
from tests.support.rig import Pool, RankEnv


def test_ratios_are_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("mesh 2", Rounds("a", [1.0, 4.0, 3.0], [1.0] * 3), Rounds("b", [2.0, 2.0, 3.0], [2.0] * 3))
    report("nothing", [row], {"rounds": 3}, str(tmp_path / "out.json"))
    assert "mesh 2    0.50   1.00   2.00    0.50   0.50   0.50  3000.0, 2000.0" in capsys.readouterr().out
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["rows"][0]["wall_ratio"] == {"min": 0.5, "median": 1.0, "max": 2.0}
    assert content["settings"] == {"rounds": 3}


def _make_writer(path: str, letter: str, mesh: DeviceMesh) -> Step:
    def step() -> None:
        if mesh.get_rank() == 0:
            with open(path, "a") as file:
                file.write(letter)

    return step


def test_contenders_take_turns_in_fresh_processes(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    a, b = (Contender(letter, partial(_make_writer, str(path), letter)) for letter in "ab")
    row = compare("mesh 2", (2,), a, b, Plan(rounds=2, steps=3, warmup=1))
    assert path.read_text() == "ab" + "aaabbb" * 2
    assert (row.a.name, len(row.a.wall), len(row.b.cpu)) == ("a", 2, 2)


def _run_step(env: RankEnv, library: str) -> None:
    sizes = Sizes(vocab=16, dim=8, heads=2, hidden=16, layers=1, rows=1, length=4)
    step = build(library, {}, sizes, env.mesh(2))
    step()
    step()


@pytest.mark.parametrize("library", ["hsdp", "fsdp2"])
def test_step_runs(pool2: Pool, library: str) -> None:
    pool2.run(_run_step, library)


def _check_verbs(env: RankEnv) -> list[str]:
    alone = env.mesh((2, 1)).get_group("shard")
    return gpu.check_verbs(alone, torch.device("cpu"))


def test_the_gpu_benchmark_s_rehearsal(pool2: Pool) -> None:
    device = torch.device("cpu")
    verbs = pool2.run(_check_verbs)[0]
    assert len(verbs) == 10 and "reduce-scatter of two dtypes" in verbs
    steps = [vars(gpu.measure_steps(library, 8, gpu.TINY, device)) for library in gpu.LIBRARIES]
    overlap = gpu.measure_overlap(gpu.TINY, device)
    report = gpu.table({"verbs": verbs, "steps": steps, "overlap": vars(overlap)})
    assert all(library in report for library in gpu.LIBRARIES) and "10 paths" in report
    assert "all-reduce" in overlap.summary and overlap.delayed_ms > 0


def _measure_ranks(env: RankEnv) -> list[dict[str, object]]:
    return [gpu_ranks.measure(one, gpu.TINY, env.mesh(2), torch.device("cpu")) for one in ("hsdp", "fsdp2")]


def test_the_rehearsal_of_ranks_that_share_a_gpu(pool2: Pool) -> None:
    ours, theirs = pool2.run(_measure_ranks)[0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-2)
    assert "fsdp2" in gpu_ranks.table([{"mesh": "2", **ours}, {"mesh": "2", **theirs}])


def test_the_optimizer_s_contenders_compute_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "UNITS", 2)
    optimizer.main(["--kind", "foreach", "--dim", "16", "--rounds", "1", "--steps", "1"])
    assert "foreach" in capsys.readouterr().out


def test_the_tracing_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    tracing.main(["--units", "2", "--params", "2", "--rounds", "1", "--steps", "1"])
    assert "step foreach" in capsys.readouterr().out


def test_a_step_changes_package_no_more_often_than_fsdp2s_changes_file(tmp_path: Path) -> None:
    """Nor file more often than when all files lay in one folder, which was 200 and 362 times; the benchmark's units travel
    packed, and are unpacked before gathers ahead, which takes backward a move more for two of them.

    In a process of its own: Python's profiler watches it, and debug mode would add its calls.
    """
    out = tmp_path / "moves.json"
    environment = os.environ | {"HSDP_DEBUG": "0"}
    subprocess.run([sys.executable, "-m", "benchmarks.moves", "--json", str(out)], env=environment, check=True, timeout=120)
    rows = json.loads(out.read_text())["rows"]
    packages = {row["pass"]: row["packages"] for row in rows if row["library"] == "hsdp"}
    files = {row["pass"]: row["moves"] for row in rows if row["library"] == "FSDP2"}
    assert packages.keys() == files.keys() == {"forward", "backward"}
    assert all(packages[name] <= files[name] for name in files), (packages, files)
    moves = {row["pass"]: row["moves"] for row in rows if row["library"] == "hsdp"}
    assert moves["forward"] <= 200 and moves["backward"] <= 364, moves

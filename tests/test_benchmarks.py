"""The benchmarks' machinery, and that each contender still runs; never how fast."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness import Contender, Plan, Rounds, Row, Step, compare, report
from benchmarks.step import Sizes, build
from tests.rig import Pool, RankEnv


def test_ratios_are_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("mesh 2", Rounds("a", [1.0, 4.0, 3.0], [1.0] * 3), Rounds("b", [2.0, 2.0, 3.0], [2.0] * 3))
    report("nothing", [row], {"rounds": 3}, str(tmp_path / "out.json"))
    assert "mesh 2    0.50   1.00   2.00    0.50   0.50   0.50  3000.0, 2000.0" in capsys.readouterr().out
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["rows"][0]["wall_ratio"] == {"min": 0.5, "median": 1.0, "max": 2.0}
    assert told["settings"] == {"rounds": 3}


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

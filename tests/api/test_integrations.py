"""`replace_fsdp2`: who calls FSDP2's functions gets hsdp's; `python -m hsdp.integrations` likewise."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch import nn

import hsdp
from hsdp.integrations import replace_fsdp2
from hsdp.integrations.__main__ import USAGE, main
from tests.support.rig import Pool, RankEnv

NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


def test_names_are_exchanged_wherever_they_are_and_put_back() -> None:
    torchs = {name: getattr(fsdp, name) for name in NAMES}
    library = types.ModuleType("a_library")
    vars(library).update(torchs)
    vars(library)["kept"] = torchs["fully_shard"]
    ours = types.ModuleType("a_script")
    vars(ours)["fully_shard"] = hsdp.fully_shard
    sys.modules.update({"a_library": library, "a_script": ours})
    try:
        replace_fsdp2()
        for name in NAMES:
            assert getattr(fsdp, name) is getattr(library, name) is getattr(hsdp, name)
        assert vars(library)["kept"] is torchs["fully_shard"]
        replace_fsdp2()  # again is the same
        replace_fsdp2(False)
        assert {name: getattr(fsdp, name) for name in NAMES} == {name: vars(library)[name] for name in NAMES} == torchs
        assert vars(ours)["fully_shard"] is hsdp.fully_shard, "it was never FSDP2's"
    finally:
        replace_fsdp2(False)
        del sys.modules["a_library"], sys.modules["a_script"]


def _both(env: RankEnv) -> None:
    before = fsdp.fully_shard(nn.Linear(4, 4), mesh=env.mesh((2,)))
    replace_fsdp2()
    try:
        after = fsdp.fully_shard(nn.Linear(4, 4), mesh=env.mesh((2,)))
        fsdp.register_fsdp_forward_method(after, "extra_repr")
        assert isinstance(after, hsdp.HSDPModule) and not isinstance(before, hsdp.HSDPModule)
        assert isinstance(after, fsdp.FSDPModule) and isinstance(before, fsdp.FSDPModule)
        for model in (before, after):
            model.set_requires_gradient_sync(True)
            model(torch.ones(2, 4)).sum().backward()
            assert torch.equal(model.bias.grad.full_tensor(), torch.full((4,), 2.0))  # type: ignore[union-attr]
    finally:
        replace_fsdp2(False)


def test_models_of_both_work_side_by_side(pool2: Pool) -> None:
    pool2.run(_both)


SCRIPT = """
import sys
from torch.distributed.fsdp import fully_shard
from beside import name
print(__name__, fully_shard.__module__, name, sys.argv)
"""


@pytest.mark.parametrize("how", [["train.py"], ["-m", "train"]])
def test_a_script_runs_as_it_is(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("name = 'neighbour'")
    command = [sys.executable, "-m", "hsdp.integrations", *how, "--lr", "1"]
    root = str(Path(hsdp.__file__).parents[1])
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True, timeout=120, check=True
    )
    output = done.stdout.split(maxsplit=3)
    assert output[:3] == ["__main__", "hsdp.api.fully_shard", "neighbour"]
    assert "train" in output[3] and "'--lr', '1'" in output[3]


SPAWNING = """
import sys
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

def work(rank, deeper):
    print(rank, __name__, fully_shard.__module__, flush=True)
    if deeper:
        mp.start_processes(work, (False,), nprocs=1, start_method=sys.argv[1])

if __name__ == "__main__":
    mp.start_processes(work, (True,), nprocs=1, start_method=sys.argv[1])
    if len(sys.argv) > 2:
        import hsdp.integrations
        hsdp.integrations.replace_fsdp2(False)
        mp.start_processes(work, (False,), nprocs=1, start_method=sys.argv[1])
"""


@pytest.mark.beside
@pytest.mark.parametrize(("how", "method"), [(["train.py"], "spawn"), (["-m", "train"], "forkserver")])
def test_processes_that_a_script_starts_have_hsdp_too(tmp_path: Path, how: list[str], method: str) -> None:
    """They import the script anew, and theirs do. hsdp is found by the parent's path alone."""
    (tmp_path / "train.py").write_text(SPAWNING)
    root = str(Path(hsdp.__file__).parents[1])
    start = f"import os, sys; sys.path.insert(0, {root!r}); sys.path.insert(0, os.getcwd()); "
    start += f"from hsdp.integrations.__main__ import main; sys.exit(main({[*how, method]}))"
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["0 __mp_main__ hsdp.api.fully_shard"] * 2, done.stderr


@pytest.mark.beside
def test_processes_have_torchs_again_where_a_script_has_put_it_back(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNING)
    command = [sys.executable, "-m", "hsdp.integrations", "train.py", "spawn", "back"]
    root = str(Path(hsdp.__file__).parents[1])
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True, timeout=120, check=True
    )
    output = [line.split()[2] for line in done.stdout.splitlines()]
    assert output[:2] == ["hsdp.api.fully_shard"] * 2 and output[2].startswith("torch."), done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no safe path")
def test_a_safe_path_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.path[:2])")
    command = [sys.executable, "-m", "hsdp.integrations", "train.py"]
    root = str(Path(hsdp.__file__).parents[1])
    env = {"PYTHONPATH": f"{tmp_path / 'first'}:{root}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == repr([str(tmp_path / "first"), root])


@pytest.mark.parametrize("what", [["missing.py"], ["-m", "missing"], ["-m", "missing.inside"], ["-m", "json.missing"]])
def test_what_is_missing_is_named(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(what) == 2
    said = capsys.readouterr().err
    assert f"there is no {'module' if what[0] == '-m' else 'script'} {what[-1]!r}" in said and USAGE in said


def test_without_a_script_it_says_how() -> None:
    command = [sys.executable, "-m", "hsdp.integrations"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and USAGE in done.stderr

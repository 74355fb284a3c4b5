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
    told = done.stdout.split(maxsplit=3)
    assert told[:3] == ["__main__", "hsdp.api.fully_shard", "neighbour"]
    assert "train" in told[3] and "'--lr', '1'" in told[3]


@pytest.mark.parametrize("what", [["missing.py"], ["-m", "missing"], ["-m", "missing.inside"], ["-m", "json.missing"]])
def test_what_is_missing_is_named(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(what) == 2
    said = capsys.readouterr().err
    assert f"there is no {'module' if what[0] == '-m' else 'script'} {what[-1]!r}" in said and USAGE in said


def test_without_a_script_it_says_how() -> None:
    command = [sys.executable, "-m", "hsdp.integrations"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and USAGE in done.stderr

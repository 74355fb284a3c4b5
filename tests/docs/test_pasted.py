"""A new user's way, with HSDP_FULL=1: a fresh clone, a fresh environment, every command of README and tutorial in a shell.

The last set-up command runs all tests; here pytest is told, through its environment, to run one file of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hsdp
from tests.docs.documents import README, ROOT, TUTORIAL, blocks
from tests.docs.test_documents import losses
from tests.support.share import FULL

MINUTES = 60.0


def shell(line: str, cwd: Path, minutes: float = 30, **env: str) -> str:
    """What a command prints that is pasted into bash; commands sent to the background are waited for."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "HSDP_DEBUG")}
    done = subprocess.run(
        ["bash", "-e", "-c", f"{line}\nwait"],
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=minutes * MINUTES,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone of this commit and of what is not committed yet would hold, and nothing else."""
    if not FULL:
        pytest.skip("takes the network and ten minutes: HSDP_FULL=1")
    target = tmp_path_factory.mktemp("clone")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def test_readme_and_tutorial_pasted_into_a_shell(clone: Path) -> None:
    content: dict[str, list[str]] = {}
    for page in (README, TUTORIAL):
        for block in blocks(page):
            if block.title is not None:
                (clone / block.title).write_text(block.text)
            elif block.language == "sh":
                line = block.text
                if page == TUTORIAL:  # each block gets a shell of its own, so what the first one did is said again
                    line = f"source .venv/bin/activate\n{line}"
                content.setdefault(page.name, []).append(shell(line, clone, PYTEST_ADDOPTS="tests/buffers/test_layout.py"))
            else:
                assert not block.language, f"{block} is neither saved nor pasted"
    main_job, tests, script = content["README.md"]
    assert "sample:" in main_job and "held" in main_job, "the main job came to its end"
    assert "passed" in tests or "100%" in tests
    assert "step 9: " in script and "step 19: " in script, "trained, saved and went on"
    alone, sharded, hybrid, _, resumed, looked_at, nodes = content["tutorial.md"][1:]
    for output in (sharded, hybrid, resumed, nodes):
        assert losses(output)[-1] == pytest.approx(losses(alone)[len(losses(output)) - 1], abs=2e-3)
    assert "all-gather" in looked_at
    assert (clone / "trace.svg").stat().st_size > 1000


def test_wheel_and_sdist_build_and_install(clone: Path, tmp_path: Path) -> None:
    """Both are built, hold what they should and nothing else, and work when they are installed."""
    python = Path(sys.executable)
    shell(f"python3 -m venv {tmp_path}/build && {tmp_path}/build/bin/pip install -q build twine", clone)
    shell(f"{tmp_path}/build/bin/python -m build -o {tmp_path}/dist .", clone)
    shell(f"{tmp_path}/build/bin/twine check --strict {tmp_path}/dist/*", clone)
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        inside = set(file.namelist())
    sources = {path.relative_to(clone).as_posix() for path in (clone / "hsdp").rglob("*.py")} | {"hsdp/py.typed"}
    assert sources <= inside and {name.split("/")[0].split("-")[0] for name in inside} == {"hsdp"}
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
        assert {*sources, "README.md", "LICENSE", "pyproject.toml"} <= names
    for number, built in enumerate((wheel, sdist)):
        # torch is this environment's own: what is tried is hsdp's metadata and files, not torch's download.
        target = tmp_path / f"installed{number}"
        shell(f"{python} -m pip install -q --no-deps --target {target} {built}", tmp_path)
        run = "import hsdp; print(hsdp.__file__, hsdp.__version__)"
        output = shell(f'{python} -c "{run}"', tmp_path, PYTHONPATH=str(target))
        assert output.split() == [f"{target}/hsdp/__init__.py", hsdp.__version__]
        assert "plan" in shell(f"{python} -m hsdp --help", tmp_path, PYTHONPATH=str(target))
        metadata = next(target.glob("hsdp-*.dist-info/METADATA")).read_text()
        (bounds,) = re.findall(r'"torch(>=[\d.]+),(<[\d.]+)"', (clone / "pyproject.toml").read_text())
        assert "Typing :: Typed" in metadata and f"Requires-Dist: torch{bounds[1]},{bounds[0]}" in metadata

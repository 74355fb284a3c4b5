"""Scripts written for FSDP2 run with hsdp when only the module that they import from changes: with the same losses."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.rig import Pool, RankEnv

SCRIPTS = Path(__file__).parent / "fsdp2_scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("[a-z]*.py"))


def _load(name: str, library: str) -> ModuleType:
    """The script, with "from torch.distributed.fsdp import" made "from `library` import" and nothing else changed."""
    path = SCRIPTS / f"{name}.py"
    source, count = re.subn(r"(?m)^from torch\.distributed\.fsdp import", f"from {library} import", path.read_text())
    assert count == 1, f"{name} imports once from torch.distributed.fsdp"
    spec = importlib.util.spec_from_loader(f"{name}_with_{library.replace('.', '_')}", None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def _run(env: RankEnv, name: str, dtype: torch.dtype, tolerance: float) -> None:
    theirs = _load(name, "torch.distributed.fsdp").main(dtype)
    ours = _load(name, "hsdp").main(dtype)
    assert theirs[0] != theirs[-1] and all(map(math.isfinite, theirs)), "it trains"
    differ = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if not math.isclose(*pair, rel_tol=tolerance)]
    assert not differ, f"{name}: {[(ours[i], theirs[i]) for i in differ]} at {differ} of {len(ours)}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float64", "the script's own"])
def test_losses_are_those_of_fsdp2(pool4: Pool, name: str, dtype: str) -> None:
    if dtype == "float64":
        pool4.run(_run, name, torch.float64, 1e-11, timeout=120)
    else:
        pool4.run(_run, name, torch.bfloat16 if name == "mixed" else torch.float32, 1e-6, timeout=120)

"""accelerate, transformers and TRL around hsdp train as around FSDP2, and as one process. With the extra `ecosystem`."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.support.torchrun import torchrun

NEEDS = {
    "accelerate": ["accelerate", "transformers"],
    "efficient": ["accelerate", "transformers"],
    "trainer": ["accelerate", "transformers"],
    "trainer_bf16": ["accelerate", "transformers"],
    "sft": ["trl", "datasets"],
    "sft_lora": ["trl", "datasets", "peft"],
    "dpo": ["trl", "datasets"],
    "from_pretrained": ["transformers"],
}
WITHOUT_TWIN = ("trainer_bf16", "dpo")
CASES = [
    *((recipe, 2) for recipe in NEEDS),
    *((recipe, 4) for recipe in ("accelerate", "trainer", "from_pretrained")),  # HSDP 2 x 2
]


def _missing(recipe: str) -> str | None:
    missing = [package for package in NEEDS[recipe] if importlib.util.find_spec(package) is None]
    if missing:
        return f"{', '.join(missing)} not installed: pip install 'hsdp[ecosystem]'"
    if recipe == "from_pretrained" and importlib.util.find_spec("transformers.distributed.fsdp") is None:
        return "this transformers shards no model by itself: 5.23 does"
    return None


@pytest.mark.parametrize(("recipe", "ranks"), CASES)
def test_it_trains_and_resumes_as_with_fsdp2(recipe: str, ranks: int) -> None:
    if (reason := _missing(recipe)) is not None:
        pytest.skip(reason)
    printed = torchrun("tests.api.huggingface_run", recipe, ranks=ranks, timeout=600)
    content: dict[str, Any] = json.loads(next(line for line in printed.splitlines() if line.startswith('{"plain"')))
    mesh = "2 x 2" if ranks == 4 else "2"
    assert (content["hsdp"]["kind"], content["FSDP2"]["kind"]) == (f"hsdp {mesh}", f"FSDP2 {mesh}")
    assert len(content["plain"]["losses"]) == len(set(content["plain"]["losses"])) == 10
    assert content["hsdp"]["losses"] == pytest.approx(content["FSDP2"]["losses"], rel=3e-7)  # models give them in fp32
    for what in ("norms", "params", "resumed", "evaluated"):
        if content["hsdp"].get(what):
            near = 1e-9 if what in ("norms", "params") else 3e-7  # losses
            assert content["hsdp"][what] == pytest.approx(content["FSDP2"][what], rel=near), what
            if recipe not in WITHOUT_TWIN:
                assert content["hsdp"][what] == pytest.approx(content["plain"][what], rel=1e-5), what
    if recipe not in WITHOUT_TWIN:
        assert content["hsdp"]["losses"] == pytest.approx(content["plain"]["losses"], rel=1e-6)
    half = content["hsdp"]["losses"][-len(content["hsdp"]["resumed"]) :]
    assert content["hsdp"]["resumed"] == pytest.approx(half, rel=3e-7)

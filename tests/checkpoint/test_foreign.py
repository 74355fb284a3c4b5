"""Checkpoints made by torchtitan, Lightning and accelerate themselves load bit for bit. With the extra `ecosystem`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.torchrun import torchrun


@pytest.mark.parametrize("library", ["torchtitan", "lightning", "accelerate"])
def test_a_checkpoint_of_the_library_itself_loads(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'hsdp[ecosystem]'")
    told = torchrun("tests.checkpoint.foreign_run", library)
    assert f"{library} " in told and "settings equal" in told

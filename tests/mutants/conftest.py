"""Processes for mutants alone: what a planted bug does to their memory must not show in other tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import device_pool
from tests.support.rig import Pool


@pytest.fixture(scope="package")
def pool2() -> Iterator[Pool]:
    """Two ranks, for all files of this folder."""
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="package")
def pool4() -> Iterator[Pool]:
    """Four ranks."""
    with Pool(4) as pool:
        yield pool


@pytest.fixture(scope="package")
def device2() -> Iterator[Pool]:
    """Two ranks on the emulated device."""
    yield from device_pool(2)


@pytest.fixture(scope="package")
def device4() -> Iterator[Pool]:
    """Four ranks on the emulated device."""
    yield from device_pool(4)

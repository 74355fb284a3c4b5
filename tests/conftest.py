"""Fixtures every test may use, and what is set before torch is imported."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the workers: ranks share few cores

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

import hsdp.debug  # noqa: F401  # as it is outside of tests: this process counts copies and bytes
from benchmarks import still_group
from tests.support import beside
from tests.support import device as emulator
from tests.support.rig import Pool
from tests.support.share import spread
from tests.support.worker import restore_globals

torch.set_num_threads(1)
os.environ.setdefault("HSDP_DEBUG", "1")  # inherited by the workers: a silent read of freed parameters becomes NaN

# Deterministic, so that a red CI run can be repeated, and without deadlines, because machines are shared.
settings.register_profile("hsdp", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("hsdp")


def pytest_configure(config: pytest.Config) -> None:
    """A pytest that runs beside another one reports to it."""
    beside.configure(config)


@pytest.hookimpl(trylast=True)  # behind `-k`: what is asked for by name is run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves combinations of parameters out: every value has its test. What runs beside the others is waited for last."""
    chosen, others = (items, []) if beside.IS_SECOND else spread(items)
    items[:] = sorted(chosen, key=beside.is_beside)
    if others:
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Takes the tests' modules out of the garbage collector's sight, and begins what runs meanwhile."""
    gc.collect()
    gc.freeze()
    if any("device" in item.nodeid for item in session.items) and emulator.why_not() is None:
        emulator.start_build()
    if any("test_benchmarks" in item.nodeid for item in session.items):
        still_group.start_build()
    if not session.config.option.collectonly:
        beside.begin(session)


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap() -> Iterator[None]:
    """What the libraries that a module of tests imported have made is not searched for garbage again and again."""
    yield
    gc.collect()  # first: what is frozen is never collected
    gc.freeze()


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    """Two ranks; the processes start when the first test runs something on them."""
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four ranks; the processes start when the first test runs something on them."""
    with Pool(4) as pool:
        yield pool


def device_pool(world_size: int) -> Iterator[Pool]:
    """What fixtures yield: ranks on the emulated device, or the reason why it cannot be had here."""
    if (reason := emulator.why_not()) is not None:
        pytest.skip(reason)
    emulator.build()
    with Pool(world_size, device=emulator.NAME) as pool:
        yield pool


@pytest.fixture(scope="session")
def device2() -> Iterator[Pool]:
    """Two ranks on the emulated device."""
    yield from device_pool(2)


@pytest.fixture(scope="session")
def device4() -> Iterator[Pool]:
    """Four ranks on the emulated device."""
    yield from device_pool(4)


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """No test leaves a process group or changed torch globals behind in pytest's own process."""
    torch.manual_seed(0)
    yield
    left = restore_globals()
    if dist.is_initialized():
        dist.destroy_process_group()
        left.append("a default process group")
    assert not left, "the test left behind: " + ", ".join(left)

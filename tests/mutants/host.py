"""Bugs planted in collectives through memory that ranks of a host share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import Tensor

from hsdp.comm import host_memory
from hsdp.comm.host_memory import HostMemory, Reading
from tests.comm import test_host_memory as host
from tests.mutants.planting import Check, mutant, replaced

READ_LATE = Check(host._slow_reader)


@mutant(READ_LATE, kill="was written for post")
def writes_blocks_again_that_others_still_read() -> Any:
    def change(take_lines: Callable[..., bool]) -> Callable[..., bool]:
        def take(memory: HostMemory, timeout: float | None) -> bool:
            came = take_lines(memory, timeout)
            memory._readings.update((rank, Reading(below=memory._posts)) for rank in memory._readings)
            return came

        return take

    return replaced(HostMemory, "_take_lines", change)


@mutant(Check(host._disagrees), kill="DID NOT RAISE")
def lets_any_two_collectives_meet() -> Any:
    return mock.patch.object(host_memory, "_KEY", 0)


@mutant(Check(host._abandons), kill="AssertionError")
def keeps_what_nobody_waits_for() -> Any:
    return mock.patch.object(HostMemory, "forget", lambda memory, number: None)


@mutant(Check(host._collectives, world=4), kill="AssertionError")
def adds_the_first_two_ranks_only() -> Any:
    def change(add: Callable[..., None]) -> Callable[..., None]:
        def add_two(parts: list[Tensor], output: Tensor) -> None:
            add(parts[:2], output)

        return add_two

    return replaced(host_memory, "_sum", change)


@mutant(Check(host._trains_alike, ((4,), host.POLICIES["default"]), world=4), kill="AssertionError")
def adds_starting_from_its_own_part() -> Any:
    """Each rank in another order: other bits on each."""

    def change(add: Callable[..., None]) -> Callable[..., None]:
        return lambda parts, output: add(parts[::-1], output)

    return replaced(host_memory, "_sum", change)

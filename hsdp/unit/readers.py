"""The compute streams that read a unit's unsharded parameters: one, unless users have forwards call units on several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hsdp.comm.streams import Streams
from hsdp.unit.dtype_group import DtypeGroup


class Readers:
    """The streams that read one gather. Its memory is the allocating stream's; the allocator knows of no other one."""

    def __init__(self) -> None:
        self._allocated_on = -1
        self._reached: dict[int, Any] = {}

    def begin(self, streams: Streams) -> None:
        """A gather has begun: its memory belongs to the compute stream that it is behind."""
        self._allocated_on, self._reached = streams.before.stream_id, {}

    def add(self, streams: Streams, dtype_groups: Iterable[DtypeGroup]) -> None:
        """The current stream is about to read. The first one to read has waited for the gather."""
        here = streams.current()
        if here.stream_id in self._reached:
            return
        first = next(iter(self._reached.values()), None)
        if first is not None:
            here.wait_stream(first)  # this stream unpacks packed parameters
        if first is not None or here.stream_id != self._allocated_on:
            for group in dtype_groups:
                for memory in group.transient_memory():
                    memory.record_stream(here)
        self._reached[here.stream_id] = here

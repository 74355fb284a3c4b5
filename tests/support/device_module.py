"""What a library asks `torch.<device>` for: streams that can be current, and events. The streams are the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")


class DeviceModule(Generic[StreamT, EventT]):
    """Stands in for a device module.

    Args:
        new_stream, new_event: make one. The first stream is the compute stream.
    """

    def __init__(self, new_stream: Callable[[], StreamT], new_event: Callable[[], EventT]) -> None:
        self._new_stream, self._new_event = new_stream, new_event
        self._streams = [new_stream()]
        self._current = [self._streams[0]]

    def Stream(self, device: Any = None, priority: int = 0) -> StreamT:
        self._streams.append(self._new_stream())
        return self._streams[-1]

    def Event(self, enable_timing: bool = False) -> EventT:
        return self._new_event()

    def current_stream(self, device: Any = None) -> StreamT:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: StreamT) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

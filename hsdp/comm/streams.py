"""Streams and events of any device behind a few verbs; on the CPU they do nothing, because its work handles do the waiting.

Three side streams per device, shared by all units of a model so that their work keeps its order:
`gather` (all-gathers), `scatter` (reduce-scatters) and `replicate` (all-reduces across replicas). The stream that is
current when a hook runs is called the compute stream. Users may have several: they train on one of their own, call
`backward` on another one than the forward's, or run a branch of a forward beside the rest.

Gradients have one compute stream all the same, `home`, to which all memory of reductions belongs: autograd accumulates into
a parameter on the stream on which it was sharded, and autograd does not order that stream behind a wait on another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

StreamName = Literal["gather", "scatter", "replicate"]
Event = Any
"""A device event; None on the CPU."""

_NOTHING = nullcontext()


def host_wait(device: torch.device) -> None:
    """The host waits for the current stream of `device`: for what it copied to host memory."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).current_stream(device).synchronize()


def note_read(tensor: Tensor) -> None:
    """The current stream reads `tensor`: its memory, of whichever stream, is not reused before that."""
    if tensor.device.type not in ("cpu", "meta"):
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


class Streams:
    """The side streams of one device.

    Args:
        device: the device.
        home: the compute stream of gradients; None: the one that is current.

    Attributes:
        device, home: as given; without streams `home` is None.
        active: whether the device has streams.
        before: the compute stream that the last `on` was called on.
    """

    def __init__(self, device: torch.device, home: Any = None) -> None:
        self.device = device
        self.active = device.type not in ("cpu", "meta")
        self.home = self.before = self.current() if home is None else home
        self._streams: dict[StreamName, Any] = {}
        self._host_reads: dict[int, Event] = {}
        self._compute: dict[int, Any] = {}

    def _module(self) -> Any:
        # Looked up when used, not when imported: a test can put a recording device module in its place.
        return torch.get_device_module(self.device)

    def _stream(self, name: StreamName) -> Any:
        if name not in self._streams:
            # Communication that compute will wait for goes first: high priority.
            self._streams[name] = self._module().Stream(device=self.device, priority=-1)
        return self._streams[name]

    def current(self) -> Any:
        """The current stream; None on the CPU."""
        return self._module().current_stream(self.device) if self.active else None

    def is_away(self) -> bool:
        """Whether another stream than `home` is current. Of a device: a CPU has none."""
        return bool(self._module().current_stream(self.device) != self.home)

    def at_home(self) -> AbstractContextManager[None]:
        """Runs the body on `home`: behind all that the current stream holds so far, which then waits for the body."""
        return self._at_home() if self.active and self.is_away() else _NOTHING

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        module, home = self._module(), self.home
        here = module.current_stream(self.device)
        home.wait_stream(here)
        try:
            with module.stream(home):
                yield
        finally:
            here.wait_stream(home)

    def on(self, name: StreamName) -> AbstractContextManager[None]:
        """Runs the body on stream `name`, after everything that the compute stream holds so far."""
        return self._on(name, None) if self.active else _NOTHING

    def after(self, name: StreamName, event: Event) -> AbstractContextManager[None]:
        """Runs the body on stream `name`, after `event` only."""
        return self._on(name, event) if self.active else _NOTHING

    @contextmanager
    def _on(self, name: StreamName, event: Event) -> Iterator[None]:
        module = self._module()
        stream = self._stream(name)
        if event is None:
            # Behind everything, and not only behind what wrote the operands: buffers are memory of the compute stream,
            # which its allocator may have taken from work that is still enqueued. A gather is started before the compute
            # that it is to hide behind is enqueued, so it waits for nothing that would have to run beside it.
            self.before = module.current_stream(self.device)
            self._compute[self.before.stream_id] = self.before
            stream.wait_stream(self.before)
        else:
            stream.wait_event(event)
        with module.stream(stream):
            yield

    def mark(self) -> Event:
        """An event at this point of the current stream."""
        if not self.active:
            return None
        event = self._module().Event()
        event.record(self._module().current_stream(self.device))
        return event

    def stamp(self) -> Event:
        """Like `mark`, with an event that records its time."""
        if not self.active:
            return None
        event = self._module().Event(enable_timing=True)
        event.record(self._module().current_stream(self.device))
        return event

    def note_host_read(self) -> None:
        """The current stream's work so far reads host memory that users may write: `finish_host_reads` waits for it."""
        if (event := self.mark()) is not None:
            # Streams keep their order: the last event of each stands for all before it.
            self._host_reads[self._module().current_stream(self.device).stream_id] = event

    def finish_host_reads(self) -> None:
        """The host waits until no copy from host memory is under way."""
        for event in self._host_reads.values():
            event.synchronize()
        self._host_reads.clear()

    def synchronize(self) -> None:
        """The host waits for all streams of the device."""
        if self.active:
            self._module().synchronize(self.device)

    def catch_up(self) -> None:
        """The current stream waits for all compute streams: behind a failed backward autograd does not do so."""
        if self.active:
            here = self._module().current_stream(self.device)
            for stream in (self.home, *self._compute.values()):
                here.wait_stream(stream)

    def join(self, event: Event) -> None:
        """The current stream waits for `event`; the host does not."""
        if event is not None:
            self._module().current_stream(self.device).wait_event(event)

"""Virtual time: layers, collectives, streams and events that take set durations on a clock of their own.

The engine runs as it is, on tiny tensors; only the process groups of its `Comm`s, and the device module that
`hsdp.comm.streams` looks up, are replaced. Two modes:

    host     as on gloo: the host computes, a collective goes on beside it, and waiting moves the clock to its end
    device   as on CUDA: the host takes no time; work goes to streams, which wait for each other's events

A group's collectives share its link: one at a time, in the order in which they were issued. What happened is in
`Clock.trace`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from hsdp.comm.collectives import Comm
from hsdp.comm.streams import Streams
from tests.support.best_step import Durations
from tests.support.device_module import DeviceModule

Mode = Literal["host", "device"]
Cost = Callable[[str, int], float]
"""(kind of collective, bytes of its operands on a rank) -> duration."""


@dataclass(frozen=True)
class Span:
    """Something that took time: "forward", "backward" or a kind of collective, of a unit.

    `ready` is when it could have started, had nothing else taken its link: from then on it is in flight.
    """

    kind: str
    unit: str
    ready: float
    start: float
    end: float
    transfers: int = 1
    """Tensors that it moved, more than 1 when coalesced."""

    def during(self, other: Span) -> bool:
        """Whether both were under way at some moment."""
        return max(self.start, other.start) < min(self.end, other.end)


class Stream:
    """A device stream: work enqueued on it runs behind whatever it holds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.end = 0.0

    @property
    def stream_id(self) -> int:
        return id(self)

    def wait_stream(self, other: Stream) -> None:
        self.end = max(self.end, other.end)

    def wait_event(self, event: Event) -> None:
        self.end = max(self.end, event.time)

    def record_event(self) -> Event:
        event = Event(self._clock)
        event.record(self)
        return event


class Event:
    """A device event."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> Event:
        self.time = (stream or self._clock.current_stream()).end
        return self

    def query(self) -> bool:
        return self._clock.now >= self.time

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds, if the clock counts seconds."""
        return 1e3 * (later.time - self.time)


class Clock(DeviceModule[Stream, Event]):
    """The host's time and the device's streams; also the device module that the engine finds.

    Attributes:
        now: the host's time.
        trace: what took time, in the order of issue.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.now = 0.0
        self.trace: list[Span] = []
        self.groups: list[Group] = []
        super().__init__(lambda: Stream(self), lambda: Event(self))

    # -- passing time ------------------------------------------------------------------------------------------

    def compute(self, kind: str, unit: str, duration: float) -> None:
        """A layer computes."""
        start = self.now if self.mode == "host" else max(self.now, self.current_stream().end)
        if self.mode == "host":
            self.now = start + duration
        else:
            self.current_stream().end = start + duration
        self.trace.append(Span(kind, unit, start, start, start + duration))

    def synchronize(self, device: Any = None) -> float:
        """The host waits for the device; returns the time."""
        self.now = max(self.now, *(stream.end for stream in self._streams))
        return self.now

    def restart(self) -> None:
        """Everything is done, and it is time 0."""
        self.synchronize()
        self.now = 0.0
        self.trace = []
        for stream in self._streams:
            stream.end = 0.0
        for group in self.groups:
            group.free = 0.0

    def all(self, kind: str) -> list[Span]:
        """Of one kind, in the order of issue."""
        return [span for span in self.trace if span.kind == kind]

    def most_in_flight(self, kind: str) -> int:
        """How many of one kind were in flight at a time, at most."""
        spans = self.all(kind)
        return max((sum(one.ready <= other.ready < one.end for one in spans) for other in spans), default=0)


class Work:
    """The handle of a collective."""

    def __init__(self, clock: Clock, end: float) -> None:
        self._clock = clock
        self._end = end

    def wait(self) -> None:
        if self._clock.mode == "host":
            self._clock.now = max(self._clock.now, self._end)

    def is_completed(self) -> bool:
        return self._clock.now >= self._end


class Group:
    """A process group whose collectives take time and move nothing."""

    def __init__(self, clock: Clock, cost: Cost) -> None:
        self._clock = clock
        self._cost = cost
        self.free = 0.0  # when its link is
        clock.groups.append(self)
        self.starting = ("", "")  # kind and unit of the collective that a Comm is about to start

    def _start(self, operands: list[Tensor]) -> Work:
        clock = self._clock
        kind, unit = self.starting
        stream = clock.current_stream()
        ready = clock.now if clock.mode == "host" else max(clock.now, stream.end)
        start = max(ready, self.free)
        self.free = end = start + self._cost(kind, sum(one.nbytes for one in operands))
        if clock.mode == "device":
            stream.end = end
        clock.trace.append(Span(kind, unit, ready, start, end, len(operands)))
        return Work(clock, end)

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any) -> Work:
        return self._start([output])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> Work:
        return self._start(outputs)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, options: Any) -> Work:
        return self._start([given])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> Work:
        return self._start(inputs)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:
        return self._start(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any) -> Work:
        return self._start(tensors)


class VirtualComm(Comm):
    """A Comm that tells its group what it starts, and for which unit."""

    def _ready(self, key: int, kind: str, owner: Any, custom: object = None) -> Any:
        key = super()._ready(key, kind, owner, custom)
        self.group.starting = (kind, owner.name)  # type: ignore[union-attr]
        return key


class Compute(torch.autograd.Function):
    """A layer's work on the clock; its weights get gradients."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*weights)
        layer.clock.compute("forward", layer.name, layer.forward_time)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.layer.clock.compute("backward", ctx.layer.name, ctx.layer.backward_time)
        return None, grad, *(torch.ones_like(weight) for weight in ctx.saved_tensors)


class Layer(nn.Module):
    """A weight that takes its time."""

    def __init__(self, clock: Clock, name: str, forward_time: float, backward_time: float, rows: int = 64) -> None:
        super().__init__()
        self.clock, self.name = clock, name
        self.forward_time, self.backward_time = forward_time, backward_time
        self.weight = nn.Parameter(torch.zeros(rows, 64))

    def forward(self, x: Tensor) -> Tensor:
        return Compute.apply(self, x, self.weight)


def virtual_model(clock: Clock, mesh: DeviceMesh, times: Durations, units: int, rows: int = 64, **options: Any) -> Any:
    """A sharded chain of layers "0", "1", ... whose parts take these times, each a unit."""
    model = nn.Sequential(*(Layer(clock, str(i), times.forward, times.backward, rows) for i in range(units)))
    for module in (*model, model):
        hsdp.fully_shard(module, mesh=mesh, **options)
    costs = {"all-gather": times.gather, "reduce-scatter": times.scatter, "all-reduce": times.all_reduce}
    install(model, clock, lambda kind, nbytes: costs[kind])
    return model


def divert_fsdp2(monkeypatch: pytest.MonkeyPatch, module: Any, start: Callable[[str, list[Tensor]], None]) -> None:
    """Makes FSDP2 take `module` for its device's, and call `start(kind, tensors)` for each of its collectives."""
    for name in ("collectives", "param_group", "state"):
        part = importlib.import_module(f"torch.distributed.fsdp._fully_shard._fsdp_{name}")
        monkeypatch.setattr(part, "_get_device_handle", lambda kind: module)
    # torch 2.13 has new names for two of them.
    verbs = {
        "all_gather_single": "all-gather",
        "all_gather_into_tensor": "all-gather",
        "reduce_scatter_single": "reduce-scatter",
        "reduce_scatter_tensor": "reduce-scatter",
        "all_reduce": "all-reduce",
    }
    for verb, kind in verbs.items():

        def started(*args: Any, kind: str = kind, **kwargs: Any) -> None:
            start(kind, [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)])

        if hasattr(dist, verb):
            monkeypatch.setattr(dist, verb, started)


def fsdp2_model(monkeypatch: pytest.MonkeyPatch, clock: Clock, mesh: DeviceMesh, times: Durations, units: int) -> Any:
    """The same chain sharded by FSDP2, its streams and collectives on the clock too (device mode only)."""
    costs = {"all-gather": times.gather, "reduce-scatter": times.scatter, "all-reduce": times.all_reduce}
    links = {name: Group(clock, lambda kind, nbytes: costs[kind]) for name in ("shard", "replicate")}

    def start(kind: str, operands: list[Tensor]) -> None:
        link = links["replicate" if kind == "all-reduce" else "shard"]
        link.starting = (kind, "")
        link._start([])

    divert_fsdp2(monkeypatch, clock, start)
    model = nn.Sequential(*(Layer(clock, str(i), times.forward, times.backward) for i in range(units)))
    for module in (*model, model):
        fsdp.fully_shard(module, mesh=mesh)
    return model


def micro_batch(model: nn.Module) -> None:
    """Forward and backward."""
    model(torch.zeros(1, requires_grad=True)).sum().backward()


def steady_trace(clock: Clock, step: Callable[[], object]) -> float:
    """Runs a step until it is steady; then the clock's trace holds one more of it, from time 0. Returns its duration."""
    for _ in range(3):
        step()
    clock.restart()
    step()
    return clock.synchronize()


def install(model: nn.Module, clock: Clock, cost: Cost) -> None:
    """Puts virtual groups in the place of a sharded model's own: one link per axis, whatever the unit."""
    shard, replicate = Group(clock, cost), Group(clock, cost)
    for unit in model._units():  # type: ignore[operator,union-attr]
        for comm, group in ((unit.shard_comm, shard), (unit.replicate_comm, replicate)):
            comm.__class__ = VirtualComm
            if comm.group is not None:
                comm.use_group(group)


def use_device(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Makes the engine take the clock for the module of a device with streams. Call it before `fully_shard`."""
    plain_init = Streams.__init__

    def active_init(self: Streams, device: torch.device, home: Any = None) -> None:
        plain_init(self, device)
        self.active = clock.mode == "device"
        self.home = self.current() if home is None else home

    monkeypatch.setattr(Streams, "__init__", active_init)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: clock)

"""The recorder: observes the units of one model between its start and its stop.

What is recorded are two lists:

    log        what began and what ended on the compute track, and when (replay.py makes marks of it)
    works      a record for each collective: when it started, when it was done, its bytes

Times are pairs of the host's clock and an event on the current stream (None on the CPU). They become spans at the end: a
step that is traced pays for appending to lists.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hsdp.comm.collectives import Comm
from hsdp.comm.labels import Named
from hsdp.comm.observer import Point, Work
from hsdp.comm.questions import Late, late_listeners
from hsdp.comm.streams import Streams
from hsdp.comm.work import CommWork
from hsdp.schedule.pipeline import ReductionBucket
from hsdp.tracing.events import Entry, Mark, Moment, Op, WorkRecord
from hsdp.tracing.replay import replay
from hsdp.tracing.spans import Recording, Span, Track
from hsdp.unit.lookup import unit_of
from hsdp.unit.unit import Unit

_BEHIND = {"all-gather": "copy", "reduce-scatter": "sum"}
"""What the host does in `CommWork.wait` once the collective is done."""

_STAGES: dict[str, tuple[Track, str]] = {
    "all-gather": ("gather", "all-gather"),
    "reduce-scatter": ("scatter", "reduce-scatter"),
    "all-reduce": ("replicate", "all-reduce"),
}
"""The track of each kind of collective, and the kind under which it is shown. `CommWork`s of other kinds are none."""

_BEGIN, _END = Op.BEGIN, Op.END  # an enum's members are looked up slowly
_now = time.perf_counter


class Recorder:
    """Records what some units do: an `Observer`, see `comm/observer.py`.

    Args:
        paths: the units, on one device, and where each is in what is traced.
    """

    def __init__(self, paths: dict[Unit, str]) -> None:
        self._paths = paths
        self._units = list(paths)
        device = self._units[0].axes.device
        self._device = device.type
        self._streams = Streams(device)
        self._stamp = self._streams.stamp if self._streams.active else None
        self._log: list[Entry] = []
        self._marks: list[Mark] = []
        self._works: list[WorkRecord] = []
        self._under_way: weakref.WeakKeyDictionary[CommWork, WorkRecord] = weakref.WeakKeyDictionary()
        self._starts: Moment | None = None
        self._iterations: list[Moment] = []
        self._memory: list[tuple[float, int]] = []
        self._held: dict[Unit, int] = {}
        self._held_by_all = 0
        self._names: list[str] = []
        self._hooks: list[Any] = []
        self._late: list[Late] = []
        self._begin: Moment
        self._end: Moment

    def start(self) -> None:
        """Observes the units from now on.

        Raises:
            RuntimeError: a recorder does already.
        """
        if any(unit.context.observer is not None for unit in self._units):
            raise RuntimeError("trace: the model is being traced already; end that trace first")
        self._streams.synchronize()
        self._begin = self.now()
        self._held = dict.fromkeys(self._units, 0)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer_step),
            register_optimizer_step_post_hook(self._after_optimizer_step),
        ]
        late_listeners.append(self._late.append)
        for unit in self._units:
            unit.observe(self)

    def stop(self) -> None:
        """Lets the units go, whatever they are doing."""
        # Before anything that may raise: a device that has failed does so wherever it is asked.
        for unit in self._units:
            unit.observe(None)
        for hook in self._hooks:
            hook.remove()
        late_listeners.remove(self._late.append)
        self._end = self.now()
        names = self._name_units()
        self._names = list(names.values())
        self._marks = replay(self._log, names)
        # A trace that is kept must not keep the model.
        self._log, self._hooks, self._units, self._held, self._paths = [], [], [], {}, {}
        self._under_way.clear()
        self._streams.synchronize()

    # -- as an observer ------------------------------------------------------------------------------------------

    def passes(self, point: Point, what: Any) -> None:
        """See `Observer`."""
        stamp = self._stamp
        moment = _now(), None if stamp is None else stamp()
        if point is Point.FORWARD_BEGINS:
            self._iterations.append(moment)
        self._log.append((*moment, point, "", what))

    def begins(self, work: Work, what: Any) -> None:
        """See `Observer`."""
        if work != "wait":
            self.log(_BEGIN, work, what)
        elif (record := self._under_way.get(what)) is not None:
            self.log(_BEGIN, record.wait, record)

    def ends(self, work: Work, what: Any) -> None:
        """See `Observer`."""
        if not self._held:
            return  # stopped in the middle of it, by a user's hook
        if work != "wait":
            self.log(_END)
            self.allocates(what)
        elif (record := self._under_way.pop(what, None)) is not None:
            self.log(_END)
            record.waited = _now()

    def starting(self) -> None:
        """See `Observer`."""
        self._starts = self.now()

    def started(self, comm: Comm, owner: Named, comm_work: CommWork, calls: list[Any]) -> None:
        """See `Observer`."""
        start, self._starts = self._starts or self.now(), None
        stage = _stage(comm, owner, comm_work.kind)
        if stage is None or not calls:
            return
        once, twice = comm_work.traffic()
        if stage[1] == comm_work.kind == "reduce-scatter" and not once and twice:
            stage = stage[0], "all-reduce"  # of scalars and parameters that every rank has whole: nothing is scattered
        sent = _sent(comm, comm_work.kind, once) + 2 * _nbytes(twice)
        share = (comm.size - 1) / comm.size
        record = WorkRecord(*stage, owner.name, start, _nbytes(once) + _nbytes(twice), share * sent)
        record.units = _units_of(owner)
        self._works.append(record)
        self._under_way[comm_work] = record
        works = [work for work in calls if work is not None]
        record.calls = len(works)
        if self._streams.active:
            record.end = self.now()
            return
        # Futures tell when calls are done; asking `is_completed` from time to time would not.
        try:
            for work in works:
                work.get_future().then(record.call_done)
        except (AttributeError, NotImplementedError, RuntimeError):
            pass  # the backend has none: the end of the wait has to do

    def allocates(self, unit: Unit) -> None:
        """See `Observer`."""
        before = self._held[unit]
        if (held := _held_by(unit)) != before:
            self._held[unit] = held
            self._held_by_all += held - before
            self._memory.append((_now(), self._held_by_all))

    # -- recording -----------------------------------------------------------------------------------------------

    def now(self) -> Moment:
        """This moment, on the host and on the current stream."""
        return _now(), self._stamp() if self._stamp is not None else None

    def log(self, op: Op, kind: str = "", what: Any = "") -> None:
        """Something began or ended on the compute track."""
        stamp = self._stamp
        self._log.append((_now(), None if stamp is None else stamp(), op, kind, what))

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._steps(optimizer):
            self.log(_BEGIN, "optimizer", type(optimizer).__name__)

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._steps(optimizer):
            self.log(Op.END_KIND, "optimizer")

    def _steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps parameters of these units: those of other traces are none of ours."""
        return any(unit_of(param) in self._held for group in optimizer.param_groups for param in group["params"])

    # -- the end -------------------------------------------------------------------------------------------------

    def _name_units(self) -> dict[Unit, str]:
        """What units are called: as their model calls them, or by their paths if that is what units of several share."""
        names = {unit: unit.name for unit in self._units}
        if len(set(names.values())) < len(names):
            names = {unit: path or unit.name for unit, path in self._paths.items()}
        for record in self._works:
            if record.units:
                record.unit = " + ".join(names.get(unit, unit.name) for unit in record.units)
                record.units = []
        return names

    def finish(self) -> Recording:
        """What was recorded, as spans."""
        end = self._seconds(self._end)
        spans = self._compute_spans("compute", end)
        if self._streams.active:
            spans += self._compute_spans("host", self._end[0] - self._begin[0])
        for record in self._works:
            spans.append(
                Span(
                    record.track,
                    record.kind,
                    record.unit,
                    self._seconds(record.start),
                    self._end_of(record, end),
                    record.nbytes,
                    record.sent,
                    record.calls,
                )
            )
        return Recording(
            spans=spans,
            iterations=[self._seconds(moment) for moment in self._iterations],
            end=end,
            memory=[(at - self._begin[0], nbytes) for at, nbytes in self._memory],
            units=self._names,
            device=self._device,
            late=tuple(self._late),
        )

    def _seconds(self, moment: Moment) -> float:
        host, event = moment
        if event is None:
            return host - self._begin[0]
        return float(self._begin[1].elapsed_time(event)) / 1e3

    def _end_of(self, record: WorkRecord, end: float) -> float:
        if (done := record.done) is not None:
            return self._seconds(done)
        return end if record.waited is None else record.waited - self._begin[0]

    def _compute_spans(self, track: Track, end: float) -> list[Span]:
        by_host = track == "host" or not self._streams.active
        times = [mark[0] - self._begin[0] if by_host else self._seconds(mark[:2]) for mark in self._marks]
        spans: list[Span] = []

        def add(kind: str, unit: str, start: float, stop: float) -> None:
            last = spans[-1] if spans else None
            if last is not None and (last.kind, last.unit, last.end) == (kind, unit, start):
                spans[-1] = Span(track, kind, unit, last.start, stop)
            elif stop > start:
                spans.append(Span(track, kind, unit, start, stop))

        stops = [*times[1:], end][: len(times)]  # none if nothing was marked
        for (_, _, kind, unit, comm_work), start, stop in zip(self._marks, times, stops, strict=True):
            ended = comm_work.done if comm_work is not None and not self._streams.active else None
            if comm_work is not None and ended is not None:
                # The wait ends with the collective; behind it the host unpacks or sums what came.
                done = min(max(start, self._seconds(ended)), stop)
                add(kind, unit, start, done)
                add(_BEHIND.get(comm_work.kind, "sum"), unit, done, stop)
            elif kind:
                add(kind, unit, start, stop)
        return spans


def _stage(comm: Comm, owner: Named, kind: str) -> tuple[Track, str] | None:
    """The track of a collective and the kind under which it is shown; None: it is not shown."""
    if isinstance(owner, ReductionBucket):
        # Stages may be made of other collectives: those of `CompressedAllReduce` and of the tree begin with an all-to-all.
        return _STAGES["all-reduce" if comm is owner.items[0].unit.replicate_comm else "reduce-scatter"]
    if isinstance(owner, Unit) and comm is owner.replicate_comm:
        return "replicate", kind  # parameters that an optimizer stepped on one of the replicas
    return _STAGES.get(kind)


def _units_of(owner: Named) -> list[Unit]:
    if isinstance(owner, ReductionBucket):
        return [reduction.unit for reduction in owner.items]
    return [owner] if isinstance(owner, Unit) else []


def _sent(comm: Comm, kind: str, operands: list[Tensor]) -> int:
    """Bytes of operands on the wire. A custom reduce-scatter may send another dtype, and say which."""
    custom = comm.custom_reduce_scatter if kind == "reduce-scatter" else None
    wire: torch.dtype | None = getattr(custom, "wire_dtype", None)
    return _nbytes(operands) if wire is None else sum(tensor.numel() for tensor in operands) * wire.itemsize


def _held_by(unit: Unit) -> int:
    """Bytes of a unit's gather buffers, unsharded gradients and reduction buffers."""
    held = unit.gradients.held_bytes()
    for group in unit.dtype_groups:
        held += group.transient_bytes
    return held


def _nbytes(tensors: list[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        total += tensor.nbytes
    return total

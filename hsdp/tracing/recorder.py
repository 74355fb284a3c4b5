"""The recorder: wraps methods of one model's units, runtimes and process groups while it is entered.

Wrappers lie in the objects' own `__dict__`, in front of their class's methods, and are removed at the end: a model that
is not traced runs the code as it is written. What is recorded are two lists:

    log        what began and what ended on the compute track, and when (replay.py makes marks of it)
    collectives    a record for each collective: when it started, when it was done, its bytes

Times are pairs of the host's clock and an event on the current stream (None on the CPU). They become spans at the end: a
step that is traced pays for appending to lists.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hsdp.comm.collectives import Comm
from hsdp.comm.labels import Named
from hsdp.comm.questions import Late, late_listeners
from hsdp.comm.streams import Streams
from hsdp.comm.work import CommWork
from hsdp.schedule.module_hooks import ModuleHooks
from hsdp.schedule.runtime import Runtime, runtime_of
from hsdp.tracing.events import Entry, Mark, Moment, Op, WorkRecord
from hsdp.tracing.replay import replay
from hsdp.tracing.spans import Recording, Span, Track
from hsdp.tracing.works import TracedWork, forget_works
from hsdp.unit.lookup import unit_of
from hsdp.unit.reduce_plan import GroupReduction
from hsdp.unit.unit import Unit

_BEHIND = {"all-gather": "copy", "reduce-scatter": "sum"}
"""What the host does in `CommWork.wait` once the collective is done."""

_Stage = tuple[Track, str]
"""The track of a collective, and the kind under which it is shown."""

_ALL_REDUCE: _Stage = ("replicate", "all-reduce")

_BEGIN, _END = Op.BEGIN, Op.END  # an enum's members are looked up slowly
Change = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What makes a wrapper of a method."""

_now = time.perf_counter
_traced: weakref.WeakSet[Unit] = weakref.WeakSet()


class Recorder:
    """Records the units of some module states while it is entered.

    Attributes:
        reducing: bytes of unsharded gradients and reduction buffers in the pipelines.
    """

    def __init__(self, states: list[ModuleHooks]) -> None:
        self._states = states
        self._units = [state.unit for state in states]
        device = self._units[0].axes.device
        self._device = device.type
        self._streams = Streams(device)
        self._stamp = self._streams.stamp if self._streams.active else None
        self._log: list[Entry] = []
        self._marks: list[Mark] = []
        self._works: list[WorkRecord] = []
        self._asides: list[tuple[Track, str, str, Moment, Moment]] = []
        self._iterations: list[Moment] = []
        self._memory: list[tuple[float, int]] = []
        self._gathered: dict[Unit, int] = {}
        self._gathering = 0
        self.reducing = 0
        self._names: list[str] = []
        self._undo: list[tuple[Any, str]] = []
        self._hooks: list[Any] = []
        self._late: list[Late] = []
        self._begin: Moment
        self._end: Moment

    # -- wrapping ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        if any(unit in _traced for unit in self._units):
            raise RuntimeError("trace: the model is being traced already; end that trace first")
        _traced.update(self._units)
        self._streams.synchronize()
        self._begin = self.now()
        for state in self._states:
            # A root's runtime may be made later than this, and there may be several roots.
            self._wrap(state.own_runtime, lambda call: lambda: self._attach(call()))
            self._attach_unit(state.unit)
        for runtime in dict.fromkeys(map(runtime_of, self._units)):
            if runtime is not None:
                self._attach(runtime)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer_step),
            register_optimizer_step_post_hook(self._after_optimizer_step),
        ]
        late_listeners.append(self._late.append)
        return self

    def __exit__(self, *_: object) -> None:
        self._end = self.now()
        for owner, name in reversed(self._undo):
            delattr(owner, name)
        for hook in self._hooks:
            hook.remove()
        late_listeners.remove(self._late.append)
        _traced.difference_update(self._units)
        forget_works(self)
        self._names = [unit.name for unit in self._units]
        self._streams.synchronize()
        self._marks = replay(self._log)
        # A trace that is kept must not keep the model.
        self._log, self._undo, self._hooks, self._states, self._units = [], [], [], [], []
        self._gathered = {}

    def _wrap(self, method: Any, change: Change) -> None:
        """Puts `change(method)` in front of a bound method."""
        owner, name = method.__self__, method.__name__
        self._undo.append((owner, name))
        setattr(owner, name, change(method))

    def _during(self, kind: str, unit: Unit, after: Callable[..., object] | None = None) -> Change:
        """While the method runs, the compute track does `kind`; `after` is called with its arguments once it has run."""
        append, stamp = self._log.append, self._stamp

        def change(call: Callable[..., Any]) -> Callable[..., Any]:
            def during(*args: Any, **kwargs: Any) -> Any:
                append((_now(), None if stamp is None else stamp(), _BEGIN, kind, unit))
                try:
                    result = call(*args, **kwargs)
                finally:
                    append((_now(), None if stamp is None else stamp(), _END, "", ""))
                if after is not None:
                    after(*args)
                return result

            return during

        return change

    def _before(self, before: Callable[..., object]) -> Change:
        """`before` is called with the method's arguments before it runs."""

        def change(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                before(*args)
                return call(*args, **kwargs)

            return wrapped

        return change

    def _after(self, after: Callable[..., object]) -> Change:
        """`after` is called with the method's arguments once it has run."""

        def change(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any) -> Any:
                result = call(*args)
                after(*args)
                return result

            return wrapped

        return change

    def _attach(self, runtime: Runtime) -> Runtime:
        if "begin_forward" in vars(runtime):
            return runtime
        log = self.log

        def begin_forward() -> None:
            if not len(runtime.pipeline):
                self.reducing = 0
            log(Op.BEGIN_PASS, "", runtime)
            self._iterations.append(self.now())

        self._wrap(runtime.begin_forward, self._before(begin_forward))
        self._wrap(runtime.enter_forward, self._before(partial(log, Op.BEGIN, "forward")))
        self._wrap(runtime.leave_forward, self._after(partial(log, Op.END_FORWARD, "forward")))
        self._wrap(runtime.forget_forward, self._after(partial(log, Op.FORGET_PASS, "", runtime)))
        self._wrap(runtime.enter_backward, self._before(partial(log, Op.ENTER_BACKWARD, "backward")))
        self._wrap(runtime.completed, self._after(partial(log, Op.LEAVE_BACKWARD, "backward")))
        self._wrap(runtime._end_backward, self._after(partial(log, Op.END_BACKWARD)))
        self._wrap(runtime.pipeline.submit, self._submitting)
        return runtime

    def _attach_unit(self, unit: Unit) -> None:
        measure = partial(self._measure, unit)
        self._wrap(unit.launch, self._during("launch", unit, measure))
        self._wrap(unit.finish, self._after(measure))
        self._wrap(unit.reshard, self._after(partial(self._freed, unit)))
        self._wrap(unit.gradients.take, self._during("copy", unit))
        self._wrap(unit.gradients.stash, self._during("copy", unit))
        self._wrap(unit.gradients.land, self._during("landing", unit, self._landed))
        self._wrap(unit.gradients.defer, self._after(self._landed))
        if self._streams.active:
            self._wrap(unit._unpack, self._aside("gather", "copy", unit))
        for comm in (unit.shard_comm, unit.scatter_comm, unit.replicate_comm, unit.part_comm):
            if comm is None or "all_gather" in vars(comm):
                continue
            gathers: _Stage = ("gather", "all-gather")
            scatters: _Stage = ("scatter", "reduce-scatter")
            if comm is unit.replicate_comm:
                # Whatever a unit sends between replicas belongs to its all-reduce stage, which a `ReplicaReduce` may
                # make of other collectives: `CompressedAllReduce` is an all-to-all and an all-gather.
                gathers = scatters = _ALL_REDUCE
            self._wrap(comm.all_gather, self._recorded(comm, gathers, single=0))
            self._wrap(comm.reduce_scatter, self._recorded(comm, scatters, single=1, double=2))
            self._wrap(comm.all_to_all, self._recorded(comm, scatters, single=1))
            self._wrap(comm.all_reduce, self._recorded(comm, _ALL_REDUCE, double=0))
            self._wrap(comm.all_reduce_beyond, self._recorded(comm, _ALL_REDUCE, double=0))

    def _recorded(self, comm: Comm, stage: _Stage, single: int | None = None, double: int | None = None) -> Change:
        """The method starts a collective; `single` and `double` are the operands that a ring sends once and twice."""
        track, kind = stage
        share = (comm.size - 1) / comm.size
        append, stamp = self._works.append, self._stamp

        def change(call: Callable[..., CommWork]) -> Callable[..., CommWork]:
            def start(owner: Named, op: int, *operands: Any) -> CommWork:
                began = _now(), None if stamp is None else stamp()
                once = _nbytes(operands[single]) if single is not None else 0
                twice = _nbytes(operands[double]) if double is not None else 0
                comm_work: Any = call(owner, op, *operands)
                record = WorkRecord(track, kind, owner.name, began, once + twice, share * (once + 2 * twice))
                if track == "scatter":
                    record.frees = once
                comm_work.__class__ = TracedWork
                comm_work.watch(self, record)
                append(record)
                return comm_work  # type: ignore[no-any-return]

            return start

        return change

    def _submitting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def submit(reduction: Any) -> None:
            for part in reduction.parts:
                self.reducing += _nbytes(part.inputs) + _nbytes(part.operands)
            self._note_memory()
            self.log(Op.BEGIN, "launch", reduction.unit)
            try:
                call(reduction)
            finally:
                self.log(Op.END)

        return submit

    def _aside(self, track: Track, kind: str, unit: Unit) -> Change:
        """The method's work goes to a side stream."""

        def change(call: Callable[..., Any]) -> Callable[..., Any]:
            def aside(*args: Any) -> None:
                began = self.now()
                call(*args)
                self._asides.append((track, kind, unit.name, began, self.now()))

            return aside

        return change

    # -- recording -----------------------------------------------------------------------------------------------

    def now(self) -> Moment:
        """This moment, on the host and on the current stream."""
        return _now(), self._stamp() if self._stamp is not None else None

    def log(self, op: Op, kind: str = "", what: Any = "", *_: object) -> None:
        """Something began or ended on the compute track."""
        stamp = self._stamp
        self._log.append((_now(), None if stamp is None else stamp(), op, kind, what))

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._steps(optimizer):
            self.log(Op.BEGIN, "optimizer", type(optimizer).__name__)

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._steps(optimizer):
            self.log(Op.END_KIND, "optimizer")

    def _steps(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(unit_of(param) in _traced for group in optimizer.param_groups for param in group["params"][:1])

    def _freed(self, unit: Unit) -> None:
        if self._gathered.get(unit):  # most units are resharded more often than they are whole
            self._measure(unit)

    def _measure(self, unit: Unit, *_: object) -> None:
        held = 0
        for group in unit.dtype_groups:
            held += group.transient_bytes
        before = self._gathered.get(unit, 0)
        if held != before:
            self._gathering += held - before
            self._gathered[unit] = held
            self._note_memory()

    def _landed(self, parts: list[GroupReduction]) -> None:
        for part in parts:
            self.reducing -= _nbytes(part.operands)
        self._note_memory()

    def _note_memory(self) -> None:
        self._memory.append((_now(), self._gathering + self.reducing))

    # -- the end -------------------------------------------------------------------------------------------------

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
        for track, kind, unit, start, stop in self._asides:
            spans.append(Span(track, kind, unit, self._seconds(start), self._seconds(stop)))
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

        for (_, _, kind, unit, comm_work), start, stop in zip(self._marks, times, [*times[1:], end], strict=False):
            ended = comm_work.done if comm_work is not None and not self._streams.active else None
            if comm_work is not None and ended is not None:
                # The wait ends with the collective; behind it the host unpacks or sums what came.
                done = min(max(start, self._seconds(ended)), stop)
                add(kind, unit, start, done)
                add(_BEHIND.get(comm_work.kind, "sum"), unit, done, stop)
            elif kind:
                add(kind, unit, start, stop)
        return spans


def _nbytes(tensors: list[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        total += tensor.nbytes
    return total

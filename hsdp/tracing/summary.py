"""A recording as a few numbers: what was exposed, what was hidden, how much was moved, which units are slow."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

from hsdp.comm.questions import Late
from hsdp.format import several
from hsdp.planning import Plan
from hsdp.tracing.spans import COLLECTIVES, WORKING, Recording, Span, intersection, length, union

_MOST_UNITS = 8


@dataclass(frozen=True)
class Collectives:
    """All collectives of one kind.

    Attributes:
        started: how many; `calls` of the backend.
        nbytes: bytes of their whole operands.
        sent: bytes that this rank sends at least, by the ring's formula.
        under_way: seconds in which at least one was under way.
        exposed: seconds in which the compute track waited for one.
    """

    started: int
    calls: int
    nbytes: int
    sent: float
    under_way: float
    exposed: float


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of the compute track that a unit took, by kind; `total` sums them."""

    name: str
    by_kind: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of all kinds."""
        return sum(self.by_kind.values())

    @property
    def waits(self) -> float:
        """Seconds of waiting."""
        return sum(seconds for kind, seconds in self.by_kind.items() if kind.startswith("wait"))


@dataclass(frozen=True)
class Summary:
    """What a trace says.

    Attributes:
        seconds: how long the trace is.
        iterations: forwards of a root in it: micro-batches, of which a step may have several.
        steps: optimizer steps in it; 0 where none was seen.
        collectives: by kind.
        under_way: seconds in which at least one collective was under way.
        overlap: the share of these in which the compute track worked: neither waited nor did nothing. 1: all is hidden.
        peak_bytes: most bytes of gather buffers, unsharded gradients and reduction buffers at a time.
        units: the slowest first.
        late: with HSDP_SLOW, ranks that others waited for, as far as it was this rank that told of them.
    """

    seconds: float
    iterations: int
    steps: int
    collectives: dict[str, Collectives]
    under_way: float
    overlap: float
    peak_bytes: int
    units: list[UnitTimes]
    late: tuple[Late, ...] = ()

    def __str__(self) -> str:
        exposed = sum(one.exposed for one in self.collectives.values())
        lines = [
            f"{self._counted()} in {_ms(self.seconds)} ms; collectives under way for {_ms(self.under_way)} ms, "
            f"{self.overlap:.0%} of it under compute; {_ms(exposed)} ms of waiting; "
            f"communication buffers at most {self.peak_bytes / 2**20:.2f} MiB",
            f"{'':16}{'started':>9}{'calls':>8}{'MiB':>10}{'MiB sent':>10}{'ms':>10}{'exposed':>10}",
        ]
        for kind, one in self.collectives.items():
            lines.append(
                f"{kind:16}{one.started:9}{one.calls:8}{one.nbytes / 2**20:10.2f}{one.sent / 2**20:10.2f}"
                f"{_ms(one.under_way):>10}{_ms(one.exposed):>10}"
            )
        width = max((len(unit.name) for unit in self.units[:_MOST_UNITS]), default=0)
        lines.append(f"slowest of {several(len(self.units), 'unit')}, ms on the compute track:")
        for unit in self.units[:_MOST_UNITS]:
            kinds = ", ".join(f"{kind} {_ms(s)}" for kind, s in sorted(unit.by_kind.items(), key=lambda pair: -pair[1]))
            lines.append(f"  {unit.name:{width}}  {_ms(unit.total):>8}: {kinds}")
        lines += map(str, self.late)
        return "\n".join(lines)

    def _counted(self) -> str:
        """Steps, and their micro-batches where there are several; else forwards."""
        if not self.steps:
            return several(self.iterations, "forward")
        steps = several(self.steps, "step")
        return steps if self.iterations == self.steps else f"{steps} ({several(self.iterations, 'micro-batch', 'es')})"

    def beside(self, plan: Plan) -> str:
        """What was measured beside what `hsdp.plan` foretold, per step, as a table.

        Args:
            plan: of the traced model. The trace holds whole steps of its number of micro-batches, and nothing else.

        Raises:
            ValueError: the trace has no forward.
        """
        if not self.iterations:
            raise ValueError("Summary.beside(plan): the trace has no forward; record whole steps of the model")
        steps = self.iterations / plan.assumptions.micro_batches
        lines = [
            f"per step, measured / planned{'':4}{'started':>16}{'MiB sent':>20}{'ms under way':>20}{'ms exposed':>20}",
        ]
        for kind, one in self.collectives.items():
            planned = [part for part in plan.collectives if part.kind == kind]
            pairs = [
                (f"{one.calls / steps:.0f}", f"{sum(part.calls for part in planned)}"),
                (f"{one.sent / steps / 2**20:.2f}", f"{sum(part.sent for part in planned) / 2**20:.2f}"),
                (_ms(one.under_way / steps), _ms(sum(part.seconds for part in planned))),
                (_ms(one.exposed / steps), _ms(plan.time.exposed.get(kind, 0.0))),
            ]
            cells = [f"{measured} / {foretold}" for measured, foretold in pairs]
            lines.append(f"{kind:32}{cells[0]:>16}" + "".join(f"{cell:>20}" for cell in cells[1:]))
        return "\n".join(lines)


def summarize(recording: Recording) -> Summary:
    """The summary of a recording."""
    compute = recording.track("compute")
    working = union((span.start, span.end) for span in compute if span.kind in WORKING)
    under_way = _under_way(recording.started())
    seconds = length(under_way)
    return Summary(
        seconds=recording.end,
        iterations=len(recording.iterations),
        steps=_steps(compute, recording.iterations),
        collectives={kind: _collectives(recording, kind) for kind in COLLECTIVES},
        under_way=seconds,
        overlap=length(intersection(under_way, working)) / seconds if seconds else 1.0,
        peak_bytes=max((nbytes for _, nbytes in recording.memory), default=0),
        units=_units(recording, compute),
        late=recording.late,
    )


def _steps(compute: list[Span], iterations: list[float]) -> int:
    """Optimizer steps: several behind one forward, in a row or within its backward, are one step."""
    return len({bisect_right(iterations, span.start) for span in compute if span.kind == "optimizer"})


def _under_way(started: list[Span]) -> list[tuple[float, float]]:
    return union((span.start, span.end) for span in started)


def _collectives(recording: Recording, kind: str) -> Collectives:
    started = [span for span in recording.started() if span.kind == kind]
    waits = (span.seconds for span in recording.track("compute") if span.kind == f"wait {kind}")
    return Collectives(
        started=len(started),
        calls=sum(span.calls for span in started),
        nbytes=sum(span.nbytes for span in started),
        sent=sum(span.sent for span in started),
        under_way=length(_under_way(started)),
        exposed=sum(waits),
    )


def _units(recording: Recording, compute: list[Span]) -> list[UnitTimes]:
    times: dict[str, dict[str, float]] = {name: defaultdict(float) for name in recording.units}
    for span in compute:
        for name in span.unit.split(" + "):
            if name in times:
                times[name][span.kind] += span.seconds / (span.unit.count(" + ") + 1)
    units = [UnitTimes(name, dict(by_kind)) for name, by_kind in times.items()]
    return sorted(units, key=lambda unit: -unit.total)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"

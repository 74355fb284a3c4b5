"""`trace`: what a sharded model did while it ran, as numbers, as a file for Perfetto, and as one picture.

A step, for example:

    with hsdp.trace(model) as t:
        train_step()
    print(t.summary())
    t.to_chrome("trace.json")
    t.to_svg("trace.svg")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from hsdp.comm.groups import own_rank
from hsdp.tracing.chrome import chrome_trace
from hsdp.tracing.picture import draw
from hsdp.tracing.recorder import Recorder
from hsdp.tracing.spans import Recording, Span
from hsdp.tracing.summary import Summary, summarize
from hsdp.unit.lookup import unit_of_module
from hsdp.unit.unit import Unit

__all__ = ["Span", "Summary", "Trace", "trace"]


class Trace:
    """What was recorded. It is complete once the `with` block of `trace` has ended."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recording: Recording | None = None

    def _finish(self) -> None:
        self._recording = self._recorder.finish()

    @property
    def recording(self) -> Recording:
        """Every span, in seconds since the trace began.

        Raises:
            RuntimeError: the `with` block has not ended.
        """
        if self._recording is None:
            raise RuntimeError("trace: still recording; read it behind the `with hsdp.trace(model) as t:` block")
        return self._recording

    def summary(self) -> Summary:
        """Exposed waits, overlap, bytes, the peak of communication buffers and the slowest units. Print it."""
        return summarize(self.recording)

    def to_chrome(self, path: str | Path) -> None:
        """Writes the trace of this rank in Chrome's trace event format, which ui.perfetto.dev opens."""
        Path(path).write_text(chrome_trace(self.recording, own_rank()), encoding="utf-8")

    def to_svg(self, path: str | Path, iteration: int = -1) -> None:
        """Draws one forward (of a micro-batch) and what follows it until the next one: a track per stream, units coloured.

        Args:
            path: the SVG file.
            iteration: which one, as an index; by default the last one that had a backward.

        Raises:
            ValueError: there is no such iteration.
        """
        Path(path).write_text(draw(self.recording, iteration, own_rank()), encoding="utf-8")


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Records what the units of `model` do inside the `with` block, on this rank.

    Nothing of it exists outside of the block, and nothing of the engine is changed in it: the units of this model tell a
    recorder what they do, until the block ends or raises; what was recorded until then can be read either way. On the CPU
    times are the host's, and the end of a collective is told by its future. On a device they are those of events on the
    streams, read once, when the block ends: it waits for the device.

    Args:
        model: a sharded module, or one that holds some. Where units of several models in it have the same name, units are
            called by their paths in it.

    Raises:
        TypeError: it is no module.
        ValueError: nothing in the model is sharded.
        RuntimeError: the model is being traced already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace: expected an nn.Module, not {type(model).__name__}")
    units: dict[Unit, str] = {}
    for path, module in model.named_modules():
        if (unit := unit_of_module(module)) is not None:
            units.setdefault(unit, path)
    if not units:
        raise ValueError(f"trace({type(model).__name__}): nothing in it is sharded; call fully_shard first")
    recorder = Recorder(units)
    result = Trace(recorder)
    recorder.start()
    try:
        yield result
    finally:
        recorder.stop()
        result._finish()

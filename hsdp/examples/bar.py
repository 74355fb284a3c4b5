"""A line at the bottom of a terminal that says how far a run is; nothing where nobody watches."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_CELLS = 24


class ProgressBar:
    """One line that is drawn over itself: steps done, the time that the rest will take, and some words.

    Args:
        total: steps of the run.
        done: steps behind it already.
        stream: where to draw; it does so only on a terminal. None: standard error.
    """

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._total = total
        self._first = done
        self._since = time.perf_counter()
        self._length = 0

    def step(self, done: int, words: str) -> None:
        """Draws it anew, when `done` steps are behind."""
        if self._shown:
            full = _CELLS * done // self._total
            line = f"{done}/{self._total} [{'#' * full}{'-' * (_CELLS - full)}] {self.remaining(done)} left  {words}"
            self._stream.write("\r" + line.ljust(self._length))
            self._stream.flush()
            self._length = len(line)

    def clear(self) -> None:
        """Makes room for a line of text."""
        if self._shown and self._length:
            self._stream.write("\r" + " " * self._length + "\r")
            self._stream.flush()
            self._length = 0

    def remaining(self, done: int) -> str:
        """The time for the other steps at the present rate: "1:05", "2:03:04"; "?" before the first one."""
        if done <= self._first:
            return "?"
        seconds = round((time.perf_counter() - self._since) / (done - self._first) * (self._total - done))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

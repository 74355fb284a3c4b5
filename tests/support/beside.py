"""A second pytest for tests that are marked `beside`: ranks leave a core idle for a fifth of the time, and it uses that.

It begins when the first has collected, gives way to the first's processes, and writes down what becomes of its tests. The
first comes to them last, waits for the second, and reports what it wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

_FILES = "HSDP_TESTS_BESIDE"
"""In the environment of the second: the file where it writes, and the descriptor of a pipe that the first holds open."""

IS_SECOND = _FILES in os.environ

_NICENESS = 10
"""Of the least, ranks may get no time while four others compute, and would be taken for lost."""

_LIMIT = 1800.0
"""Seconds that the first waits for the second when it has nothing else to do."""

_TOLD = 20_000
"""Characters of the second's output that tell why tests have no reports."""


def is_beside(item: pytest.Item) -> bool:
    """Whether the second has the test."""
    return item.get_closest_marker("beside") is not None


def configure(config: pytest.Config) -> None:
    """Makes this pytest the second, if it was begun as such."""
    if IS_SECOND:
        reports, pipe = os.environ.pop(_FILES).split(os.pathsep)
        threading.Thread(target=_end_with_first, args=(int(pipe),), daemon=True).start()
        config.pluginmanager.register(_Second(config, Path(reports)))


def _end_with_first(pipe: int) -> None:
    """Ends this process when the first has ended, however that was."""
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def begin(session: pytest.Session) -> None:
    """Begins the second, if there are tests for it, and others meanwhile."""
    items = [item for item in session.items if is_beside(item)]
    if items and len(items) < len(session.items) and not (IS_SECOND or session.config.option.usepdb):
        session.config.pluginmanager.register(_First(session.config, [item.nodeid for item in items]))


class _Second:
    """Writes reports down, a line each."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._file = path.open("a")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        print(json.dumps(told), file=self._file, flush=True)


class _First:
    """Runs the second, and reports for its tests."""

    def __init__(self, config: pytest.Config, nodeids: Sequence[str]) -> None:
        self._config = config
        self._scratch = tempfile.TemporaryDirectory()
        self._reports, self._output = (Path(self._scratch.name) / name for name in ("reports", "output"))
        nice = ["nice", "-n", str(_NICENESS)] if shutil.which("nice") else []
        pipe, self._held = os.pipe()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*nice, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *nodeids],
                cwd=config.rootpath,
                env={**os.environ, _FILES: f"{self._reports}{os.pathsep}{pipe}"},
                pass_fds=[pipe],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        os.close(pipe)
        self._found: dict[str, list[pytest.TestReport]] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Reports what the second wrote about a test of its own."""
        if not is_beside(item):
            return None
        if self._found is None:
            self._found = self._wait()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._found.get(item.nodeid) or [self._lost(item)]:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        """Stops the second, for which nobody waits any more."""
        self._process.terminate()
        self._process.wait()
        os.close(self._held)
        self._scratch.cleanup()

    def _wait(self) -> dict[str, list[pytest.TestReport]]:
        """The reports by test; none, if the second did not come to its end."""
        found = defaultdict[str, list[pytest.TestReport]](list)
        try:
            status = self._process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            return found
        if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            for line in self._reports.read_text().splitlines():
                content = json.loads(line)
                report = self._config.hook.pytest_report_from_serializable(config=self._config, data=content)
                found[report.nodeid].append(report)
        return found

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        """What is reported for a test that the second did not finish."""
        message = f"the pytest beside this one ended with {self._process.poll()} (None: not in {_LIMIT:.0f} s):\n"
        message += self._output.read_text(errors="replace")[-_TOLD:]
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")

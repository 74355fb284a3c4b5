"""PyTorch's own test-suite of FSDP2, on CPUs, with hsdp in the place of FSDP2 and with FSDP2 itself.

    OMP_NUM_THREADS=1 python -m benchmarks.fsdp2_suite DIRECTORY [-k PART] [--ranks 4] [--show] > table.txt

The files are not in the wheel: DIRECTORY is your copy of `test/distributed/_composable/fsdp` of PyTorch's sources, of any
version. Needs the package expecttest, as they do. They are written for GPUs: their text is read, devices in it are turned
into "cpu", and each case runs in a process of its own, with torch's own bases for tests: ranks are processes on gloo, or
threads on torch's `threaded` groups. What needs streams, CUDA's memory counters or Triton, or names that the installed
torch has no longer, fails with both libraries, and tells nothing about either. hsdp's errors may have words of their own;
their types may not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hsdp.integrations
from benchmarks.fsdp2_suite_reasons import REASONS, WHY

LIBRARIES = ("fsdp2", "hsdp")
SECONDS = 400.0
"""What one case may take."""

OTHER_WORDS = "raised with other words than"

TO_CPU: list[tuple[str, str]] = [
    (r"torch\.device\(\s*(\"cuda\"|device_type\.type),\s*[^()]*(\(\))?[^()]*\)", 'torch.device("cpu")'),
    (r"([\"'])(cuda|xpu)(:0)?\1", r"\1cpu\1"),
    (r"got cpu for DTensor and cuda for FSDP", "got cpu for DTensor and cpu for FSDP"),
    (r"\.cuda\(\)", ".cpu()"),
    (r"torch\.accelerator\.current_accelerator\(\)", 'torch.device("cpu")'),
    (r"torch\.(get_device_module\([^()]*\)|(cuda|xpu))\.device_count\(\)", "torch.cpu.device_count()"),
    (r"torch\.(cuda|xpu)\.(?=(_sleep|synchronize|Stream|stream|current_stream|Event|set_device)\b)", "torch.cpu."),
    (r"(?<=\()not TEST_CUDA\b", "False"),
    (r"device_ids=\[self\.rank\]", "device_ids=None"),
    (r"import HAS_CUDA\b", "import HAS_GPU as HAS_CUDA"),
]
"""What becomes of devices in the text of a file."""

RENAMED = {
    "torch.testing._internal.common_fsdp": {"test_compiled_fsdp": "compiled_fsdp_test"},
}
"""Names that older files import, under which today's torch has them."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case with one library: "ok", "failed", "skipped" or "timed out", and why."""

    word: str
    why: str = ""
    seconds: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases and prints the table; 1 if hsdp fails where FSDP2 does not and no reason is known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fsdp2_suite")
    parser.add_argument("directory", type=Path, help="with PyTorch's test_fully_shard_*.py")
    parser.add_argument("-k", default="", help="only cases with this in FILE::CLASS::CASE (a regular expression)")
    parser.add_argument("--ranks", type=int, default=4, help="as many devices as cases are told that there are")
    parser.add_argument("--library", choices=LIBRARIES, help="only with this one, without a table")
    parser.add_argument("--json", type=Path, help="outcomes: written there, and read again where they are there already")
    parser.add_argument("--show", action="store_true", help="print whole errors")
    options = parser.parse_args(arguments)
    known: dict[str, dict[str, Outcome]] = _read(options.json)
    _pretend(options.ranks)
    for library in [options.library] if options.library else LIBRARIES:
        told = known.setdefault(library, {})
        for path in sorted(options.directory.glob("test_*.py")):
            for case, outcome in _in_a_process(path, library, options):
                told[case] = outcome
                print(f"{library:6}{outcome.word:10}{outcome.seconds:6.1f} s  {case}", file=sys.stderr, flush=True)
                if options.show:
                    print(outcome.why, file=sys.stderr)
                _write(options.json, known)
    if options.library:
        return 0
    lines, unknown = table(known["fsdp2"], known["hsdp"])
    print("\n".join(lines))
    return int(unknown > 0)


def table(fsdp2: dict[str, Outcome], ours: dict[str, Outcome]) -> tuple[list[str], int]:
    """The lines of the table, and how many cases fail with hsdp alone for no known reason."""
    cases = [case for case in sorted(fsdp2) if case in ours]
    width = max((len(case) for case in cases), default=4)
    counts: Counter[tuple[str, str]] = Counter()
    rows, unknown = [], 0
    for case in cases:
        theirs, mine = fsdp2[case].word, ours[case].word
        counts[theirs, mine] += 1
        reason = ""
        if theirs == "ok" != mine:
            reason = WHY.get(REASONS.get(case.partition("::")[2], ""), "?")
            unknown += reason == "?"
        elif theirs != "ok" and mine == "ok":
            reason = "FSDP2 here: " + _last_line(fsdp2[case].why)
        rows.append(f"{case:{width}}  {theirs:10}{mine:10}{reason}".rstrip())
    head = f"torch {torch.__version__}, {len(cases)} cases"
    totals = [f"  FSDP2 {theirs}, hsdp {mine}: {count}" for (theirs, mine), count in counts.most_common()]
    return [head, *totals, "", f"{'case':{width}}  {'FSDP2':10}{'hsdp':10}why they differ", *rows], unknown


def _last_line(why: str) -> str:
    """The error at the end of a traceback, without the advice that torch's tests add."""
    found = [line for line in why.splitlines() if re.match(r"\w*(\.\w+)*(Error|Exception)\b", line)]
    return found[-1].split(" and exception:")[0][:90] if found else "no answer in time"


def _in_a_process(path: Path, library: str, options: argparse.Namespace) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of a file's cases. The file is loaded once, in a process that lends itself to each case by a fork."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run_file, args=(path, library, options.k, send))
    process.start()
    send.close()
    with contextlib.suppress(EOFError):
        while True:
            yield receive.recv()
    process.join()


def _run_file(path: Path, library: str, wanted: str, send: Any) -> None:
    """Every wanted case of a file, one after the other, into the pipe."""
    if library == "hsdp":
        hsdp.integrations.replace_fsdp2()
        unittest.TestCase.assertRaisesRegex = lambda self, *args, **keywords: _Raises(*args, **keywords)
    try:
        module = _load(path)
    except Exception as error:
        send.send((f"{path.name}::*", Outcome("failed", f"{type(error).__name__}: {error}")))
        return
    for case in _cases(unittest.defaultTestLoader.loadTestsFromModule(module)):
        name = f"{path.name}::{type(case).__name__}::{case.id().rpartition('.')[2]}"
        if re.search(wanted, name):
            send.send((name, _run_case(case)))


def _pretend(ranks: int) -> None:
    """Has torch's bases for tests run on CPUs, in processes that are forked."""
    distributed = importlib.import_module("torch.testing._internal.common_distributed")
    common_fsdp = importlib.import_module("torch.testing._internal.common_fsdp")
    utils = importlib.import_module("torch.testing._internal.common_utils")
    for name, names in RENAMED.items():
        module = importlib.import_module(name)
        for old, new in names.items():
            if not hasattr(module, old) and hasattr(module, new):
                setattr(module, old, getattr(module, new))
    vars(torch.cpu).update(device_count=lambda: ranks, _sleep=lambda cycles: None)
    torch.accelerator.device_count = lambda: ranks
    vars(common_fsdp)["DEVICE_COUNT"] = ranks
    vars(common_fsdp)["get_cycles_per_ms"] = vars(utils)["get_cycles_per_ms"] = lambda *args: 1.0
    vars(utils)["device_sleep"] = lambda *args, **kwargs: None
    vars(distributed)["skip_if_lt_x_gpu"] = functools.partial(_skip_if_fewer, ranks)
    process = torch.multiprocessing.get_context("fork").Process
    distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(process)
    torch.multiprocessing.set_start_method("fork", force=True)
    barrier = dist.barrier
    vars(dist)["barrier"] = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)


class _Raises:
    """`assertRaisesRegex` without the expression: hsdp's errors have words of their own. The process tells of each."""

    def __init__(self, error: Any, words: Any, function: Any = None, *args: Any, **keywords: Any) -> None:
        self.error, self.words = error, words
        if function is not None:
            with self:
                function(*args, **keywords)

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if error is None:
            raise AssertionError(f"{self.error} was not raised: {self.words}")
        if isinstance(error, self.error):
            self.exception = error
            if not re.search(self.words, str(error)):
                os.write(2, f"\n{OTHER_WORDS}: {self.words!r}: {error}\n".encode())
            return True
        return False


def _skip_if_fewer(ranks: int, needed: int, **kwargs: Any) -> Callable[[Any], Any]:
    return unittest.skipIf(ranks < needed, f"{needed} ranks are needed")


def _load(path: Path) -> types.ModuleType:
    """A file as a module, with its devices turned into CPUs."""
    text = path.read_text(encoding="utf-8")
    for pattern, replacement in TO_CPU:
        text = re.sub(pattern, replacement, text)
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def _cases(suite: Iterable[Any]) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _cases(one)
        else:
            yield one


def _run_case(case: unittest.TestCase) -> Outcome:
    """One case in a forked process group, which is killed when its time is over."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            _be_the_case(case, said)
        while time.monotonic() - began < SECONDS and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.05)
        seconds = time.monotonic() - began
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        said.seek(0)
        lines = said.read().splitlines()
    told = next((line for line in reversed(lines) if line.startswith('{"word"')), None)
    if told is None:
        return Outcome("timed out" if seconds >= SECONDS else "failed", "\n".join(lines[-40:]), seconds)
    told = json.loads(told)
    if told["word"] == "ok":
        told["why"] = "\n".join(sorted({line for line in lines if line.startswith(OTHER_WORDS)}))
    return Outcome(seconds=seconds, **told)


def _be_the_case(case: unittest.TestCase, said: Any) -> None:
    """Runs the case in this process, writes its outcome as the last line, and ends the process."""
    os.setpgid(0, 0)
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    suite, result = unittest.TestSuite([case]), unittest.TestResult()
    try:
        suite.run(result)
    except BaseException as error:
        result.errors.append((case, f"{type(error).__name__}: {error}"))
    bad = [*result.errors, *result.failures]
    word = "failed" if bad else "skipped" if result.skipped else "ok"
    why = bad[0][1] if bad else result.skipped[0][1] if result.skipped else ""
    os.write(1, f"\n{json.dumps({'word': word, 'why': why})}\n".encode())
    os._exit(0)


def _read(path: Path | None) -> dict[str, dict[str, Outcome]]:
    if path is None or not path.exists():
        return {}
    held = json.loads(path.read_text(encoding="utf-8"))
    return {library: {case: Outcome(**one) for case, one in told.items()} for library, told in held.items()}


def _write(path: Path | None, known: dict[str, dict[str, Outcome]]) -> None:
    if path is not None:
        held = {library: {case: vars(one) for case, one in told.items()} for library, told in known.items()}
        path.write_text(json.dumps(held, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""Loads hostile and damaged checkpoints (`checkpoint_hostile.py`) and looks at what that does to this process.

python -m tests.soak.checkpoint_fuzz --cases 20000 --log benchmarks/results/checkpoint_fuzz.txt

Whatever is changed, the outcome is a load or a CheckpointError. After a refusal the model and the optimizer are bit for bit
as they were. In no case may code run, a class or a module of this process change, a file outside of the directory be
opened, or the load take long.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError, archive_reader, index, manifests, objects, pickles, store
from tests.soak.checkpoint_hostile import Net, Target, make_case, make_good

CHUNK = 1000
SLOWEST = 30.0
"""Seconds after which a load counts as one that does not end; a good one takes milliseconds."""


# -- what must not happen ----------------------------------------------------------------------------------------------

_FORBIDDEN = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "exec",
    "compile",
    "pickle.find_class",
    "socket.connect",
)
_seen: list[str] | None = None
_inside = ""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in _FORBIDDEN:
        _seen.append(f"{event} {str(args)[:100]}")
    elif event == "import" and args[0] not in sys.modules:
        _seen.append(f"import of {args[0]}")
    elif event == "open" and isinstance(args[0], (str, bytes)):
        opened = os.fsdecode(args[0])
        if not os.path.realpath(opened).startswith(_inside):
            _seen.append(f"open of {opened}")


@contextmanager
def watched(directory: Path) -> Iterator[list[str]]:
    """What happens in this process meanwhile that must not."""
    global _seen, _inside
    _inside = os.path.realpath(directory)
    _seen = found = []
    before = snapshot()
    try:
        yield found
    finally:
        _seen = None
        after = snapshot()
        found += [f"{name} changed" for name, content in before.items() if after[name] != content]


_CLASSES: list[Any] = [
    *(getattr(metadata, name) for name in metadata.__all__), metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
    PurePath, PurePosixPath, Path, type(Path()), torch.Size, torch.Tensor, nn.Module, nn.Linear, dict, list, tuple,
    set, Counter, CheckpointError, pickles.Name, pickles.Call, pickles._Machine, index.Index, index.FileRange,
    index.TensorRecord, archive_reader.Stored, manifests.Manifest, manifests.FileRecord, checkpoint.Loaded, Net,
]  # fmt: skip
_MODULES: list[Any] = [
    os,
    sys,
    io,
    json,
    pickle,
    random,
    checkpoint,
    index,
    manifests,
    objects,
    pickles,
    archive_reader,
    store,
    metadata,
    filesystem,
]


def snapshot() -> dict[str, Any]:
    """Every name in classes and modules that a pickle could reach, by identity; the environment."""
    found: dict[str, Any] = {}
    for one in (*_CLASSES, *_MODULES):
        names = vars(one).items() if one is not sys else [(k, v) for k, v in vars(sys).items() if not k.startswith("last_")]
        found[f"{getattr(one, '__module__', '')}.{one.__name__}"] = {name: id(value) for name, value in names}
    found["environment"] = dict(os.environ)
    found["working directory"] = os.getcwd()
    return found


def start_watching() -> None:
    """Once per process: hooks of this kind cannot be removed."""
    "".encode("cp437")  # how zip files may spell names; imported when first needed
    sys.addaudithook(_audit)


# -- a case ------------------------------------------------------------------------------------------------------------


def load_case(seed: int, kind: str, path: Path, target: Target) -> None:
    """Loads it in one of the ways in which it can be."""
    rng = random.Random(seed + 1)
    if kind == "tensors":
        checkpoint.load_safetensors(path, target.model.layer, cast=rng.random() < 0.5)
        return
    what = rng.randrange(8)
    if what == 0 and kind == "own":
        checkpoint.verify(path)
    elif what == 1:
        checkpoint.resume(path, target.model, target.optimizer)
    elif what == 2:
        checkpoint.load(path, target.model, strict=False, cast=True)
    else:
        checkpoint.load(path, target.model, target.optimizer, validate=rng.random() < 0.5)


def run_case(seed: int, good: dict[str, Path], directory: Path, target: Target) -> tuple[str, str, list[str]]:
    """One case: (kind and change, outcome, what happened that must not)."""
    kind, name = make_case(seed, good, directory)
    before, started = target.content(), time.perf_counter()
    outcome, wrong = "loaded", []
    with watched(directory) as found:
        try:
            load_case(seed, kind, directory, target)
        except CheckpointError as error:
            outcome = "refused"
            if "partly changed" in str(error):
                wrong.append(f"partly changed: {error}")
        except Exception as error:
            outcome = "other error"
            wrong.append(f"{type(error).__name__}: {str(error)[:200]}")
    wrong += found
    if outcome != "loaded" and target.content() != before:
        wrong.append("the model changed")
    if time.perf_counter() - started > SLOWEST:
        wrong.append(f"it took {time.perf_counter() - started:.0f} s")
    return f"{kind}: {name}", outcome, wrong


def run(first: int, count: int, directory: Path) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Cases `first` to `first + count`, in this process."""
    good = make_good(directory / "good")
    target = Target()
    for kind, path in good.items():
        for seed in range(40):  # whatever is imported at the first load is imported now
            load_case(seed, kind, path, target)
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for seed in range(first, first + count):
        try:
            what, outcome, told = run_case(seed, good, directory / "case", target)
        except BaseException as error:
            raise RuntimeError(f"case {seed} could not be run") from error
        counts[what, outcome] += 1
        wrong += [f"case {seed}, {what}, {outcome}: {one}" for one in told]
        if outcome == "loaded" or told:
            target = Target()
    return counts, wrong


def main() -> None:
    """Runs cases in processes of a thousand each, so that one that dies is told by its number, and writes the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--chunk", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default %(default)s)")
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    if options.chunk:
        start_watching()
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as directory:
            counts, wrong = run(options.first, options.cases, Path(directory))
        print(json.dumps([[[*key, count] for key, count in counts.items()], wrong]))
        return
    told = Told()
    end = options.first + options.cases
    with ThreadPoolExecutor(options.jobs) as threads:
        for done in threads.map(lambda first: run_chunk(first, min(CHUNK, end - first)), range(options.first, end, CHUNK)):
            told.add(done)
            print(f"{sum(told.counts.values())} cases, {len(told.wrong)} wrong", flush=True)
            if options.log is not None:
                options.log.write_text(told.text())  # a run that is cut short leaves what it saw
    print(told.text())
    sys.exit(bool(told.wrong))


def run_chunk(first: int, count: int) -> tuple[Counter[tuple[str, str]], list[str]] | str:
    """Cases in a process of their own: as `run`, or how it died."""
    command = [sys.executable, "-m", "tests.soak.checkpoint_fuzz", "--chunk", "--first", str(first), "--cases", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"cases {first} to {first + count}: exit {done.returncode}: {done.stderr[-800:]}"
    found, wrong = json.loads(done.stdout.splitlines()[-1])
    return Counter({(what, outcome): number for what, outcome, number in found}), wrong


class Told:
    """What all chunks said."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()
        self.wrong: list[str] = []
        self._died = 0

    def add(self, chunk: tuple[Counter[tuple[str, str]], list[str]] | str) -> None:
        """One more."""
        if isinstance(chunk, str):
            self._died += 1
            self.wrong.append(chunk)
        else:
            self.counts.update(chunk[0])
            self.wrong += chunk[1]

    def text(self) -> str:
        """The log."""
        total, wrong = sum(self.counts.values()), len(self.wrong)
        lines = [f"{total} hostile and damaged checkpoints; {self._died} processes died; {wrong} things went wrong", ""]
        for what in sorted({what for what, _ in self.counts}):
            outcomes = [f"{self.counts[what, outcome]:6d} {outcome}" for outcome in ("refused", "loaded", "other error")]
            lines.append(f"{what:26s}" + "".join(outcomes))
        return "\n".join([*lines, "", *self.wrong[:200]]).rstrip() + "\n"


if __name__ == "__main__":
    main()

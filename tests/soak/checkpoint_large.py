"""A model of 200 M parameters on two ranks: out to safetensors and back, and the memory that this and whole states take.

    python -m tests.soak.checkpoint_large --log benchmarks/results/large_model.txt

Read back by the `safetensors` library alone: a process that imports neither torch nor hsdp takes the SHA-256 of each
tensor's bytes, and so do the ranks of the model that was exported and of one that loaded the files.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hsdp import checkpoint, fully_shard
from tests.checkpoint.test_full import M_MMAP_THRESHOLD, MIB, Peak
from tests.support.facts import header, in_words
from tests.support.rig import run_procs
from tests.support.worker import RankEnv

VOCAB, DIM, LAYERS = 16_000, 2_000, 42  # 32 M in the largest tensor, 4 M in each of the others

BY_THE_LIBRARY_ALONE = """
import hashlib, json, pathlib, sys
import safetensors

directory = pathlib.Path(sys.argv[1])
weights = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
for file in sorted(set(weights.values())):
    for name, tensor in safetensors.deserialize((directory / file).read_bytes()):
        assert weights[name] == file, name
        digest = hashlib.sha256(tensor["data"]).hexdigest()
        print(json.dumps([name, [tensor["dtype"], tensor["shape"], digest]]))
assert not {"torch", "hsdp"} & sys.modules.keys()
"""


class Large(nn.Module):
    """200 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))

    def forward(self) -> None: ...


class OneByOne(Mapping[str, Tensor]):
    """A state whose tensors are made when they are asked for, as those of a file that is read lazily."""

    def __init__(self, model: nn.Module) -> None:
        self._shapes = {name: value.shape for name, value in model.state_dict().items()}

    def __getitem__(self, name: str) -> Tensor:
        return torch.full(self._shapes[name], 0.25)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def digests(model: nn.Module) -> dict[str, list[Any]]:
    """By name: dtype, shape and SHA-256 of the bytes, on rank 0."""
    found = {}
    for name, value in checkpoint.iter_full_state_dict(model):
        if value is not None:
            assert value.dtype == torch.float32
            data = (ctypes.c_char * value.nbytes).from_address(value.data_ptr())
            found[name] = ["F32", list(value.shape), hashlib.sha256(data).hexdigest()]
    return found


def measure(env: RankEnv, directory: str) -> dict[str, Any]:
    """On each rank: the peaks in MiB above the shard and the seconds of each operation; on rank 0 the digests."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)  # what is freed goes back to the system at once
    torch.manual_seed(0)
    model = fully_shard(Large(), mesh=env.mesh((1, 2)))
    other = fully_shard(Large(), mesh=env.mesh((2, 1)))
    content: dict[str, Any] = {"numel": sum(p.numel() for p in model.parameters()), "rows": {}}

    @contextmanager
    def row(name: str) -> Iterator[None]:
        started = time.perf_counter()
        with Peak() as peak:
            yield
        content["rows"][name] = (peak.bytes / MIB, time.perf_counter() - started)

    with row("save_safetensors"):
        checkpoint.save_safetensors(directory, model, max_file_bytes=300 * 10**6)
    with row("load_safetensors"):
        checkpoint.load_safetensors(directory, other)
    content["exported"], content["loaded"] = digests(model), digests(other)
    del other
    with row("iter_full_state_dict"):
        for _, whole in checkpoint.iter_full_state_dict(model):
            del whole
    with row("full_state_dict"):
        state = checkpoint.full_state_dict(model)
    del state
    with row("load_full_state_dict"):
        checkpoint.load_full_state_dict(model, OneByOne(model))
    assert all(bool((p.to_local() == 0.25).all()) for p in model.parameters())
    return content


def large_run(directory: Path) -> list[str]:
    """Measures and checks; returns the lines of the log.

    Raises:
        AssertionError: a byte differs, or a peak is more than the formula says.
    """
    first, second = run_procs(measure, 2, str(directory), timeout=500)
    out = subprocess.run(
        [sys.executable, "-c", BY_THE_LIBRARY_ALONE, str(directory)], capture_output=True, text=True, check=True
    )
    found = dict(json.loads(line) for line in out.stdout.splitlines())
    assert found == first["exported"], "what the library reads is not what the model has"
    assert first["loaded"] == first["exported"], "what was loaded is not what was exported"
    files = sorted(directory.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    lines = [
        f"{first['numel']:,} parameters, {len(found)} tensors, {size / MIB:.0f} MiB in {len(files)} files: the SHA-256 of "
        f"each tensor is the same in the model, by the library alone, and in a model that loaded the files",
        f"{'peak above the shard, MiB':24} {'formula':>8} {'rank 0':>8} {'rank 1':>8}   seconds",
    ]
    largest, total, slack = VOCAB * DIM * 4 / MIB, first["numel"] * 4 / MIB, 4.0
    formula = dict.fromkeys(first["rows"], (largest, 0.0))
    # The library maps the files: pages that were read count as held, until the system takes them back.
    formula |= {"full_state_dict": (total, 0.0), "load_safetensors": (size / MIB, size / MIB)}
    for name, (peak, seconds) in first["rows"].items():
        other = second["rows"][name][0]
        lines.append(f"{name:24} {formula[name][0]:8.1f} {peak:8.1f} {other:8.1f} {seconds:9.1f}")
        for measured, most in zip((peak, other), formula[name], strict=True):
            assert measured <= most + slack, lines
    lines.append("load_safetensors: on 2x1 each rank reads all; pages of mapped files, which the system can take back")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="write to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="hsdp-large-") as directory:
        lines = large_run(Path(directory))
    facts = {**header(), "safetensors": metadata.version("safetensors")}
    command = f"python -m tests.soak.checkpoint_large {shlex.join(sys.argv[1:] if argv is None else argv)}"
    text = "\n".join([command, in_words(facts), *lines]) + "\n"
    print(text)
    if options.log is not None:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        with options.log.open("w") as log:
            log.write(text)


if __name__ == "__main__":
    main()

"""The text every machine has: CPython's standard library, split by whole files, with n-gram baselines.

The selection is a function of file names and sizes alone, so two machines with the same Python agree on
every byte of the split, and a machine with another Python agrees on most of them. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

NUM_BYTES = 256
"""Size of the vocabulary: a token is a byte."""

# Tests repeat each other, `encodings` is generated tables, the rest is not the standard library's own text.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"})
_LARGEST_FILE = 256 * 1024  # bigger ones are generated, and one of them could be half of the held-out text
_CHUNK_BYTES = 2**20
_HELD_OUT_OF_256 = 26  # about a tenth of the files


class CorpusError(RuntimeError):
    """There is no usable text on this machine."""


@dataclass(frozen=True)
class Corpus:
    """Two byte streams, `uint8` of shape `[num_bytes]` each, from disjoint sets of files."""

    train: Tensor
    held_out: Tensor
    num_train_files: int
    num_held_out_files: int


def load_corpus(max_bytes: int, folder: Path | None = None) -> Corpus:
    """Reads up to `max_bytes` of Python sources below `folder` (default: the standard library).

    Files are taken in the order of a hash of their relative path, which is a fixed shuffle, until the next
    one would not fit; another byte of the same hash decides which of them are held out. Files that are not
    UTF-8 are left out.

    Raises:
        CorpusError: if either side of the split is empty.
    """
    root = folder if folder is not None else Path(sysconfig.get_path("stdlib"))
    streams = (bytearray(), bytearray())
    num_files = [0, 0]
    num_bytes_left = max_bytes
    for digest, path in sorted((_digest(path, root), path) for path in _sources(root)):
        source = path.read_bytes()
        if len(source) > num_bytes_left:
            break
        if not _is_utf8(source):
            continue
        num_bytes_left -= len(source)
        # The first bytes of the digest order the files; the last one is independent of them.
        side = int(digest[-1] < _HELD_OUT_OF_256)
        streams[side].extend(source)
        num_files[side] += 1
    if not all(streams):
        raise CorpusError(
            f"no text to train on: {num_files[0]} training and {num_files[1]} held-out files "
            f"of {max_bytes} bytes at most under {root}; raise --corpus-bytes"
        )
    train, held_out = (torch.frombuffer(stream, dtype=torch.uint8) for stream in streams)
    return Corpus(train, held_out, num_files[0], num_files[1])


def _sources(root: Path) -> list[Path]:
    found = []
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in _SKIPPED_FOLDERS]  # not walked: libraries have 10,000 files
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            machines_own = path.name.startswith("_sysconfigdata")  # describes the machine that it was built on
            if not machines_own and path.is_file() and path.stat().st_size <= _LARGEST_FILE:
                found.append(path)
    return found


def _digest(path: Path, root: Path) -> bytes:
    return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()


def _is_utf8(source: bytes) -> bool:
    try:
        source.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def batch_windows(stream: Tensor, *, seed: int, step: int, batch: int, seq_len: int) -> Tensor:
    """The whole global batch of one step: `int64 [batch, seq_len + 1]`, inputs and targets overlapping.

    Row `i` depends on `(seed, step, i)` and on nothing else. A rank takes the rows that are its own, so
    the data of a step does not change with the mesh, and a resumed run needs no state but its step.
    """
    generator = torch.Generator().manual_seed(_mix(seed, step))
    starts = torch.randint(len(stream) - seq_len, (batch,), generator=generator)
    return stream[starts[:, None] + torch.arange(seq_len + 1)].long()


def _mix(seed: int, step: int) -> int:
    """One 63-bit generator seed from two numbers, such that neighbouring steps have unrelated draws."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:8], "little") >> 1


def consecutive_windows(stream: Tensor, seq_len: int) -> Tensor:
    """Cuts a stream into `int64 [num_windows, seq_len + 1]` so that every byte is a target at most once.

    Only the first byte and an incomplete last window are never predicted.
    """
    return stream.unfold(0, seq_len + 1, seq_len).long()


def ngram_cross_entropy(corpus: Corpus, order: int) -> float:
    """Nats per held-out byte of an interpolated n-gram model fitted to the training files.

    `order` is n: 2 for bigrams. Smoothing is Witten and Bell's (1991): a context seen `N` times with
    `T` different successors gives `p(b) = (count(b) + T * p_shorter(b)) / (N + T)`, down to the uniform
    distribution over bytes. It has nothing to tune and is finite on any text.
    """
    num_targets = len(corpus.held_out) - (order - 1)
    if num_targets < 1 or len(corpus.train) < order:
        raise ValueError(f"a text of {len(corpus.held_out)} bytes is too short for n-grams of order {order}")
    probability = torch.full((num_targets,), 1.0 / NUM_BYTES, dtype=torch.float64)
    for n in range(1, order + 1):
        grams, counts = _counted_grams(corpus.train, n)
        contexts, context_of_gram = torch.unique(grams // NUM_BYTES, return_inverse=True)
        context_counts = torch.zeros_like(contexts).index_add_(0, context_of_gram, counts)
        num_successors = torch.bincount(context_of_gram)
        queries = _grams(corpus.held_out, n)[order - n :]
        seen = _lookup(grams, counts, queries)
        context_seen = _lookup(contexts, context_counts, queries // NUM_BYTES)
        backoff = _lookup(contexts, num_successors, queries // NUM_BYTES)
        interpolated = (seen + backoff * probability) / (context_seen + backoff)
        # An unseen context is 0 / 0 and knows no more than its suffix does.
        probability = torch.where(context_seen > 0, interpolated, probability)
    return -probability.log().mean().item()


def _counted_grams(stream: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The different windows of `n` bytes, sorted, and how often each occurs: two `int64 [num_grams]`."""
    grams = torch.empty(0, dtype=torch.int64)
    counts = torch.empty(0, dtype=torch.int64)
    # In chunks, each with the n - 1 bytes that its last window reaches into: sorting all of the text at once
    # would take more memory than training does.
    for start in range(0, len(stream) - n + 1, _CHUNK_BYTES):
        chunk = stream[start : start + _CHUNK_BYTES + n - 1]
        new_grams, new_counts = torch.unique(_grams(chunk, n), return_counts=True)
        grams, place = torch.unique(torch.cat((grams, new_grams)), return_inverse=True)
        counts = torch.zeros_like(grams).index_add_(0, place, torch.cat((counts, new_counts)))
    return grams, counts


def _grams(stream: Tensor, n: int) -> Tensor:
    """Each window of `n` bytes as one integer: `int64 [num_bytes - n + 1]`."""
    num_grams = len(stream) - n + 1
    grams = torch.zeros(num_grams, dtype=torch.int64)
    for offset in range(n):
        grams.mul_(NUM_BYTES).add_(stream[offset : offset + num_grams])
    return grams


def _lookup(sorted_keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """`values` at the place of each query among `sorted_keys`, 0 where it is not there."""
    position = torch.searchsorted(sorted_keys, queries).clamp_(max=len(sorted_keys) - 1)
    return torch.where(sorted_keys[position] == queries, values[position], 0)

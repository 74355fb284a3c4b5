"""Where each parameter's bytes lie: integers alone, no tensors, no ranks' state.

A *dtype group* is the set of a unit's parameters that share dtypes. For one dtype group and S shard ranks the layout is

    shard buffer      [ big A | big B | mid C | small d | small e | pad ]              one rank's pieces
                      '- direct -----'                                                 own transfer each
                                      '- packed --------------------'                  one transfer together
                        ^ every piece starts at a multiple of ALIGN elements, those behind packed ones of ALIGN_PACKED

    whole             [ whole A | whole B ] [ whole C | whole d | whole e ]            same order, whole sizes
                        there when their gather starts   when it has ended

Pieces are ordered so that what is packed forms one contiguous range: first those that go unevenly, then those that are
gathered and reduced directly, then those gathered directly but reduced packed, then those packed in both. A piece is
*padded* to the size of the largest rank's, so that every rank's buffer has the same length and collectives need no per-rank
sizes. Where that would multiply what travels (8 experts on 64 ranks), a large piece goes *unevenly*: directly, and of every
rank what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

ALIGN = 64
"""Alignment of pieces, in elements: 128 bytes in 16-bit dtypes, the widest vector access and cache-line pair in use."""

ALIGN_PACKED = 8
"""The same of packed pieces on several ranks: what a vector access needs. On many ranks small ones have fewer elements than
`ALIGN`, and every rank would pad them to it."""

DIRECT_MULTIPLE_BYTES = 16
"""A direct piece is a multiple of this many bytes per rank; odd sizes can be 12 times slower on NCCL."""


def chunk_of(rows: int, parts: int, part: int) -> tuple[int, int]:
    """Where a part of some rows begins, and how many it has: as torch.chunk cuts, and DTensor's `Shard`.

    The last parts may have fewer rows than the others, or none.
    """
    size = -(-rows // parts)
    start = min(part * size, rows)
    return start, min(size, rows - start)


@dataclass(frozen=True)
class ParamSpec:
    """What the layout of a parameter depends on.

    Attributes:
        shape: its whole shape.
        dim: the tensor dim it is sharded on; None: not sharded.
        merged: how many leading dims are cut as if they were one: 1, or 2 with `dim` 0. For 8 experts on 64 ranks, say:
            each rank holds an eighth of one expert's rows, where Shard(0) would pad 8 rows to 64. The rank's part must be
            a part of one row of dim 0.
    """

    shape: tuple[int, ...]
    dim: int | None
    merged: int = 1

    @property
    def cut(self) -> int:
        """Rows that are divided among the ranks."""
        assert self.dim is not None, "a parameter that is not sharded has no rows"
        return self.shape[self.dim] if self.merged == 1 else math.prod(self.shape[: self.merged])

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


NEVER = 1 << 62
"""A threshold that no piece reaches."""


@dataclass(frozen=True)
class Thresholds:
    """When a piece goes direct: at least this many bytes per rank, counted in `itemsize`-byte elements.

    And when one with padding goes unevenly: if for each rank that holds rows it spares `uneven_bytes` of those gathered.
    """

    gather_bytes: int
    gather_itemsize: int
    reduce_bytes: int
    reduce_itemsize: int
    uneven_bytes: int = NEVER


SMALL_PADDING = 1 / 64
"""Of a parameter: what is padded by no more goes evenly. All ranks take part in one transfer then, and not in one for each
rank that holds rows."""


@dataclass(frozen=True)
class Piece:
    """One parameter's place. Offsets and sizes are in elements.

    Attributes:
        spec: the parameter.
        offset: start in the shard buffer.
        numel: elements per rank, padding included; the same on every rank.
        whole_offset: start in the whole buffer.
        chunk: rows (along the sharded dim) of a full rank; later ranks may hold fewer, or none.
        even: rank r's piece is exactly the r-th of S equal parts of the whole parameter in memory order.
        direct_gather, direct_reduce: whether it is transferred on its own, without a copy.
        uneven: it is, in both, and each rank gives and gets its rows without padding. They lie in the whole parameter in
            memory order, as those of even pieces do.
    """

    spec: ParamSpec
    offset: int
    numel: int
    whole_offset: int
    chunk: int
    even: bool
    direct_gather: bool
    direct_reduce: bool
    uneven: bool = False

    def rows(self, rank: int) -> int:
        """Rows along the sharded dim that `rank` holds (torch.chunk's rule, as DTensor's `Shard` has it)."""
        return max(0, min(self.chunk, self.spec.cut - rank * self.chunk))

    def sizes(self, shards: int) -> list[int]:
        """Elements of each rank's rows, without padding."""
        each = self.numel // self.chunk if self.chunk else 0
        return [self.rows(rank) * each for rank in range(shards)]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard that `rank` holds."""
        if self.spec.dim is None:
            return self.spec.shape
        if self.spec.merged > 1:
            return (1, self.chunk, *self.spec.shape[2:])
        shape = list(self.spec.shape)
        shape[self.spec.dim] = self.rows(rank)
        return tuple(shape)


@dataclass(frozen=True)
class Layout:
    """The layout of one dtype group.

    Attributes:
        shards: number of shard ranks S.
        pieces: one per parameter, in the order in which the parameters were given.
        numel: length of the shard buffer, and of the reduction buffer without its tail of used-flags.
        whole_numel: length of all whole parameters.
        reduce_packed_start, gather_packed_start: where the packed ranges start; both end at `numel`.
        whole_packed_start: where, among the whole parameters, those begin that are gathered packed.
    """

    shards: int
    pieces: tuple[Piece, ...]
    numel: int
    whole_numel: int
    reduce_packed_start: int
    gather_packed_start: int
    whole_packed_start: int

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """Indices of the pieces in the order in which they lie in the buffers."""
        return tuple(sorted(range(len(self.pieces)), key=lambda i: (self.pieces[i].offset, self.pieces[i].whole_offset)))

    @property
    def padding(self) -> int:
        """Elements that all ranks together hold beyond those of the parameters (whole ones counted once per rank)."""
        held = sum(p.spec.numel * (self.shards if p.spec.dim is None else 1) for p in self.pieces)
        return self.shards * self.numel - held


def lay_out(specs: Sequence[ParamSpec], shards: int, thresholds: Thresholds) -> Layout:
    """Plans the buffers of one dtype group.

    Args:
        specs: its parameters.
        shards: number of shard ranks, at least 1.
        thresholds: sizes from which a piece goes direct. What is reduced directly is gathered directly too.

    Returns:
        The layout; the same on every rank, as it depends on the arguments alone.
    """
    drafts = [_draft(spec, shards, thresholds) for spec in specs]
    order = sorted(
        range(len(specs)),
        key=lambda i: (not drafts[i].uneven, not drafts[i].direct_reduce, not drafts[i].direct_gather),
    )
    pieces = list(drafts)
    offset = whole_offset = 0
    starts: dict[str, int] = {}
    for i in order:
        draft = drafts[i]
        if not draft.direct_reduce:
            starts.setdefault("reduce", offset)
        if not draft.direct_gather:
            starts.setdefault("gather", offset)
            starts.setdefault("whole", whole_offset)
        pieces[i] = replace(draft, offset=offset, whole_offset=whole_offset)
        offset = _align(offset + draft.numel, ALIGN if draft.direct_gather or shards == 1 else ALIGN_PACKED)
        whole_offset = _align(whole_offset + draft.spec.numel)
    return Layout(
        shards=shards,
        pieces=tuple(pieces),
        numel=offset,
        whole_numel=whole_offset,
        reduce_packed_start=starts.get("reduce", offset),
        gather_packed_start=starts.get("gather", offset),
        whole_packed_start=starts.get("whole", whole_offset),
    )


def _draft(spec: ParamSpec, shards: int, thresholds: Thresholds) -> Piece:
    """A piece without its offsets."""
    if spec.dim is None:
        return Piece(
            spec, offset=0, numel=spec.numel, whole_offset=0, chunk=0, even=False, direct_gather=False, direct_reduce=False
        )
    rows = spec.cut
    chunk = -(-rows // shards)
    others = spec.numel // rows if rows else 0
    numel = chunk * others
    # With Shard(0) and equal shards, rank r's rows are exactly the r-th S-th of the whole parameter: no reordering.
    even = spec.dim == 0 and rows % shards == 0 and numel > 0
    assert spec.merged == 1 or (even and spec.shape[1] % chunk == 0), f"merged dims of {spec.shape} do not fit {shards}"

    def goes_direct(smallest: int, itemsize: int) -> bool:
        size = numel * itemsize
        return even and size >= smallest and size % DIRECT_MULTIPLE_BYTES == 0

    gather = goes_direct(thresholds.gather_bytes, thresholds.gather_itemsize)
    reduce = gather and goes_direct(thresholds.reduce_bytes, thresholds.reduce_itemsize)
    if uneven := not even and spec.dim == 0 and numel > 0 and _goes_unevenly(spec, shards, thresholds):
        gather = reduce = True
    return Piece(
        spec,
        offset=0,
        numel=numel,
        whole_offset=0,
        chunk=chunk,
        even=even,
        direct_gather=gather,
        direct_reduce=reduce,
        uneven=uneven,
    )


def _goes_unevenly(spec: ParamSpec, shards: int, thresholds: Thresholds) -> bool:
    """Whether a parameter of which ranks hold different numbers of rows goes without its padding."""
    rows, chunk = spec.cut, -(-spec.cut // shards)
    padding, row = shards * chunk - rows, spec.numel // rows
    gathered, reduced = row * thresholds.gather_itemsize, row * thresholds.reduce_itemsize
    if gathered % DIRECT_MULTIPLE_BYTES or reduced % DIRECT_MULTIPLE_BYTES:
        return False
    if chunk * gathered < thresholds.gather_bytes or chunk * reduced < thresholds.reduce_bytes:
        return False
    # Each rank that holds rows sends to all others in a transfer of its own, which must be worth its latency.
    holders = -(-rows // chunk)
    return padding > SMALL_PADDING * rows and padding * gathered >= holders * thresholds.uneven_bytes


def _align(numel: int, multiple: int = ALIGN) -> int:
    return -(-numel // multiple) * multiple

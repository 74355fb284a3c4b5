"""Layouts: what they promise for any parameters, numbers of ranks and thresholds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard

from hsdp.buffers.layout import (
    ALIGN,
    ALIGN_PACKED,
    DIRECT_MULTIPLE_BYTES,
    NEVER,
    Layout,
    ParamSpec,
    Piece,
    Thresholds,
    lay_out,
)
from hsdp.buffers.views import merge_copies, row_views, whole_views


@st.composite
def _specs(draw: st.DrawFn) -> ParamSpec:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 96]), max_size=3)))
    dim = draw(st.sampled_from(range(len(shape)))) if shape and draw(st.integers(0, 9)) else None
    return ParamSpec(shape, dim)


_THRESHOLDS = st.builds(
    Thresholds,
    gather_bytes=st.sampled_from([0, 1, 64, 512, 4096, NEVER]),
    gather_itemsize=st.sampled_from([2, 4, 8]),
    reduce_bytes=st.sampled_from([0, 1, 64, 512, 4096, NEVER]),
    reduce_itemsize=st.sampled_from([2, 4, 8]),
)
_LANES = st.tuples(st.lists(_specs(), max_size=8), st.integers(1, 9), _THRESHOLDS)


def _overlaps(spans: list[tuple[int, int]]) -> bool:
    """Whether spans (start, size) share an element; empty ones do not."""
    ends = 0
    for start, size in sorted((start, size) for start, size in spans if size):
        if start < ends:
            return True
        ends = start + size
    return False


@given(_LANES)
def test_pieces_do_not_overlap_and_lie_in_the_buffers(group: tuple[list[ParamSpec], int, Thresholds]) -> None:
    layout = lay_out(*group)
    assert [piece.spec for piece in layout.pieces] == group[0]
    assert not _overlaps([(p.offset, p.numel) for p in layout.pieces])
    assert not _overlaps([(p.whole_offset, p.spec.numel) for p in layout.pieces])
    assert all(p.offset >= 0 and p.offset + p.numel <= layout.numel for p in layout.pieces)
    assert all(p.whole_offset >= 0 and p.whole_offset + p.spec.numel <= layout.whole_numel for p in layout.pieces)


@given(_LANES)
def test_every_piece_starts_aligned(group: tuple[list[ParamSpec], int, Thresholds]) -> None:
    layout = lay_out(*group)
    starts = [p.whole_offset for p in layout.pieces] + [layout.whole_numel, layout.whole_packed_start]
    starts += [p.offset for p in layout.pieces if p.direct_gather or layout.shards == 1]
    assert all(start % ALIGN == 0 for start in starts)
    assert ALIGN * 2 % 128 == 0, "128 bytes in the narrowest dtype"
    starts = [p.offset for p in layout.pieces] + [layout.numel, layout.reduce_packed_start, layout.gather_packed_start]
    assert all(start % ALIGN_PACKED == 0 for start in starts)
    assert ALIGN_PACKED * 2 % 16 == 0, "a vector access in the narrowest dtype"


def test_small_pieces_on_many_ranks_are_hardly_padded() -> None:
    layout = lay_out(
        [ParamSpec((256,), 0), ParamSpec((64, 100), 0), ParamSpec((256,), 0)], 64, Thresholds(1 << 9, 4, 1 << 9, 4)
    )
    assert [piece.offset for piece in layout.pieces] == [0, 8, 112]
    assert layout.numel == 120, "4, 100 and 4 elements"


@given(_LANES)
def test_padding_is_bounded_and_reported(group: tuple[list[ParamSpec], int, Thresholds]) -> None:
    specs, shards, _ = group
    layout = lay_out(*group)
    held = sum(s.numel * (shards if s.dim is None else 1) for s in specs)
    assert layout.padding == shards * layout.numel - held
    # Each piece: less than one row per missing rank, and less than one alignment per rank.
    rows = sum(0 if s.dim is None or not s.numel else (shards - 1) * s.numel // s.shape[s.dim] for s in specs)
    assert 0 <= layout.padding <= rows + shards * (ALIGN - 1) * len(specs)


def test_large_parameters_are_hardly_padded() -> None:
    specs = [ParamSpec((1000, 999), 0), ParamSpec((513, 511), 0), ParamSpec((1000,), 0)]
    layout = lay_out(specs, 8, Thresholds(0, 4, 0, 4))
    assert layout.padding / sum(s.numel for s in specs) < 0.01


@given(_LANES)
@example(([ParamSpec((5, 3), 0)], 4, Thresholds(0, 4, 0, 4)))  # the last rank holds no rows
def test_ranks_hold_what_dtensor_says(group: tuple[list[ParamSpec], int, Thresholds]) -> None:
    shards = group[1]
    for piece in lay_out(*group).pieces:
        spec = piece.spec
        for rank in range(shards):
            local = piece.local_shape(rank)
            assert math.prod(local) <= piece.numel
            if spec.dim is None:
                assert local == spec.shape
                continue
            size, _ = Shard.local_shard_size_and_offset(spec.shape[spec.dim], shards, rank)
            assert local == (*spec.shape[: spec.dim], size, *spec.shape[spec.dim + 1 :])


def _can_go_direct(piece: Piece, shards: int, at_least: int, itemsize: int) -> bool:
    spec, size = piece.spec, piece.numel * itemsize
    even = spec.dim == 0 and spec.numel > 0 and spec.shape[0] % shards == 0
    return even and size >= at_least and size % DIRECT_MULTIPLE_BYTES == 0


@given(_LANES)
@example(([ParamSpec((8, 8), 0), ParamSpec((6, 4), 0)], 2, Thresholds(0, 4, 0, 4)))
@example(([ParamSpec((8, 1), 0)], 8, Thresholds(0, 4, 0, 4)))  # 4 bytes per rank: an odd size
@example(([ParamSpec((8, 1), 0)], 2, Thresholds(0, 4, 0, 2)))  # 16 bytes to gather, 8 to reduce
def test_what_is_large_and_even_goes_direct_and_the_rest_is_packed(
    group: tuple[list[ParamSpec], int, Thresholds],
) -> None:
    _, shards, thresholds = group
    layout = lay_out(*group)
    for piece in layout.pieces:
        gather = _can_go_direct(piece, shards, thresholds.gather_bytes, thresholds.gather_itemsize)
        reduce = _can_go_direct(piece, shards, thresholds.reduce_bytes, thresholds.reduce_itemsize)
        assert piece.direct_gather == gather
        assert piece.direct_reduce == (gather and reduce)
        # The packed ranges hold all that is packed and nothing that is direct.
        if piece.numel:
            assert (piece.offset >= layout.gather_packed_start) == (not gather)
            assert (piece.offset >= layout.reduce_packed_start) == (not (gather and reduce))
            assert (piece.whole_offset >= layout.whole_packed_start) == (not gather)
    assert layout.reduce_packed_start <= layout.gather_packed_start <= layout.numel


def test_thresholds_count_bytes_of_a_ranks_piece() -> None:
    specs = [ParamSpec((32, 8), 0), ParamSpec((28, 8), 0)]  # 64 and 56 elements per rank
    layout = lay_out(specs, 4, Thresholds(gather_bytes=256, gather_itemsize=4, reduce_bytes=256, reduce_itemsize=2))
    assert [(p.direct_gather, p.direct_reduce) for p in layout.pieces] == [(True, False), (False, False)]
    assert lay_out(specs[:1], 4, Thresholds(257, 4, 0, 4)).pieces[0].direct_gather is False


@given(_LANES)
def test_order_in_the_buffers_is_the_same_for_shards_and_wholes(
    group: tuple[list[ParamSpec], int, Thresholds],
) -> None:
    layout = lay_out(*group)
    pieces = [layout.pieces[i] for i in layout.in_order]
    assert sorted(layout.in_order) == list(range(len(layout.pieces)))
    offsets = [(p.offset, p.whole_offset) for p in pieces]
    assert offsets == sorted(offsets)
    if layout.shards == 1:
        assert all(p.offset == p.whole_offset for p in pieces), "with one rank the shard buffer is the whole one"


def _filled(spec: ParamSpec) -> torch.Tensor:
    return torch.arange(1, spec.numel + 1, dtype=torch.float64).view(spec.shape)


def _pack(layout: Layout, wholes: list[torch.Tensor]) -> torch.Tensor:
    """All pieces copied into one row per rank; what nothing is copied to stays NaN."""
    rows = torch.full((layout.shards, layout.numel), torch.nan, dtype=torch.float64)
    for piece, whole in zip(layout.pieces, wholes, strict=True):
        views = row_views(piece, rows[:, piece.offset : piece.offset + piece.numel])
        for view, part in zip(views, whole_views(piece, whole, layout.shards), strict=True):
            assert view.shape == part.shape
            view.copy_(part)
    return rows


@given(_LANES)
@example(([ParamSpec((3, 5), 1), ParamSpec((4, 6), 1), ParamSpec((0, 4), 0)], 2, Thresholds(0, 4, 0, 4)))
def test_rows_hold_the_shards_and_give_the_wholes_back(group: tuple[list[ParamSpec], int, Thresholds]) -> None:
    specs, shards, thresholds = group
    specs = [spec for spec in specs if spec.dim is not None]  # others are not packed in rows
    layout = lay_out(specs, shards, thresholds)
    wholes = [_filled(spec) for spec in specs]
    rows = _pack(layout, wholes)
    for piece, whole in zip(layout.pieces, wholes, strict=True):
        assert piece.spec.dim is not None
        chunks = list(whole.chunk(shards, piece.spec.dim))
        for rank in range(shards):
            local = piece.local_shape(rank)
            start = piece.offset
            held = rows[rank, start : start + math.prod(local)].view(local)
            if rank < len(chunks) or math.prod(local):
                assert torch.equal(held, chunks[rank])
            if piece.even:
                assert torch.equal(held.flatten(), whole.reshape(shards, -1)[rank])
        back = torch.zeros_like(whole)
        views = row_views(piece, rows[:, piece.offset : piece.offset + piece.numel])
        for part, view in zip(whole_views(piece, back, shards), views, strict=True):
            part.copy_(view)
        assert torch.equal(back, whole)


@pytest.mark.parametrize("rows", [3, 4095, 4097, 12287])
def test_views_do_not_grow_with_the_ranks(rows: int) -> None:
    spec = ParamSpec((rows, 2), 0)
    (piece,) = lay_out([spec], 4096, Thresholds(NEVER, 4, NEVER, 4)).pieces
    views = row_views(piece, torch.zeros(4096, piece.numel))
    assert len(views) == len(whole_views(piece, _filled(spec), 4096)) <= 2


def test_the_plan_depends_on_the_arguments_alone() -> None:
    specs = [ParamSpec((5, 7), 0), ParamSpec((64, 64), 0), ParamSpec((3,), 0), ParamSpec((), None)]
    layouts = {repr(lay_out(specs, 4, Thresholds(512, 4, 1024, 4))) for _ in range(3)}
    assert len(layouts) == 1
    assert eval(layouts.pop()) == lay_out(specs, 4, Thresholds(512, 4, 1024, 4))


@pytest.mark.parametrize("shards", [1, 2, 64])
def test_no_parameters_need_no_buffers(shards: int) -> None:
    layout = lay_out([], shards, Thresholds(0, 4, 0, 4))
    assert (layout.numel, layout.whole_numel, layout.padding, layout.pieces) == (0, 0, 0, ())


_PLACES = st.permutations(range(6)) | st.just(list(range(6)))


@given(_PLACES, _PLACES, st.lists(st.sampled_from([4, 8]), min_size=6, max_size=6))
@example([1, 0, 2, 3, 4, 5], list(range(6)), [8] * 6)
def test_merged_copies_copy_the_same(to: list[int], sources: list[int], widths: list[int]) -> None:
    memory = torch.arange(2 * 6 * 16.0)
    into = torch.zeros(2, 6 * 16)
    views = [memory.as_strided((2, width), (width, 1), 32 * at) for at, width in zip(sources, widths, strict=True)]
    places = [into[:, 16 * at : 16 * at + width] for at, width in zip(to, widths, strict=True)]
    expected = into.clone()
    for at, view, width in zip(to, views, widths, strict=True):
        expected[:, 16 * at : 16 * at + width] = view
    merged = merge_copies(places, views)
    torch._foreach_copy_(*merged)
    assert torch.equal(into, expected)
    if to == sources == list(range(6)) and len(set(widths)) == 1:
        assert len(merged[0]) == 1

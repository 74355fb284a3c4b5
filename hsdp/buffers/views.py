"""Views of parameters and of packed rows that fit each other, and how copies between them are merged."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from hsdp.buffers.layout import Piece

Place = tuple[object, int]
"""How a part of a storage looks, and where it begins, in elements."""


def row_views(piece: Piece, columns: Tensor) -> list[Tensor]:
    """Views of the packed rows that hold one parameter's pieces, shaped as `whole_views` shapes its parts.

    Args:
        piece: its place in the layout.
        columns: the rows' columns of this piece, (S, piece.numel), or narrower where ranks hold less.
    """
    shards, shape, dim = columns.shape[0], piece.spec.shape, piece.spec.dim
    assert dim is not None, "what every rank keeps whole is not packed in rows"
    if piece.even or shape[dim] % shards == 0:
        before = math.prod(shape[:dim])
        return [columns.view(shards, before, piece.numel // before if before else 0)]
    if not piece.spec.numel:
        return []
    # As many ranks as are full, in one; then the one that holds the rest.
    full, rest = divmod(shape[dim], piece.chunk)
    before = math.prod(shape[:dim])
    views: list[Tensor] = []
    if full:
        each = math.prod(shape) // shape[dim] * piece.chunk
        views.append(columns[:full, :each].view(full, before, each // before))
    if rest:
        local = piece.local_shape(full)
        views.append(columns[full, : math.prod(local)].view(local))
    return views


def whole_views(piece: Piece, whole: Tensor, shards: int) -> list[Tensor]:
    """The parts of a whole parameter, or gradient: one stack of ranks' equal parts, and what the rank behind them holds."""
    shape, dim = piece.spec.shape, piece.spec.dim
    assert dim is not None, "what every rank keeps whole is not cut"
    if piece.even or shape[dim] % shards == 0:
        before = math.prod(shape[:dim])
        return [whole.reshape(before, shards, piece.numel // before if before else 0).transpose(0, 1)]
    if not piece.spec.numel:
        return []
    full, rest = divmod(shape[dim], piece.chunk)
    before = math.prod(shape[:dim])
    views: list[Tensor] = []
    if full:
        stack = whole.narrow(dim, 0, full * piece.chunk)
        views.append(stack.reshape(before, full, stack.numel() // (before * full)).transpose(0, 1))
    if rest:
        views.append(whole.narrow(dim, full * piece.chunk, rest))
    return views


def merge_copies(to: list[Tensor], sources: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The same copies as fewer: neighbours that look alike and lie equally far apart become one, with one more dim.

    A copy of a strided view is a kernel, or an operator, of its own. Parameters of equal size lie side by side.

    Args:
        to: views of one storage, in the order in which they lie there; sources: as many views of another one, each of the
            shape of its destination.

    Returns:
        What to copy to, and from.
    """
    runs = runs_of(
        *([((view.shape, view.stride()), int(view.storage_offset())) for view in views] for views in (to, sources))
    )
    return [_stacked(to, run) for run in runs], [_stacked(sources, run) for run in runs]


def runs_of(*lists: Sequence[Place]) -> list[list[int]]:
    """The numbers of neighbours that look alike and lie equally far apart, in each of these lists, which are as long."""
    runs: list[list[int]] = []
    for i in range(len(lists[0])):
        if not (runs and all(_goes_on(places, runs[-1], i) for places in lists)):
            runs.append([])
        runs[-1].append(i)
    return runs


def _goes_on(places: Sequence[Place], run: list[int], i: int) -> bool:
    """Whether place `i` continues a run."""
    (looks, at), (looked, before) = places[i], places[run[-1]]
    if looks != looked:
        return False
    if len(run) == 1:
        return at > before  # torch has no negative strides
    return at - before == before - places[run[-2]][1]


def _stacked(views: list[Tensor], run: list[int]) -> Tensor:
    first = views[run[0]]
    if len(run) == 1:
        return first
    step = views[run[1]].storage_offset() - first.storage_offset()
    return first.as_strided((len(run), *first.shape), (step, *first.stride()))

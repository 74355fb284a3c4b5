"""Views of parameters and of packed rows that fit each other, and how copies between them are merged."""

from __future__ import annotations

import math

from torch import Tensor

from hsdp.buffers.layout import Piece


def row_views(piece: Piece, columns: Tensor) -> list[Tensor]:
    """Views of the packed rows that hold one parameter's pieces, shaped as `whole_views` shapes its parts.

    Args:
        piece: its place in the layout.
        columns: the rows' columns of this piece, (S, piece.numel), or narrower where ranks hold less.
    """
    shards, shape, dim = columns.shape[0], piece.spec.shape, piece.spec.dim
    if dim is None:
        return [columns]
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
    if dim is None:
        return [whole.reshape(1, -1).expand(shards, -1)]
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
    runs: list[list[int]] = []
    for i in range(len(to)):
        if not (runs and all(_goes_on(views, runs[-1], i) for views in (to, sources))):
            runs.append([])
        runs[-1].append(i)
    return [_stacked(to, run) for run in runs], [_stacked(sources, run) for run in runs]


def _goes_on(views: list[Tensor], run: list[int], i: int) -> bool:
    """Whether view `i` continues a run of views of one storage."""
    last, this = views[run[-1]], views[i]
    if (this.shape, this.stride()) != (last.shape, last.stride()):
        return False
    step = this.storage_offset() - last.storage_offset()
    if len(run) == 1:
        return step > 0  # torch has no negative strides
    return step == last.storage_offset() - views[run[-2]].storage_offset()


def _stacked(views: list[Tensor], run: list[int]) -> Tensor:
    first = views[run[0]]
    if len(run) == 1:
        return first
    step = views[run[1]].storage_offset() - first.storage_offset()
    return first.as_strided((len(run), *first.shape), (step, *first.stride()))

"""One bucket's way through a step: pieces to the owners, whole matrices there, updated pieces to all that hold them.

    local tensors --gives--> all-to-all --comes--> batches of whole matrices --update--> --returns--> all-to-all --gets-->

Where replicas have equal gradients and momentum, an owner takes pieces from its own replica only; where each has its share,
from all of them. What it computes goes to every replica, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsdp.comm.collectives import Comm
from hsdp.comm.work import CommWork
from hsdp.optim.matrices import Bucket, Matrix, Piece

Update = Callable[[Tensor, dict[str, Any]], Tensor]
"""Whole matrices `[k, rows, cols]` of one group, and that group, to their updates, of the same shape."""


@dataclass
class Label:
    """What the ranks' divergence guard calls an exchange."""

    name: str


@dataclass(frozen=True)
class Updated:
    """An updated piece that has arrived: `value`, shaped as the part of the local tensor that it belongs to."""

    piece: Piece
    matrix: Matrix
    value: Tensor


class Exchange:
    """A bucket in a step. Its three parts are called in turn; collectives run between them.

    Args:
        bucket: what travels.
        comm: among the ranks that hold it.
        ranks: these, by their numbers in `comm`.
        label, op: for the divergence guard.
    """

    def __init__(self, bucket: Bucket, comm: Comm, ranks: tuple[int, ...], label: Label, op: int) -> None:
        self._bucket = bucket
        self._comm = comm
        self._ranks = ranks
        self._me = ranks[comm.rank]
        self._label = label
        self._op = op
        self._work: CommWork | None = None
        self._own: list[Tensor] = []
        self._received = torch.empty(0)
        self._whole: dict[int, Tensor] = {}
        self._batches: list[Tensor] = []

    def start(self, locals_: dict[int, Tensor]) -> None:
        """Sends pieces to the owners. `locals_`: what this rank has to give, by identity of its target."""
        bucket = self._bucket
        for numbers in bucket.batches:
            first = bucket.matrices[numbers[0]]
            shape = (len(numbers), first.rows, first.cols)
            batch = torch.empty(shape, dtype=bucket.dtype, device=self._comm.device)
            self._batches.append(batch)
            for matrix, number in zip(batch, numbers, strict=True):
                self._whole[number] = matrix.view(bucket.matrices[number].box.sizes)
        given = [locals_[id(bucket.matrices[p.matrix].target)][p.place.slices] for p in bucket.gives]
        self._send(bucket.gives, given, bucket.comes)
        kept = [value for piece, value in zip(bucket.gives, given, strict=True) if piece.peer == self._me]
        own = [piece for piece in bucket.comes if piece.peer == self._me]
        _copy([self._whole[piece.matrix][piece.part.slices] for piece in own], kept)

    def compute(self, update: Update) -> None:
        """Waits for this rank's matrices, updates them, and sends the pieces back."""
        bucket = self._bucket
        pieces, values = self._arrived(bucket.comes)
        _copy([self._whole[piece.matrix][piece.part.slices] for piece in pieces], values)
        for numbers, batch in zip(bucket.batches, self._batches, strict=True):
            updated = update(batch, bucket.matrices[numbers[0]].target.group)
            if updated.shape != batch.shape:
                raise ValueError(
                    f"an update of matrices of shape {tuple(batch.shape)} has shape {tuple(updated.shape)}; it must have "
                    "the same"
                )
            for matrix, number in zip(updated.to(bucket.dtype), numbers, strict=True):
                self._whole[number] = matrix.reshape(bucket.matrices[number].box.sizes)
        self._batches = []
        given = [self._whole[piece.matrix][piece.part.slices] for piece in bucket.returns]
        self._send(bucket.returns, given, bucket.gets)
        self._own = [value for piece, value in zip(bucket.returns, given, strict=True) if piece.peer == self._me]

    def finish(self) -> list[Updated]:
        """Waits for the updates of what this rank holds."""
        bucket = self._bucket
        pieces, values = self._arrived(bucket.gets)
        own = [piece for piece in bucket.gets if piece.peer == self._me]
        pairs = [*zip(pieces, values, strict=True), *zip(own, self._own, strict=True)]
        found = [Updated(piece, bucket.matrices[piece.matrix], value) for piece, value in pairs]
        self._whole, self._own = {}, []
        return found

    def _send(self, out: Sequence[Piece], values: Sequence[Tensor], back: Sequence[Piece]) -> None:
        """Starts the all-to-all of `values`, the pieces `out`, for the pieces `back`; this rank's own stay out of it."""
        if self._comm.size == 1:
            return
        sizes, counts = (_sizes(pieces, self._ranks, self._me) for pieces in (out, back))
        device, dtype = self._comm.device, self._bucket.dtype
        sent = torch.empty(sum(sizes), dtype=dtype, device=device)
        self._received = torch.empty(sum(counts), dtype=dtype, device=device)
        foreign = [(piece, value) for piece, value in zip(out, values, strict=True) if piece.peer != self._me]
        _copy(_views(sent, [piece for piece, _ in foreign]), [value for _, value in foreign])
        self._op += 1
        with self._comm.context.streams.on("gather"):
            self._work = self._comm.exchange_parts(self._label, self._op, self._received, counts, sent, sizes)

    def _arrived(self, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Tensor]]:
        """The pieces that came from others, once they are there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        foreign = [piece for piece in pieces if piece.peer != self._me]
        return foreign, _views(self._received, foreign)


def _sizes(pieces: Sequence[Piece], ranks: tuple[int, ...], me: int) -> list[int]:
    sizes = dict.fromkeys(ranks, 0)
    for piece in pieces:
        if piece.peer != me:
            sizes[piece.peer] += piece.count
    return list(sizes.values())


def _views(flat: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The pieces that lie in `flat` one behind the other."""
    parts = flat[: sum(piece.count for piece in pieces)].split([piece.count for piece in pieces])
    return [part.view(piece.part.sizes) for part, piece in zip(parts, pieces, strict=True)]


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)

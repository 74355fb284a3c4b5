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
from hsdp.comm.work import CommWork, abandon
from hsdp.optim.matrices import Bucket, Matrix, MatrixPiece

Update = Callable[[Tensor, dict[str, Any]], Tensor]
"""Whole matrices `[k, rows, cols]` of one group, and that group, to their updates, of the same shape."""


@dataclass
class Label:
    """What the ranks' divergence guard calls an exchange."""

    name: str


@dataclass(frozen=True)
class Updated:
    """An updated piece that has arrived: `value`, shaped as the part of the local tensor that it belongs to."""

    piece: MatrixPiece
    matrix: Matrix
    value: Tensor


class Journey:
    """Pieces in one of the two exchanges, seen from one end: those that travel, by peer, and those that this rank keeps.

    Attributes:
        pieces: all of them.
        own, foreign: those that stay, and those that travel.
        sizes: elements for each rank, in order.
    """

    def __init__(self, pieces: Sequence[MatrixPiece], ranks: tuple[int, ...], me: int) -> None:
        self.pieces = pieces
        self.own = [piece for piece in pieces if piece.peer == me]
        self.foreign = [piece for piece in pieces if piece.peer != me]
        sizes = dict.fromkeys(ranks, 0)
        for piece in self.foreign:
            sizes[piece.peer] += piece.count
        self.sizes = list(sizes.values())
        self._stays = [piece.peer == me for piece in pieces]
        self._counts = [piece.count for piece in self.foreign]
        self._shapes = [piece.part.sizes for piece in self.foreign]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The pieces that travel, as they lie in `flat`."""
        return [part.view(shape) for part, shape in zip(flat.split(self._counts), self._shapes, strict=True)]

    def sort(self, values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What stays of the values of all pieces, and what travels."""
        pairs = list(zip(values, self._stays, strict=True))
        return [value for value, stays in pairs if stays], [value for value, stays in pairs if not stays]


class Exchange:
    """A bucket's way in each step. Its three parts are called in turn; collectives run between them.

    Args:
        bucket: what travels.
        comm: among the ranks that hold it.
        ranks: these, by their numbers in `comm`.
        label, key: for the divergence guard; two numbers from `key` + 1 on are its own.
    """

    def __init__(self, bucket: Bucket, comm: Comm, ranks: tuple[int, ...], label: Label, key: int) -> None:
        self.bucket = bucket
        self._comm = comm
        self._label = label
        self._key = key
        self._gives, self._comes, self._returns, self._gets = (
            Journey(pieces, ranks, ranks[comm.rank]) for pieces in (bucket.gives, bucket.comes, bucket.returns, bucket.gets)
        )
        self._work: CommWork | None = None
        self._own: list[Tensor] = []
        self._received = torch.empty(0)
        self._whole: dict[int, Tensor] = {}
        self._batches: list[Tensor] = []

    def start(self, locals_: dict[int, Tensor]) -> None:
        """Sends pieces to the owners. `locals_`: what this rank has to give, by identity of its target."""
        bucket = self.bucket
        self._batches = []
        for numbers in bucket.batches:
            first = bucket.matrices[numbers[0]]
            shape = (len(numbers), first.rows, first.cols)
            batch = torch.empty(shape, dtype=bucket.dtype, device=self._comm.device)
            self._batches.append(batch)
            for matrix, number in zip(batch, numbers, strict=True):
                self._whole[number] = matrix.view(bucket.matrices[number].box.sizes)
        given = [locals_[id(bucket.matrices[p.matrix].target)][p.place.slices] for p in bucket.gives]
        kept, foreign = self._gives.sort(given)
        self._send(self._gives, foreign, self._comes, self._key + 1)
        _copy(self._places(self._comes.own), kept)

    def compute(self, update: Update) -> None:
        """Waits for this rank's matrices, updates them, and sends the pieces back."""
        bucket = self.bucket
        _copy(self._places(self._comes.foreign), self._arrived(self._comes))
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
        own, foreign = self._returns.sort(self._places(bucket.returns))
        # As the others arrive: where 16 bits do not lie in order a kernel may round otherwise, and the owner's replica
        # would drift away from the others.
        self._own = [value.contiguous() for value in own]
        self._send(self._returns, foreign, self._gets, self._key + 2)

    def finish(self) -> list[Updated]:
        """Waits for the updates of what this rank holds."""
        arrived = self._arrived(self._gets)
        pairs = [*zip(self._gets.foreign, arrived, strict=True), *zip(self._gets.own, self._own, strict=True)]
        found = [Updated(piece, self.bucket.matrices[piece.matrix], value) for piece, value in pairs]
        self._let_go()
        return found

    def give_up(self) -> None:
        """The step failed: whole matrices go. A collective under way keeps its buffers until it has ended."""
        if self._work is not None:
            abandon(self._work)
            self._work = None
        self._let_go()

    def _let_go(self) -> None:
        self._whole, self._own, self._batches, self._received = {}, [], [], torch.empty(0)

    def _places(self, pieces: Sequence[MatrixPiece]) -> list[Tensor]:
        """Where pieces lie in the matrices that this rank owns."""
        return [self._whole[piece.matrix][piece.part.slices] for piece in pieces]

    def _send(self, out: Journey, values: list[Tensor], back: Journey, key: int) -> None:
        """Starts the all-to-all of `values`, the pieces of `out` that travel, for those of `back`."""
        if self._comm.size == 1:
            return
        device, dtype = self._comm.device, self.bucket.dtype
        sent = torch.empty(sum(out.sizes), dtype=dtype, device=device)
        self._received = torch.empty(sum(back.sizes), dtype=dtype, device=device)
        _copy(out.views(sent), values)
        with self._comm.context.streams.on("gather"):
            self._work = self._comm.exchange_parts(self._label, key, self._received, back.sizes, sent, out.sizes)

    def _arrived(self, journey: Journey) -> list[Tensor]:
        """The pieces that came from others, once they are there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return journey.views(self._received)


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)

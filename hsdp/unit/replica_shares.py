"""Gradients of which each replica gets its share: what a reduce-scatter over replicas takes, and what it leaves.

    sums over the shard group     [ A rows 0:8 | B rows 0:3 | c | flags ]            laid out alike on R = 2 replicas
    transfers                     A as it lies, in R equal parts
                                  rows, one per replica:  [ B rows 0:2 | flags ]
                                                          [ B row 2, 0 | flags ]
    summed in place               c, of which replicas have no shares
    replica 0 is left with        [ A rows 0:4 | c | B rows 0:2 | flags ]            memory of its own: 1/R, and stays

Large even gradients go as they lie. The others are packed by one operator, which cuts by torch.chunk's rule and pads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hsdp.buffers.layout import DIRECT_MULTIPLE_BYTES, Thresholds
from hsdp.torch_private import chunk_cat
from hsdp.unit.grad_layout import GradLayout, cut


class ReplicaBuffers(NamedTuple):
    """The memory of one reduce-scatter over replicas: what it leaves, and the packed rows that it takes."""

    result: Tensor
    rows: Tensor


class TransferKinds(NamedTuple):
    """Indices of gradients by how they travel: as they lie, summed in place, or packed."""

    direct: list[int]
    whole: list[int]
    packed: list[int]


def transfer_kinds(
    shapes: Sequence[tuple[int, ...]], shared: Sequence[bool], replicas: int, itemsize: int, reduce_bytes: int
) -> TransferKinds:
    """How gradients of these local shapes travel over replicas, of which some are `shared` out among them."""
    kinds = TransferKinds([], [], [])
    for i, (is_shared, shape) in enumerate(zip(shared, shapes, strict=True)):
        if not math.prod(shape):
            continue
        if not is_shared:
            kinds.whole.append(i)
            continue
        nbytes = math.prod(shape) // replicas * itemsize
        even = shape[0] % replicas == 0 and nbytes % DIRECT_MULTIPLE_BYTES == 0
        (kinds.direct if even and nbytes >= reduce_bytes else kinds.packed).append(i)
    return kinds


class ReplicaShares:
    """How sums over the shard group become a replica's share of them.

    Attributes:
        result_layout: where gradients lie in what it leaves.
    """

    def __init__(self, sums: GradLayout, replicas: int, thresholds: Thresholds) -> None:
        self._replicas = replicas  # not `sums`: it holds this, and a cycle would keep the shards of a deleted model
        shares = [param.share for param in sums.params]
        shapes = [s if one is None else (one.rows, *s[1:]) for one, s in zip(shares, sums.shapes, strict=True)]
        offsets = [0] * len(shapes)
        shared = [share is not None for share in shares]
        self._direct, self._whole, self._packed = transfer_kinds(
            sums.shapes, shared, replicas, sums.kind.reduce.itemsize, thresholds.reduce_bytes
        )
        at = 0
        for i in (*self._direct, *self._whole):
            offsets[i] = at
            at += math.prod(shapes[i])
        self._whole_start, self._packed_start = sum(math.prod(shapes[i]) for i in self._direct), at
        for i in self._packed:
            offsets[i] = at
            share = shares[i]
            assert share is not None, "only shares are packed"
            at += share.chunk * math.prod(shapes[i][1:])
        self.result_layout = GradLayout(
            sums.kind, sums.device, sums.offload, sums.params, sums.slots, shapes, offsets, at, alone=False
        )

    def buffers(self) -> ReplicaBuffers:
        """Allocates the memory of one reduce-scatter: on the compute stream, to which gradients belong."""
        layout = self.result_layout
        dtype, device, total = layout.kind.reduce, layout.device, layout.numel + layout.flags
        return ReplicaBuffers(
            torch.empty(total, dtype=dtype, device=device),
            torch.empty(self._replicas, total - self._packed_start, dtype=dtype, device=device),
        )

    def fill(
        self, buffers: ReplicaBuffers, locals_: list[Tensor], flags: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Fills the buffers; on the stream of the sums.

        Args:
            buffers: their memory.
            locals_: this rank's sums, one tensor for each parameter.
            flags: the used-flags.

        Returns:
            Inputs and outputs of the transfers, and what is summed in place; all 1-D.
        """
        layout, result = self.result_layout, buffers.result
        inputs = [locals_[i].view(-1) for i in self._direct]
        offsets = [layout.offsets[i] for i in self._direct]
        outputs = [cut(result, at, mine.numel() // self._replicas) for at, mine in zip(offsets, inputs, strict=True)]
        chunk_cat([*(locals_[i] for i in self._packed), flags.repeat(self._replicas)], 0, self._replicas, out=buffers.rows)
        inputs.append(buffers.rows.view(-1))
        outputs.append(cut(result, self._packed_start, buffers.rows.shape[1]))
        if not self._whole:
            return inputs, outputs, []
        whole = cut(result, self._whole_start, self._packed_start - self._whole_start)
        torch.cat([locals_[i].reshape(-1) for i in self._whole], out=whole)
        return inputs, outputs, [whole]

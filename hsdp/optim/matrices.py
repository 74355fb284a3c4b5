"""Which matrices an optimizer orthogonalises (or otherwise updates whole), which rank owns each, and what travels when.

    parameter --cut--> matrices --assigned by cost--> owners --in parameter order--> buckets --> pieces that ranks exchange

All of it follows from shapes, placements and meshes, so every rank finds the same without asking.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from hsdp.params.local import local_of
from hsdp.params.replica_rows import Share
from hsdp.params.shard_geometry import Box, Holding, holdings

KINDS = ("one", "stacked", "flattened")
"""What a group's `matrices` may be: how its parameters are read as matrices."""


def cut(shape: Sequence[int], kind: str, split_sizes: int | Sequence[int] | None) -> list[tuple[Box, int, int]]:
    """The matrices of a parameter, in order: where each lies in it, its rows and its columns.

    Args:
        shape: the parameter's whole shape.
        kind: "one": it is a matrix; "stacked": the last two dims are, the dims before number them (experts); "flattened":
            all dims but the first are columns (convolutions).
        split_sizes: the matrix is several, one above the other, with these numbers of rows (fused projections); an
            integer: of that many rows each (heads).

    Raises:
        ValueError: the shape does not fit; tells what would.
    """
    shape = tuple(shape)
    if kind not in KINDS:
        raise ValueError(f"matrices={kind!r}: expected one of {', '.join(map(repr, KINDS))}")
    if len(shape) < 2 or (kind == "one" and len(shape) != 2):
        raise ValueError(
            f"it has shape {shape}, which is no matrix; update it by AdamW (a group with algorithm='adamw'), or if it is "
            "made of matrices give its group matrices='stacked' (experts: the last two dims) or 'flattened' (convolutions: "
            "the first dim and all others)"
        )
    at = len(shape) - 2 if kind == "stacked" else 0
    rows, cols = shape[at], math.prod(shape[at + 1 :])
    sizes = [rows] if split_sizes is None else split_sizes
    if isinstance(sizes, int):
        sizes = [sizes] * (rows // sizes if sizes > 0 else 0)
    if sum(sizes) != rows or any(size < 0 for size in sizes):
        raise ValueError(f"split_sizes={split_sizes} does not add up to the {rows} rows of its shape {shape}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    tail = shape[at + 1 :]
    return [
        (Box((*lead, start, *(0 for _ in tail)), (*(1 for _ in lead), size, *tail)), size, cols)
        for lead in product(*map(range, shape[:at]))
        for start, size in zip(starts, sizes, strict=True)
        if size * cols
    ]


class Held:
    """How tensors of one spec lie on the ranks.

    Attributes:
        by_rank: what each global rank holds.
        by_box: the ranks that hold each part, in order.
    """

    def __init__(self, spec: DTensorSpec) -> None:
        self.by_rank = {holding.rank: holding for holding in sorted(holdings(spec), key=lambda holding: holding.rank)}
        self.by_box: dict[Box, list[int]] = {}
        for rank, holding in self.by_rank.items():
            self.by_box.setdefault(holding.box, []).append(rank)
        self.ranks = tuple(self.by_rank)


class MatrixParam:
    """A parameter that is stepped.

    Attributes:
        param: itself.
        block: what this rank holds of it, as a plain tensor.
        group: its group of the optimizer.
        share: this replica's rows of `block`, of which alone it has gradients and momentum; None: it has them all.
        spec: how it is distributed; None for a plain tensor, which each rank steps by itself.
        state_spec: the same of its momentum.
        held: what each rank has of it; None for a plain tensor.
        given: what each rank has of its momentum, and gives to owners.
    """

    def __init__(
        self, param: Tensor, group: dict[str, Any], known: dict[DTensorSpec, Held], share: Share | None = None
    ) -> None:
        self.param = param
        self.group = group
        self.share = share
        self.spec: DTensorSpec | None = param._spec if isinstance(param, DTensor) else None
        self.state_spec = self.spec if share is None else share.spec
        self.held, self.given = (_held(spec, known) for spec in (self.spec, self.state_spec))
        self.block = local_of(param)

    @property
    def local(self) -> Tensor:
        """The memory of what this rank holds of it, which wants no gradient. Looked up anew each time: whoever assigns to
        `.data` gives the same parameter other memory."""
        return local_of(self.param).detach()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that hold parts of it, in order; none for a plain tensor."""
        return () if self.held is None else self.held.ranks

    def box(self, rank: int) -> Box:
        """What a rank holds; all of a plain tensor."""
        if self.held is None:
            return Box((0,) * self.param.ndim, tuple(self.param.shape))
        return self.held.by_rank[rank].box

    def given_box(self, rank: int) -> Box:
        """What a rank gives to owners: all that it holds, or its share."""
        return self.box(rank) if self.given is None else self.given.by_rank[rank].box

    def shares_copy(self, rank: int, other: int) -> bool:
        """Whether two ranks belong to one of the copies that there are of its momentum: to one replica, without shares."""
        return self.given is None or self.given.by_rank[rank].copy == self.given.by_rank[other].copy

    def check(self, rank: int) -> None:
        """Compares what this rank holds with what it should.

        Raises:
            ValueError: it is something else.
        """
        if tuple(self.local.shape) != self.box(rank).sizes:
            raise ValueError(
                f"rank {rank} holds {tuple(self.local.shape)} of a parameter of shape {tuple(self.param.shape)}, not "
                f"{self.box(rank).sizes} as its placements {getattr(self.spec, 'placements', ())} say"
            )
        if self.share is not None and (self.share.rows, *self.local.shape[1:]) != self.given_box(rank).sizes:
            raise ValueError(
                f"rank {rank} steps {self.share.rows} rows of its part of a parameter of shape {tuple(self.param.shape)}, "
                f"not {self.given_box(rank).sizes[0]} as placements {self.share.spec.placements} say"
            )


def _held(spec: DTensorSpec | None, known: dict[DTensorSpec, Held]) -> Held | None:
    if spec is None:
        return None
    if spec not in known:
        known[spec] = Held(spec)
    return known[spec]


@dataclass(frozen=True)
class Matrix:
    """A matrix: `box` of a target, read as `rows` times `cols`, updated by global rank `owner`."""

    target: MatrixParam
    box: Box
    rows: int
    cols: int
    owner: int


@dataclass(frozen=True)
class MatrixPiece:
    """What this rank sends to or gets from rank `peer`, or keeps (`peer` is itself): a part of a matrix that it holds.

    `part` counts from the matrix's corner, `place` from that of the local tensor of the rank that holds it.
    """

    peer: int
    matrix: int
    part: Box
    place: Box

    @cached_property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.part.sizes)


@dataclass
class Bucket:
    """Parameters whose matrices travel together, in one dtype.

    Attributes:
        matrices: all of theirs.
        dtype: that of pieces and of what owners compute with.
        gives: pieces of what this rank has to give, to owners; comes: pieces of matrices that this rank owns. Both by peer.
        returns, gets: the same pieces, updated, on the way back: to all that hold them, replicas included.
        batches: numbers of the matrices that this rank owns, by shape and group.
    """

    targets: list[MatrixParam]
    matrices: list[Matrix]
    dtype: torch.dtype
    gives: list[MatrixPiece] = field(default_factory=list)
    comes: list[MatrixPiece] = field(default_factory=list)
    returns: list[MatrixPiece] = field(default_factory=list)
    gets: list[MatrixPiece] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)

    def route(self, rank: int) -> None:
        """Finds what this rank sends and gets."""
        batches: dict[tuple[int, int, int], list[int]] = {}
        for number, matrix in enumerate(self.matrices):
            target, owner = matrix.target, matrix.owner
            common = matrix.box.common(target.box(rank))
            if common is not None:
                mine = MatrixPiece(owner, number, common.inside(matrix.box), common.inside(target.box(rank)))
                self.gets.append(mine)
            given = matrix.box.common(target.given_box(rank))
            if given is not None and target.shares_copy(rank, owner):
                self.gives.append(
                    MatrixPiece(owner, number, given.inside(matrix.box), given.inside(target.given_box(rank)))
                )
            if owner == rank:
                batches.setdefault((matrix.rows, matrix.cols, id(target.group)), []).append(number)
                if target.held is not None and target.given is not None:
                    givers = [h for h in target.given.by_rank.values() if target.shares_copy(rank, h.rank)]
                    self.comes += _pieces(number, matrix, givers)
                    self.returns += _pieces(number, matrix, target.held.by_rank.values())
                elif common is not None:
                    self.comes.append(mine)
                    self.returns.append(mine)
        for pieces in (self.gives, self.comes, self.returns, self.gets):
            pieces.sort(key=lambda piece: (piece.peer, piece.matrix))
        self.batches = list(batches.values())


def _pieces(number: int, matrix: Matrix, held: Iterable[Holding]) -> list[MatrixPiece]:
    return [
        MatrixPiece(holding.rank, number, common.inside(matrix.box), common.inside(holding.box))
        for holding in held
        if (common := matrix.box.common(holding.box)) is not None
    ]


def _holders(target: MatrixParam, box: Box) -> list[int]:
    """The ranks that have this part of a target to give, if one rank can: none where they are all the same."""
    by_box = {} if target.given is None or len(target.given.by_box) == 1 else target.given.by_box
    return next((ranks for held, ranks in by_box.items() if box.common(held) == box), [])


def plan_buckets(
    targets: Sequence[MatrixParam],
    ranks: tuple[int, ...],
    cost: Callable[[int, int, Mapping[str, Any]], float],
    dtype_of: Callable[[MatrixParam], torch.dtype],
    bucket_bytes: int,
) -> list[Bucket]:
    """The buckets of some parameters, each matrix with its owner.

    A matrix that one rank has whole (an expert) stays there, as long as that costs no balance. Of the others the dearest
    comes first, and goes to the rank that has least to do so far: ranks differ by one matrix at most.

    Args:
        targets: the parameters.
        ranks: the global ranks that hold them.
        cost: the work of a matrix of so many rows and columns, in any unit.
        dtype_of: in which dtype a parameter's pieces travel.
        bucket_bytes: from how many bytes per owner on, in the mean, a bucket is closed.
    """
    cuts = [cut(t.param.shape, t.group.get("matrices", "one"), t.group.get("split_sizes")) for t in targets]
    flat = [(at, *found) for at, all_of in enumerate(cuts) for found in all_of]
    costs = [cost(rows, cols, targets[at].group) for at, _, rows, cols in flat]
    owners = owners_of(ranks, costs, [_holders(targets[at], box) for at, box, _, _ in flat])
    made: dict[int, list[Matrix]] = {}
    for (at, box, rows, cols), owner in zip(flat, owners, strict=True):
        made.setdefault(at, []).append(Matrix(targets[at], box, rows, cols, owner))
    buckets: list[Bucket] = []
    size, most = 0, bucket_bytes * len(ranks)
    for at, target in enumerate(targets):
        dtype = dtype_of(target)
        if not buckets or size >= most or buckets[-1].dtype != dtype:
            buckets.append(Bucket([], [], dtype))
            size = 0
        buckets[-1].targets.append(target)
        size += target.param.numel() * dtype.itemsize
        buckets[-1].matrices += made.get(at, ())
    return buckets


def owners_of(ranks: tuple[int, ...], costs: Sequence[float], near: Sequence[list[int]]) -> list[int]:
    """An owner for each matrix, by its cost and the ranks that have it whole: see `plan_buckets`."""
    loads = dict.fromkeys(ranks, 0.0)
    fair = max(sum(costs) / len(ranks), *costs, 0.0) * (1 + 1e-9)
    dearest_first = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    owners: dict[int, int] = {}
    for i in dearest_first:  # what needs no journey stays, up to a rank's fair part of the work, or the dearest matrix
        if near[i] and loads[best := min(near[i], key=loads.__getitem__)] + costs[i] <= fair:
            owners[i] = best
            loads[best] += costs[i]
    least = [(load, at) for at, load in enumerate(loads.values())]
    heapq.heapify(least)
    for i in dearest_first:
        if i not in owners:
            load, at = heapq.heappop(least)
            owners[i] = ranks[at]
            loads[ranks[at]] = load + costs[i]
            heapq.heappush(least, (load + costs[i], at))
    return [owners[i] for i in range(len(costs))]

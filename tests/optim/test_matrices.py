"""Who owns which matrix and what travels: for drawn shapes and meshes all ranks' pieces fit together."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from hsdp.optim.matrices import Bucket, MatrixParam, cut, plan_buckets
from hsdp.params.dtensors import as_dtensor, spec_of
from hsdp.params.replica_rows import Share
from hsdp.params.shard_geometry import holdings
from hsdp.params.tensor_parallel import over_replicas
from tests.support.rig import fake_world

WORLD = 8
MESHES = [(8,), (1, 8), (2, 4), (4, 2), (8, 1), (2, 2, 2)]


@st.composite
def _parameters(draw: Any) -> list[tuple[tuple[int, ...], dict[str, Any], int]]:
    """Shapes, settings of their groups, and how they are placed."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["one", "one", "stacked", "flattened"]))
        ndim = 2 if kind == "one" else draw(st.integers(3, 4))
        shape = tuple(draw(st.integers(1, 9)) for _ in range(ndim))
        rows = shape[-2] if kind == "stacked" else shape[0]
        at = draw(st.integers(0, rows))
        split = draw(st.sampled_from([None, 1, (at, rows - at)]))
        found.append((shape, {"matrices": kind, "split_sizes": split}, draw(st.integers(0, 5))))
    return found


def _placements(mesh_ndim: int, ndim: int, how: int) -> tuple[Placement, ...]:
    """Of a parameter on a mesh (shard), (replicate, shard) or (replicate, shard, tp)."""
    dim = how % ndim
    if how == 5:
        return (Replicate(),) * mesh_ndim
    if mesh_ndim < 3:
        return (Replicate(),) * (mesh_ndim - 1) + (Shard(dim),)
    return (
        (Replicate(), _StridedShard(dim, split_factor=2), Shard(dim))
        if how % 2
        else (Replicate(), Shard(dim), Shard(1 - dim))
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(_parameters(), st.sampled_from(MESHES), st.sampled_from([1, 200, 10**9]), st.booleans())
def test_pieces_of_all_ranks_fit_together(
    parameters: list[tuple[tuple[int, ...], dict[str, Any], int]],
    mesh_shape: tuple[int, ...],
    bucket_bytes: int,
    shares: bool,
) -> None:
    with fake_world(WORLD):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard", "tp")[: len(mesh_shape)])
        known: dict[Any, Any] = {}
        targets, wholes = [], []
        for shape, group, how in parameters:
            if len(mesh_shape) == 3 and how % len(shape) > 1:
                how = how % 2
            spec = spec_of(mesh, _placements(len(mesh_shape), len(shape), how), shape, torch.float32)
            share = _first_share(spec) if shares else None
            targets.append(MatrixParam(as_dtensor(torch.empty(holdings(spec)[0].box.sizes), spec), group, known, share))
            targets[-1].check(0)
            wholes.append(torch.arange(math.prod(shape), dtype=torch.float32).view(shape))
        buckets = plan_buckets(targets, tuple(range(WORLD)), _cost, lambda _: torch.float32, bucket_bytes)
    matrices = [matrix for bucket in buckets for matrix in bucket.matrices]
    assert len(matrices) == sum(len(cut(shape, g["matrices"], g["split_sizes"])) for shape, g, _ in parameters)
    loads = [sum(_cost(m.rows, m.cols, {}) for m in matrices if m.owner == rank) for rank in range(WORLD)]
    assert max(loads) - min(loads) <= max(_cost(m.rows, m.cols, {}) for m in matrices), "work is dealt evenly"
    for bucket in buckets:
        values = {id(target): whole for target, whole in zip(targets, wholes, strict=True)}
        _check_trip(bucket, values)


def _first_share(spec: DTensorSpec) -> Share | None:
    """Rank 0's share of a parameter, where its placements allow shares."""
    cut_ = over_replicas(spec, 0) if spec.mesh.ndim > 1 else None
    if cut_ is None:
        return None
    rows = holdings(cut_)[0].box.sizes[0]
    return Share(cut_, 0, rows, rows)


def _cost(rows: int, cols: int, group: Any) -> float:
    return float(rows * cols)


def _check_trip(bucket: Bucket, wholes: dict[int, Tensor]) -> None:
    """Plays the two exchanges of a bucket."""
    routed = [Bucket(bucket.targets, bucket.matrices, bucket.dtype) for _ in range(WORLD)]
    for rank, one in enumerate(routed):
        one.route(rank)
    seen = [{id(t): torch.zeros(t.box(rank).sizes) for t in bucket.targets} for rank in range(WORLD)]
    for owner, mine in enumerate(routed):
        gathered = {n: torch.full(m.box.sizes, -1.0) for n, m in enumerate(bucket.matrices) if m.owner == owner}
        for peer, theirs in enumerate(routed):
            given_ = [piece for piece in theirs.gives if piece.peer == owner]
            come = [piece for piece in mine.comes if piece.peer == peer]
            assert [(p.matrix, p.part, p.place) for p in given_] == [(p.matrix, p.part, p.place) for p in come]
            for piece in come:
                target = bucket.matrices[piece.matrix].target
                local = wholes[id(target)][target.given_box(peer).slices]
                part = gathered[piece.matrix][piece.part.slices]
                assert (part == -1).all(), "an element comes once"
                part.copy_(local[piece.place.slices])
        for number, whole in gathered.items():
            matrix = bucket.matrices[number]
            assert torch.equal(whole, wholes[id(matrix.target)][matrix.box.slices])
        assert sorted(n for batch in mine.batches for n in batch) == sorted(gathered)
        for peer, theirs in enumerate(routed):
            back = [piece for piece in mine.returns if piece.peer == peer]
            got = [piece for piece in theirs.gets if piece.peer == owner]
            assert [(p.matrix, p.part, p.place) for p in back] == [(p.matrix, p.part, p.place) for p in got]
            for piece in got:
                seen[peer][id(bucket.matrices[piece.matrix].target)][piece.place.slices] += 1
    for rank in range(WORLD):
        assert all((count == 1).all() for count in seen[rank].values()), "every element comes back once"


def test_experts_stay_where_they_are() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        spec = spec_of(mesh, (Replicate(), Shard(0)), (8, 6, 5), torch.float32)
        target = MatrixParam(as_dtensor(torch.empty(2, 6, 5), spec), {"matrices": "stacked"}, {})
        (bucket,) = plan_buckets([target], tuple(range(8)), _cost, lambda _: torch.float32, 10**9)
    assert sorted(matrix.owner for matrix in bucket.matrices) == list(range(8))
    for rank in range(8):
        one = Bucket(bucket.targets, bucket.matrices, bucket.dtype)
        one.route(rank)
        assert [piece.peer for piece in one.comes] == [rank], "a matrix that one rank holds is not sent to its owner"


def test_several_experts_stay_too_and_others_level_the_work() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
        experts, dense = (spec_of(mesh, (Replicate(), Shard(0)), s, torch.float32) for s in ((8, 6, 5), (40, 10)))
        targets = [
            MatrixParam(as_dtensor(torch.empty(2, 6, 5), experts), {"matrices": "stacked"}, {}),
            *(MatrixParam(as_dtensor(torch.empty(10, 10), dense), {}, {}) for _ in range(4)),
        ]
        buckets = plan_buckets(targets, tuple(range(4)), _cost, lambda _: torch.float32, 10**9)
    owners = [matrix.owner for bucket in buckets for matrix in bucket.matrices]
    assert owners[:8] == [0, 0, 1, 1, 2, 2, 3, 3] and sorted(owners[8:]) == [0, 1, 2, 3]


def test_plain_tensors_are_stepped_where_they_are() -> None:
    target = MatrixParam(nn.Parameter(torch.zeros(3, 4)), {}, {})
    (bucket,) = plan_buckets([target], (0,), _cost, lambda _: torch.float32, 1)
    bucket.route(0)
    assert [piece.peer for piece in bucket.comes + bucket.returns] == [0, 0]

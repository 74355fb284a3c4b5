"""Gradients become the rows of a reduce-scatter: with one operator where it can, else parameter by parameter."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
from hsdp.buffers.flat_buffer import FlatBuffer
from hsdp.schedule.module_hooks import own_state
from hsdp.torch_private import chunk_cat
from hsdp.unit import dtype_group, reduce_plan
from tests.support.rig import Pool, RankEnv, fake_world

SHARDS = 2
TILES = [(16, 8), (8, 16), (3, 64), (1, 64)]
"""Shapes whose parts lie side by side; the last two are padded."""
GAPS = [(16, 8), (5, 3), (4, 4)]


class Params(nn.Module):
    """Parameters of these shapes."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self) -> list[Tensor]:
        """The parameters."""
        return list(self.weights)


def _as_on_cuda(tensors: list[Tensor], dim: int, chunks: int, out: Tensor) -> Tensor:
    """torch's kernel for CUDA takes memory that is dense, transposed or not, for row-major."""
    assert all(t.is_contiguous() or 0 in t.stride() for t in tensors)
    return chunk_cat(tensors, dim, chunks, out=out)


def _gradients(shapes: list[tuple[int, int]], kind: str) -> list[Tensor | None]:
    grads: list[Any] = [torch.randn(shape) for shape in shapes]
    if kind == "transposed":
        grads = [torch.randn(shape[::-1]).t() for shape in shapes]
    elif kind == "a part of another":
        grads = [torch.randn(shape[0] + 1, 2 * shape[1])[1:, ::2] for shape in shapes]
    elif kind == "some missing":
        grads[0] = grads[-1] = None
    elif kind == "of two dtypes":
        grads[1] = grads[1].double()
    return grads


BF16 = hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("kind", ["plain", "transposed", "a part of another", "some missing", "of two dtypes"])
@pytest.mark.parametrize("shapes", [TILES, GAPS], ids=["tiles", "gaps"])
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
def test_rows_hold_every_rank_s_part_of_each_gradient(
    shapes: list[tuple[int, int]], kind: str, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(reduce_plan, "chunk_cat", _as_on_cuda)
    with fake_world(SHARDS) as env:
        model = hsdp.fully_shard(
            Params(shapes),
            mesh=env.mesh((SHARDS,)),
            comm_policy=hsdp.CommPolicy(fusion="packed"),
            mp_policy=BF16 if narrow else hsdp.MixedPrecisionPolicy(),
        )
        plan = own_state(model).unit.gradients._plans[0]
        assert (plan._tiles is None) == (shapes is GAPS)
        assert plan._pads_first == (narrow and shapes is TILES)
        grads = _gradients(shapes, kind)
        if narrow:
            grads = [grad.bfloat16() if grad is not None and grad.dtype == torch.float32 else grad for grad in grads]
        part = plan.fill(list(grads))
        rows = part.inputs[-1].view(SHARDS, -1)
        for at, (grad, piece) in enumerate(zip(grads, plan.layout.pieces, strict=True)):
            for rank in range(SHARDS):
                there = rows[rank, piece.offset : piece.offset + piece.rows(rank) * piece.spec.shape[1]]
                whole = torch.zeros(piece.spec.shape) if grad is None else grad.float()
                expected = whole[rank * piece.chunk :][: piece.rows(rank)].reshape(-1)
                assert torch.equal(there, expected), (at, rank)
                assert rows[rank, plan.layout.numel + at] == float(grad is not None), "whether it was used"


@pytest.mark.parametrize("kind", ["plain", "transposed", "a part of another", "some missing"])
def test_small_gradients_are_cast_together_and_large_ones_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shapes = [(16, 8), (64, 64), (8, 16), (32, 64)]  # every other one is large
    monkeypatch.setattr(dtype_group, "CAST_TOGETHER_BYTES", 16 * 8 * 4)
    with fake_world(SHARDS) as env:
        policy = hsdp.CommPolicy(fusion="direct")
        model = hsdp.fully_shard(Params(shapes), mesh=env.mesh((SHARDS,)), comm_policy=policy, mp_policy=BF16)
        plan = own_state(model).unit.gradients._plans[0]
        for _ in range(2):  # the second time in memory of the first
            grads = [None if grad is None else grad.bfloat16() for grad in _gradients(shapes, kind)]
            part = plan.fill(list(grads))
            *inputs, _ = part.inputs
            *outputs, _ = part.outputs
            locals_ = part.locals()
            found = {}
            for operand, output in zip(inputs, outputs, strict=True):
                (at,) = (i for i, local in enumerate(locals_) if local is output)
                found[at] = operand
            assert sorted(found) == [0, 1, 2, 3], "each is scattered once, to its own part"
            assert [found[i].untyped_storage().nbytes() == found[i].nbytes for i in range(4)] == [False, True, False, True]
            for at, grad in enumerate(grads):
                whole = torch.zeros(shapes[at]) if grad is None else grad.float()
                assert torch.equal(found[at].view(shapes[at]), whole), at
            part.release_inputs()


def _poison(buffer: FlatBuffer) -> None:
    _allocate(buffer)
    buffer.tensor.fill_(torch.nan)


_allocate = FlatBuffer.alloc


def _clips_in_hooks(env: RankEnv, custom: bool) -> None:
    """What users see of a reduction is gradients, and zeros: its norm is theirs."""
    model: Any = hsdp.fully_shard(Params(GAPS), mesh=env.mesh(2), comm_policy=hsdp.CommPolicy(fusion="packed"))
    seen: list[Tensor] = []

    def scatter(*, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool) -> Any:
        seen.append(input_tensor.clone())
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    if custom:
        model.set_custom_reduce_scatter(scatter)
    else:
        model.set_all_reduce_hook(lambda buffer: seen.append(buffer.clone()))
    with mock.patch.object(FlatBuffer, "alloc", _poison):
        sum(param.square().sum() for param in model()).backward()
    (buffer,) = seen
    assert buffer.isfinite().all(), "memory that nothing was written to"


@pytest.mark.parametrize("custom", [False, True], ids=["hook", "reduce-scatter"])
def test_users_see_zeros_between_gradients(pool2: Pool, custom: bool) -> None:
    pool2.run(_clips_in_hooks, custom)

"""`whole` gives of many tensors at once what torch's `full_tensor` gives of each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.rig import Pool, RankEnv
from tests.support.twin import whole


def _as_each_alone(env: RankEnv) -> None:
    tensors: dict[str, Tensor] = {"plain": torch.ones(3)}
    for shape in ((4,), (2, 2)):
        mesh = env.mesh(shape)
        for dtype in (torch.float64, torch.bfloat16):
            for size in ((1,), (8,), (5, 3), (2, 7), (0, 3), ()):
                value = torch.randn(size).mul(100).to(dtype)
                for dim in range(-1, len(size)):  # -1: on every rank
                    last = Shard(dim) if dim >= 0 else Replicate()
                    for first in (Replicate(), last) if len(shape) == 2 else (None,):
                        placements = [last] if first is None else [first, last]
                        name = f"{size} {dtype} {placements} on {shape}"
                        tensors[name] = distribute_tensor(value, mesh, placements)
    at_once = whole(tensors)
    assert at_once.keys() == tensors.keys()
    for name, tensor in tensors.items():
        alone = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        got = at_once[name]
        assert type(got) is Tensor and got.dtype == alone.dtype and torch.equal(got, alone), name
        assert not got.numel() or got.data_ptr() != alone.data_ptr(), f"{name} is no copy"


def test_whole_tensors_are_those_that_torch_gathers(pool4: Pool) -> None:
    pool4.run(_as_each_alone)

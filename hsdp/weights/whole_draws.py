"""Random numbers of tensor-parallel parameters on CPUs: drawn for the whole tensor, of which each rank keeps its block.

    uniform_ of (16, 8), Shard(0) over tp=2     each rank draws all 16 rows, and keeps 8

For CUDA, DTensor sets each rank's generator forward. Where it cannot, each rank draws its block with its own generator:
those in one state draw the same, so that the blocks of a weight are equal, and train alike for good. Functions that draw
again until all elements are within bounds (`trunc_normal_`) ask a DTensor whether they are, and each rank is told of its
block. Here ranks are told of all blocks: else one would draw more often than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hsdp.params.dtensors import as_dtensor, part_of_whole, with_dtype

_aten = torch.ops.aten
_IN_PLACE = {_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float}
_LIKE = {_aten.rand_like.default, _aten.randn_like.default}
_ASK = {_aten._local_scalar_dense.default, _aten.is_nonzero.default}


class WholeDraws(TorchDispatchMode):
    """Inside it random functions give a DTensor the block of what they would give one process."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else None
        if isinstance(tensor, DTensor) and func in _ASK:
            return func(tensor.full_tensor())
        if func not in _IN_PLACE | _LIKE or not isinstance(tensor, DTensor) or _draws_parts(tensor.device_mesh):
            return func(*args, **kwargs)
        whole: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
        whole = func(whole, *args[1:], **kwargs)
        part = part_of_whole(whole, tensor._spec)
        if func in _LIKE:
            return as_dtensor(part.clone(), with_dtype(tensor._spec, part.dtype))
        tensor._local_tensor.copy_(part)
        return tensor


def _draws_parts(mesh: DeviceMesh) -> bool:
    """Whether DTensor itself draws each rank's part, by setting the device's generator."""
    return hasattr(torch.get_device_module(mesh.device_type), "set_rng_state")

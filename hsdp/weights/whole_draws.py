"""Random numbers of tensor-parallel parameters on CPUs: drawn for the whole tensor, of which each rank keeps its block.

    uniform_ of (16, 8), Shard(0) over tp=2     each rank draws all 16 rows, and keeps 8

For CUDA, DTensor sets each rank's generator forward, for the operators that it knows. Where not, each rank draws its
block with its own generator: those in one state draw the same, so that the blocks of a weight are equal, and train alike
for good; and blocks of unequal sizes leave them in unequal states. Functions that draw again until all elements are within
bounds (`trunc_normal_`) ask a DTensor whether they are, and each rank is told of its block. Here ranks are told of all
blocks: else one would draw more often than others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from hsdp.params.arguments import by_name, written_by
from hsdp.params.dtensors import as_dtensor, full_tensor, part_of_whole, spec_of

_aten = torch.ops.aten
_ASK = {_aten._local_scalar_dense.default, _aten.is_nonzero.default}


class WholeDraws(TorchDispatchMode):
    """Inside it, DTensors are filled with the part of this rank of what one process would draw.

    Args:
        asks: `.item()`, `float()` and `bool()` of a DTensor tell of the whole. It is gathered for that, so that all ranks
            have to ask.
    """

    def __init__(self, asks: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asks = asks

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._asks and func in _ASK and isinstance(args[0], DTensor):
            return func(args[0].full_tensor())
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = [one for one in tree_iter((args, kwargs)) if isinstance(one, DTensor)]
            if given and not _draws_parts(func, given[0]):
                return _draw(func, args, kwargs, given[0]._spec)
        return func(*args, **kwargs)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: DTensorSpec) -> Any:
    """Does an operator to whole tensors, and distributes what comes out as `spec` does."""
    given, written = by_name(func, args, kwargs), written_by(func)
    wholes = dict(given)
    name = func._schema.arguments[0].name
    first = given.get(name)
    if isinstance(first, DTensor) and (written == [name] or func._schema.name.endswith("_like")):
        wholes[name] = _blank(first)  # filled, or asked for its shape: no rank waits for what another has of it
    wholes = tree_map_only(DTensor, full_tensor, wholes)
    found = func(**wholes)
    targets = {id(wholes[name]): given[name] for name in written if name in given}
    for name in written:
        if isinstance(target := given.get(name), DTensor):
            target._local_tensor.copy_(part_of_whole(wholes[name], target._spec))
    return tree_map_only(
        Tensor, lambda whole: targets[id(whole)] if id(whole) in targets else _distribute(whole, spec), found
    )


def _blank(tensor: DTensor) -> Tensor:
    """Memory for the whole of a tensor, laid out as that is: it decides which element gets which number."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor._local_tensor.device)


def _distribute(whole: Tensor, like: DTensorSpec) -> DTensor:
    """A whole tensor, the same on all ranks, as one that is cut as `like` if that has its shape; else each keeps all."""
    alike = whole.shape == like.shape
    placements = tuple(p if alike and not p.is_partial() else Replicate() for p in like.placements)
    spec = spec_of(like.mesh, placements, whole.shape, whole.dtype)
    return as_dtensor(part_of_whole(whole, spec).clone(memory_format=torch.contiguous_format), spec)


def _draws_parts(func: Any, tensor: DTensor) -> bool:
    """Whether DTensor itself draws each rank's part, by setting the device's generator."""
    known: Collection[Any] = getattr(DTensor._op_dispatcher, "_random_ops", ())
    return func in known and hasattr(torch.get_device_module(tensor.device_mesh.device_type), "set_rng_state")

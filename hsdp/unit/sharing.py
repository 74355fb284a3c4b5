"""Gradients that replicas share among each other: which, and how a rank gets them whole again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.comm.replica_reduce import AllReduce
from hsdp.errors import StateError
from hsdp.params.dtensors import as_dtensor, with_dtype
from hsdp.params.param import ManagedParam
from hsdp.params.replica_rows import Share, share_of
from hsdp.unit.replica_gather import ReplicaGather
from hsdp.unit.unit import Unit


def share_gradients(unit: Unit, params: Iterable[Tensor]) -> None:
    """From now on each replica gets its share of these parameters' gradients. Called between iterations, on all ranks.

    Some stay unshared: those of units whose all-reduce over replicas is the users' own, in 16 bits or in the order of a
    tree; of parameters without shares; and of those with fewer rows than ranks, to whose shares DTensor would add nothing.
    """
    settings, fresh = unit.settings, False
    if type(settings.replica_reduce) is not AllReduce or settings.all_reduce_hook is not None:
        return
    named = set(map(id, params))
    for param in unit.params:
        if param.share is None and id(param.sharded) in named and param.wrapper is None:
            share = share_of(param.tensor_spec, param.local, unit.axes)
            if share is not None and not share.has_few_rows:
                param.share, fresh = share, True
    if fresh:
        unit.gradients.arrange(unit.dtype_groups)
        if unit.trainable:
            unit.gradients.choose(unit.trainable, unit.name)


def gather_gradients(units: Iterable[Unit], params: Iterable[Tensor]) -> None:
    """Gathers shared gradients on every replica, for an optimizer that does not step shares.

    The shares travel once more, as in the second half of an all-reduce. Every rank calls it, with the same parameters.
    """
    named = {id(param) for param in params}
    gathers: list[tuple[ReplicaGather, list[tuple[ManagedParam, Tensor]]]] = []
    for unit in units:
        shared: list[tuple[int, Tensor, Share]] = []
        found: list[tuple[ManagedParam, Tensor]] = []
        for slot, param in enumerate(unit.params):
            grad: Any = param.sharded.grad
            if param.share is None or grad is None or id(param.sharded) not in named:
                continue
            if not isinstance(grad, DTensor) or grad._spec.placements != param.grad_spec.placements:
                continue  # the user's own, as every replica has it
            part = grad._local_tensor
            whole = torch.empty(param.local.shape, dtype=part.dtype, device=part.device)
            param.share.of(whole).copy_(part)
            shared.append((slot, whole, param.share))
            found.append((param, whole))
        if found:
            gathers.append((ReplicaGather(unit, "gradients", shared), found))
    for gather, _ in gathers:
        gather.start()
    for gather, found in gathers:
        gather.finish()
        for param, whole in found:
            param.sharded.grad = as_dtensor(whole, with_dtype(param.tensor_spec, whole.dtype))


def refuse_shared(unit: Unit, what: str) -> None:
    """Raises StateError if replicas have shares of the unit's gradients, which `what` cannot handle."""
    if unit.gradients.shared:
        raise StateError(
            f"{what}: gradients of unit {unit.name!r} are reduce-scattered over replicas, as an optimizer with "
            f"over_replicas=True has it; call {what} before the optimizer is made"
        )

"""Norms, sums and maxima of sharded tensors, which are to be added up over ranks yet: whole where an optimizer's step asks.

item, float, bool    in a step, which all ranks make, of the whole sum; elsewhere of this rank's part, which is warned of
pow_, clamp_, ...    of such a sum, which DTensor refuses as its placements change; it is added up first
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
import zlib
from itertools import chain
from types import CodeType, FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from hsdp.errors import StateError
from hsdp.params.dtensors import full_tensor, largest
from hsdp.params.handlers import as_torch_does, handle
from hsdp.params.operators import is_watched
from hsdp.unit.lookup import place_of

_aten = torch.ops.aten
_ASKS = (_aten._local_scalar_dense.default, _aten.is_nonzero.default)
_IN_PLACE = (
    _aten.pow_.Scalar,
    _aten.clamp_.default,
    _aten.clamp_min_.default,
    _aten.sqrt_.default,
    _aten.rsqrt_.default,
    _aten.reciprocal_.default,
)
"""Operators that optimizers apply to norms and means, and that must not be applied to partial sums."""

_compared: weakref.WeakKeyDictionary[Optimizer, dict[int, list[int]]]
_compared = weakref.WeakKeyDictionary()
"""The parameters of an optimizer, by identity, whose order the ranks of a mesh (its hash) have compared."""


@functools.cache
def watch_norms(closure: CodeType) -> None:
    """Installs handlers of these operators; `closure` is the code that calls a user's closure in a step."""
    handle(_ASKS, functools.partial(_ask, closure))
    handle(_IN_PLACE, functools.partial(_in_place, closure))


def _ask(closure: CodeType, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not is_watched(tensor) or not _is_partial(tensor):
        return as_torch_does(op, args, kwargs)
    if (optimizer := _stepping(closure)) is not None:
        _compare_orders(optimizer, tensor)
        return op(full_tensor(tensor), *args[1:])
    # Not gathered here: code that logs on one rank alone would hang.
    warnings.warn(
        "hsdp: item(), float() or bool() of a DTensor that is still to be reduced over ranks (a norm, sum or maximum "
        "of sharded tensors) gives this rank's part of it; call .full_tensor() first, on all ranks",
        stacklevel=2,
    )
    return as_torch_does(op, args, kwargs)


def _in_place(closure: CodeType, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor gets other placements, in its own object: no copy of the partial one is left."""
    tensor = args[0]
    if is_watched(tensor) and _is_partial(tensor):
        if (optimizer := _stepping(closure)) is not None:
            _compare_orders(optimizer, tensor)
        whole = tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
        tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec
    return as_torch_does(op, args, kwargs)


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _stepping(closure: CodeType) -> Optimizer | None:
    """The optimizer whose step asks, on all ranks. Its closure is the user's, and may read a loss on one rank."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is closure:
            return None
        if code.co_name == "step":
            first = frame.f_locals.get(next(iter(code.co_varnames), ""))
            if isinstance(first, Optimizer):
                return first
        frame = frame.f_back
    return None


def _compare_orders(optimizer: Optimizer, tensor: DTensor) -> None:
    """Raises StateError on all ranks of the mesh if they come to their parameters in different orders.

    A norm of one parameter would be added to that of another one.
    """
    mesh = tensor.device_mesh
    params = [
        param
        for param in chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if isinstance(param, DTensor) and param.device_mesh == mesh
    ]
    ids = list(map(id, params))
    known = _compared.setdefault(optimizer, {})
    if known.get(hash(mesh)) == ids:
        return
    order = zlib.crc32(repr([place_of(param) for param in params]).encode())
    most, least = largest(torch.tensor([order, -order], device=tensor._local_tensor.device), mesh).tolist()
    if most != -least:
        raise StateError(
            f"{type(optimizer).__name__}.step: it asks for norms over all ranks, parameter by parameter, but ranks list "
            "the parameters in different orders, as they do the elements of a set; make the optimizer with a list that is "
            "the same on all ranks, such as model.parameters()"
        )
    known[hash(mesh)] = ids

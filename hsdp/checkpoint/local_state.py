"""State of an optimizer that would be lost: that of no parameter, for which a checkpoint has no name; and plain tensors
beside a rank's rows, which are this rank's alone, and nobody could put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hsdp.checkpoint.ranks import carried
from hsdp.checkpoint.structure import leaves_of
from hsdp.errors import CheckpointError
from hsdp.optim.targets import is_number
from hsdp.params.local import local_of

T = TypeVar("T")


def refuse_local_state(name: str, param: Tensor, entries: Mapping[str, Any], counts: Collection[str]) -> None:
    """Refuses a parameter's state if a plain tensor in it has the shape of this rank's rows, and not the parameter's.

    Only rank 0's would be kept. A rank whose rows are the whole parameter finds nothing wrong: the others tell it.

    Args:
        name: of the parameter.
        param: the parameter.
        entries: its state.
        counts: entries that are numbers where they have one element, also where a rank has one row (see `counts_in`).

    Raises:
        CheckpointError: names the parameter and the entry.
    """
    if not isinstance(param, DTensor):
        return
    shape = local_of(param).shape
    for entry, value in leaves_of(entries).items() if shape != param.shape else ():
        # One of shape (0,) holds nothing that could be lost: optimizers keep it in the place of what they do not need.
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape != (0,)
        if plain and value.shape == shape and not is_number(entry, value, counts):
            raise CheckpointError(
                f"entry {entry!r} of the optimizer's state of {name!r} is a plain tensor, which has the shape of a rank's "
                f"own rows and not the parameter's {tuple(param.shape)}: all rows but rank 0's would be lost; keep such "
                "state as DTensors, torch.zeros_like(param), and not torch.zeros_like(param.to_local())"
            )


def refuse_unnamed_state(optimizer: Optimizer) -> None:
    """Refuses state under keys that are no parameters, `optimizer.state["global"]` say.

    Raises:
        CheckpointError: names the keys.
    """
    held = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    unnamed = [repr(key) for key, value in held.items() if not (isinstance(value, Mapping) and not value)]
    if unnamed:
        raise CheckpointError(
            f"the optimizer keeps state under {', '.join(unnamed)}, which is no parameter, so that it would be lost: keep "
            "it in the state of a parameter or in the settings of a group, or save it in extra= and take it out meanwhile"
        )


def alike(params: Iterable[Tensor], action: Callable[[], T], given: Callable[[T], Iterable[Any]] | None = None) -> T:
    """Does `action` on all ranks of the meshes that the parameters are on, which all call this: if one raises, all do.

    Args:
        params: parameters of the model.
        action: what to do.
        given: what of its result will go between the ranks, as bytes, none of which sees another one's dtypes.

    Raises:
        CheckpointError: `action` raised it on this rank, or any error on another; or sizes of what is given differ.
        Exception: what `action` raised here.
    """
    text: str | None = None
    raised: Exception | None = None
    travels: list[DTensor] = []
    try:
        result = action()
        travels += [value for value in given(result) if isinstance(value, DTensor)] if given is not None else []
    except Exception as error:
        raised = error
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    for mesh in dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)):
        nbytes = sum(value.numel() * value.dtype.itemsize for value in travels if value.device_mesh == mesh)
        axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        for group in map(mesh.get_group, axes) if mesh.get_coordinate() is not None else ():
            seen = torch.tensor([text is not None, nbytes, -nbytes], dtype=torch.int64, device=mesh.device_type)
            carried(dist.all_reduce, seen, dist.ReduceOp.MAX, group=group)
            failed, most, least = seen.tolist()
            if failed or most != -least:
                answers: list[Any] = [None] * group.size()
                carried(dist.all_gather_object, answers, (text, nbytes), group=group)
                text = next((one for one, _ in answers if one is not None), None) or (
                    f"ranks hold other numbers of bytes, {-least:,} and {most:,}: a tensor has another dtype or shape on "
                    "some rank"
                )
    if raised is not None and not isinstance(raised, CheckpointError):
        raise raised
    if text is not None:
        raise CheckpointError(text)
    return result

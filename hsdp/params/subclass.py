"""Parameters that are tensor subclasses with a gather extension: the plain data inside, and the same wrapper around others.

    Int8Weight around (4096, 4096) fp32   the user's parameter, which wraps one plain tensor of its own shape and dtype
    Int8Weight around (512, 4096) fp32    the sharded one's local tensor: the same wrapper around rows of the shard buffer

The extension is FSDP2's: `fsdp_pre_all_gather` says what of a shard is sent, `fsdp_post_all_gather` what becomes of it.
Everything in hsdp that reads, writes or moves shards deals with the data; `unit.extension_group` calls the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


@dataclass(frozen=True)
class Wrapper:
    """What a tensor subclass puts around its data.

    Attributes:
        kind: the subclass.
        name: the inner tensor that is the data.
        others: inner tensors beside it; scalars, which every rank keeps.
        context: the rest, as `__tensor_flatten__` tells it.
    """

    kind: Any
    name: str
    others: Mapping[str, Tensor]
    context: Any

    def around(self, data: Tensor) -> Tensor:
        """The subclass around `data`, whose memory it shares."""
        inner = {**self.others, self.name: data}
        return self.kind.__tensor_unflatten__(inner, self.context, data.shape, data.stride())  # type: ignore[no-any-return]


def wrapper_of(tensor: Tensor, where: str) -> Wrapper | None:
    """What is around the data of a tensor with a gather extension; None of any other tensor.

    Args:
        tensor: a parameter, or the local tensor of a sharded one.
        where: names it in errors.

    Raises:
        ValueError: it is a wrapper without the extension, or one whose data cannot be told apart.
    """
    kind = type(tensor).__name__
    if not (extends(tensor) or hasattr(tensor, POST)):
        if is_traceable_wrapper_subclass(tensor):
            raise ValueError(
                f"{where} is a {kind}, and its shards would not be: the class has no gather extension; give it {PRE} and "
                f"{POST} (FSDP2's protocol), shard the plain parameter, or pass it in ignored_params"
            )
        return None
    if not (extends(tensor) and hasattr(tensor, POST) and is_traceable_wrapper_subclass(tensor)):
        raise ValueError(
            f"{where} is a {kind}, whose gather extension is incomplete; the class needs {PRE}, {POST}, "
            "__tensor_flatten__ and __tensor_unflatten__"
        )
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    found = _data_names(tensor)
    if len(found) != 1 or any(other.ndim for name, other in inner.items() if name not in found):
        shapes = {name: (tuple(value.shape), str(value.dtype)) for name, value in inner.items()}
        raise ValueError(
            f"{where} is a {kind} around {shapes}; what can be sharded is a wrapper around one plain tensor of its own "
            f"shape {tuple(tensor.shape)} and dtype {tensor.dtype}, and scalars: quantise in {PRE}, or pass it in "
            "ignored_params"
        )
    return Wrapper(type(tensor), found[0], {name: inner[name] for name in names if name not in found}, context)


def data_of(tensor: Tensor) -> Tensor:
    """The plain tensor inside one with a gather extension; any other tensor is its own data."""
    return getattr(tensor, _data_names(tensor)[0]) if extends(tensor) else tensor


def extends(tensor: object) -> bool:
    """Whether a tensor says how it is gathered."""
    return hasattr(tensor, PRE)


def _data_names(tensor: Any) -> list[str]:
    names, _ = tensor.__tensor_flatten__()
    inner = ((name, getattr(tensor, name)) for name in names)
    return [
        name
        for name, found in inner
        if (found.shape, found.dtype) == (tensor.shape, tensor.dtype) and not is_traceable_wrapper_subclass(found)
    ]

"""Parameters that are tensor subclasses with a gather extension: what is inside, and the same wrapper around other tensors.

    Int8Weight around (4096, 4096) fp32         the user's parameter: around one plain tensor of its own shape and dtype
    Int8Weight around (512, 4096) fp32          the sharded one's local tensor: the same wrapper around rows of the shards

    NF4 around codes (8192 K) uint8, scales ..  a *composite*: several tensors, or of another shape or dtype, or nested
    NF4 around codes (1024 K) uint8, scales ..  cut by its own `split`; the shards hold the bytes of what is inside

The extension is FSDP2's: `fsdp_pre_all_gather` says what of a shard is sent, `fsdp_post_all_gather` what becomes of it.
Everything in hsdp that reads, writes or moves shards deals with what is inside; `unit.extension_group` calls the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hsdp.torch_private import storage_key


def _function(kind: type[Tensor]) -> Any:
    """The `__torch_function__` of a class, without the class that it is bound to."""
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


_PLAIN = (_function(Tensor), _function(nn.Parameter))
_LOST = object()
PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


@dataclass(frozen=True)
class Wrapper:
    """A tensor subclass, without its data.

    Attributes:
        kind: the subclass.
        name: the inner tensor that is the data; None of a composite, which is rebuilt from all its parts (`with_parts`).
        others: inner tensors beside it; scalars, which every rank keeps.
        context: the rest, as `__tensor_flatten__` tells it.
    """

    kind: Any
    name: str | None
    others: Mapping[str, Tensor]
    context: Any

    @property
    def composite(self) -> bool:
        """Whether its data is anything but one plain tensor of its own shape and dtype."""
        return self.name is None

    def around(self, data: Tensor) -> Tensor:
        """The subclass around `data`, whose memory it shares."""
        assert self.name is not None, "a composite has no single tensor inside"
        inner = {**self.others, self.name: data}
        return self.kind.__tensor_unflatten__(inner, self.context, data.shape, data.stride())  # type: ignore[no-any-return]


def wrapper_of(tensor: Tensor, where: str) -> Wrapper | None:
    """The wrapper of a tensor with a gather extension; None for any other tensor.

    Args:
        tensor: a parameter, or the local tensor of a sharded one.
        where: names it in errors.

    Raises:
        ValueError: it is a wrapper without the extension, or with half of one, or does torch's functions in its own way.
    """
    kind = type(tensor).__name__
    if not (extends(tensor) or hasattr(tensor, POST)):
        if is_traceable_wrapper_subclass(tensor):
            raise ValueError(
                f"{where} is a {kind}, and its shards would not be: the class has no gather extension; give it {PRE} and "
                f"{POST} (FSDP2's protocol), shard the plain parameter, or pass it in ignored_params"
            )
        if _function(type(tensor)) not in _PLAIN:
            raise ValueError(
                f"{where} is a {kind}, whose __torch_function__ its shards would not have; shard the plain parameter, or "
                "pass it in ignored_params"
            )
        return None
    if not (extends(tensor) and hasattr(tensor, POST) and is_traceable_wrapper_subclass(tensor)):
        raise ValueError(
            f"{where} is a {kind}, whose gather extension is incomplete; the class needs {PRE}, {POST}, "
            "__tensor_flatten__ and __tensor_unflatten__"
        )
    _, context = tensor.__tensor_flatten__()
    return Wrapper(type(tensor), _data_name(tensor), beside(tensor), context)


def data_of(tensor: Tensor) -> Tensor:
    """The plain tensor inside one with a gather extension; any other tensor, or a composite, is its own data."""
    name = _data_name(tensor) if extends(tensor) else None
    return tensor if name is None else getattr(tensor, name)


def around_other(tensor: Tensor, data: Tensor) -> Tensor:
    """The subclass of a tensor with a gather extension around other `data`: with more rows, or on another device.

    What was set on the tensor later and rebuilding loses (torchao's precomputed scales) comes along: else ranks whose
    tensor is rebuilt would compute otherwise than the rest, and perhaps communicate otherwise. What rebuilding makes of the
    data itself, its number of rows say, does not.
    """
    wrapper = wrapper_of(tensor, "a shard")
    assert wrapper is not None, "parameters with a gather extension have one"
    own = data_of(tensor)
    made, again = wrapper.around(data), wrapper.around(own)
    for name, value in vars(tensor).items():
        rebuilt = vars(again).get(name, _LOST)
        if isinstance(value, Tensor):
            if value is not rebuilt and storage_key(value.untyped_storage()) != storage_key(own.untyped_storage()):
                setattr(made, name, value.to(data.device))
        elif value is not rebuilt and _words(value) != _words(rebuilt):
            setattr(made, name, value)
    return made


def beside(tensor: Tensor) -> dict[str, Tensor]:
    """The scalars beside the data of a tensor with a gather extension, by name; none of other tensors, composites too."""
    data = _data_name(tensor) if extends(tensor) else None
    if data is None:
        return {}
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names if name != data}


def make_of(tensor: Tensor) -> str:
    """Describes a subclass but for the values of its tensors, in words that are equal on ranks that have equal ones.

    Numbers in the context (a scale that is a float, say) are values as those in tensors are, and gathers reckon with them.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    names, context = tensor.__tensor_flatten__()
    inner = ", ".join(f"{name}: {make_of(getattr(tensor, name))}" for name in names)
    return f"{type(tensor).__name__}({inner}; {_words(context)})"


def _words(value: Any) -> str:
    """A context in words. Of objects that are no plain data it tells the class: their `repr` may tell addresses."""
    if isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, type(None))) and not isinstance(value, Enum):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_words(key)}: {_words(held)}" for key, held in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_words, value)) + ")"
    if is_dataclass(value) and not isinstance(value, type):
        held = {one.name: getattr(value, one.name, None) for one in fields(value)}
        return type(value).__name__ + _words(held)
    return str(value) if isinstance(value, (Enum, torch.layout, torch.memory_format)) else type(value).__name__


def extends(tensor: object) -> bool:
    """Whether a tensor has a gather extension."""
    return hasattr(tensor, PRE)


def is_composite(tensor: Tensor) -> bool:
    """Whether a tensor has a gather extension and no single plain tensor of its shape and dtype inside."""
    return extends(tensor) and is_traceable_wrapper_subclass(tensor) and _data_name(tensor) is None


def _data_name(tensor: Any) -> str | None:
    """The inner tensor that is all there is to a subclass but for scalars: plain, and of its shape and dtype."""
    names, _ = tensor.__tensor_flatten__()
    inner = [(name, getattr(tensor, name)) for name in names]
    found = [
        name
        for name, held in inner
        if (held.shape, held.dtype) == (tensor.shape, tensor.dtype) and not is_traceable_wrapper_subclass(held)
    ]
    alone = len(found) == 1 and not any(held.ndim for name, held in inner if name not in found)
    return found[0] if alone else None


# -- composites: subclasses around several tensors ----------------------------------------------------------------------


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: itself, or those inside of it, however deep."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def with_parts(tensor: Tensor, parts: Iterator[Tensor]) -> Tensor:
    """The same subclass, size and stride around other plain tensors, in the order of `parts_of`."""
    if not is_traceable_wrapper_subclass(tensor):
        return next(parts)
    names, context = tensor.__tensor_flatten__()
    inner = {name: with_parts(getattr(tensor, name), parts) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


@torch.no_grad()
def own_rows(whole: Tensor, rank: int, shards: int) -> Tensor:
    """What `rank` of `shards` ranks holds of a composite, cut on dim 0 by the subclass itself, as FSDP2 does it.

    `torch.chunk` cuts; a rank with fewer rows than the first one gets as many, those behind its own made by `new_zeros`,
    so that all ranks send alike.
    """
    chunks = torch.chunk(whole, shards)
    if rank < len(chunks) and len(chunks[rank]) == len(chunks[0]):
        return chunks[rank]
    mine = chunks[rank] if rank < len(chunks) else chunks[0].narrow(0, 0, 0)
    return padded(mine, len(chunks[0]))


@torch.no_grad()
def padded(rows: Tensor, count: int) -> Tensor:
    """A composite with the rows of `rows` and `count` in all."""
    made = rows.new_zeros((count, *rows.shape[1:]))
    if len(rows):
        made.narrow(0, 0, len(rows)).copy_(rows)
    return made

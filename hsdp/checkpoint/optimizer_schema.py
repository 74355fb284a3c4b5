"""What state an optimizer makes for a parameter, found by letting a copy of it step on a tensor without content.

PyTorch's optimizers load whatever they are given, and fail, or quietly compute nonsense, in the next step. So their states
are compared with what they would make themselves: by class and settings, on the meta device, where a step costs nothing.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hsdp.optim.elementwise import bare_step
from hsdp.optim.targets import is_number


def class_of(optimizer: Optimizer) -> Any:
    """The optimizer's class, or the one that `hsdp.optim.local` made that of."""
    return getattr(optimizer, "_hsdp_made_of", type(optimizer))


def is_known(optimizer: Optimizer) -> bool:
    """Whether the optimizer's class is one of PyTorch's or hsdp's: the state of others may be anything."""
    return str(class_of(optimizer).__module__).startswith(("torch.optim", "hsdp.optim"))


def kind_of(optimizer: Optimizer) -> str:
    """The optimizer's class, or the one of PyTorch's that it is a subclass of."""
    kind = class_of(optimizer)
    for cls in kind.__mro__:
        if cls.__module__.startswith("torch.optim") and cls is not Optimizer:
            return str(cls.__name__)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_of_kind(optimizer: Optimizer, saved: str) -> bool:
    """Whether the optimizer is of the class that was saved under this name.

    A class of a user's has another module where its file is run as a script, or was moved: then its own name decides.
    """
    own = kind_of(optimizer)
    if saved == own or "." not in own or is_known(optimizer):  # PyTorch's go by their names alone
        return saved == own
    name = class_of(optimizer).__qualname__
    if saved.endswith(f".elementwise.Local{name}"):  # by earlier versions, of one that `hsdp.optim.local` was given
        return True
    if not saved.endswith(f".{name}") or saved.startswith(("torch.optim.", "hsdp.optim.")):
        return False
    if f"__main__.{name}" not in (saved, own):
        warnings.warn(f"hsdp: the checkpoint's optimizer is a {saved}; {own} is taken for the same class", stacklevel=2)
    return True


def is_of_weights(name: object, value: Tensor, param: Tensor) -> bool:
    """Whether state of a known optimizer is kept in its parameter's dtype: not counts, nor products that are kept wide."""
    return value.is_floating_point() and not is_number(name, value) and (value.ndim > 0 or param.ndim == 0)


_MOMENTS_ON = {"momentum": 0.5, "amsgrad": True, "centered": True}
"""Settings under which PyTorch's optimizers make all the state that they ever make."""


class Probe:
    """Knows what an optimizer makes for the parameters of one group: it steps once for each shape and dtype among them.

    Args:
        optimizer: the optimizer that loads.
        group: the settings that the group will have.
    """

    def __init__(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._made: dict[tuple[torch.Size, torch.dtype], Mapping[str, Any] | None] = {}
        self._most: dict[tuple[torch.Size, torch.dtype], Mapping[str, Any]] = {}

    def misfit(self, param: Tensor, state: Mapping[str, Any]) -> str | None:
        """How a parameter's state differs from what the optimizer makes for it; None if it does not, or is not known to.

        Args:
            param: the parameter.
            state: its state by entry: tensors or whatever has a shape and a dtype, and values.
        """
        kind = param.shape, param.dtype
        if kind not in self._made:
            self._made[kind] = _made(self._optimizer, self._group, param)
        made = self._made[kind]
        if made is None:
            return None
        if left := state.keys() - made.keys():
            # Made under other settings, before a scheduler brought the momentum to 0, say: the optimizer keeps that.
            if kind not in self._most:
                on = {key: value for key, value in _MOMENTS_ON.items() if key in self._group}
                self._most[kind] = _made(self._optimizer, {**self._group, **on}, param) or {}
            made = {**made, **{entry: value for entry, value in self._most[kind].items() if entry in left}}
        return _difference(self._optimizer, made, state)


def _difference(optimizer: Optimizer, made: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    if missing := sorted(made.keys() - state.keys()):
        return f"has no {', '.join(map(repr, missing))}, which {kind_of(optimizer)} keeps"
    if left := sorted(state.keys() - made.keys()):
        return f"has {', '.join(map(repr, left))}, which {kind_of(optimizer)} does not keep"
    kind = kind_of(optimizer)
    for entry, value in made.items():
        found = state[entry]
        if not (isinstance(value, Tensor) and hasattr(found, "shape")):
            plain = (int, float, type(None))  # numbers may be kept in tensors or not, by version
            if type(value) is not type(found) and not isinstance(found, plain) and not isinstance(value, plain):
                return f"has {entry!r} as a {type(found).__name__}, which {kind} keeps as a {type(value).__name__}"
        elif tuple(found.shape) != tuple(value.shape):
            return f"has {entry!r} of shape {tuple(found.shape)}, which {kind} keeps of shape {tuple(value.shape)}"
        elif _family(found.dtype) != _family(value.dtype):
            return f"has {entry!r} of {found.dtype}, which {kind} keeps as {value.dtype}"
    return None


def _family(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _made(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> Mapping[str, Any] | None:
    """The state that one step makes; None for classes that are not PyTorch's, whose steps may do anything."""
    cls = class_of(optimizer)
    if not cls.__module__.startswith("torch.optim"):
        return None
    probe: Any = object.__new__(cls)
    ghost = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"))
    ghost.grad = torch.empty_like(ghost)
    settings = {key: value for key, value in group.items() if key != "params"}
    settings.update({key: False for key in ("foreach", "fused", "capturable", "differentiable") if key in settings})
    probe.__dict__.update(vars(optimizer))
    probe.__dict__.update(param_groups=[{**settings, "params": [ghost]}], state=defaultdict(dict))
    try:
        with torch.no_grad():
            bare_step(cls)(probe)
    except Exception:  # some look at numbers, which a tensor without content does not have
        return None
    return dict(probe.state[ghost])

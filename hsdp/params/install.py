"""Unsharded parameters in front of sharded ones: put into modules' `__dict__`, where attribute access finds them first."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from hsdp.params.param import ManagedParam, refresh_flat_weights
from hsdp.params.subclass import parts_of
from hsdp.params.tensor_parallel import block_of
from hsdp.torch_private import has_storage, storage_address, storage_key

_local_of = attrgetter("_local_tensor")


class Shadows:
    """What opening, closing and checking a unit go through, resolved once: places, not lookups.

    Args:
        params: the unit's parameters, with their whole ones (or without, on the meta device).
    """

    def __init__(self, params: Sequence[ManagedParam]) -> None:
        # The dict of parameters does not hold the module: no cycle.
        self._registered: list[dict[str, Any]] = []
        self._registered_as: list[str] = []
        self._registered_params: list[Any] = []
        self._names: dict[int, list[tuple[int, str]]] = {}
        for param in params:
            if param.unsharded is not None:
                for part in parts_of(block_of(param.unsharded)):
                    storage, start = _place_of(part)
                    self._names.setdefault(storage, []).append((start, param.fqn))
        self._entries: list[tuple[dict[str, Any], str, ManagedParam]] = []
        modules: dict[int, tuple[weakref.ref[nn.Module], dict[str, Any], bool]] = {}
        for param in params:
            for module, name in param.holders():
                entry = modules.setdefault(id(module), (weakref.ref(module), {}, isinstance(module, nn.RNNBase)))
                entry[1][name] = param.unsharded
                self._entries.append((entry[1], name, param))
                self._registered.append(module._parameters)
                self._registered_as.append(name)
                self._registered_params.append(param.sharded)
        self._modules = list(modules.values())
        # What tells a DTensor's own storage, which has no memory, from those of others that are alive.
        self._params = list(params)
        self._sharded = [param.sharded for param in params]
        self._locals = [param.local for param in params]
        self._wrappers = list(map(storage_address, self._sharded))

    def choose(self) -> None:
        """Takes the unsharded parameters that forwards are to see from now on (`ManagedParam.choose`)."""
        for shadows, name, param in self._entries:
            shadows[name] = param.unsharded

    def show(self) -> None:
        """Puts the unsharded parameters in front."""
        for module, shadows, rnn in self._modules:
            there = module()
            if there is None:  # users took it out of their model
                continue
            there.__dict__.update(shadows)
            if rnn:
                for name, unsharded in shadows.items():
                    refresh_flat_weights(there, name, unsharded)

    def hide(self) -> None:
        """Takes them away again."""
        for module, shadows, rnn in self._modules:
            there = module()
            if there is None:
                continue
            held = there.__dict__
            for name in shadows:
                held.pop(name, None)
            if rnn:
                for name in shadows:
                    refresh_flat_weights(there, name, there._parameters[name])  # type: ignore[arg-type]

    def name_of(self, tensor: Tensor) -> str | None:
        """The parameter whose whole tensor `tensor` is, or looks into, whether autograd knows or not."""
        for part in parts_of(block_of(tensor)):
            if has_storage(part):
                storage, start = _place_of(part)
                if (names := self._names.get(storage)) is not None:
                    return max((name for name in names if name[0] <= start), default=names[0])[1]
        return None

    def disturbed(self) -> bool:
        """Whether somebody replaced or moved a sharded parameter since these shadows were made."""
        # Loops without Python in them: every gather asks.
        registered = map(dict.get, self._registered, self._registered_as)
        return not (
            all(map(is_, registered, self._registered_params))
            and all(map(is_, map(_local_of, self._sharded), self._locals))
        )

    def assigned(self) -> str | None:
        """The name of a sharded parameter whose `.data` somebody assigned to; its shadows then forget about that.

        torch gives such a DTensor another wrapper and leaves its local tensor as it was.
        """
        now = list(map(storage_address, self._sharded))
        if now == self._wrappers:
            return None
        found = None
        for param, sharded, before, after in zip(self._params, self._sharded, self._wrappers, now, strict=True):
            if before != after and sharded._local_tensor is param.local:  # type: ignore[attr-defined]
                found = param.fqn
        self._wrappers = now
        return found


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """The storage that a tensor lies in, and its first byte there."""
    return storage_key(tensor), int(tensor.storage_offset()) * tensor.itemsize

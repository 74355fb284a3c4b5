"""Unsharded parameters as attributes of their modules, shown in one of two ways.

Inside forwards and backwards they are *registered* in the place of the sharded ones, where `parameters()` finds them too,
and `torch.func.functional_call` replaces them. Otherwise they lie in front of the sharded ones, in modules' `__dict__`,
where attribute access looks first.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor, nn

from hsdp.params.local import local_of
from hsdp.params.param import ManagedParam, refresh_flat_weights
from hsdp.params.subclass import parts_of
from hsdp.torch_private import has_storage, plain_access, storage_key

requires_grad_of = attrgetter("requires_grad")


class Shadows:
    """The places in modules that opening, closing and checking a unit go through, resolved once.

    Args:
        params: the unit's parameters, with their whole ones (or without, on the meta device). They count as `disturbed`
            until the unit is built, which `mend` tells.

    Attributes:
        toggled: the user set `requires_grad` of shown parameters; `choose` is to be called.
        registered: `parameters()` gives the unsharded parameters.
    """

    def __init__(self, params: Sequence[ManagedParam]) -> None:
        # The dict of parameters does not hold the module: no cycle.
        self._registered: list[dict[str, Any]] = []
        self._registered_as: list[str] = []
        self._registered_params: list[Any] = []
        self._names: dict[int, list[tuple[int, str]]] = {}
        for param in params:
            if param.unsharded is not None:
                for part in parts_of(local_of(param.unsharded)):
                    self._names.setdefault(storage_key(part.untyped_storage()), []).append((_start_of(part), param.fqn))
        self._holders: list[tuple[weakref.ref[nn.Module], str, ManagedParam]] = []
        self._in_rnns: list[tuple[weakref.ref[nn.Module], str]] = []
        for param in params:
            for module, name in param.holders():
                ref = weakref.ref(module)
                self._holders.append((ref, name, param))
                if isinstance(module, nn.RNNBase):
                    self._in_rnns.append((ref, name))
                self._registered.append(module._parameters)
                self._registered_as.append(name)
                self._registered_params.append(param.sharded)
        self._expected: list[Any]
        self.spoil()
        self.registered = False
        self._shown = self._in_front = False
        self._params = list(params)
        self.choose()
        self._sharded = [param.sharded for param in params]
        self._with_locals: list[tuple[Any, Tensor]] = [(param.sharded, param.local) for param in params]
        self._wrappers = self._storages()

    def _storages(self) -> list[torch.UntypedStorage]:
        """The DTensors' own storages, which have no memory."""
        with plain_access():
            return list(map(Tensor.untyped_storage, self._sharded))

    def choose(self) -> None:
        """Takes the unsharded parameters that forwards are to see from now on (`ManagedParam.choose`)."""
        self.unregister()
        self._shadows = [(ref, name, param.unsharded) for ref, name, param in self._holders]
        self._unsharded: list[Any] = [unsharded for _, _, unsharded in self._shadows]
        self._leaves = [param.unsharded for param in self._params if param.unsharded is not None]
        self._wanted = list(map(requires_grad_of, self._leaves))
        self.toggled = False
        if self._shown:
            self._put_in_front()
            self._refresh_rnns()

    def show(self, registered: bool = False) -> None:
        """Has attributes give the unsharded parameters, and `parameters()` too if they are to be `registered`."""
        was_shown, self._shown = self._shown, True
        if registered:
            self.register()
        elif not was_shown and not self.registered:
            self._put_in_front()
        if self._in_rnns and not was_shown:
            self._refresh_rnns()

    def register(self) -> None:
        """Makes `parameters()` give the unsharded parameters until they are hidden."""
        if not self.registered:
            self.registered = True  # first: what a KeyboardInterrupt leaves half done is then taken away again
            self._exchange(self._unsharded)
            # In `__dict__` they would hide replacements for the length of a forward, as `functional_call` makes them.
            if self._in_front:
                self._take_from_front()

    def unregister(self) -> None:
        """Makes `parameters()` give the sharded parameters again."""
        if self.registered:
            self._exchange(self._registered_params)
            self.registered = False
            if self._shown:
                self._put_in_front()
            self._heed_toggles()

    def _heed_toggles(self) -> None:
        """A `requires_grad` that the user set on shown parameters, in a forward say, is meant for the sharded ones."""
        now = list(map(requires_grad_of, self._leaves))
        if now != self._wanted:
            params = [param for param in self._params if param.unsharded is not None]
            for param, leaf, wants, wanted in zip(params, self._leaves, now, self._wanted, strict=True):
                if wants != wanted:
                    param.heed_toggle(leaf, wants)
            self._wanted = list(map(requires_grad_of, self._leaves))
            self.toggled = True

    def _put_in_front(self) -> None:
        self._in_front = True
        for (module, name, unsharded), registered, sharded in zip(
            self._shadows, self._registered, self._registered_params, strict=True
        ):
            # Else users took the module out of their model, or put another object there.
            if (there := module()) is not None and registered.get(name) is sharded:
                there.__dict__[name] = unsharded

    def _take_from_front(self) -> None:
        for module, name, _ in self._shadows:
            if (there := module()) is not None:
                there.__dict__.pop(name, None)
        self._in_front = False  # last: what a KeyboardInterrupt leaves there is taken away later
        self._heed_toggles()

    def _refresh_rnns(self) -> None:
        for module, name in self._in_rnns:
            if (there := module()) is not None:
                refresh_flat_weights(there, name, getattr(there, name))

    def _exchange(self, params: list[Any]) -> None:
        for registered, name, sharded, unsharded, after in zip(
            self._registered, self._registered_as, self._registered_params, self._unsharded, params, strict=True
        ):
            now = registered.get(name)
            if now is sharded or now is unsharded:  # else the user replaced it, which `disturbed` is to see
                registered[name] = after
        self._expected = params

    def hide(self) -> None:
        """Removes the unsharded parameters from both places."""
        self._shown = False
        if self.registered:
            self.unregister()
        if self._in_front:
            self._take_from_front()
        if self._in_rnns:
            self._refresh_rnns()

    def name_of(self, tensor: Tensor) -> str | None:
        """The parameter whose whole tensor `tensor` is, or is a view of, with or without autograd's knowing."""
        for part in (tensor,) if type(tensor) is Tensor else parts_of(local_of(tensor)):
            if has_storage(part) and (names := self._names.get(storage_key(part.untyped_storage()))) is not None:
                start = _start_of(part)
                return max((name for name in names if name[0] <= start), default=names[0])[1]
        return None

    def spoil(self) -> None:
        """Counts as disturbed while the unit is being built: a call that finds it half built begins anew."""
        self._expected = [object()] * len(self._registered)

    def mend(self) -> None:
        """The unit is built."""
        self._expected = self._registered_params

    def disturbed(self) -> bool:
        """Whether a parameter was replaced or moved since these shadows were made."""
        for sharded, local in self._with_locals:
            if sharded._local_tensor is not local:
                return True
        return any(map(is_not, map(dict.get, self._registered, self._registered_as), self._expected))

    def replaced(self) -> str | None:
        """The name of a parameter that was replaced or moved since these shadows were made."""
        for (_, _, param), registered, name, expected in zip(
            self._holders, self._registered, self._registered_as, self._expected, strict=True
        ):
            if registered.get(name) is not expected or param.sharded._local_tensor is not param.local:  # type: ignore[attr-defined]
                return param.fqn
        return None

    def assigned(self) -> str | None:
        """The name of a sharded parameter whose `.data` was assigned to; its shadows then forget about that.

        torch gives such a DTensor another wrapper and leaves its local tensor as it was.
        """
        now = self._storages()
        if all(map(is_, now, self._wrappers)):
            return None
        found = None
        for at, (param, sharded) in enumerate(zip(self._params, self._sharded, strict=True)):
            # Else the user replaced both (`swap_tensors`), which `disturbed` is to see, and may put both back.
            if now[at] is not self._wrappers[at] and sharded._local_tensor is param.local:  # type: ignore[attr-defined]
                found, self._wrappers[at] = param.fqn, now[at]
        return found


def _start_of(tensor: Tensor) -> int:
    """A tensor's first byte in its storage."""
    return int(tensor.storage_offset()) * tensor.itemsize

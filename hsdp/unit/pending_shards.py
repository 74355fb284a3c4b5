"""A unit's shards between an optimizer's step and their first reader: other replicas' parts of them are on their way.

    optimizer.step()      each replica steps its share; the gathers of all units start          (optim/replicas.py)
    next forward          a unit's own gather reads its shards: they land first                 (`Unit.version`)
    any other reader      finds a stand-in behind the DTensor, which lands them first           (params/pending.py)

A tensor that shares a shard's memory and was made before the step (`p.to_local()`, kept in a list) has no stand-in before
it. `held_elsewhere` finds out that there is one: then the shards land before the step returns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hsdp.comm.streams import Streams, host_wait
from hsdp.params.param import ManagedParam
from hsdp.params.pending import PendingShard
from hsdp.torch_private import outside_transforms, storage_uses


def _as_argument() -> int:
    """How many references to its argument `getrefcount` counts that are its own: interpreters may borrow them."""
    held = SimpleNamespace(local=object())
    return sys.getrefcount(held.local) - 1


_HOLDERS = 5 + _as_argument()
"""References to a local tensor that are hsdp's own: `ManagedParam.local`, its DTensor, `Shadows`, `Unit._versioned`, the
list of the optimizer that steps it, and what looks."""


class PendingShards:
    """The gather of a unit's stepped parameters; the first reader waits for it.

    Args:
        finish: waits for the gather, which writes to the memory of their local tensors by aliases that have storages of
            their own.
        params: those parameters.
        streams: the device's.
    """

    def __init__(self, finish: Callable[[], None], params: Sequence[ManagedParam], streams: Streams) -> None:
        self._finish = finish
        self._params = [param for param in params if param.local.numel()]
        self._streams = streams
        self._began_on: Any = None
        self._stood_in: list[tuple[Any, Tensor, PendingShard]] = []
        # Several threads may read: one that logs weights, say, beside the one that trains.
        self._lock = threading.RLock()

    def held_elsewhere(self) -> bool:
        """Whether user code, beside the DTensors, may hold a tensor in the memory of the shards.

        Tensors inside of a tensor subclass may be held without its knowing.
        """
        return any(
            param.wrapper is not None or storage_uses(param.local) != 1 or sys.getrefcount(param.local) > _HOLDERS
            for param in self._params
        )

    def stand_in(self) -> None:
        """The gather has started: stand-ins take the places of the local tensors."""
        self._began_on = self._streams.current()
        for param in self._params:
            sharded: Any = param.sharded
            stand_in = PendingShard(param.local, _Landed(self, param))
            self._stood_in.append((sharded, param.local, stand_in))
            sharded._local_tensor = stand_in

    @torch.no_grad()
    def land(self) -> None:
        """Waits for the gather, and puts the local tensors back; at once if that was done.

        Raises:
            CollectiveError, DivergenceError: the gather failed; the next call raises it, too.
        """
        with self._lock:
            if not self._stood_in:
                return
            with outside_transforms():  # the first reader may be a forward under vmap or jvp
                self._finish()
            if self._streams.active and self._streams.current() != self._began_on:
                # The stream of this reader is behind the gather now. Those that are ordered behind the step are not.
                host_wait(self._streams.device)
            for sharded, local, stand_in in self._stood_in:
                if sharded._local_tensor is stand_in:  # else the user replaced it, which `disturbed` is to see
                    sharded._local_tensor = local
            self._stood_in = []


class _Landed:
    """The call that a stand-in makes."""

    __slots__ = ("_param", "_pending")

    def __init__(self, pending: PendingShards, param: ManagedParam) -> None:
        self._pending = pending
        self._param = param

    def __call__(self) -> Tensor:
        self._pending.land()
        return self._param.local

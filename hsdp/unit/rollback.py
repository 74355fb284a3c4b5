"""Undoes the landings of a failed backward: the gradients of one unit are put back as they were before its sums.

Sums land in place, as users (and flat optimizers) hold the memory of gradients. So the values from before are kept until
the backward has ended. Gradients that were None before need no memory: they are None again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hsdp.params.param import ManagedParam
from hsdp.torch_private import storage_key
from hsdp.unit.zero_grad import SentinelBacking, ZeroGradSentinel


class _Assigned(NamedTuple):
    """Gradients where there were none."""

    params: Sequence[ManagedParam]
    grads: Sequence[Any]
    locals: Sequence[Tensor]


class _Added(NamedTuple):
    """A gradient that was there: its memory, the values from before, and the version that it had behind the sum."""

    memory: Tensor
    before: Tensor
    version: int
    backing: SentinelBacking | None


class Undo:
    """The landings of the backward under way: `entries`, in order."""

    def __init__(self) -> None:
        self.entries: list[_Assigned | _Added] = []

    def note_assigned(self, params: Sequence[ManagedParam], grads: Sequence[Any], locals_: Sequence[Tensor]) -> None:
        """Notes that these gradients, around these local tensors, come where there are none, before they do.

        An interrupt from the keyboard may come between the two.
        """
        self.entries.append(_Assigned(params, grads, locals_))

    def add_noted(self, memory: Tensor, landed: Tensor, backing: SentinelBacking | None = None) -> None:
        """Copies a gradient, or the zeros behind a sentinel, and adds a sum to it."""
        before = memory.clone()
        self.entries.append(_Added(memory, before, memory._version + 1, backing))
        memory.add_(landed)

    def forget_taken(self, since: int) -> None:
        """Lets go of gradients that were taken away meanwhile (an optimizer in backward): they are not to be kept."""
        late = self.entries[since:]
        for at, one in enumerate(late):
            if isinstance(one, _Assigned):
                still = [i for i, param in enumerate(one.params) if param.sharded.grad is one.grads[i]]
                late[at] = _Assigned(
                    [one.params[i] for i in still], [one.grads[i] for i in still], [one.locals[i] for i in still]
                )
        self.entries[since:] = [one for one in late if not isinstance(one, _Assigned) or one.params]

    def clear(self) -> None:
        """The backward ended well."""
        self.entries.clear()

    def run(self, at_once: bool) -> bool:
        """Puts all gradients back, the last landing first; returns whether it could.

        Without `at_once` the user may have written to a gradient since the failure. Zeros stay then, as they were
        zeroed. What anything else should be is unknown.
        """
        able = True
        untouched: dict[int, bool] = {}
        for entry in reversed(self.entries):
            if isinstance(entry, _Assigned):
                for assigned in zip(*entry, strict=True):
                    self._take_away(*assigned)
                continue
            storage = storage_key(entry.memory.untyped_storage())
            if at_once or untouched.setdefault(storage, entry.memory._version <= entry.version):
                entry.memory.copy_(entry.before)
                if entry.backing is not None:
                    entry.backing.is_blank = True
            else:
                able = able and not bool(entry.memory.count_nonzero())
        self.entries.clear()
        return able

    @staticmethod
    def _take_away(param: ManagedParam, grad: Any, local: Tensor) -> None:
        now: Any = param.sharded.grad
        held = getattr(now, "_local_tensor", None)
        if isinstance(held, ZeroGradSentinel):
            if held.backing.base is local:
                held.backing.base = None
        elif now is grad:
            param.sharded.grad = None

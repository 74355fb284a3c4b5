"""A guard over unsharded parameters: what the engine gathered is what the backward finds; no user's write is lost.

An unsharded parameter is a copy that is freed at the end of its use. A forward that writes to it (`weight.copy_()`,
`weight.data = ...`, an embedding with `max_norm`) changes that copy alone: its backward would compute with other weights
than its forward, and the shards would keep the old ones. The guard looks at what a write leaves behind: a parameter's
version counter, its storage, offset and shape, and its content, as writes to `weight.data` change nothing else: in debug
mode always, else now and then: in the first two forwards, as a model that writes does so from the start, as a rule; then
whenever their number has doubled, and at last in one of a thousand.

Between its uses an unsharded parameter has no memory, or memory that a gather is still to fill, and in a later use it may
hold other weights. The guard sets its version counter accordingly: the same number whenever it holds the same weights,
another one whenever it does not. Autograd, which compares the counters of what it saved, then refuses a backward that
would read it at the wrong moment, by whatever way that backward came.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from hsdp import debug
from hsdp.buffers.fingerprints import as_bytes, fingerprints
from hsdp.torch_private import set_versions
from hsdp.unit.dtype_group import DtypeGroup

_version_of = attrgetter("_version")

_MOST_BETWEEN = 1000
"""Forwards, at most, from one in which content is looked at to the next: on devices the host waits for the answer, and
fingerprints take 24 MiB meanwhile."""


class WriteGuard:
    """What the unsharded parameters of a unit look like while only the engine wrote to them.

    Args:
        dtype_groups: those of the unit. Writes to unsharded parameters that are the shards themselves, on one rank alone,
            are kept, and not looked for.
        fillings: how many different weights the unsharded parameters have held.
        before: the guard that this one takes the place of.

    Attributes:
        forwards: how many there were, without gradients and with them; `next_look`: the number of the next in which the
            content is looked at.
    """

    def __init__(self, dtype_groups: Sequence[DtypeGroup], fillings: int, before: WriteGuard | None = None) -> None:
        self._watched: list[tuple[str, Tensor, Tensor]] = []
        self.forwards: list[int] = [0, 0] if before is None else before.forwards
        self.next_look: list[int] = [1, 1] if before is None else before.next_look
        self._content: list[Tensor] = []  # in debug mode
        self._prints: list[tuple[int, int]] = []
        shells: list[tuple[str, Tensor]] = []
        for group in dtype_groups:
            for index, param in enumerate(group.params):
                blocks = group.guarded(index)
                self._watched += [(param.fqn, block, block.detach()) for block in blocks]
                if blocks and param.unsharded is not blocks[0]:
                    assert param.unsharded is not None, "it consists of these blocks"
                    shells.append((param.fqn, param.unsharded))
        # Third-party devices answer `is_set_to` by way of a copy on the host.
        self._same = Tensor.is_set_to if all(b.device.type in ("cpu", "cuda") for _, b, _ in self._watched) else _same
        self._blocks = tuple(block for _, block, _ in self._watched)
        self._places = tuple(there for _, _, there in self._watched)
        # A DTensor (tensor parallelism), or another subclass, around blocks: that is what autograd saves and compares.
        self._named = [*((name, block) for name, block, _ in self._watched), *shells]
        self._counted = tuple(tensor for _, tensor in self._named)
        self._filled = 2 * fillings  # even numbers are weights; the odd one between two says that there are none

    def freed(self) -> None:
        """The unsharded parameters are not to be read until they are filled again."""
        set_versions(self._counted, (self._filled + 1,) * len(self._counted))
        self._content, self._prints = [], []

    def opened(self, fillings: int) -> None:
        """The unsharded parameters were just filled, with the `fillings`th weights that they hold."""
        self._filled = 2 * fillings
        set_versions(self._counted, (self._filled,) * len(self._counted))
        self._prints = []
        if debug.ON:
            self._content = [block.detach().clone() for _, block, _ in self._watched]

    def look(self) -> None:
        """Fingerprints the content as a forward begins; `written` compares it."""
        grad = torch.is_grad_enabled()
        self.next_look[grad] += min(self.next_look[grad], _MOST_BETWEEN)
        if not (self._content or self._prints):
            self._prints = fingerprints(self._blocks)

    def written(self, content: bool = True) -> str | None:
        """The name of a parameter that was written to since it was gathered; the guard then forgets about that write.

        The content is compared, too, if it was looked at, and if `content` asks for it.
        """
        if not content:
            self._content, self._prints = [], []
        if (
            not (self._content or self._prints)
            and all(map(self._same, self._blocks, self._places))
            and sum(map(_version_of, self._counted)) == self._filled * len(self._counted)
        ):
            return None
        found = None
        for name, block, there in self._watched:
            if not self._same(block, there):
                block.data = there
                found = name
        for name, tensor in self._named:
            if tensor._version != self._filled:
                set_versions((tensor,), (self._filled,))
                found = name
        if self._content:
            gathered, self._content = self._content, []
            for (name, block, _), then in zip(self._watched, gathered, strict=True):
                if not torch.equal(as_bytes(block), as_bytes(then)):
                    found = name
        if self._prints:
            prints, self._prints = self._prints, []
            for (name, _, _), now, before in zip(self._watched, fingerprints(self._blocks), prints, strict=True):
                if now != before:
                    found = name
        return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()

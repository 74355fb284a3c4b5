"""What buffers were when a step began, so that one that is dropped leaves no trace in them: running means, counters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hsdp.elastic.healing import buffer_places
from hsdp.params.local import is_expanded, local_of


class _Kept(NamedTuple):
    """A buffer of a module: the tensor that it held, and a copy of that; no copy of what nobody can write to in place."""

    module: nn.Module
    leaf: str
    held: Tensor | None
    copy: Tensor | None


class KeptBuffers:
    """The buffers of a model as they were. Copies have memory of their own, which is used again in the next step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[str, _Kept] = {}
        self._valid = False

    @torch.no_grad()
    def keep(self) -> None:
        """A step begins."""
        before, self._kept = self._kept, {}
        for name, (module, leaf) in buffer_places(self._model).items():
            held = module._buffers[leaf]
            old = before[name].copy if name in before else None
            self._kept[name] = _Kept(module, leaf, held, _copied(held, old))
        self._valid = True

    def forget(self) -> None:
        """They have been replaced by another replica's."""
        self._valid = False

    @torch.no_grad()
    def put_back(self) -> None:
        """The step is dropped. Tensors that forwards assigned go; buffers that they registered stay."""
        if not self._valid:
            return
        for module, leaf, held, copy in self._kept.values():
            if leaf not in module._buffers:
                continue  # somebody deleted it
            if held is not None and copy is not None:
                if local_of(held).shape == copy.shape:
                    local_of(held).copy_(copy)
                else:  # somebody resized it
                    held = copy.clone()
            module._buffers[leaf] = held


def _copied(held: Tensor | None, old: Tensor | None) -> Tensor | None:
    if held is None:
        return None
    local = local_of(held.detach())
    if is_expanded(local):
        return None
    if old is not None and (old.shape, old.dtype, old.device) == (local.shape, local.dtype, local.device):
        return old.copy_(local)
    return local.clone()

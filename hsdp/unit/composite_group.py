"""The dtype group of composites: subclasses around several tensors, say the codes of a 4-bit weight and their scales.

    NF4 (512, 64) around codes (16384) uint8, scales (512) fp32     the user's parameter
       | own_rows: torch.chunk, as the subclass has it
    NF4 (256, 64) around codes (8192) uint8, scales (256) fp32      what one of 2 ranks holds
       | parts_of
    shard buffer, bytes  [ codes 8192 | scales 1024 ]               the local tensor is the same subclass around views of it

Gathers are those of any extension. Gradients, if there are any, are plain tensors of the subclass's shape and dtype, and
are laid out as if the shards were.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.buffers.flat_buffer import with_own_storage
from hsdp.buffers.layout import ALIGN
from hsdp.params.param import ManagedParam
from hsdp.params.subclass import own_rows, padded, parts_of, with_parts
from hsdp.unit.dtype_group import NOT_OFFLOADED, U8
from hsdp.unit.extension_group import ExtensionGroup, naming


class CompositeGroup(ExtensionGroup):
    """Buffers and transfers of composites.

    The shard buffer holds bytes. A rank that has fewer rows than the first one holds as many, so that all send alike.
    """

    _offsets: list[list[int]]
    _full: dict[int, Tensor]

    def allocate(self, device: torch.device) -> None:
        """Makes the shard buffer, for compute on `device`."""
        self.device = device
        offset, self._offsets, self._full = 0, [], {}
        for index, param in enumerate(self.params):
            starts = []
            for part in parts_of(self._rows(index, param)):
                starts.append(offset)
                offset = -(-(offset + part.numel() * part.itemsize) // ALIGN) * ALIGN
            self._offsets.append(starts)
        home = NOT_OFFLOADED if device.type == "meta" else self.offload
        with torch.inference_mode(False):
            self.shard = home.memory(offset, U8, device)

    def held_bytes(self, index: int) -> int:
        """Bytes of the shard buffer that are parameter `index`'s, padding of its rows included."""
        return sum(part.numel() * part.itemsize for part in parts_of(self._full[index]))

    def _rows(self, index: int, param: ManagedParam) -> Tensor:
        """This rank's rows of a parameter, as it is at present: the original one, or its sharded successor."""
        piece, now = self.layout.pieces[index], param.sharded
        rows = now._local_tensor if isinstance(now, DTensor) else now.detach()
        with naming(self._unit, param.fqn, rows, "chunk, narrow, new_zeros or copy_"):
            if not isinstance(now, DTensor):
                rows = own_rows(rows, self.rank, self.shards)
            return rows if len(rows) == piece.chunk else padded(rows, piece.chunk)

    def local(self, index: int) -> Tensor:
        """Parameter `index`'s local tensor, filled: the subclass around its bytes of the shard buffer."""
        piece, rows = self.layout.pieces[index], self._rows(index, self.params[index])
        with torch.inference_mode(False), torch.no_grad():
            parts = []
            for part, start in zip(parts_of(rows), self._offsets[index], strict=True):
                if self.shard.is_meta:  # apart, too: a subclass may ask that all its tensors begin where their memory does
                    parts.append(torch.empty(part.shape, dtype=part.dtype, device="meta"))
                    continue
                data = self.shard.data[start : start + part.numel() * part.itemsize].view(part.dtype)
                parts.append(with_own_storage(data).view(part.shape).copy_(part))
            full = self._full[index] = with_parts(rows, iter(parts))
            return full if piece.rows(self.rank) == piece.chunk else full.narrow(0, 0, piece.rows(self.rank))

    def trial_gather(self) -> None:
        """Gathers once from the original parameters: user code that fails does so while the module is unchanged."""
        if self.shard.is_meta:
            return
        with torch.inference_mode(False), torch.no_grad():
            for index in range(len(self.params)):
                self._member(index, self.local(index))

    def _source(self, index: int, local: Tensor) -> Tensor:
        full = self._full[index]
        if self.shard.device == self.device:
            return full
        return with_parts(full, (part.to(self.device, non_blocking=True) for part in parts_of(full)))

"""A dtype group: the parameters of a unit that share dtypes, and the buffers behind them.

    shard buffer --(direct: own transfer)---------------------> unsharded parameter's place in one flat buffer
    shard buffer --(packed: one transfer)--> staging --(copy)-> unsharded parameters' places in another flat buffer

A gather's outputs are allocated when it starts; the places of packed parameters when it has ended, just before staging
is freed: a unit that is gathered ahead takes the memory of its parameters once.

Where the compute dtype differs, or shards are offloaded, they are first copied to this rank's own slots of the flat buffer
and of staging, and gathered in place.

With one shard rank nothing is transferred: unsharded parameters alias the shard buffer (or its cast copy).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hsdp.buffers.flat_buffer import FlatBuffer, with_own_storage
from hsdp.buffers.layout import NEVER, Layout, Piece, Thresholds, lay_out
from hsdp.buffers.views import merge_copies, row_views, whole_views
from hsdp.comm.mesh import MeshAxes
from hsdp.comm.uneven import Uneven
from hsdp.offload import OffloadPolicy
from hsdp.params.local import local_of
from hsdp.params.param import ManagedParam
from hsdp.policies import CommPolicy, MixedPrecisionPolicy, is_castable, is_trainable
from hsdp.unit.shard_prints import in_columns

U8 = torch.uint8
NOT_OFFLOADED = OffloadPolicy()

CAST_TOGETHER_BYTES = 256 * 1024
"""Up to so many bytes gradients are cast together; larger ones one by one, each gone before the next is cast."""


@dataclass(frozen=True)
class GroupKey:
    """The properties that parameters of one dtype group share."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    replicated: bool = False
    """Whether every rank keeps its parameters whole (`replicate_params`, scalars): each rank acts as if it were alone."""
    extension: bool = False
    """Whether its parameters define how they are gathered (extension_group.py)."""
    composite: bool = False
    """Whether those are subclasses around several tensors, whose bytes the shard buffer holds (composite_group.py)."""

    @classmethod
    def of(
        cls,
        storage: torch.dtype,
        policy: MixedPrecisionPolicy,
        replicated: bool = False,
        extension: bool = False,
        composite: bool = False,
    ) -> GroupKey:
        """The kind of a parameter that is stored as `storage`, under a policy."""
        if not is_castable(storage):
            reduce = storage if is_trainable(storage) else torch.float32
            return cls(storage, storage, reduce, replicated, extension, composite)
        compute = policy.param_dtype or storage
        return cls(storage, compute, policy.reduce_dtype or compute, replicated, extension, composite)

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype of sums over micro-batches: fp32, or the reduce dtype if that is wider."""
        return torch.promote_types(self.reduce, torch.float32)

    @property
    def summed(self) -> torch.dtype:
        """The dtype that a backend sums: of complex numbers their two reals."""
        return self.reduce.to_real()

    @property
    def widens(self) -> bool:
        """Whether gradients take more bytes when they are reduced than when autograd makes them."""
        return self.reduce.itemsize > self.compute.itemsize

    def casts_together(self, numel: int) -> bool:
        """Whether a gradient that is reduced directly, but in another dtype, is cast by one operator with others.

        Such a gradient is so small that the host's time for an operator counts more than its memory.
        """
        return self.reduce != self.compute and numel * self.reduce.itemsize <= CAST_TOGETHER_BYTES


class DtypeGroup:
    """Buffers and transfers of one dtype group.

    Attributes:
        kind: its dtypes.
        params: its parameters; `slots` gives their indices in the unit.
        layout: where their bytes lie.
        parts: size of the group over which unsharded parameters stay sharded after forward (1: none).
        shard: the shard buffer, 1-D, storage dtype.
        outputs, inputs: the transfers of its gather, as 1-D byte tensors.
        uneven: those of parameters of which ranks hold different parts.
        wire_signature: stands for what ranks must send alike beyond what follows from the model (divergence.py).
    """

    wire_signature = 0

    def __init__(
        self,
        kind: GroupKey,
        params: list[ManagedParam],
        slots: list[int],
        axes: MeshAxes,
        thresholds: Thresholds,
        parts: int = 1,
        offload: OffloadPolicy = NOT_OFFLOADED,
    ) -> None:
        self.kind = kind
        self.params = params
        self.slots = slots
        self.axes = axes
        self.thresholds = thresholds
        self.shards = 1 if kind.replicated else axes.shard_size
        self.rank = 0 if kind.replicated else axes.shard_rank
        self.layout = lay_out([p.spec for p in params], self.shards, thresholds)
        self.shard: Tensor
        self.device = axes.device
        self.offload = offload
        self.outputs: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.uneven: list[Uneven] = []
        self._parts = parts
        self._whole: list[FlatBuffer] = []
        self._kept: list[Tensor] = []
        self._direct: FlatBuffer | None = None
        self._packed: FlatBuffer | None = None
        self._staging: FlatBuffer | None = None
        self._filling = False  # staging is allocated, for a gather
        self._fill_to: list[Tensor] = []
        self._fill_from: list[Tensor] = []
        self._unpack_to: list[Tensor] = []
        self._unpack_from: list[Tensor] = []

    def allocate(self, device: torch.device) -> None:
        """Makes the shard buffer, for compute on `device`. Parameters are then put into it one by one."""
        self.device = device
        with torch.inference_mode(False):
            # Zeros: padding is read with the flat buffer (norms, checkpoints of it), never by parameters.
            home = NOT_OFFLOADED if device.type == "meta" else self.offload
            self.shard = home.memory(self.layout.numel, self.kind.storage, device)

    @property
    def _moves(self) -> bool:
        """Whether gathers read a copy of the shard buffer: in another dtype, or on another device."""
        return self.kind.compute != self.kind.storage or self.shard.device != self.device

    def columns(self) -> list[Tensor]:
        """The shard buffer in columns (`in_columns`); nothing if the unsharded parameters are no copy of it."""
        return in_columns(self.shard.detach()) if self.shards > 1 or self._moves else []

    @property
    def keeps_writes(self) -> bool:
        """Whether writes to unsharded parameters change the model: they are the shards, and no rank has others."""
        return self.axes.shard_size == 1 and self.axes.replicate_size == 1 and not self._moves

    def guarded(self, index: int) -> list[Tensor]:
        """The tensors in which parameter `index`'s gather arrives, and to which only the gather writes."""
        if self.shard.is_meta or self.keeps_writes:
            return []
        unsharded = self.params[index].unsharded
        assert unsharded is not None, "a dtype group that is not on the meta device has unsharded parameters"
        return [local_of(unsharded)]

    def local(self, index: int) -> Tensor:
        """Parameter `index`'s local tensor: its bytes of the shard buffer, as a tensor with a storage of its own.

        A plain view would do for hsdp, but DTensor takes a view's offset for its own, and code that copies storages (the
        stager of torch's `async_save`) then reads past it.
        """
        piece = self.layout.pieces[index]
        shape = piece.local_shape(self.rank)
        size = math.prod(shape)
        with torch.inference_mode(False):
            part = self.shard.data[piece.offset : piece.offset + size]
            # `.data`: a view would hold the tensor that it was made of, which would count as the user's.
            return (part if part.is_meta else with_own_storage(part)).view(shape).data

    def held_bytes(self, index: int) -> int:
        """Bytes of the shard buffer that are parameter `index`'s, padding of its rows included."""
        return self.layout.pieces[index].numel * self.kind.storage.itemsize

    @property
    def is_shard(self) -> bool:
        """Whether its unsharded parameters are the sharded ones, in the same memory."""
        return self.shards == 1 and not self._moves

    def lies_otherwise(self, uneven_bytes: int) -> bool:
        """Whether its layout would differ with this threshold."""
        thresholds = replace(self.thresholds, uneven_bytes=uneven_bytes)
        return (
            thresholds != self.thresholds and lay_out([p.spec for p in self.params], self.shards, thresholds) != self.layout
        )

    def trial_gather(self) -> None:
        """Runs user code that may fail, while the parameters are still the original ones."""

    def arrange(self) -> None:
        """Makes the unsharded parameters and the gather's transfers; nothing is allocated for good but the shard buffer."""
        if self.shard.is_meta:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._arrange()
        self.release_transients()
        self.free_unsharded()

    def _arrange(self) -> None:
        if self.shards == 1:
            self._arrange_alone()
        else:
            self._arrange_gather()

    def _arrange_alone(self) -> None:
        # One shard rank: the layout of unsharded parameters is that of the shard buffer.
        if not self._moves:
            source = self.shard.data
        else:
            self._direct = self._new_whole(self.layout.numel)
            source = self._direct.tensor
            self._fill_to, self._fill_from = [source.data], [self.shard.data]
        for param, piece in zip(self.params, self.layout.pieces, strict=True):
            param.make_whole(source.data[piece.offset : piece.offset + piece.numel])

    def _arrange_gather(self) -> None:
        layout, compute, device = self.layout, self.kind.compute, self.device
        shards = layout.shards
        direct, unpacked = whole_numels(layout, self._parts)
        if direct:
            self._direct = self._new_whole(direct)
        if unpacked:
            self._packed = self._new_whole(unpacked)
        for param, piece in zip(self.params, layout.pieces, strict=True):
            param.make_whole(self._place(piece))
        for i in layout.in_order:
            piece = layout.pieces[i]
            if piece.uneven:
                self._add_uneven(self._place(piece), piece)
            elif piece.direct_gather:
                self._add_transfer(self._place(piece), piece.offset, piece.offset + piece.numel)
        start = layout.gather_packed_start
        packed = layout.numel - start
        if packed:
            self._staging = FlatBuffer.empty(shards * packed, compute, device)
            self._add_transfer(self._staging.tensor.data, start, layout.numel)
            rows = self._staging.tensor.data.view(shards, packed)
            for piece in map(layout.pieces.__getitem__, layout.in_order):
                if not piece.direct_gather and piece.spec.numel:
                    unsharded = self._place(piece).view(piece.spec.shape)
                    sources = row_views(piece, rows[:, piece.offset - start : piece.offset - start + piece.numel])
                    self._unpack_to += whole_views(piece, unsharded, shards)
                    self._unpack_from += sources
            self._unpack_to, self._unpack_from = merge_copies(self._unpack_to, self._unpack_from)

    def _new_whole(self, numel: int) -> FlatBuffer:
        self._whole.append(FlatBuffer.empty(numel, self.kind.compute, self.device))
        return self._whole[-1]

    def _place(self, piece: Piece) -> Tensor:
        """Where an unsharded parameter is, 1-D, with a version counter of its own."""
        flat_buffer = self._direct if piece.direct_gather else self._packed
        if flat_buffer is None:  # all that is packed is empty
            return torch.empty(0, dtype=self.kind.compute, device=self.device)
        start = piece.whole_offset - (0 if piece.direct_gather else self.layout.whole_packed_start)
        return flat_buffer.alias(start, start + piece.spec.numel)

    def _add_transfer(self, output: Tensor, start: int, stop: int) -> None:
        """Gathers elements `start:stop` of every rank's shard buffer into `output`."""
        own = self.shard.data[start:stop]
        if self._moves:
            self._fill_from.append(own)
            own = output.view(self.shards, -1)[self.rank].data
            self._fill_to.append(own)
        self.outputs.append(output.view(U8))
        self.inputs.append(own.view(U8))

    def _add_uneven(self, whole: Tensor, piece: Piece) -> None:
        """Fills a whole parameter in place: this rank's rows by a copy of its shard, the others by their holders'."""
        sizes = piece.sizes(self.shards)
        own = whole.split(sizes)[self.rank].data
        if own.numel():
            self._fill_from.append(self.shard.data[piece.offset : piece.offset + own.numel()])
            self._fill_to.append(own)
        data = whole.view(U8)
        self.uneven.append(Uneven(data, tuple(size * whole.itemsize for size in sizes), own.view(U8)))
        # Ranks that do not agree on it would start other collectives.
        self.wire_signature = (hash((self.wire_signature, *sizes)) & 0xFFFFFFFF) << 2

    @property
    def whole_bytes(self) -> int:
        """The memory behind the unsharded parameters; none where they alias the shards."""
        if self.shards == 1:
            return self.layout.numel * self.kind.compute.itemsize if self._moves else 0
        return sum(whole_numels(self.layout, self._parts)) * self.kind.compute.itemsize

    @property
    def staging_bytes(self) -> int:
        """Bytes of a gather's staging: the rows of packed parameters."""
        return 0 if self._staging is None else self._staging.nbytes

    @property
    def flat_buffers(self) -> dict[str, FlatBuffer]:
        """The buffers that are allocated and freed in each step, by name."""
        found = {"whole, direct": self._direct, "whole, packed": self._packed, "staging": self._staging}
        return {name: flat_buffer for name, flat_buffer in found.items() if flat_buffer is not None}

    def transient_memory(self) -> list[Tensor]:
        """The memory that a gather fills, or reads, and that is freed."""
        return [*(flat_buffer.tensor for flat_buffer in self.flat_buffers.values() if flat_buffer.held), *self._kept]

    @property
    def transient_bytes(self) -> int:
        """Bytes of unsharded parameters, and of what their gather needs, that are allocated now."""
        return sum(flat_buffer.held for flat_buffer in self.flat_buffers.values())

    def prepare_gather(self) -> None:
        """Allocates a gather's outputs. Runs on the compute stream, so that their memory is ordered by that stream."""
        if self._direct is not None:
            self._direct.alloc()
        if self._staging is not None:
            self._staging.alloc()
            self._filling = True

    def fill_gather(self) -> None:
        """The one copy, where compute and storage dtypes or devices differ; the gather's inputs are ready after it."""
        if self._fill_to:
            parts = self._fill_from
            if self.shard.device != self.device:
                # First to the device, then to the compute dtype: the other way round the host would cast, and wait.
                parts = [part.to(self.device, non_blocking=True) for part in parts]
            torch._foreach_copy_(self._fill_to, parts)

    def assemble(self) -> None:
        """Runs when the gather has ended, on the compute stream: copies packed parameters from staging to their places.

        Their memory is that stream's, as all of a gather is: it is allocated here, and not while others fill staging, which
        goes behind the copy. Parameters that come from kept parts are in their places already.
        """
        staging = self._staging
        if staging is None or not self._filling:
            return
        self._filling = False
        if self._packed is not None:
            self._packed.alloc()
            # Without `no_grad`, which costs host time: none of these tensors requires a gradient.
            torch._foreach_copy_(self._unpack_to, self._unpack_from)
        # The copy out of it is enqueued on the stream that this memory belongs to: its next user is ordered behind.
        staging.free()

    def release_transients(self) -> None:
        """Frees the gather's staging and inputs."""
        if self._staging is not None:
            self._filling = False
            self._staging.free()

    def free_unsharded(self) -> None:
        """Frees the unsharded parameters (unless they alias the shards)."""
        for flat_buffer in self._whole:
            flat_buffer.free()

    def keep_part(self, index: int) -> None:
        """Copies part `index` of equal parts of the unsharded parameters: their bytes, sharded over a smaller group."""
        if self.shards > 1:
            self._kept = [one.tensor.view(self._parts, -1)[index].clone() for one in self._whole]

    def prepare_parts(self) -> list[tuple[Tensor, Tensor]]:
        """Allocates the unsharded parameters; returns the transfers (output, input) that fill them from kept parts."""
        for flat_buffer in self._whole:
            flat_buffer.alloc()
        if not self._kept:
            self.fill_gather()
            return []
        return [(one.tensor.data.view(U8), kept.view(U8)) for one, kept in zip(self._whole, self._kept, strict=True)]

    def drop_part(self) -> None:
        """Forgets the kept part."""
        self._kept = []


def whole_numels(layout: Layout, parts: int) -> tuple[int, int]:
    """Elements behind the unsharded parameters: of those gathered directly, and of packed ones; in `parts` equal parts."""
    direct = layout.whole_packed_start
    packed = layout.whole_numel - direct
    return -(-direct // parts) * parts, -(-packed // parts) * parts


def unpacks_first(staging_bytes: int, whole_bytes: int) -> bool:
    """Whether a unit is unpacked before gathers ahead of it start, which then find the memory of its staging free.

    Where little of it is packed, gathers ahead start first, and run while it is unpacked.
    """
    return 8 * staging_bytes > whole_bytes


def thresholds_for(policy: CommPolicy, kind: GroupKey, gather: int, reduce: int, uneven: int) -> Thresholds:
    """The sizes from which parameters of a kind go direct, given a backend's defaults: what `Comm.thresholds` says."""
    if policy.fusion == "packed":
        gather = reduce = NEVER
    elif policy.fusion == "direct":
        gather = reduce = 0
    else:
        gather = gather if policy.direct_gather_bytes is None else policy.direct_gather_bytes
        reduce = reduce if policy.direct_reduce_bytes is None else policy.direct_reduce_bytes
    return Thresholds(gather, kind.compute.itemsize, reduce, kind.reduce.itemsize, uneven)

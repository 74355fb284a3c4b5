"""How a dtype group's gradients are reduced: from whole ones to the operands of a reduction, and back to local ones.

    gradients ----(direct: as autograd made them)-------------> reduce-scatter inputs
    gradients ----(packed: one copy)----> rows ---------------> reduce-scatter input
    reduction buffer (layout of the shard buffer) <------------ reduce-scatter outputs

With one shard rank gradients are all-reduced where autograd made them. The reduce-scatter over replicas that
share gradients: replica_shares.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hsdp.buffers.flat_buffer import FlatBuffer
from hsdp.buffers.layout import Layout, lay_out
from hsdp.buffers.views import row_views, whole_views
from hsdp.comm.uneven import Uneven
from hsdp.torch_private import are_alone, chunk_cat, storage_uses
from hsdp.unit.dtype_group import DtypeGroup
from hsdp.unit.grad_layout import GradLayout, cut
from hsdp.unit.replica_shares import ReplicaBuffers, ReplicaShares

_MOST_PLANS = 8
"""How many sets of trainable parameters a dtype group keeps the plans of; a GAN alternates between two."""


class ReducePlans:
    """The plans of a unit's dtype groups by their trainable parameters: a few, the last used."""

    def __init__(self, dtype_groups: int) -> None:
        self._most = _MOST_PLANS * dtype_groups
        self._made: dict[tuple[int, tuple[int, ...]], ReducePlan] = {}

    def plan(self, group: DtypeGroup, trainable: tuple[int, ...]) -> ReducePlan:
        """The plan of a dtype group's parameters at these places in it."""
        key = (id(group), trainable)
        found = self._made.pop(key, None)
        if found is None:
            while len(self._made) >= self._most:
                del self._made[next(iter(self._made))]
            found = ReducePlan(group, trainable)
        self._made[key] = found  # the last one: the first goes first
        return found


class ReducePlan(GradLayout):
    """How the gradients of a set of a dtype group's parameters are reduced.

    The reduction buffer has the layout of the shard buffer, then a tail of one *used-flag* per parameter: how many
    ranks used it. Each rank sends its flags with every row of the packed transfer.

    Attributes:
        key: identifies the set for the ranks' divergence guard.
        shares: the reduce-scatter over replicas that share gradients; else None.
        scatter_bytes: of the inputs of its reduce-scatter.
        free_rows: `Rows` of finished reductions, kept for their views; their memory is freed.
    """

    def __init__(self, group: DtypeGroup, trainable: tuple[int, ...]) -> None:
        # Not the dtype group itself: it holds its plans, and a cycle would keep the buffers of a deleted model.
        self.shards = group.shards
        params = [group.params[i] for i in trainable]
        everything = len(trainable) == len(group.params)
        specs = [p.spec for p in params]
        self.layout: Layout = group.layout if everything else lay_out(specs, group.shards, group.thresholds)
        layout = self.layout
        super().__init__(
            group.kind,
            group.device,
            # Gradients go where their shards are; None: on the device.
            group.offload if group.shard.device != group.device else None,
            params,
            [group.slots[i] for i in trainable],
            [piece.local_shape(group.rank) for piece in layout.pieces],
            [piece.offset for piece in layout.pieces],
            layout.numel,
            alone=group.shards == 1,
        )
        shared = tuple(i for i, param in zip(trainable, params, strict=True) if param.share is not None)
        uneven = [(i, piece) for i, piece in enumerate(layout.pieces) if piece.uneven]
        self._uneven = [(i, piece, tuple(piece.sizes(self.shards))) for i, piece in uneven]
        self.key = hash((trainable, shared)) if shared else hash(trainable)
        if self._uneven:
            self.key = hash((self.key, *(sizes for _, _, sizes in self._uneven)))
        self.shares = ReplicaShares(self, group.axes.replicate_size, group.thresholds) if shared else None
        self._rank = group.rank
        direct = [i for i in layout.in_order if layout.pieces[i].direct_reduce and not layout.pieces[i].uneven]
        self._small = [i for i in direct if group.kind.casts_together(layout.pieces[i].spec.numel)]
        self._large = [i for i in direct if i not in self._small]
        self._direct = self._large + self._small
        self.packed = layout.numel - layout.reduce_packed_start + self.flags
        # Where the first two dims are cut as one, a gradient is flattened. Of others the backend splits dim 0: they go as
        # they lie, if they are contiguous.
        self._merged = {i for i in self._direct if layout.pieces[i].spec.merged > 1}
        self._in_parts = layout.reduce_packed_start > 0
        self._even = [i for i, p in enumerate(layout.pieces) if not p.direct_reduce and p.even]
        self._even_rows = [(i, (self.shards, layout.pieces[i].numel)) for i in self._even]
        self._odd = [i for i, p in enumerate(layout.pieces) if not p.direct_reduce and not p.even and p.spec.numel]
        numel = self.shards * self.packed + sum(p.spec.numel for p in layout.pieces if p.direct_reduce)
        self.scatter_bytes = numel * self.kind.reduce.itemsize if self.shards > 1 else 0
        self._tiles = self._tiled()
        # The kernel for CUDA pads and casts at once. On the CPU each tensor is cast by itself, in five times the time.
        self._pads_first = bool(self._tiles) and group.device.type == "cpu" and group.kind.widens
        with torch.inference_mode(False):
            # Real memory: chunk_cat's kernel is for tensors without overlaps.
            self._all_used = torch.ones(self.shards * self.flags, dtype=self.kind.compute, device=self.device)
        self.free_rows: list[Rows] = []

    def _tiled(self) -> list[int] | None:
        """The packed pieces in order, if cutting each on dim 0 gives its part of every row, with no gaps between parts."""
        pieces = [(i, self.layout.pieces[i]) for i in self.layout.in_order if not self.layout.pieces[i].direct_reduce]
        tiles = all(p.spec.dim == 0 and p.spec.merged == 1 and p.numel for _, p in pieces)
        full = sum(p.numel for _, p in pieces) == self.packed - self.flags
        return [i for i, _ in pieces] if tiles and full else None

    def fill(self, grads: list[Tensor | None], clean: bool = False) -> GroupReduction:
        """Turns gradients (whole, any strides; None: not used here) into the operands of a reduction.

        `clean`: gaps between gradients are zeroed.

        Those that go directly are cast here, one at a time, and taken out of `grads`: in the parameter's own hook a wide
        copy would live beside the reduction before it, which by now has ended.
        """
        used = [grad is not None for grad in grads]
        if self.shards == 1:
            return self._fill_alone(grads, used)
        dtype, device = self.kind.reduce, self.device
        buffer = (torch.zeros if clean else torch.empty)(self.numel + self.flags, dtype=dtype, device=device)
        rows = self.free_rows.pop() if self.free_rows else Rows(self, dtype, device)
        uneven = self._fill_uneven(grads, buffer) if self._uneven else ()
        inputs = self._own(grads, self._large)
        padded = self._pad(grads) if self._pads_first else None
        rows.flat_buffer.alloc()
        if clean:
            rows.flat_buffer.tensor.zero_()
        if self._small:
            inputs += self._cast(rows, grads)
        if padded is not None:
            rows.values.copy_(padded)
            rows.flags.fill_(1.0)
            self._mark(rows, used)
        elif not self._tile(rows, grads, used):
            self._copy(rows, grads, used)
        inputs.append(rows.flat)
        reduction = GroupReduction(self, inputs, [buffer], [buffer], used, rows, uneven)
        if self._in_parts:
            # The output of a direct transfer is a local gradient: one tensor serves as both.
            locals_ = reduction.cut(reduction.values()) if self._direct else []
            reduction.outputs = [locals_[i] for i in self._direct]
            reduction.outputs.append(cut(buffer, self.layout.reduce_packed_start, self.packed))
        return reduction

    def _fill_uneven(self, grads: list[Tensor | None], buffer: Tensor) -> list[Uneven]:
        """Inputs of the uneven reduce-scatter; in `buffer`, zeros follow this rank's rows where other ranks hold more."""
        found = []
        for i, piece, sizes in self._uneven:
            (whole,) = self._own(grads, (i,))
            own = cut(buffer, piece.offset, sizes[self._rank])
            if own.numel() < piece.numel:
                cut(buffer, piece.offset + own.numel(), piece.numel - own.numel()).zero_()
            found.append(Uneven(whole.ravel(), sizes, own))
        return found

    def _own(self, grads: list[Tensor | None], places: Sequence[int]) -> list[Tensor]:
        """Takes gradients out of `grads`: contiguous, in the reduce dtype, and writable; copied where need be."""
        taken = [grads[i] for i in places]
        for i in places:
            grads[i] = None
        dtype, merged, owned = self.kind.reduce, self._merged, []
        if taken and not (merged or dtype.is_complex) and all([grad is not None and grad.dtype is dtype for grad in taken]):
            as_they_are: list[Tensor] = taken  # type: ignore[assignment]  # a cast would cost a call
            contiguous = all(map(Tensor.is_contiguous, as_they_are)) and are_alone(as_they_are)
            if contiguous and not any(map(Tensor.is_neg, as_they_are)):
                return as_they_are
        for at, i in enumerate(places):
            grad, taken[at] = taken[at], None
            if grad is None:
                grad = torch.zeros(self.layout.pieces[i].spec.shape, dtype=dtype, device=self.device)
            elif grad.dtype is not dtype:
                grad = grad.type(dtype)  # `to` reads its arguments for as long as the cast of a small one takes
            elif storage_uses(grad) > 1:
                grad = grad.clone()
            elif grad.is_conj() or grad.is_neg():
                grad = grad.clone()  # its memory, which a collective reads, holds the conjugates or negatives of its values
            if i in merged or not grad.is_contiguous():
                grad = grad.ravel()
            owned.append(grad)
        return owned

    def _cast(self, rows: Rows, grads: list[Tensor | None]) -> list[Tensor]:
        """Takes small gradients out of `grads` and casts them with one operator, into memory that reductions reuse."""
        to: list[Tensor] = []
        sources: list[Tensor] = []
        for i, small in zip(self._small, rows.small, strict=True):
            grad, grads[i] = grads[i], None
            if grad is None:
                small.zero_()
            else:
                to.append(small)
                sources.append(grad)
        if to:
            torch._foreach_copy_(to, sources)
        return rows.transfers

    def _pad(self, grads: list[Tensor | None]) -> Tensor | None:
        """The rows, without flags, in the dtype of the gradients; these are gone before wide rows are there.

        None if they are of another dtype: sums of earlier micro-batches.
        """
        assert self._tiles, "gradients tile the rows"
        compute = self.kind.compute
        sources = [self._zeros(i) if (grad := grads[i]) is None else grad.contiguous() for i in self._tiles]
        if any([source.dtype != compute for source in sources]):
            return None
        padded = torch.empty(self.shards, self.packed - self.flags, dtype=compute, device=self.device)
        chunk_cat(sources, 0, self.shards, out=padded)
        for i in self._tiles:
            grads[i] = None
        return padded

    def _tile(self, rows: Rows, grads: list[Tensor | None], used: list[bool]) -> bool:
        """Fills the rows with one operator, if there is one for these gradients; returns whether it did."""
        if not self._tiles:  # None: there are gaps; empty: only the flags are packed
            return False
        # The kernel for CUDA takes what is dense for row-major: a transposed gradient would be reduced in the wrong order.
        sources = [self._zeros(i) if (grad := grads[i]) is None else grad.contiguous() for i in self._tiles]
        try:
            chunk_cat([*sources, self._all_used], 0, self.shards, out=rows.wide)
        except RuntimeError:  # sums of earlier micro-batches are of a wider dtype than gradients
            return False
        if not all(used):
            self._mark(rows, used)
        return True

    @staticmethod
    def _mark(rows: Rows, used: list[bool]) -> None:
        for at, was_used in enumerate(used):
            if not was_used:
                rows.flags[:, at] = 0.0

    def _zeros(self, index: int) -> Tensor:
        """Zeros for an absent gradient; they take no memory."""
        return torch.zeros((), dtype=self.kind.compute, device=self.device).expand(self.params[index].spec.shape)

    def _copy(self, rows: Rows, grads: list[Tensor | None], used: list[bool]) -> None:
        """Fills the rows parameter by parameter."""
        to: list[Tensor] = []
        sources: list[Tensor] = []
        rows.flags.fill_(1.0)
        self._mark(rows, used)
        for (i, shape), column in zip(self._even_rows, rows.even, strict=True):
            grad = grads[i]
            if grad is None:
                column.zero_()
            else:
                to.append(column)
                sources.append(grad.reshape(shape))
        for i, columns in zip(self._odd, rows.odd, strict=True):
            grad = grads[i]
            if grad is None:
                torch._foreach_zero_(columns)
            else:
                to += columns
                sources += whole_views(self.layout.pieces[i], grad, self.shards)
        if to:
            torch._foreach_copy_(to, sources)

    def _fill_alone(self, grads: list[Tensor | None], used: list[bool]) -> GroupReduction:
        operands = [grad.ravel() for grad in self._own(grads, range(len(grads)))]
        operands.append(self.flags_of(used))
        return GroupReduction(self, [], [], operands, used, None)


class Rows:
    """The packed operand of a reduce-scatter: one row per rank, and its views, which outlive its memory.

    Behind the rows are gradients that go directly but are small and cast, each as a transfer and in its own shape.
    """

    __slots__ = ("even", "flags", "flat", "flat_buffer", "odd", "small", "transfers", "values", "wide")

    def __init__(self, plan: ReducePlan, dtype: torch.dtype, device: torch.device) -> None:
        layout = plan.layout
        start = layout.reduce_packed_start
        with torch.inference_mode(False):
            sizes = [layout.shards * plan.packed, *(layout.pieces[i].spec.numel for i in plan._small)]
            self.flat_buffer = FlatBuffer.empty(sum(sizes), dtype, device)
            self.flat, *small = self.flat_buffer.tensor.split(sizes)
            self.small = [one.view(layout.pieces[i].spec.shape) for i, one in zip(plan._small, small, strict=True)]
            self.transfers = [
                one.ravel() if i in plan._merged else one for i, one in zip(plan._small, self.small, strict=True)
            ]
            rows = self.wide = self.flat.view(layout.shards, plan.packed)
            self.values = rows[:, : plan.packed - plan.flags]
            columns = [rows[:, p.offset - start : p.offset - start + p.numel] for p in layout.pieces]
            self.flags = rows[:, plan.packed - plan.flags :]
            self.even = [columns[i] for i in plan._even]
            self.odd = [row_views(layout.pieces[i], columns[i]) for i in plan._odd]


class GroupReduction:
    """One dtype group's part of a reduction.

    Attributes:
        inputs, outputs: the transfers of the reduce-scatter (none with one shard rank).
        uneven: those of gradients of which ranks get different parts.
        operands: the tensors that are all-reduced and become gradients: the reduction buffer, or, with one shard rank, each
            gradient and the flags.
        used: which parameters this rank used.
        dropped: slots whose gradients were zeroed by the user while the reduction was under way.
        void: its backward failed: it must not land; `undoable`: its backward may still fail, and its landing be undone.
        late_factor: the factor that its sums are still to get when they are complete.
        joined: deferred sums that are added to the operands on a side stream, kept until the reduction lands.
        grad_layout: where gradients lie in the operands.
        replica_buffers: memory for its reduce-scatter over replicas, if there is to be one; `sums`: the operands before it.
            Both are kept until it lands: a side stream reads them when the compute stream has let its inputs go.
    """

    __slots__ = (
        "_cut_of",
        "_locals",
        "_stored",
        "_values",
        "dropped",
        "grad_layout",
        "inputs",
        "joined",
        "late_factor",
        "operands",
        "outputs",
        "plan",
        "replica_buffers",
        "rows",
        "sums",
        "undoable",
        "uneven",
        "used",
        "void",
    )

    def __init__(
        self,
        plan: ReducePlan,
        inputs: list[Tensor],
        outputs: list[Tensor],
        operands: list[Tensor],
        used: list[bool],
        rows: Rows | None = None,
        uneven: Sequence[Uneven] = (),
    ) -> None:
        self.plan = plan
        self.grad_layout: GradLayout = plan
        self.inputs = inputs
        self.outputs = outputs
        self.operands = operands
        self.used = used
        self.uneven = uneven
        self.rows = rows
        self.dropped: set[int] = set()
        self.void = self.undoable = False
        self.joined: list[Tensor] | None = None
        self.late_factor = 1.0
        self.replica_buffers: ReplicaBuffers | None = None
        self.sums: list[Tensor] = []
        self._stored: list[Tensor] | None = None
        self._values: list[Tensor] | None = None
        self._locals: list[Tensor] = []
        self._cut_of: list[Tensor] | None = None

    def release_inputs(self, ended: bool = True) -> None:
        """Frees the unsharded gradients. If the reduce-scatter has not `ended`, its rows are left to it."""
        self.inputs = self.outputs = []
        self.uneven = ()
        rows = self.rows
        if rows is not None and ended:
            # Their memory goes, their views stay for the next reduction.
            rows.flat_buffer.free()
            self.plan.free_rows.append(rows)
            self.rows = None

    def held_bytes(self) -> int:
        """Bytes of its inputs, until they are released, and of its operands."""
        return sum(tensor.nbytes for tensor in (*self.inputs, *(one.whole for one in self.uneven), *self.operands))

    def scale_late(self) -> None:
        """Multiplies the operands with `late_factor`. Runs on the operands' stream."""
        if self.late_factor != 1.0:
            torch._foreach_mul_(self.values(), self.late_factor)
            self.late_factor = 1.0

    def values(self) -> list[Tensor]:
        """The operands without the used-flags."""
        if self._values is None:
            operands = self.operands
            alone = len(operands) == 1
            self._values = [operands[0].as_strided((self.grad_layout.numel,), (1,))] if alone else operands[:-1]
        return self._values

    def share_out(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Prepares the reduce-scatter over replicas: the operands become this replica's share of the sums.

        Returns:
            Inputs, outputs, and what is summed in place.
        """
        buffers, shares = self.replica_buffers, self.plan.shares
        assert buffers is not None and shares is not None, "replicas have shares of its gradients"
        transfers = shares.fill(buffers, self.cut(self.values()), self.flags())
        self.sums, self.operands = self.operands, [buffers.result]
        self.grad_layout, self._values = shares.result_layout, None
        return transfers

    def store(self) -> None:
        """Copies the reduced values to where the shards live, if that is not the device; the host waits in `drain`."""
        offload, dtype = self.plan.offload, self.plan.kind.storage
        if offload is not None:
            values = [value.to(dtype) for value in self.values()]
            self._stored = [offload.staging(value).copy_(value, non_blocking=True) for value in values]

    def stored(self) -> list[Tensor]:
        """The reduced values in the dtype and on the device of the shards."""
        if self._stored is not None:
            return self._stored
        values, dtype = self.values(), self.plan.kind.storage
        if values[0].dtype == dtype:
            return values
        self._stored = [value.to(dtype) for value in values]
        return self._stored

    def locals(self) -> list[Tensor]:
        """`stored` as one local gradient for each parameter."""
        return self.cut(self.stored())

    def cut(self, values: list[Tensor]) -> list[Tensor]:
        """`values` as one tensor for each parameter; the same tensors each time, for the same list."""
        if values is not self._cut_of:
            self._locals, self._cut_of = self.grad_layout.locals(values), values
        return self._locals

    def flags(self) -> Tensor:
        """By parameter, in the reduce dtype: 0 if no rank used it. Sums may be scaled, by a negative factor too."""
        if len(self.operands) == 1:
            return self.operands[0][self.grad_layout.numel :]
        return self.operands[-1]

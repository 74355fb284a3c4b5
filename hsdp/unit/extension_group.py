"""The dtype group of parameters that define how they are gathered (in 8 bits, say), by FSDP2's protocol.

    shard --fsdp_pre_all_gather--> inputs ==all-gather==> outputs --fsdp_post_all_gather--> unsharded parameter
                        '------------------ metadata ------------------------^

What is sent has the shapes and dtypes that the subclass returns, and each input is a transfer of its own. Both methods are
called once when the buffers are made, on this rank's own rows, so that unsharded parameters are there from the start, as
in other units; after that `fsdp_post_all_gather` refills them. Their storages, and those of the outputs, come and go.
Gradients of unsharded parameters are reduced as any others.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hsdp.buffers.fingerprints import as_bytes
from hsdp.buffers.flat_buffer import FlatBuffer
from hsdp.buffers.layout import Piece, Thresholds
from hsdp.comm.labels import Named
from hsdp.comm.mesh import MeshAxes
from hsdp.errors import ExtensionError, HSDPError
from hsdp.offload import OffloadPolicy
from hsdp.params.local import local_of
from hsdp.params.param import ManagedParam, rows_of, share_marks
from hsdp.params.subclass import POST, PRE, around_other, data_of, parts_of
from hsdp.policies import MixedPrecisionPolicy
from hsdp.torch_private import keeping_versions, storage_key
from hsdp.unit.dtype_group import U8, DtypeGroup, GroupKey


class ExtensionGroup(DtypeGroup):
    """Buffers and transfers of parameters with a gather extension.

    The shard buffer is as any dtype group's; local tensors are the subclass around views of it.

    Args:
        unit: whose dtype group it is; its name is told in errors.
        policy: the unit's dtypes, about which a subclass may ask.
    """

    def __init__(
        self,
        kind: GroupKey,
        params: list[ManagedParam],
        slots: list[int],
        axes: MeshAxes,
        thresholds: Thresholds,
        parts: int,
        offload: OffloadPolicy,
        unit: Callable[[], Named | None],
        policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(kind, params, slots, axes, thresholds, parts, offload)
        self._unit = unit
        # Subclasses are written for FSDP2, and get its arguments.
        self._policy = fsdp.MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )
        self._members: list[_Member] = []

    @property
    def _moves(self) -> bool:
        """Always: a subclass sends tensors of its own."""
        return True

    def local(self, index: int) -> Tensor:
        """Parameter `index`'s local tensor: the subclass around its bytes of the shard buffer."""
        wrapper = self.params[index].wrapper
        assert wrapper is not None, "parameters of this dtype group have one"
        return wrapper.around(super().local(index))

    def trial_gather(self) -> None:
        """Gathers once from the original parameters: user code that fails does so while the module is unchanged."""
        if self.shard.is_meta:
            return
        with torch.inference_mode(False), torch.no_grad():
            for index, (param, piece) in enumerate(zip(self.params, self.layout.pieces, strict=True)):
                local = self.local(index)
                data_of(local).copy_(rows_of(local_of(param.sharded), piece, self.rank))
                self._member(index, local)

    def _arrange(self) -> None:
        self._members = [self._member(index, param.local) for index, param in enumerate(self.params)]
        for param, member in zip(self.params, self._members, strict=True):
            param.unsharded = member.unsharded
            share_marks(param.unsharded, param.sharded)
        if self.shards > 1:
            self.outputs = [flat_buffer.tensor.data.view(U8) for member in self._members for flat_buffer in member.outputs]
        signature = [(member.fqn, member.kinds) for member in self._members]
        self.wire_signature = zlib.crc32(repr(signature).encode()) << 2

    def _member(self, index: int, local: Tensor) -> _Member:
        piece = self.layout.pieces[index]
        member = _Member(self._unit, self.params[index], piece, self.axes, self._policy, self.kind.compute)
        member.make(self._source(index, local), self.shards, self.device)
        return member

    def _source(self, index: int, local: Tensor) -> Tensor:
        """The tensor to ask: the local one, but on the group's device, and with as many rows as that of the first rank."""
        piece = self.layout.pieces[index]
        if piece.rows(self.rank) == piece.chunk and self.shard.device == self.device:
            return local
        rows = self.shard.data[piece.offset : piece.offset + piece.numel].to(self.device, non_blocking=True)
        return around_other(local, rows.view(piece.chunk, *piece.spec.shape[1:]))

    def guarded(self, index: int) -> list[Tensor]:
        """What the unsharded parameter consists of, but for what the subclass keeps beside it: a table for all, say."""
        unsharded = self.params[index].unsharded
        if self.shard.is_meta or unsharded is None:
            return []
        ours = {storage_key(one.tensor.untyped_storage()) for one in self._members[index].flat_buffers}
        return [part for part in parts_of(unsharded) if storage_key(part.untyped_storage()) in ours]

    def transient_memory(self) -> list[Tensor]:
        """The memory that a gather fills, or reads, and that is freed."""
        held = [one.tensor for member in self._members for one in member.flat_buffers if one.held]
        return held + [tensor for member in self._members for tensor in member.inputs]

    @property
    def transient_bytes(self) -> int:
        """Bytes of unsharded parameters, and of what their gather needs, that are allocated now."""
        return sum(flat_buffer.held for member in self._members for flat_buffer in member.flat_buffers)

    def prepare_gather(self) -> None:
        """Calls `fsdp_pre_all_gather`. On the compute stream, which orders memory, and a subclass's own collectives."""
        with torch.inference_mode(False), torch.no_grad():
            for index, (param, member) in enumerate(zip(self.params, self._members, strict=True)):
                member.prepare(self._source(index, param.local))
        if self.shards > 1:
            self.inputs = [as_bytes(tensor) for member in self._members for tensor in member.inputs]

    def fill_gather(self) -> None:
        """With one shard rank, copies the inputs to the outputs."""
        if self.shards == 1:
            for member in self._members:
                member.fill(1)

    def assemble(self) -> None:
        """Makes unsharded parameters of the outputs. On the compute stream, as `fsdp_post_all_gather` computes."""
        with torch.inference_mode(False), torch.no_grad():
            for param, member in zip(self.params, self._members, strict=True):
                member.assemble(_leaves_of(param))
        self.release_transients()

    def release_transients(self) -> None:
        """Frees the inputs, and the outputs unless the unsharded parameters live in them."""
        self.inputs = []
        for member in self._members:
            member.release_transients()

    def free_unsharded(self) -> None:
        """Frees the unsharded parameters."""
        for member in self._members:
            for flat_buffer in member.flat_buffers:
                flat_buffer.free()


class _Member:
    """One parameter on its way from shard to whole.

    Attributes:
        fqn: its name.
        inputs: what it sends, as long as it is needed.
        kinds: shapes and dtypes of that.
        outputs: the memory in which what is gathered arrives.
        unsharded: the unsharded parameter, until the first choice of another one (`ManagedParam.choose`).
        flat_buffers: all memory that comes and goes: `outputs`, and what the subclass named along with the unsharded
            parameter.
    """

    inputs: list[Tensor]
    kinds: list[tuple[tuple[int, ...], torch.dtype]]
    outputs: list[FlatBuffer]
    flat_buffers: list[FlatBuffer]
    unsharded: nn.Parameter

    def __init__(
        self,
        unit: Callable[[], Named | None],
        param: ManagedParam,
        piece: Piece,
        axes: MeshAxes,
        policy: fsdp.MixedPrecisionPolicy,
        dtype: torch.dtype,
    ) -> None:
        self._unit = unit
        self.fqn = param.fqn
        self._module = param.places[0].module
        self._requires_grad = param.sharded.requires_grad
        self._shape = torch.Size(piece.spec.shape)
        self._stride = torch.empty(self._shape, device="meta").stride()
        self._mesh = axes.shard_mesh
        self._policy = policy
        self._dtype = dtype
        self._source: Tensor | None = None
        self._metadata: Any = None

    def make(self, source: Tensor, shards: int, device: torch.device) -> None:
        """The first time: makes outputs, all of them this rank's own rows, and the unsharded parameter of them."""
        self.inputs, self._metadata = self._ask(source)
        self.kinds = _kinds(self.inputs)
        self.outputs = [FlatBuffer.empty(shards * tensor.numel(), tensor.dtype, device) for tensor in self.inputs]
        self._shown = tuple(
            flat_buffer.tensor.data.view(shards * (shape[0] if shape else 1), *shape[1:])
            for flat_buffer, (shape, _) in zip(self.outputs, self.kinds, strict=True)
        )
        self.fill(shards)
        with naming(self._unit, self.fqn, source, POST):
            unsharded, inner = getattr(source, POST)(self._shown, self._metadata, self._dtype)
            if unsharded.shape != self._shape:  # rows of padding come behind its own
                unsharded = torch.as_strided(unsharded, self._shape, self._stride, 0)
            self.unsharded = nn.Parameter(unsharded, requires_grad=self._requires_grad)
            named = {_address(tensor): FlatBuffer(tensor) for tensor in inner}
        used = {*named, *map(_address, parts_of(unsharded))}
        outputs = {_address(flat_buffer.tensor): flat_buffer for flat_buffer in self.outputs}
        self._inner = [flat_buffer for at, flat_buffer in named.items() if at not in outputs]
        self._spare = [flat_buffer for at, flat_buffer in outputs.items() if at not in used]
        self.flat_buffers = [*self.outputs, *self._inner]
        self.inputs, self._metadata = [], None

    def fill(self, shards: int) -> None:
        """Puts the inputs in each of `shards` places of the outputs."""
        for flat_buffer, tensor in zip(self.outputs, self.inputs, strict=True):
            flat_buffer.tensor.data.view(shards, -1).copy_(tensor.view(1, -1))

    def prepare(self, source: Tensor) -> None:
        """Asks `source` what to send, and allocates the memory for what arrives."""
        inputs, self._metadata = self._ask(source)
        with naming(self._unit, self.fqn, source, PRE):
            if _kinds(inputs) != self.kinds:
                raise ValueError(
                    f"it returned {_kinds(inputs)}, and {self.kinds} the first time; shapes and dtypes must stay the same, "
                    "as what arrives lives in memory that is made once"
                )
        self.inputs, self._source = inputs, source
        for flat_buffer in self.outputs:
            flat_buffer.alloc()

    def assemble(self, leaves: Sequence[Tensor]) -> None:
        """Refills the unsharded parameter, of which there may be several `leaves`."""
        source, self._source = self._source, None
        assert source is not None, f"{self.fqn!r} was not gathered"
        for flat_buffer in self._inner:
            flat_buffer.alloc()
        for leaf in leaves:
            # Autograd must not see a change between forward and backward: units compare versions.
            with naming(self._unit, self.fqn, source, POST), keeping_versions((leaf, *parts_of(leaf))):
                getattr(source, POST)(self._shown, self._metadata, self._dtype, out=leaf)
        self._metadata = None

    def release_transients(self) -> None:
        """Forgets what was sent; frees what arrived, unless the unsharded parameter lives in it."""
        self.inputs, self._metadata, self._source = [], None, None
        for flat_buffer in self._spare:
            flat_buffer.free()

    def _ask(self, source: Tensor) -> tuple[list[Tensor], Any]:
        with naming(self._unit, self.fqn, source, PRE):
            pre = getattr(source, PRE)
            args = (self._mesh, self._shape, self._stride, self._module(), self._policy)
            count = len(inspect.signature(pre).parameters)
            if count not in (1, len(args)):
                raise TypeError(
                    f"it takes {count} arguments, and not (mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
                )
            inputs, metadata = pre(*args[:count])
            return [tensor.contiguous() for tensor in inputs], metadata


@contextmanager
def naming(unit: Callable[[], Named | None], fqn: str, source: Tensor, method: str) -> Iterator[None]:
    """Turns errors of a subclass's own code, inside it, into ExtensionErrors that name the parameter."""
    try:
        yield
    except HSDPError:
        raise
    except Exception as error:
        owner, kind = unit(), type(source).__name__
        raise ExtensionError(
            f"unit {owner.name if owner is not None else '(freed)'!r}, parameter {fqn!r}: {kind}.{method} failed "
            f"with {type(error).__name__}: {error}"
        ) from error


def check_extension(param: ManagedParam, axes: MeshAxes, reshard_after_forward: object, where: str) -> None:
    """Raises ValueError if a parameter with a gather extension cannot be sharded as asked for; `where` names it."""
    parts = reshard_after_forward if type(reshard_after_forward) is int else 1
    problem = ""
    if param.replicated and param.spec.shape:
        problem = "is in replicate_params, and what is kept whole is not gathered; leave it out"
    elif param.spec.dim != 0 or param.spec.merged > 1:
        problem = "can be sharded on dim 0 only; let shard_placement_fn return None for it"
    elif axes.shard_axis is None or (axes.mesh.ndim > 1 and axes.mesh.mesh_dim_names is None):
        problem = "needs a mesh with a shard axis that has a name; pass mesh_dim_names to init_device_mesh"
    elif 1 < parts < axes.shard_size:
        problem = f"cannot stay sharded over {parts} ranks after forward; pass reshard_after_forward=True or False"
    if problem:
        raise ValueError(f"{where} has a gather extension and {problem}")


def _leaves_of(param: ManagedParam) -> Sequence[Tensor]:
    """The unsharded parameters to refill: the one that forwards see, and the one that graphs from before a freeze read.

    They share memory, so that one call serves both where they are plain. Subclasses may have more to set on each: a scale.
    """
    shown, trained = param.unsharded, param.trained
    assert shown is not None, "an arranged parameter has a whole one"
    if trained is None or trained is shown or not is_traceable_wrapper_subclass(shown):
        return (shown,)
    return (shown, trained)


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

"""One parameter's life: the sharded DTensor that users see, and the whole tensor that a forward computes with.

While a unit is open, attributes give the whole one. Inside a forward or backward it is registered in the module, for models
that ask `parameters()` for their dtype. At any other moment the sharded one is: `named_parameters()` and new optimizers see
it, and `state_dict()` does even inside a forward. Then the whole one lies in front of it, in the module's `__dict__`, where
attribute access looks first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.weak import WeakIdKeyDictionary

from hsdp.buffers.fingerprints import same_bits
from hsdp.buffers.layout import ParamSpec, Piece
from hsdp.comm.mesh import MeshAxes
from hsdp.comm.streams import note_read
from hsdp.errors import StateError
from hsdp.params.dtensors import as_dtensor, spec_of, with_dtype
from hsdp.params.local import local_of
from hsdp.params.operators import watch_operators
from hsdp.params.pending import landed
from hsdp.params.replica_rows import Share
from hsdp.params.subclass import data_of, extends, is_composite, parts_of, wrapper_of
from hsdp.params.tensor_parallel import Inner, same_sharding
from hsdp.policies import is_trainable

PlacementFn = Callable[..., Any]

originals: Any = WeakIdKeyDictionary()
"""Parameters that were sharded and are still referenced (a tie to another module, say) -> where they went."""

shown: Any = WeakIdKeyDictionary()
"""Full parameters that stood for sharded ones for a while, and are still referenced -> for which ones."""


@dataclass(frozen=True)
class ParamName:
    """One name under which a module knows the parameter. The module is held weakly: units must not keep it alive."""

    module: weakref.ref[nn.Module]
    name: str
    fqn: str


class ManagedParam:
    """A parameter of a unit.

    Attributes:
        fqn: its first name, relative to the unit's module.
        places: every name it is known under (several when weights are tied inside the unit).
        inner: how it was distributed before hsdp (tensor parallelism, or an annotation); None for a plain tensor.
        spec: whole shape and sharded tensor dim; with `inner`, those of the block that this rank holds.
        wrapper: the tensor subclass around its data, if it has a gather extension; None for a plain tensor.
        dtype: storage dtype.
        sharded: the DTensor parameter that users see. Its local tensor is a view of the dtype group's shard buffer.
        local: the view; or with `wrapper`, the subclass around it.
        replicated: every rank keeps it whole (`replicate_params`, and scalars).
        share: the rows whose gradient this replica gets; None: all replicas get the whole.
        unsharded: the unsharded parameter that forwards see at present; its storage is filled while the unit is open.
            None until the dtype group is built. See `choose`.
        trained: the unsharded parameter of forwards that want its gradient; None as long as none did.
        node: autograd's accumulation node of `trained`, held so that it stays the same one.
    """

    __slots__ = (
        "dtype",
        "fqn",
        "inner",
        "local",
        "node",
        "piece",
        "places",
        "replicated",
        "sharded",
        "share",
        "spec",
        "tensor_spec",
        "trained",
        "unsharded",
        "wrapper",
    )

    def __init__(
        self,
        places: list[ParamName],
        original: nn.Parameter,
        dim: int | None,
        merged: int = 1,
        replicated: bool = False,
        inner: Inner | None = None,
    ) -> None:
        self.places = places
        self.fqn = places[0].fqn
        self.inner = inner
        self.spec = ParamSpec(tuple(local_of(original).shape), dim, merged)
        self.wrapper = wrapper_of(original, f"parameter {self.fqn!r}") if inner is None else None
        self.dtype = original.dtype
        self.replicated = replicated
        self.share: Share | None = None
        self.sharded: nn.Parameter = original
        self.unsharded: nn.Parameter | None = None
        self.trained: nn.Parameter | None = None
        self.node: Any = None
        self.piece: Piece
        self.local: Tensor
        self.tensor_spec: DTensorSpec

    @property
    def grad_spec(self) -> DTensorSpec:
        """How its gradient is sharded: as the parameter is, and if replicas have shares of it, over them too."""
        return self.tensor_spec if self.share is None else with_dtype(self.share.spec, self.dtype)

    def part_of(self, local: Tensor) -> Tensor:
        """This replica's share of a tensor that is laid out as `local` is."""
        return local if self.share is None else self.share.of(local)

    def holders(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules that hold the parameter, with its name there; modules that were deleted are left out."""
        for place in self.places:
            if (module := place.module()) is not None:
                yield module, place.name

    def shard(self, local: Tensor, piece: Piece, axes: MeshAxes, unit: weakref.ref[Any]) -> None:
        """Replaces the original parameter, in every place, by a DTensor around `local`. `unit` owns it from now on."""
        original = self.sharded
        originals[original] = (unit, self.fqn)
        hooked: Any = original
        before, behind = hooked._backward_hooks, hooked._post_accumulate_grad_hooks  # of users
        hooked._backward_hooks = hooked._post_accumulate_grad_hooks = None
        if original.requires_grad:
            original.register_post_accumulate_grad_hook(partial(_refuse_gradient, unit, self.fqn))
        with torch.no_grad():
            if piece.numel and not original.is_meta and not is_composite(local):  # a composite's dtype group filled it
                whole = local_of(original).detach()
                data_of(local).copy_(rows_of(whole, piece, axes.shard_rank))
                note_read(data_of(whole))  # the original may have been made on another stream, and is freed here
        self.piece = piece
        self.local = local
        self.tensor_spec = self._spec_over(axes)
        watch_operators(self.tensor_spec.mesh)
        with torch.inference_mode(False):
            self.sharded = nn.Parameter(as_dtensor(local, self.tensor_spec), requires_grad=original.requires_grad)
        self.sharded._local_tensor = local  # type: ignore[attr-defined]  # nn.Parameter made an alias of it
        # The same dicts: a hook's handle removes it as before.
        hooked = self.sharded
        hooked._backward_hooks, hooked._post_accumulate_grad_hooks = before, behind
        # Marks that users and libraries put on parameters; not what the subclass itself needs.
        self.sharded.__dict__.update({name: value for name, value in vars(original).items() if name not in vars(local)})
        self._register(self.sharded)

    def _spec_over(self, axes: MeshAxes) -> DTensorSpec:
        if self.inner is not None:
            return self.inner.sharded_spec(axes, self.spec.dim, self.dtype)
        shape = self.spec.shape
        cut = axes.merged(shape[0]) if self.spec.merged > 1 else (axes.mesh, axes.placements(self.spec.dim))
        return spec_of(*cut, shape, self.dtype)

    def make_whole(self, memory: Tensor) -> None:
        """Makes the unsharded parameter of `memory`, this parameter's part of a whole buffer."""
        view = memory.view(self.spec.shape)
        view = view if self.inner is None else self.inner.wrap(view)
        self.unsharded = self._annotated(nn.Parameter(view, requires_grad=self.sharded.requires_grad))

    def choose(self, wanted: bool) -> None:
        """Makes `unsharded` the tensor of a forward that does, or does not, want its gradient.

        They are two leaves over one memory. With one that changes its mind, autograd would drop the gradients of graphs
        that were made before.
        """
        unsharded = self.unsharded
        assert unsharded is not None, "an arranged parameter has a whole one"
        if unsharded.requires_grad != wanted:
            with torch.inference_mode(False):
                other = self.trained if wanted else None
                if other is None:
                    other = self._annotated(nn.Parameter(unsharded.detach(), requires_grad=wanted))
                self.unsharded = other
        if wanted:
            self.trained = self.unsharded

    def heed_toggle(self, leaf: nn.Parameter, wants: bool) -> None:
        """The user set `requires_grad` of a `leaf` that was shown as the unsharded parameter: the sharded one gets it too.

        Graphs that were made before a freeze lead to the leaf: what arrives there is dropped as for any parameter that was
        frozen meanwhile. Graphs that were made behind a thaw do, too: it is the leaf that trains from now on.
        """
        self.sharded.requires_grad_(wants)
        if not wants:
            leaf.requires_grad_(True)
        elif leaf is not self.trained:
            self.trained, self.node = leaf, None  # it is watched with the next choice

    def _annotated(self, unsharded: nn.Parameter) -> nn.Parameter:
        if self.inner is None or self.inner.visible:
            share_marks(unsharded, self.sharded)
        if self.inner is not None:
            self.inner.annotate(unsharded)
        return unsharded

    def refuse_untrainable(self, unit_name: str) -> None:
        """Raises StateError if gradients of its dtype cannot be reduced."""
        if not is_trainable(self.dtype):
            raise StateError(
                f"unit {unit_name!r}: parameter {self.fqn!r} has dtype {self.dtype} and wants gradients, which cannot be "
                "reduced; freeze it (requires_grad_(False))"
            )

    def dense_block(self, grad: Tensor) -> Tensor:
        """Of an unsharded gradient, the block that this rank holds; that of an embedding with sparse=True made dense."""
        grad = grad if grad.layout is torch.strided else grad.to_dense()
        return grad if self.inner is None else self.inner.block_of_grad(grad)

    def rehome(self, local: Tensor) -> None:
        """Moves the sharded values into `local` (same shape, perhaps other dtype or device), keeping the parameter."""
        with torch.no_grad():
            before = self._local_now()
            if not before.is_meta and not is_composite(local):
                data_of(local).copy_(data_of(before))
                note_read(data_of(before))
        self.local = local
        if self.sharded.device != local.device:  # offloaded, and it came from the device
            grad: Any = self.sharded.grad
            put_into(self.sharded, as_dtensor(local, self.tensor_spec), f"parameter {self.fqn!r}")
            if grad is not None:
                self.sharded.grad = as_dtensor(grad._local_tensor.to(local.device), grad._spec)
        self.sharded._local_tensor = local  # type: ignore[attr-defined]

    def moved(self) -> bool:
        """Whether the parameter, or its local tensor, was replaced since hsdp last looked.

        In a forward the unsharded one is in its place.
        """
        if self._local_now() is not self.local:
            return True
        held = [module._parameters.get(name) for module, name in self.holders()]
        return any(one is None or (one is not self.sharded and one is not self.unsharded) for one in held)

    def adopt(self, unit_name: str) -> None:
        """Takes over what replaced the parameter (`load_state_dict(assign=True)`), or refuses it.

        Raises:
            StateError: it was replaced by something that is not an equally sharded parameter.
        """
        currents = [module._parameters.get(name) for module, name in self.holders()]
        where = f"parameter {self.fqn!r} of unit {unit_name!r}"
        found = next((one for one in currents if one is not self.sharded), self.sharded)
        if found is None:
            raise StateError(
                f"{where} is no parameter of its module any more (a parametrization, or deleted?); register "
                "parametrizations, and change what parameters there are, before fully_shard"
            )
        if not (isinstance(found, nn.Parameter) and isinstance(found, DTensor)):
            raise StateError(
                f"{where} was replaced by something of type {type(found).__name__} that is not a sharded parameter "
                "(functional_call with plain tensors, or an assignment?); pass nn.Parameter(value) with a DTensor "
                "sharded as the parameter is, or write into the parameter in place"
            )
        spec, held = found._spec, landed(found._local_tensor)
        if not same_sharding(spec, self.tensor_spec) or held.shape != self.local.shape:
            raise StateError(
                f"{where} was replaced by a DTensor of shape {tuple(spec.shape)} with placements {spec.placements} on "
                f"{spec.mesh}, of which this rank holds {tuple(held.shape)}; it must keep shape "
                f"{tuple(self.tensor_spec.shape)}, placements {self.tensor_spec.placements}, mesh, and "
                f"{tuple(self.local.shape)} on this rank"
            )
        if found is not self.sharded:
            # A name that was left on the meta device has no value that would be lost.
            valued = [one for one in currents if one is not self.sharded or not one.is_meta]
            if any(not _same_values(found, other) for other in valued):
                raise StateError(
                    f"{where} has the names {', '.join(repr(place.fqn) for place in self.places)}, which were tied when "
                    "fully_shard was called and have stayed one parameter; they have different values now, as one of them "
                    "was replaced, or all by different ones: untie them before fully_shard, or put the same value under "
                    "all of them"
                )
            self.sharded = found
            self._register(found)
        self.dtype = self._local_now().dtype
        if extends(self._local_now()):
            self.wrapper, self.share = wrapper_of(self._local_now(), f"parameter {self.fqn!r} of unit {unit_name!r}"), None
        self.tensor_spec = with_dtype(self.tensor_spec, self.dtype)

    def _local_now(self) -> Tensor:
        return landed(self.sharded._local_tensor)  # type: ignore[attr-defined]

    def _register(self, sharded: nn.Parameter) -> None:
        for module, name in self.holders():
            module._parameters[name] = sharded
            refresh_flat_weights(module, name, sharded)


def _same_values(one: Any, other: Any) -> bool:
    """Whether two sharded parameters have the same bits on this rank."""
    if one is other or one.is_meta:
        return True
    if not isinstance(other, DTensor) or not same_sharding(one._spec, other._spec):
        return False
    pairs = zip(parts_of(local_of(one)), parts_of(local_of(other)), strict=True)
    return all(same_bits(a, b) for a, b in pairs)


def put_into(param: nn.Parameter, value: Tensor, what: str) -> None:
    """Turns a parameter into `value`, on another device, in its own object (for optimizers). Its gradient goes.

    Raises:
        StateError: torch does not allow it for `what`, as something refers to the parameter weakly or by autograd.
    """
    other = nn.Parameter(value, requires_grad=param.requires_grad)
    other.__dict__.update(vars(param))
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise StateError(
            f"{what} cannot change its device, because something refers to it weakly or by autograd ({error}); initialise "
            "and move the model before it is used"
        ) from error


def _refuse_gradient(unit: weakref.ref[Any], fqn: str, original: Tensor) -> None:
    """A forward computed with a parameter that was sharded, as it was then, which is never trained."""
    if (owner := unit()) is not None:
        raise StateError(
            f"a gradient came for what parameter {fqn!r} of unit {owner.name!r} was before fully_shard: a forward still "
            "uses that, by a reference from before (a list or a function made in __init__?) or by a module that is tied "
            "to it and not sharded. Look it up when the forward runs (self.weight), and shard tied modules as one unit"
        )


def share_marks(unsharded: nn.Parameter, sharded: nn.Parameter) -> None:
    """Attributes that users set on a sharded or an unsharded parameter are on both."""
    if type(unsharded) in (nn.Parameter, DTensor):  # other classes keep there what they need themselves
        unsharded.__dict__ = sharded.__dict__


def rows_of(unsharded: Tensor, piece: Piece, rank: int) -> Tensor:
    """The part of an unsharded parameter that `rank` of the shard group keeps: a view."""
    spec = piece.spec
    if spec.dim is None:
        return unsharded
    if spec.merged > 1:
        return unsharded.flatten(0, 1).narrow(0, rank * piece.chunk, piece.chunk).view(piece.local_shape(rank))
    return unsharded.narrow(spec.dim, min(rank * piece.chunk, spec.cut), piece.rows(rank))


def refresh_flat_weights(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Puts `param` into the list of weights that RNNs keep, which their forward reads."""
    if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(name)] = param

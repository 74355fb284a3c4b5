"""A sentinel stands in `.grad` while sums are pending, and sees the user's operations on it: optimizers have no hook for
`zero_grad`, and version counters do not say what an operation did.

    reads               see what has landed so far: the gradient that was there before, or zeros that take no memory
    additions           are kept: in that gradient, or in zeros that become one (`add_`, autograd's own accumulation)
    zeroing, setting    clears the pending sums, as it would clear the gradient (`zero_`, `mul_(0)`, `fill_`, `copy_`)
    any other change    cannot be made to sums that are not here yet: an error that names the parameter

A value computed from a gradient without its pending sums must not be written back either (a clipping whose norm
is 0, `g.copy_(g.clamp(-1, 1))`): behind a read, settings and factors that come as tensors are errors, and behind one of
element by element (no norm or sum, which people log), so are additions.

Aliases and views of a sentinel (`.data`, `detach()`, `[0]`) share its `SentinelBacking`: no write goes unseen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map_only

from hsdp.comm.streams import note_read
from hsdp.errors import StateError
from hsdp.params.arguments import by_name, written_by
from hsdp.params.dtensors import as_dtensor, cut_as
from hsdp.params.param import ManagedParam

_ADDS = frozenset(
    f"aten::{prefix}{name}_"
    for prefix, names in (
        ("", ("add", "sub", "addcmul", "addcdiv", "index_add", "scatter_add")),
        ("_foreach_", ("add", "sub", "addcmul", "addcdiv")),
    )
    for name in names
)
_SETS = frozenset(("aten::zero_", "aten::_foreach_zero_", "aten::fill_", "aten::copy_", "aten::_foreach_copy_"))
_SCALES = frozenset(("aten::mul_", "aten::_foreach_mul_"))
_COPIES = frozenset(("aten::clone", "aten::_to_copy"))
_FOREACH_REDUCTIONS = frozenset(("aten::_foreach_norm", "aten::_foreach_max"))
_ALIASES = frozenset(("aten::detach", "aten::alias"))


class SentinelBacking:
    """The gradient behind a sentinel and its aliases, and what happened to it while sums are pending.

    Attributes:
        fqn: the parameter's name.
        base: the gradient that was there, or has landed; None: there is none, which reads as zeros.
        is_blank: `base` was made for a view that was taken of the zeros, and is not written to yet.
        cleared: the user set the gradient to zero or to something else: the pending sums are void.
        read: something else was computed from it; `read_whole`: element by element.
        over: nothing is pending any more; the sentinel is the gradient, and no more.
        owner: the owner of the sums. It lives as long as the parameters that will get them, whatever becomes of the model.
    """

    __slots__ = ("base", "cleared", "fqn", "is_blank", "like", "over", "owner", "read", "read_whole")

    def __init__(self, fqn: str, like: Tensor, base: Tensor | None, owner: object = None) -> None:
        self.owner = owner
        self.fqn = fqn
        self.like = like
        self.base = base
        self.is_blank = self.cleared = self.read = self.read_whole = self.over = False

    @property
    def gradient(self) -> Tensor | None:
        """The gradient without what is pending; None if there is none."""
        return None if self.is_blank else self.base

    def memory(self, write: bool) -> Tensor:
        """The memory of `base`, which is allocated as zeros if there is none."""
        if self.base is None:
            self.base, self.is_blank = self.zeros(), True
        if write:
            self.is_blank = False
        return self.base

    def zeros(self) -> Tensor:
        """Zeros, as which an absent gradient reads."""
        return torch.zeros(self.like.shape, dtype=self.like.dtype, device=self.like.device)


class ZeroGradSentinel(Tensor):
    """Stands for a gradient with pending sums, or for a view of it. It has no memory of its own.

    Attributes:
        backing: the gradient behind it, shared with its aliases.
        view_of: the part of the memory that it shows; None: all of it, as it lies.
        part: whether `view_of` leaves elements out.
    """

    backing: SentinelBacking
    view_of: Tensor | None
    part: bool

    @staticmethod
    def __new__(cls, backing: SentinelBacking, view_of: Tensor | None = None, part: bool = False) -> ZeroGradSentinel:
        """A wrapper without memory of its own."""
        like = backing.like if view_of is None else view_of
        sentinel: ZeroGradSentinel = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
        )
        sentinel.backing = backing
        sentinel.view_of = view_of
        sentinel.part = part
        return sentinel

    def behind(self, write: bool) -> Tensor:
        """The memory that it shows."""
        if self.view_of is not None:
            if write:
                self.backing.memory(write)
            return self.view_of
        return self.backing.memory(write)

    def shown(self) -> Tensor:
        """The values that it reads as; zeros are allocated for the read alone."""
        if self.view_of is None and self.backing.base is None:
            return self.backing.zeros()
        return self.behind(write=False)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation on the memory behind the sentinels."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return _write(func, args, kwargs)
        if func._schema.name in _ALIASES and isinstance(args[0], ZeroGradSentinel):
            return ZeroGradSentinel(args[0].backing, args[0].view_of, args[0].part)
        if func.is_view and isinstance(args[0], ZeroGradSentinel):
            return _view(func, args[0], args[1:], kwargs)
        return _read(func, args, kwargs)


def _view(func: Any, sentinel: ZeroGradSentinel, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = sentinel.behind(write=False)
    views = func(source, *rest, **kwargs)

    def wrapped(view: Tensor) -> ZeroGradSentinel:
        part = sentinel.part or view.numel() != source.numel() or "strided" in func._schema.name
        return ZeroGradSentinel(sentinel.backing, view, part)

    return tree_map_only(Tensor, wrapped, views)


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    made_alike = name.endswith("_like") or name.startswith("aten::new_")

    read: list[ZeroGradSentinel] = []

    def shown(sentinel: ZeroGradSentinel) -> Tensor:
        read.append(sentinel)
        return sentinel.shown()

    real_args, real_kwargs = tree_map_only(ZeroGradSentinel, shown, (args, kwargs))
    result = func(*real_args, **real_kwargs)
    if not made_alike:
        # By the operator and not by sizes: a norm has as many elements as the part of a rank that has one row.
        whole = torch.Tag.pointwise in func.tags or name in _COPIES
        whole = whole or (name.startswith("aten::_foreach_") and name not in _FOREACH_REDUCTIONS)
        for sentinel in read:
            sentinel.backing.read = True
            sentinel.backing.read_whole |= whole
    return result


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    targets, others = _split(func, args, kwargs)
    written = [target.backing for target in targets if not (target.backing.over or target.backing.cleared)]
    name, sets = func._schema.name, False
    if written:
        own = {id(backing) for backing in written}
        sets = name in _SETS or (name in _SCALES and _factors(others) == {0.0})
        harmless = sets or name in _ADDS or (name in _SCALES and _factors(others) == {1.0})
        from_itself = any(isinstance(other, ZeroGradSentinel) and id(other.backing) in own for other in others)
        is_read = any(backing.read_whole if name in _ADDS else backing.read for backing in written)
        computed = is_read and any(isinstance(other, Tensor) for other in others)
        if not harmless or from_itself or computed or (sets and any(target.part for target in targets)):
            raise StateError(
                f"{name.removeprefix('aten::')} on the gradient of parameter {written[0].fqn!r}, or on a view of it, while "
                "sums of earlier micro-batches are pending for it, which this cannot change as it should; call "
                "model.flush() or zero_grad() first"
            )
    ids = {id(target) for target in targets}

    def real(sentinel: ZeroGradSentinel) -> Tensor:
        if id(sentinel) in ids:
            sentinel.backing.cleared = sentinel.backing.cleared or sets
            return sentinel.behind(write=True)
        sentinel.backing.read = True
        return sentinel.shown()

    real_args, real_kwargs = tree_map_only(ZeroGradSentinel, real, (args, kwargs))
    result = func(*real_args, **real_kwargs)
    return None if result is None else args[0]


def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[ZeroGradSentinel], list[Any]]:
    """The sentinels that an operation writes to, and everything else that it is given."""
    targets: list[ZeroGradSentinel] = []
    others: list[Any] = []
    written = written_by(func)
    for name, value in by_name(func, args, kwargs).items():
        leaves: Iterable[Any] = tree_iter(value)
        if name in written:
            targets += (leaf for leaf in leaves if isinstance(leaf, ZeroGradSentinel))
        else:
            others += leaves
    return targets, others


def _factors(others: list[Any]) -> set[float]:
    """The numbers that a scaling multiplies by; nan for what is not a number that the host knows."""
    return {float(one) if _known(one) else float("nan") for one in others}


def _known(factor: Any) -> bool:
    if isinstance(factor, Tensor):
        return type(factor) is Tensor and factor.numel() == 1 and factor.device.type == "cpu"
    return isinstance(factor, (int, float))


def _warn_of_hook(fqn: str) -> None:
    warnings.warn(
        f"hsdp: parameter {fqn!r} has a gradient hook, and sums of gradients are held back: the hook sees the sum of all "
        "micro-batches once. If it does not add up (clamp(), say), numbers are others than on one device: reduce in each "
        "micro-batch (without no_sync and accumulate), or apply the function to .grad before the step",
        stacklevel=2,
    )


class Sentinels:
    """The sentinels of a unit's gradients.

    Attributes:
        up: the gradients that have one, by the slots of their parameters.
        owner: gives the owner of the sums, to be kept alive.
    """

    def __init__(self, params: list[ManagedParam]) -> None:
        self._params = params
        self.up: dict[int, Any] = {}
        self._backings: dict[
            int, SentinelBacking
        ] = {}  # not those of `up`: a cast of the module replaces their local tensors
        self.owner: Callable[[], object] = lambda: None

    def names(self) -> list[str]:
        """The names of their parameters."""
        return [self._params[slot].fqn for slot in sorted(self.up)]

    def put_up(self, slot: int) -> None:
        """Puts a sentinel into the gradient of a parameter."""
        if slot in self.up:
            return
        param = self._params[slot]
        if param.sharded._backward_hooks:
            _warn_of_hook(param.fqn)
        grad: Any = param.sharded.grad
        held = None if grad is None else local_grad(param)
        backing = self._backings[slot] = SentinelBacking(param.fqn, param.part_of(param.local), held, self.owner())
        sentinel = ZeroGradSentinel(backing)
        if grad is None:
            grad = param.sharded.grad = as_dtensor(sentinel, param.grad_spec)
        else:
            grad._local_tensor = sentinel
        self.up[slot] = grad

    def gone(self) -> set[int]:
        """The slots of gradients that were zeroed, set or replaced since their sentinels were put up.

        Raises:
            StateError: one was replaced by a value that was computed without its pending sums.
        """
        return {slot for slot in list(self.up) if self._is_gone(slot)}

    def _is_gone(self, slot: int) -> bool:
        watched = self.up[slot]
        backing = self._backings[slot]
        shown: Any = self._params[slot].sharded.grad
        local = getattr(shown, "_local_tensor", None)
        if shown is watched and isinstance(local, ZeroGradSentinel):
            return backing.cleared
        if isinstance(local, ZeroGradSentinel) and local.backing is backing and local.view_of is None:
            self.up[slot] = shown  # another tensor of the same gradient (`p.grad = p.grad.detach()`)
            return backing.cleared
        if shown is not None and backing.read and not backing.cleared:
            backing.cleared = True
            raise StateError(
                f"the gradient of parameter {backing.fqn!r} was replaced while sums of earlier micro-batches were "
                "pending for it, by what may be computed from it without them; they are dropped. Call model.flush() before "
                "you change gradients, or zero_grad()"
            )
        return True

    def take_down(self, slot: int) -> None:
        """Removes a sentinel, as no sums are pending: `.grad` is the gradient behind it again."""
        grad = self.up.pop(slot)
        backing = self._backings.pop(slot)
        backing.over, backing.owner = True, None
        param = self._params[slot]
        if not isinstance(grad._local_tensor, ZeroGradSentinel):
            return  # the user has put another one there
        if backing.gradient is not None:
            grad._local_tensor = backing.gradient
        elif param.sharded.grad is grad:
            param.sharded.grad = None

    def restore(self, slots: list[int]) -> None:
        """Puts sentinels at `slots` alone, as before a backward that failed, whose sums are not to come."""
        for slot in set(self.up).difference(slots):
            self.take_down(slot)
        for slot in slots:
            self.put_up(slot)

    def take_all_down(self) -> None:
        """Removes all sentinels."""
        for slot in list(self.up):
            self.take_down(slot)


def local_grad(param: ManagedParam) -> Tensor:
    """This rank's part of a parameter's gradient, as far as it has landed; a sentinel where nothing has.

    Raises:
        StateError: the gradient is not sharded as the parameter is.
    """
    grad: Any = param.sharded.grad
    spec = param.tensor_spec if param.share is None else param.share.spec
    fits = isinstance(grad, DTensor) and grad._spec.placements == spec.placements
    if not fits:
        _shard(param, grad)
    local: Tensor = grad._local_tensor
    if isinstance(local, ZeroGradSentinel) and local.backing.gradient is not None:
        local = local.backing.gradient
    if not fits and param.share is not None:
        # Replicas have equal gradients: a penalty's, or one from before they had shares.
        local = grad._local_tensor = param.part_of(local)
        grad._spec = param.grad_spec
    return local


def _shard(param: ManagedParam, grad: Any) -> None:
    """Cuts a gradient, of which every rank holds all that it needs, as the parameter is sharded; or raises StateError."""
    spec = param.tensor_spec
    local = cut_as(grad, spec)
    if local is not None:
        note_read(grad._local_tensor)
        grad._local_tensor, grad._spec = local, spec
    else:
        raise StateError(
            f"parameter {param.fqn!r} has a gradient that is not sharded as the parameter is ({type(grad).__name__}); "
            f"set it to None, or to a DTensor with placements {spec.placements}"
        )

"""The tensors that lead into and out of a forward: where autograd enters a unit's backward, and where it leaves it.

    visible outputs        what the forward returns: in nested containers, dataclasses and objects, with slots too
    side outputs           what the forward leaves on its modules (`self.aux_loss = ...`), in containers and objects that
                           they hold, or in containers and objects that it was called with
    entry nodes            the autograd nodes behind them, as of the end of the forward

Hooks go on nodes and not on tensors: an in-place operation on an output that is a view (that of `nn.Linear` for 3-D
inputs) gives the tensor a new node that leads around the old one, straight to the node of the view's base.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from itertools import chain, islice
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.autograd import forward_ad

from hsdp.torch_private import REGISTRY_KEY, STATE_KEY, is_wrapped, sequence_number, tensors_behind
from hsdp.unit.lookup import unit_of_module
from hsdp.unit.unit import Unit

_NO_TENSORS = (str, bytes, int, float, bool, type(None), type, nn.Module)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MOST_ITEMS = 64
"""How many of the last items of a container are looked through for side outputs after each forward."""
_LAST_ITEMS = slice(-_MOST_ITEMS, None)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what a forward returned."""
    return [value] if isinstance(value, Tensor) else list(tensors_in(value))


def tensors_in(value: Any, depth: int = 8, seen: dict[int, int] | None = None) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts, dataclasses and plain objects, at most `depth` levels down.

    `seen` has what was looked through, and how far down: objects may refer to each other.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or isinstance(value, _NO_TENSORS):
        return
    seen = {} if seen is None else seen
    if seen.get(id(value), 0) >= depth:
        return
    seen[id(value)] = depth
    if isinstance(value, _CONTAINERS):
        items: Iterable[Any] = value
    else:
        items = value.values() if isinstance(value, dict) else _attributes(value)
    for item in items:
        yield from tensors_in(item, depth - 1, seen)


def _attributes(value: Any) -> Iterator[Any]:
    """The attributes of an object, in its dict and in slots."""
    slots = (getattr(value, name, None) for name in _slots_of(type(value)))
    return chain(list(getattr(value, "__dict__", {}).values()), slots)  # another thread may write to the object


_slots: dict[type, list[str]] = {}


def _slots_of(cls: type) -> list[str]:
    found = _slots.get(cls)
    if found is None:
        found = _slots[cls] = []
        for base in cls.__mro__:
            names = base.__dict__.get("__slots__", ())
            found += (names,) if isinstance(names, str) else names
    return found


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `fn` applied to its tensors, in nested tuples, lists, sets, dicts and dataclasses; the rest is kept.

    A container in which nothing changes is the same object again: a forward may write to it, as it does to a cache.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [map_tensors(item, fn) for item in value]
        if all(map(is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        # Before dicts: outputs of transformers and diffusers are both, and keep the two of them equal by themselves.
        held = {f.name: getattr(value, f.name, None) for f in fields(value)}
        changes = {name: new for name, item in held.items() if (new := map_tensors(item, fn)) is not item}
        return _with_fields(value, changes) if changes else value
    if isinstance(value, dict):
        items = [map_tensors(item, fn) for item in value.values()]
        return value if all(map(is_, items, value.values())) else _with_items(value, items)
    return value


def _with_fields(value: Any, changes: dict[str, Any]) -> Any:
    """A copy of a dataclass with other fields. Not by its constructor, which has no place for those with `init=False`."""
    try:
        copied = copy.copy(value)
    except TypeError:  # of an OrderedDict with fields that have no defaults
        return replace(value, **changes)
    for name, new in changes.items():
        try:
            setattr(copied, name, new)
        except FrozenInstanceError:
            object.__setattr__(copied, name, new)
    return copied


def _with_items(value: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """A copy of a dict with other items. Not by its constructor, whose arguments in a subclass may be anything."""
    if type(value) is dict:
        return dict(zip(value, items, strict=True))
    try:
        copied = copy.copy(value)
    except TypeError:  # of an OrderedDict whose constructor wants arguments
        return dict(zip(value, items, strict=True))
    if getattr(value, "__dict__", None) is value:  # items that are attributes as well
        copied.__dict__ = copied
    for key, new in zip(value, items, strict=True):
        copied[key] = new
    return copied


def entry_nodes(tensor: Tensor, first_node: int) -> Sequence[Any]:
    """The autograd nodes through which a gradient of `tensor` enters the forward that made it.

    Leaves have none: they do not lead into the forward, and hooks on them would outlive the iteration.

    Args:
        tensor: an output.
        first_node: the number of the first node that the forward made.
    """
    if is_wrapped(tensor) or forward_ad._current_level >= 0:
        return [node for behind in tensors_behind(tensor) for node in _nodes_of(behind, first_node)]
    return _nodes_of(tensor, first_node)


def _nodes_of(tensor: Tensor, first_node: int) -> Sequence[Any]:
    if (node := tensor.grad_fn) is None:
        return ()
    # An in-place operation on a view leads its gradient to the node of its base, around the view's own node.
    base = tensor._base
    if base is not None and (behind := base.grad_fn) is not None and sequence_number(behind) >= first_node:
        return node, behind
    return (node,)


class SideOutputs:
    """The places outside of its return value where the forward of a module leaves tensors.

    Args:
        modules: the module(s) of one unit. Those below them that belong to another unit are left to it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._buffers: list[dict[str, Tensor | None]] = []
        self._sizes: list[int] = []
        self._places: list[tuple[weakref.ref[nn.Module], tuple[str, ...]]] = []
        seen: set[int] = set()
        for module in modules:
            self._collect(module, unit_of_module(module), seen)

    def _collect(self, module: nn.Module, unit: Unit | None, seen: set[int]) -> None:
        if id(module) in seen or (unit_of_module(module) or unit) is not unit:
            return
        seen.add(id(module))
        self._modules.append(weakref.ref(module))
        self._buffers.append(module._buffers)  # the dict does not hold the module
        for child in module.children():
            self._collect(child, unit, seen)

    def tensors(self, arguments: Sequence[Any], first_node: int) -> list[Tensor]:
        """Tensors that a forward left behind, with autograd nodes made since the one with number `first_node`."""
        found: list[Tensor] = []
        for argument in arguments:
            found += _made_since(argument, first_node)  # of a tensor: the forward has written to it
        # Attributes appear with the first forward; from then on the sizes of the dicts tell of new ones, or one that went.
        sizes = [len(module.__dict__) if (module := ref()) is not None else 0 for ref in self._modules]
        if sizes != self._sizes:
            self._sizes = sizes
            modules = [(ref, module) for ref in self._modules if (module := ref()) is not None]
            places = [(ref, tuple(_names_that_may_hold(module))) for ref, module in modules]
            self._places = [place for place in places if place[1]]
        for buffers in self._buffers:
            for buffer in buffers.values():
                if buffer is not None and buffer.requires_grad:
                    found += _made_since(buffer, first_node)
        objects: set[int] = set()  # a config or a collector of losses is often that of many modules
        for ref, names_there in self._places:
            held = _NONE if (module := ref()) is None else module.__dict__
            for name in names_there:
                value = held.get(name, _NONE)
                if value is _NONE and module is not None:
                    self._sizes = []
                    return self.tensors(arguments, first_node)
                if value is None or isinstance(value, (int, float, nn.Parameter)) or id(value) in objects:
                    continue
                objects.add(id(value))
                found += _made_since(value, first_node)
        return found


_NONE: dict[str, Any] = {}
_OF_MODULES = frozenset((*nn.Module().__dict__, STATE_KEY, REGISTRY_KEY))


def _names_that_may_hold(module: nn.Module) -> Iterator[str]:
    return (name for name, value in module.__dict__.items() if _may_hold(name, value, module))


def _may_hold(name: str, value: Any, module: nn.Module) -> bool:
    if name in _OF_MODULES or name in module._parameters:
        return False
    if value is None or isinstance(value, (Tensor, *_CONTAINERS, dict)):
        return True
    if isinstance(value, (int, float)):  # `self.aux_loss = 0.0` until there is one
        return not isinstance(value, bool) and not type(module).__module__.startswith("torch.nn.")
    return _is_object(value)


def _is_object(value: Any) -> bool:
    """Whether it is an object of a user's class, or a distribution of torch's; functions and ours are none."""
    if isinstance(value, _NO_TENSORS) or callable(value):
        return False
    module = type(value).__module__
    if module.partition(".")[0] in ("builtins", "torch", "hsdp") and not module.startswith("torch.distributions."):
        return False
    return hasattr(value, "__dict__") or bool(_slots_of(type(value)))


def made_by(tensor: Tensor) -> Any:
    """The autograd node that made a tensor; None of leaves and their views, and of views that nobody may use any more."""
    base = tensor._base
    if base is not None and base.is_leaf:
        return None  # a view of a parameter, kept since another use of it perhaps: to ask for its node makes a new one
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view of what a custom function returned, whose base was written to
        return None


def _made_since(value: Any, first_node: int, depth: int = 3) -> Iterator[Tensor]:
    items: Any
    if isinstance(value, Tensor):
        if (node := made_by(value)) is not None and sequence_number(node) >= first_node:
            yield value
        return
    if depth == 0 or isinstance(value, _NO_TENSORS):
        return
    # Read by the built-in classes' own methods: a subclass's may raise, as `len` of e3nn's irreps does, which are tuples.
    # And at once: another thread may append to the container (one that collects what a model is trained on, say).
    if isinstance(value, dict):
        items = list(islice(reversed(dict.values(value)), _MOST_ITEMS))
    elif isinstance(value, tuple):
        items = tuple.__getitem__(value, _LAST_ITEMS)
    elif isinstance(value, list):
        items = list.__getitem__(value, _LAST_ITEMS)
    elif isinstance(value, deque):
        items = list(islice(deque.__reversed__(value), _MOST_ITEMS))
    elif isinstance(value, _CONTAINERS):
        items = value
    elif _is_object(value):
        items = _attributes(value)
    else:
        return
    for item in items:
        yield from _made_since(item, first_node, depth - 1)

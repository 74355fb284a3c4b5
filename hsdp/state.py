"""The per-module state object: turns module and autograd events into transitions of the module's unit.

No collective and no arithmetic happen here. Forward events come from `HSDPModule.__call__`, backward events from hooks on
the outputs of a forward and from autograd's accumulation into whole parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from operator import is_
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from hsdp.autograd import next_node
from hsdp.errors import StateError
from hsdp.runtime import Runtime, Visit
from hsdp.unit import Unit


class ModuleState:
    """What `fully_shard` attaches to a module (one object for all modules of a list).

    Attributes:
        unit: the unit of the module(s).
        modules: the module(s), weakly.
    """

    def __init__(self, unit: Unit, modules: list[nn.Module]) -> None:
        self.unit = unit
        self.modules = [weakref.ref(module) for module in modules]
        self._own_runtime: Runtime | None = None
        self._calls = 0
        self._run: set[int] = set()

    def run(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the module's forward, by way of `call`, with the unit open."""
        runtime = self.unit.runtime
        if runtime is not None and runtime.in_backward():
            # A recomputation: it neither records the order nor closes the unit; the backward around it does.
            runtime.enter_backward(self.unit, None, creates_graph=False)
            args, kwargs = self._cast_inputs(args, kwargs)
            first_node = next_node()
            return self.after_forward(runtime, call(*args, **kwargs), first_node)[0]
        if runtime is None or runtime.depth == 0:
            runtime = self.own_runtime()
            runtime.begin_forward()
        depth, calls = runtime.depth, self._calls
        try:
            runtime.depth, self._calls = depth + 1, calls + 1
            runtime.enter_forward(self.unit)
            args, kwargs = self._cast_inputs(args, kwargs)
            first_node = next_node()
            output, watched = self.after_forward(runtime, call(*args, **kwargs), first_node)
            runtime.depth, self._calls = depth, calls
            self._leave(module, runtime, watched)
        except BaseException:
            # Set back, not counted down: the exception may have come at any point.
            runtime.depth, self._calls = depth, calls
            if depth == 0:
                self._run.clear()
                runtime.forget_forward()
            raise
        return output

    def after_forward(self, runtime: Runtime, output: Any, first_node: int) -> tuple[Any, bool]:
        """The module's forward returned: casts its outputs and watches them for the backward.

        Args:
            runtime: that of the root.
            output: what the forward returned.
            first_node: the number that autograd gave, or would have given, to the first node of this forward.

        Returns:
            The outputs, and whether gradients can enter the unit through one of them.
        """
        dtype = self.unit.mp_policy.output_dtype
        if dtype is not None:
            output = map_tensors(output, lambda t: t.to(dtype) if t.is_floating_point() else t)
        output = self._own_output(output)
        return output, torch.is_grad_enabled() and self._watch(output, runtime, first_node)

    def _leave(self, module: nn.Module, runtime: Runtime, watched: bool) -> None:
        unit = self.unit
        self._run.add(id(module))
        is_root = runtime.depth == 0
        reshard = unit.settings.reshard_after_forward
        keep = reshard is False or (reshard is None and unit is runtime.root)
        if torch.is_grad_enabled() and any(unit.trainable):
            # No visible output carries gradients, though parameters do: they hide somewhere we cannot hook.
            keep = keep or not watched
        more = len(self._run) < len(self.modules) or self._calls > 0
        if not more:
            self._run.clear()
        runtime.leave_forward(unit, keep, more)
        if is_root:
            self._run.clear()
            runtime.end_forward()

    def own_runtime(self) -> Runtime:
        """The runtime that its module(s) have as a root."""
        if self._own_runtime is None:
            modules = [module for ref in self.modules if (module := ref()) is not None]
            self._own_runtime = Runtime(self.unit, modules, self.unit.axes.device)
        return self._own_runtime

    def _own_output(self, output: Any) -> Any:
        """Whole parameters are freed after forward, so what goes out are copies of them, and of views of them.

        Raises:
            StateError: one is hidden in an object, or the output will use them later.
        """
        if isinstance(output, GeneratorType):
            raise StateError(
                f"the forward of unit {self.unit.name!r} is a generator: it would run when the forward is over and its "
                "parameters are sharded again; return a list of what it yields"
            )
        name_of = self.unit.name_of_whole
        if not any(map(name_of, tensors_in(output))):
            return output
        output = map_tensors(output, lambda t: t.clone() if name_of(t) else t)
        if (name := next(filter(None, map(name_of, tensors_in(output))), None)) is not None:
            raise StateError(
                f"the forward of unit {self.unit.name!r} returns its parameter {name!r}, or a view of it, inside an "
                "object; it is freed when the forward ends: return a copy (.clone()), or compute with it in the module"
            )
        return output

    def _watch(self, output: Any, runtime: Runtime, first_node: int) -> bool:
        """Hooks every output tensor through which gradients will enter the unit; returns whether there is one."""
        visit, watched = Visit(self.unit.epoch, first_node), False
        for tensor in tensors_in(output):
            # Leaves do not lead into the unit, and hooks on them would outlive this iteration.
            if (node := tensor.grad_fn) is not None:
                tensor.register_hook(_entry_hook(self.unit, runtime, visit, node._sequence_nr()))
                watched = True
        return watched

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        policy = self.unit.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        dtype = policy.param_dtype

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(args, cast), map_tensors(kwargs, cast)


def state_of(module: nn.Module) -> ModuleState | None:
    """The state that `fully_shard` attached to a module, if it did."""
    return module.__dict__.get("_hsdp_state")


def own_state(module: Any) -> ModuleState:
    """The state of a module that is known to be sharded."""
    state: ModuleState = module.__dict__["_hsdp_state"]
    return state


def _entry_hook(unit: Unit, runtime: Runtime, visit: Visit, node: int) -> Callable[[Tensor], None]:
    def entered(grad: Tensor) -> None:
        # In a hook the grad mode is the engine's: on only with create_graph=True.
        runtime.enter_backward(unit, visit, torch.is_grad_enabled(), node)

    return entered


def tensors_in(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts, dataclasses and plain objects, at most `depth` levels down."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, (str, bytes, int, float, bool, type(None), type, nn.Module)):
        return
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from tensors_in(item, depth - 1)


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `fn` applied to its tensors, in nested tuples, lists, dicts and dataclasses; the rest is kept.

    A container in which nothing changes is the same object again: a forward may write to it, as it does to a cache.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, fn) for item in value]
        if all(map(is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        items = [map_tensors(item, fn) for item in value.values()]
        if all(map(is_, items, value.values())):
            return value
        try:
            return type(value)(zip(value, items, strict=True))
        except TypeError:
            return dict(zip(value, items, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        changes = {name: new for name, item in held.items() if (new := map_tensors(item, fn)) is not item}
        return replace(value, **changes) if changes else value
    return value

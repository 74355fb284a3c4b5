"""The per-module state object: turns module and autograd events into transitions of the module's unit.

No collective and no arithmetic happen here. Forward events come from `HSDPModule.__call__`, backward events from hooks on
the outputs of a forward and from autograd's accumulation into unsharded parameters.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from hsdp.comm.labels import labelled
from hsdp.errors import StateError
from hsdp.params.annotations import PACKAGE, checked, is_checked, unchecked
from hsdp.schedule.closed_units import closed_unit_used
from hsdp.schedule.outputs import SideOutputs, entry_nodes, made_by, map_tensors, tensors_of
from hsdp.schedule.passes import ForwardPass, Visit
from hsdp.schedule.runtime import Runtime, runtime_of
from hsdp.schedule.sequence_numbers import SequenceNumber
from hsdp.torch_private import (
    NO_TASK,
    dispatch_modes,
    graph_task,
    is_profiling,
    is_selective,
    leave_out_of_graphs,
    next_node,
    sequence_number,
    with_modes,
    without_modes,
)
from hsdp.unit.lookup import STATE
from hsdp.unit.state import IDLE, other_thread, training_state
from hsdp.unit.unit import Unit

_LAZY = frozenset((GeneratorType, CoroutineType, AsyncGeneratorType, map, filter, zip))
"""Outputs that compute when they are asked."""


class ModuleHooks:
    """What `fully_shard` attaches to a module (one object for all modules of a list).

    Attributes:
        unit: the unit of the module(s).
        modules: the module(s), weakly.
        companions: units of modules inside that the same `fully_shard` made, on other meshes; setters reach them too.
    """

    def __init__(self, unit: Unit, modules: list[nn.Module]) -> None:
        self.unit = unit
        self.modules = [weakref.ref(module) for module in modules]
        self.companions: list[Unit] = []
        self._own_runtime: Runtime | None = None
        self._side_outputs: tuple[int, SideOutputs] | None = None
        if (dtype := unit.mp_policy.output_dtype) is not None:
            # Users' hooks from now on see the cast outputs, and their results are not cast.
            for module in modules:
                module.register_forward_hook(lambda module, args, output: _cast(output, dtype))

    def run_method(self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a method of the module that stands for its forward: past all hooks on the module, that of casts too."""
        dtype = self.unit.mp_policy.output_dtype
        if dtype is None:
            return self.run(module, method, args, kwargs)
        return self.run(module, lambda *args, **kwargs: _cast(method(*args, **kwargs), dtype), args, kwargs)

    def run(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the module's forward, by way of `call`, with the unit open."""
        if PACKAGE in sys.modules and is_checked():
            return self._run_checked(module, call, args, kwargs)
        if dispatch_modes() and is_selective():
            return self._run_selected(module, call, args, kwargs)
        unit = self.unit
        ref = unit.runtime_ref
        runtime: Any = None if ref is None else ref()  # a Runtime: `runtime_of` without its calls
        if runtime is not None:
            if graph_task() != NO_TASK and (runtime.in_backward() or runtime.splits()):
                return self._run_again(runtime, call, args, kwargs)
            if (not runtime.depth or runtime.thread != get_ident()) and runtime.runs_elsewhere():
                raise other_thread(unit)
        calls = unit.calls
        if runtime is None or runtime.depth == 0:
            runtime = self.own_runtime()
            runtime.begin_forward()
        depth = runtime.depth
        try:
            runtime.depth = depth + 1
            runtime.enter_forward(unit)
            if unit.mp_policy.param_dtype is not None:
                args, kwargs = self._cast_inputs(args, kwargs)
            # Behind the casts of inputs: gradients pass their nodes when they have left the unit.
            first_node = NO_TASK, next_node()
            output = labelled("forward", unit.name, call, *args, **kwargs) if is_profiling() else call(*args, **kwargs)
            output, visit = self.after_forward(runtime, output, (*args, *kwargs.values()), first_node, runtime.forward_pass)
            runtime.depth = depth
            # Behind `after_forward`, which copies outputs that are unsharded parameters: now their memory may go.
            runtime.leave_forward(unit, unit.end_call(id(module), len(self.modules), calls), visit)
            if depth == 0:
                runtime.end_forward()
        except BaseException as error:
            message = closed_unit_used(error)
            # Set back, not counted down: the exception may have come at any point.
            runtime.depth = depth
            unit.set_calls(calls)
            if depth == 0:
                runtime.forget_forward()
            if message is not None:
                raise StateError(message) from error
            raise
        return output

    def _run_again(self, runtime: Runtime, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A recomputation: it neither records the order nor closes the unit; the backward around it does."""
        unit = self.unit
        runtime.enter_backward(unit, None, creates_graph=False, node=runtime.running())
        args, kwargs = self._cast_inputs(args, kwargs)
        first_node, calls = (graph_task(), next_node()), unit.calls
        try:
            unit.set_calls(calls + 1)
            output = labelled("forward", unit.name, call, *args, **kwargs)
        finally:
            unit.set_calls(calls)
        return self.after_forward(runtime, output, (*args, *kwargs.values()), first_node, None)[0]

    def _run_selected(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`run` inside of a selective checkpoint, which sees the operators of the forward alone."""
        with without_modes() as modes:

            def forward(*args: Any, **kwargs: Any) -> Any:
                with with_modes(modes):
                    return call(*args, **kwargs)

            return self.run(module, forward, args, kwargs)

    def _run_checked(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`run` where spmd_types checks: it checks the user's operations, and casts of inputs, which keep their types."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with checked():
                return call(*args, **kwargs)

        args, kwargs = self._cast_inputs(args, kwargs)
        with unchecked():
            return self.run(module, forward, args, kwargs)

    def after_forward(
        self,
        runtime: Runtime,
        output: Any,
        arguments: tuple[Any, ...],
        first_node: SequenceNumber,
        forward_pass: ForwardPass | None,
    ) -> tuple[Any, Visit | None]:
        """The module's forward returned: watches its outputs for the backward.

        Args:
            runtime: that of the root.
            output: what the forward returned.
            arguments: what it was called with.
            first_node: the sequence number of the first node that autograd made, or would have made, in this forward.
            forward_pass: the root's forward that it was a part of; None for a recomputation, a part of the backward under
                way.

        Returns:
            The outputs, and the visit that gradients make which enter the unit; None if they cannot.
        """
        output, tensors = self._own_output(output)
        if not torch.is_grad_enabled():
            return output, None
        return output, self._watch(tensors, arguments, runtime, Visit(self.unit.forward_version, first_node, forward_pass))

    def user_opens(self, unit: Unit) -> None:
        """The user is about to compute with the unsharded parameters of its unit, or of a companion, without a call."""
        if unit.runtime is None:
            self.own_runtime().adopt()
        runtime = runtime_of(unit)
        if runtime is not None and training_state(unit) is IDLE:
            unit.reshard_stale()
            unit.begin_forward(afresh=not runtime.reduce_order.awaited)

    def is_inside(self) -> bool:
        """Whether the caller runs inside a forward of its unit.

        Raises:
            StateError: another thread does.
        """
        unit = self.unit
        if not unit.calls:
            return False
        ref = unit.runtime_ref
        runtime: Any = None if ref is None else ref()  # as in `run`
        # On a device a thread of the engine recomputes, also what a forward under way differentiates.
        if runtime is not None and runtime.depth and runtime.thread != get_ident() and graph_task() == NO_TASK:
            raise other_thread(unit)
        return True

    def own_runtime(self) -> Runtime:
        """The runtime that its module(s) have as a root."""
        if self._own_runtime is None:
            leave_out_of_graphs()
            modules = [module for ref in self.modules if (module := ref()) is not None]
            self._own_runtime = Runtime(self.unit, modules, self.unit.axes.device)
        return self._own_runtime

    def _own_output(self, output: Any) -> tuple[Any, list[Tensor]]:
        """Unsharded parameters are freed after forward, so what goes out are copies of them, and of views of them.

        Returns:
            The output, and the tensors in it.

        Raises:
            StateError: one is hidden in an object, or the output will use them later.
        """
        if type(output) in _LAZY:
            raise StateError(
                f"the forward of unit {self.unit.name!r} returns a {type(output).__name__}, which would run when the "
                "forward is over and its parameters are sharded again; return a list of what it gives"
            )
        name_of = self.unit.shadows.name_of
        tensors = [output] if isinstance(output, Tensor) else tensors_of(output)
        if not any(map(name_of, tensors)):
            return output, tensors
        output = map_tensors(output, lambda t: t.clone() if name_of(t) else t)
        tensors = tensors_of(output)
        if (name := next(filter(None, map(name_of, tensors)), None)) is not None:
            raise StateError(
                f"the forward of unit {self.unit.name!r} returns its parameter {name!r}, or a view of it, inside an "
                "object; it is freed when the forward ends: return a copy (.clone()), or compute with it in the module"
            )
        return output, tensors

    def _watch(self, tensors: list[Tensor], arguments: tuple[Any, ...], runtime: Runtime, visit: Visit) -> Visit | None:
        """Hooks every node through which gradients will enter the unit: that begins `visit`, which it returns then.

        Behind the visit, the next unit's begins, as a rule. Where the root computes between them (an embedding), the nodes
        through which gradients leave the unit are hooked, too, so that its reduction is on its way meanwhile.
        """
        watched, before = False, runtime.last_watched
        made_in, number = visit.first_node
        if self._side_outputs is None or self._side_outputs[0] != runtime.generation:
            modules = [module for ref in self.modules if (module := ref()) is not None]
            self._side_outputs = runtime.generation, SideOutputs(modules)
        for tensor in tensors + self._side_outputs[1].tensors(arguments, number):
            for node in entry_nodes(tensor, number):
                runtime.last_watched = at = sequence_number(node)
                node.register_prehook(partial(_entered, self.unit, runtime, visit, (made_in, at)))
                watched = True
        if watched and self.unit.parent is runtime.root:
            begins_at = runtime.forward_pass.begins_at
            for one in arguments:
                if isinstance(one, Tensor) and (behind := made_by(one)) is not None:
                    at = sequence_number(behind)
                    if before != at and begins_at <= at < number:
                        behind.register_prehook(partial(_left, runtime, (made_in, at)))
        return visit if watched else None

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        policy = self.unit.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return _cast(args, policy.param_dtype), _cast(kwargs, policy.param_dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the floating-point tensors in it in `dtype`."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def own_state(module: Any) -> ModuleHooks:
    """The state of a module that is known to be sharded."""
    state: ModuleHooks = module.__dict__[STATE]
    return state


def _entered(unit: Unit, runtime: Runtime, visit: Visit, node: SequenceNumber, grads: Any) -> None:
    """A hook before an autograd node: gradients are about to enter the unit."""
    # In a hook the grad mode is the engine's: on only with create_graph=True.
    runtime.enter_backward(unit, visit, torch.is_grad_enabled(), node)


def _left(runtime: Runtime, node: SequenceNumber, grads: Any) -> None:
    """A hook before an autograd node: gradients have left a unit."""
    runtime.come_to(node)

"""The setters of `HSDPModule`, by what they change. Where FSDP2 has another name for one, it stands behind hsdp's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hsdp.api.fsdp2 import FSDP2Compat
from hsdp.comm.custom import AllGather, ReduceScatter, ReplicaReduce
from hsdp.comm.replica_reduce import DEFAULT, AllReduce, AllReduceStage, CustomAllReduce
from hsdp.errors import StateError
from hsdp.policies import check_flag, check_reduce_op
from hsdp.schedule.root import Root
from hsdp.unit.sharing import refuse_shared
from hsdp.unit.state import stale
from hsdp.unit.unit import Unit
from hsdp.unit.unsharded import GATHERING, SHARDED


class Setters(FSDP2Compat):
    """What users may change about the units of a sharded module between iterations.

    They are checked here and kept by the unit: in its `settings`, or by its own methods where more follows from them. How
    far each reaches is told by `HSDPModule`.
    """

    def _finish_reductions(self) -> None:
        """What earlier backwards have begun, and left to run on, is reduced as it was set then."""
        for runtime in self._runtimes():
            runtime.settle()

    # -- accumulation ----------------------------------------------------------------------------------------------

    def set_requires_grad_sync(self, requires_grad_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward communicates gradients.

        With False, unsharded gradients are summed on this rank in fp32 (or the reduce dtype, if wider) until a backward
        with True sends the sums. That takes the memory of an unsharded model in that dtype.
        """
        flag = check_flag("set_requires_grad_sync", requires_grad_sync)
        for unit in self._units(recurse):
            unit.settings.requires_grad_sync = flag

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """FSDP2's name of `set_requires_grad_sync`. As there, it switches the all-reduce over replicas too.

        Pipelining of torch 2.15 says once that no backward is the last one, and this before each part of a backward: so it
        is said again.
        """
        flag = check_flag("set_requires_gradient_sync", requires_gradient_sync)
        if not flag and not all(unit.settings.drains for unit in self._units()):
            self.set_is_last_backward(False)
        for unit in self._units(recurse):
            settings = unit.settings
            settings.requires_grad_sync = settings.requires_all_reduce = flag

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward sums over replicas; with False, sharded partial sums wait for a backward with True."""
        flag = check_flag("set_requires_all_reduce", requires_all_reduce)
        for unit in self._units(recurse):
            unit.settings.requires_all_reduce = flag

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of backward waits for every reduction.

        With False they run on beside the next micro-batch; the optimizer's step, `flush` and the next backward with True
        wait for them. Schedules that compute gradients of weights apart look for weights in `parameters()`: with False it
        shows the unsharded parameters of units for which `unshard(async_op=True)` was called since the last True, until the
        next forward or backward ends. Once such a schedule has made gradients of inputs alone, those that were resharded
        since are gathered again, on all ranks alike: gradients of weights may read them.

        Raises:
            StaleParametersError: such parameters were changed since their forward.
        """
        flag = check_flag("set_is_last_backward", is_last_backward)
        units = self._units()
        for runtime in self._runtimes() if flag else ():
            if runtime.splits():
                runtime.take_outside()  # into sums, which `zero_grad()` clears: behind a step that failed, say
        for unit in units:
            unit.settings.drains = flag
            if flag:
                unit.end_search()
                unit.end_split()
        for runtime in self._runtimes():
            runtime.root.settings.drains = flag  # which alone decides; as in FSDP2, any module below it may set it
        sought = [] if flag else [unit for unit in units if unit.sought]
        if any(unit.split for unit in sought):
            for runtime in self._runtimes():
                runtime.take_outside()  # or the next ones would be added to them in the dtype of the parameters
            _gather_again(sought)
        for unit in sought:
            unit.shadows.register()

    # -- what sums become ------------------------------------------------------------------------------------------

    def set_reduce_op_type(self, reduce_op: str, *, recurse: bool = True) -> None:
        """Chooses "avg" (the default: gradients are averaged over all ranks of the mesh) or "sum".

        A backward's gradients have the op that is set then, though they may be sent later.

        Raises:
            StateError: a divide factor is set, and whole sums of micro-batches with the other op are pending.
        """
        op = check_reduce_op(reduce_op, "set_reduce_op_type")
        units = self._units(recurse)
        for unit in units:
            _refuse_divisor("set_reduce_op_type", unit, op, unit.settings.divide_factor)
        for unit in units:
            unit.settings.reduce_op = op

    def set_gradient_scaling_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Multiplies reduced gradients by `factor`, on top of the reduce op, exactly once.

        A backward multiplies its gradients with the factor that is set then, though they may be sent later.
        """
        _check_factor("set_gradient_scaling_factor", factor, "a finite number that is not 0")
        for unit in self._units(recurse):
            unit.settings.gradient_scale = float(factor)

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Divides summed gradients by `factor` instead of what the reduce op says; None: the reduce op decides again.

        Reaches this module only, as FSDP2's does. The scaling factor multiplies on top of it. A sum over shard ranks is
        divided by the factor that is set when it is sent, with what earlier micro-batches left on the ranks (`no_sync`): a
        number of tokens may be set before the last backward. What was sent before keeps the factor of then.

        Raises:
            StateError: whole sums of micro-batches with several reduce ops are pending; or, where
                `set_force_sum_reduction_for_comms(True)` was called, sums that were sent with another factor.
        """
        if factor is not None:
            _check_factor("set_gradient_divide_factor", factor, "a finite number that is not 0, or None")
        units, divisor = self._units(recurse), None if factor is None else float(factor)
        for unit in units:
            _refuse_divisor("set_gradient_divide_factor", unit, unit.settings.reduce_op, divisor)
        for unit in units:
            unit.settings.divide_factor = divisor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's old name of `set_gradient_divide_factor`.

        Raises:
            StateError: as there.
        """
        self.set_gradient_divide_factor(factor)

    def set_unused_param_grads(self, unused: str, *, recurse: bool = True) -> None:
        """What a parameter gets that no rank used in a backward: "none" (the default, as on one device) or "zero".

        With "zero" the used-flags are not read, which saves ranks with unused parameters a host synchronisation.
        """
        if unused not in ("none", "zero"):
            raise ValueError(f"set_unused_param_grads({unused!r}): expected 'none' or 'zero'")
        self._finish_reductions()
        for unit in self._units(recurse):
            unit.settings.unused_grads = "none" if unused == "none" else "zero"

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: parameters that no rank used get zeros, False: None (`set_unused_param_grads`).

        Ranks that use different parameters are right either way: each always takes part for all of them.
        """
        flag = check_flag("set_reduce_scatter_unused_params", reduce_scatter_unused_params)
        self.set_unused_param_grads("zero" if flag else "none", recurse=recurse)

    # -- reductions ------------------------------------------------------------------------------------------------

    def set_replica_reduce(self, replica_reduce: ReplicaReduce | AllReduceStage | None, *, recurse: bool = True) -> None:
        """Replaces the all-reduce over replicas by a user's (see `hsdp.ReplicaReduce`), or by another one of hsdp's.

        hsdp's are `hsdp.AllReduce()`, which is the default, as is None, `hsdp.CompressedAllReduce()`, and
        `hsdp.elastic.replicas(manager)`.

        Raises:
            TypeError: it is none of them.
            ValueError: its replicas are not in the mesh, and the mesh has replicas too; or a unit has
                `CommPolicy(reduction="tree")`, whose order the stage would not keep.
            StateError: replicas have shares of gradients, by `hsdp.optim.local(over_replicas=True)`.
        """
        if replica_reduce is None:
            stage: AllReduceStage = DEFAULT
        elif isinstance(replica_reduce, AllReduceStage):
            stage = replica_reduce
        elif callable(replica_reduce):
            stage = CustomAllReduce(replica_reduce)
        else:
            raise TypeError(
                f"set_replica_reduce({replica_reduce!r}): expected None, an object to call with tensor=, group=, op=, "
                "async_op=, or a stage such as hsdp.CompressedAllReduce()"
            )
        units = self._units(recurse)
        _refuse_in_tree("set_replica_reduce", units)
        for unit in units:
            if type(stage) is not AllReduce:
                refuse_shared(unit, "set_replica_reduce")
            if stage.beyond_mesh and unit.axes.replicate_size > 1:
                raise ValueError(
                    f"set_replica_reduce({type(replica_reduce).__name__}): it sums over replicas that are not in the mesh, "
                    f"but unit {unit.name!r} has {unit.axes}; shard over a mesh with one replica"
                )
        self._finish_reductions()
        for unit in units:
            unit.settings.replica_reduce = stage

    def set_custom_reduce_scatter(self, comm: ReduceScatter | None) -> None:
        """Reduce-scatters this module's unit by `comm`, see `hsdp.ReduceScatter`; None: hsdp's own again."""
        _check_custom("set_custom_reduce_scatter", comm)
        units = self._units(recurse=False)
        if comm is not None:
            _refuse_in_tree("set_custom_reduce_scatter", units)
        self._finish_reductions()
        for unit in units:
            unit.reduce_scatter_by(comm)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None] | None, *, stream: Any = None) -> None:
        """Calls `hook(tensor)` on each flat reduction buffer of this module's unit after its all-reduce.

        The tensor is 1-D, in the reduce dtype, and may be changed in place; it becomes the gradients. Without replicas it
        is called after the reduce-scatter. On a device the all-reduce stream is current, or `stream`, which may be given
        without replicas only.

        Raises:
            TypeError: `hook` cannot be called.
            ValueError: `stream` is given, and the unit has replicas.
            StateError: replicas have shares of gradients, by `hsdp.optim.local(over_replicas=True)`.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"set_all_reduce_hook({hook!r}): expected a function of a tensor, or None")
        self._finish_reductions()
        units = self._units(recurse=False)
        for unit in units:
            if stream is not None and (unit.axes.replicate_size > 1 or unit.settings.replica_reduce.beyond_mesh):
                raise ValueError(
                    "set_all_reduce_hook(stream=...): with replicas the hook runs on the stream of their all-reduce; leave "
                    "`stream` out, or shard over a 1-D mesh and all-reduce in the hook"
                )
            if hook is not None:
                refuse_shared(unit, "set_all_reduce_hook")
        for unit in units:
            unit.settings.all_reduce_hook = hook if hook is None or stream is None else _on_stream(hook, stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Gives reduce-scatters a process group of their own, so that they need not wait for gathers, or takes it back.

        Every rank of the mesh calls it. Units with the same shard ranks share the group.
        """
        flag = check_flag("set_separate_reduce_scatter_group", enable)
        for unit in self._units(recurse):
            unit.separate_reduce_scatters(flag)
        Root.generation += 1  # roots look again at what their units communicate over

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Sets `CommPolicy.max_inflight_reduce_scatters`; the root's bounds all units below it.

        Raises:
            TypeError: it is no int; ValueError: it is below 1.
        """
        if type(max_input_buffers) is not int:
            raise TypeError(f"set_reduce_scatter_max_input_buffers({max_input_buffers!r}): expected an int of at least 1")
        for unit in self._units(recurse):
            unit.bound_reduce_scatters(max_input_buffers)

    # -- gathers ---------------------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether unsharded parameters are freed after forward and gathered again for backward; see `fully_shard`."""
        flag = check_flag("set_reshard_after_forward", reshard_after_forward)
        for unit in self._units(recurse):
            unit.settings.reshard_after_forward = flag

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether unsharded parameters are freed as soon as their backward is over; they never outlive the iteration."""
        flag = check_flag("set_reshard_after_backward", reshard_after_backward)
        for unit in self._units(recurse):
            unit.settings.reshard_after_backward = flag

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """With False the backward does not gather this module's unit: for one that needs no weights in it (embeddings)."""
        flag = check_flag("set_unshard_in_backward", unshard_in_backward)
        for unit in self._units(recurse=False):
            unit.settings.unshard_in_backward = flag

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule] | None) -> None:
        """Gathers exactly these modules' units when this module's forward begins; none: the recorded order again.

        A unit of another root is gathered anew when that root's forward begins.
        """
        for unit in self._units(recurse=False):
            unit.settings.forward_prefetch = _units_to_prefetch("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule] | None) -> None:
        """Gathers exactly these modules' units when this module's backward begins; none: the recorded order again."""
        for unit in self._units(recurse=False):
            unit.settings.backward_prefetch = _units_to_prefetch("set_modules_to_backward_prefetch", modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The current stream, and that of the next forward, wait for `event`: for an optimizer on a stream of its own.

        Called in the optimizer's hook, the current stream is the optimizer's, which need not wait.
        """
        for unit in self._units(recurse=False):
            if unit.context.streams.active:
                unit.context.streams.join(event)
                unit.settings.post_optim_event = event

    def set_custom_all_gather(self, comm: AllGather | None) -> None:
        """Gathers this module's unit by `comm`, see `hsdp.AllGather`; None: hsdp's own gather again."""
        _check_custom("set_custom_all_gather", comm)
        for unit in self._units(recurse=False):
            unit.gather_by(comm)


def _gather_again(units: list[Unit]) -> None:
    """Makes units whole of which a loss, or the end of a forward, resharded some before the gradients of their weights."""
    for unit in units:
        if unit.residency is SHARDED and unit.version != unit.forward_version:
            raise stale(unit)
        unit.pin()
    for unit in units:
        if unit.residency is GATHERING:
            unit.finish()
            unit.context.streams.finish_host_reads()


def _check_factor(method: str, factor: Any, expected: str) -> None:
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor == 0 or not math.isfinite(factor):
        raise ValueError(f"{method}({factor!r}): expected {expected}")


def _units_to_prefetch(method: str, modules: list[FSDPModule] | None) -> list[Unit] | None:
    if not modules:  # as in FSDP2; to gather nothing ahead is `CommPolicy(prefetch=0)`
        return None
    if isinstance(modules, Setters):  # a sharded nn.Sequential would pass as the list of its children
        raise TypeError(f"{method}({type(modules).__name__}): expected a list of sharded modules, such as [module]")
    units: list[Unit] = []
    for module in modules:
        if not isinstance(module, Setters):
            raise ValueError(
                f"{method}: {type(module).__name__} is not sharded; pass modules that fully_shard was called on"
            )
        units += module._units(recurse=False)
    return units


def _on_stream(hook: Callable[[Tensor], None], stream: Any) -> Callable[[Tensor], None]:
    """A hook that runs on `stream`, in order with what the current stream did before and does after."""

    def there(tensor: Tensor) -> None:
        module = torch.get_device_module(tensor.device)
        here = module.current_stream()
        stream.wait_stream(here)
        try:
            with module.stream(stream):
                hook(tensor)
        finally:  # of one that raises, too: what it has started reads the tensor
            here.wait_stream(stream)

    return there


def _refuse_in_tree(method: str, units: list[Unit]) -> None:
    """Raises ValueError if one of `units` sums in the order of the tree, which a user's collective would not keep."""
    for unit in units:
        if unit.in_tree:
            raise ValueError(
                f"{method}: unit {unit.name!r} has CommPolicy(reduction='tree'), whose order of sums another collective "
                "would not keep; leave the call out, or shard the module with reduction='any'"
            )


def _refuse_divisor(method: str, unit: Unit, op: str, divisor: float | None) -> None:
    """Raises StateError if pending sums would not become what such settings make of them elsewhere."""
    settings, gradients = unit.settings, unit.gradients
    if divisor is not None and gradients.has_ops_beside(op):
        raise StateError(
            f"{method}: unit {unit.name!r} has sums of micro-batches with another reduce op, and a divide factor takes "
            "the place of some of these only; set the op before the first micro-batch of a step, or call model.flush() "
            "or zero_grad() first"
        )
    if settings.forces_sum and divisor != settings.divide_factor and gradients.deferred and gradients.is_pending():
        raise StateError(
            f"{method}: unit {unit.name!r} has sums in the shard group, which keep the divide factor with which they were "
            "sent; behind set_force_sum_reduction_for_comms(True) FSDP2 would divide them by the new one. Set the factor "
            "before the first micro-batch of a step, or sum whole gradients in all but the last one, by "
            'set_requires_grad_sync(False) or accumulate() under CommPolicy(accumulate="local")'
        )


def _check_custom(method: str, comm: Any) -> None:
    if comm is not None and not callable(comm):
        raise TypeError(
            f"{method}({comm!r}): expected None, or an object to call with output_tensor=, input_tensor=, group=, async_op="
        )

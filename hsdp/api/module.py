"""`HSDPModule`: what a sharded module can do beyond its own class. Delegation only. Its setters: setters.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hsdp.api.fsdp2 import FSDP2Compat, UnshardHandle
from hsdp.api.setters import Setters
from hsdp.format import several
from hsdp.policies import check_flag
from hsdp.schedule.module_hooks import ModuleHooks
from hsdp.schedule.runtime import Runtime, await_failure, runtime_of
from hsdp.torch_private import leave_out_of_graphs, runs_as_it_is, set_compiler
from hsdp.unit.lookup import PREFIX, units_below
from hsdp.unit.state import BACKWARD_POST, FULL_PARAMS, IDLE, TrainingState, expect
from hsdp.unit.unit import Unit
from hsdp.weights.full_params import gathered_apply
from hsdp.weights.gather import check_idle

T = TypeVar("T")

_classes: dict[type, type] = {}
"""Original class -> its sharded class."""


class HSDPModule(Setters):
    """What a sharded module can do beyond its own class.

    Setters reach this module and all sharded modules below it, with `recurse=False` this one alone; where FSDP2 has the
    same setter, its reach is FSDP2's, and its docstring says so. They hold until they are called again. What makes no sense
    is refused with a TypeError or ValueError. Call setters between iterations: they do not look at the moment, and in a
    forward or backward part of the units would follow the old value. The other methods refuse the wrong moment with a
    StateError that names the unit, its state, and those that were expected. Gradients and sums are those of the ranks of
    the unit's mesh.
    """

    _hsdp_state: ModuleHooks

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing a sharded class makes an object of the original class: the sharding belongs to the instance."""
        faces = (HSDPModule, Setters, FSDP2Compat, FSDPModule, object)
        original = next((base for base in cls.__mro__[1:] if base not in faces), None)
        if original is None:
            raise TypeError("HSDPModule is not to be constructed; call hsdp.fully_shard(module)")
        return original(*args, **kwargs)

    @runs_as_it_is  # else `torch.compile(block, fullgraph=True)` would meet the break below
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module with its unsharded parameters; hooks that users put on the module see them too."""
        if torch.compiler.is_exporting():
            raise TypeError(
                f"{type(self).__name__} is sharded and cannot be exported; export a plain module that was given "
                "hsdp.checkpoint.full_state_dict(model)"
            )
        if torch.compiler.is_compiling():
            return torch.compiler.disable(_run_between_graphs, recursive=False)(self, args, kwargs)
        if (compiler := set_compiler(None)) is not None:  # the outermost frame is run, not traced
            return _run_between_graphs(self, args, kwargs, compiler)
        this: Any = self
        return self._hsdp_state.run(this, super().__call__, args, kwargs)  # type: ignore[misc]

    def __copy__(self) -> Any:
        self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            f"{type(self).__name__} is sharded and cannot be copied; copy the module before fully_shard, or shard a "
            "second instance and load this one's state_dict() into it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is sharded and cannot be pickled; save its state_dict() with "
            "torch.distributed.checkpoint"
        )

    def share_memory(self) -> Any:
        """Refused, as of a module that holds this one: torch's `share_memory_` of a DTensor ends the process.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} is sharded and cannot be shared with other processes, which hold parts of their own; "
            "share the tensors of hsdp.checkpoint.full_state_dict(model)"
        )

    def extra_repr(self) -> str:
        """What the module's own class says, and its unit: number of parameters, mesh, dtypes, placements."""
        own = super().extra_repr()  # type: ignore[misc]
        unit = self._hsdp_state.unit
        kinds = sorted(
            {f"{group.kind.storage} as {group.kind.compute}".replace("torch.", "") for group in unit.dtype_groups}
        )
        dims = sorted({unit.axes.placement_text(param.spec.dim, param.spec.merged) for param in unit.params})
        count = several(len(unit.params), "parameter")
        described = ", ".join(
            (f"hsdp unit of {count}", str(unit.axes), *filter(None, (" and ".join(kinds), "/".join(dims))))
        )
        return f"{own}, {described}" if own else described

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        if getattr(fn, "__qualname__", "").startswith("Module.share_memory."):  # of a plain module around this one
            self.share_memory()
        for unit in self._units():
            if unit.runtime is not None:
                unit.runtime.settle()
            unit.gradients.refuse_pending(unit.name, "moving or casting the model")
        # torch exchanges DTensors for new ones, which know nothing of what users and libraries put on the old ones.
        marked = [(param.sharded, dict(vars(param.sharded))) for unit in self._units() for param in unit.params]
        result = super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]  # not FSDP2's
        for sharded, marks in marked:
            vars(sharded).update(marks)
        unit = self._hsdp_state.unit
        # Of a unit of several modules the others follow; if they do not, the next use of the unit is refused.
        if unit.disturbed() and len(unit.devices()) == 1:
            unit.rebuild()
        return result

    def _units(self, recurse: bool = True) -> list[Unit]:
        units = units_below(cast(nn.Module, self), recurse)
        return units if recurse else units + self._hsdp_state.companions

    def apply(self, fn: Callable[[nn.Module], object]) -> Any:
        """Does what `torch.nn.Module.apply` does, with unsharded parameters: `hsdp.gathered_apply(self, fn)`.

        Every rank must call it, and takes the values that `fn` writes on the mesh's first rank. For a model on the meta
        device call `hsdp.init_sharded(model, fn)`. Inside `full_params`, which shows all of them, it is torch's own.
        """
        if all(unit.lent for unit in self._units()):
            return super().apply(fn)  # type: ignore[misc]
        return gathered_apply(cast(nn.Module, self), fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """What `torch.nn.Module.named_parameters` gives, and `parameters()` with it: the sharded ones between passes.

        Args:
            args, kwargs: as torch's.
        """
        # Behind a backward that failed on a device they would be unsharded ones for a moment yet, and writes lost.
        if not torch.compiler.is_compiling():
            await_failure(self._hsdp_state.unit)
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc,no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes gradients as `torch.nn.Module.zero_grad` does, inside the model's own forward too.

        There `parameters()` gives unsharded ones, while gradients are summed in those that the optimizer steps.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in self._units():
            if unit.shadows.registered:
                for param in unit.params:
                    if set_to_none:
                        param.sharded.grad = None
                    elif param.sharded.grad is not None:
                        param.sharded.grad.detach().zero_()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the unsharded parameters of this module's unit, which the module's attributes show from then on.

        They do until `reshard()`, or until the next forward or backward has gathered the unit anew, as the shards may have
        been written since, and is over. `parameters()` shows the sharded ones all the same, except inside of these.

        Args:
            async_op: return a handle at once, whose `wait()` waits for the gather; a forward waits for it too. Then the
                unsharded parameters serve every forward and backward until `reshard()`, until one that is told to
                reshard, or until the optimizer or a load changes the shards: for callers that schedule gathers,
                such as pipelines. Do not write to `p.data` meanwhile: on a device it is not seen.

        Raises:
            StateError: inside `full_params`.
        """
        async_op = check_flag("unshard", async_op, "async_op=")
        units = self._units(recurse=False)
        for unit in units:
            expect(unit, "unshard", *(state for state in TrainingState if state is not FULL_PARAMS))
            self._hsdp_state.user_opens(unit)
        handle = UnshardHandle(units)
        if not async_op:
            handle.wait()
            return None
        for unit in units:
            unit.pin()
        return handle

    def reshard(self) -> None:
        """Frees the unsharded parameters of this module's unit.

        Those that a graph of gradients (`create_graph=True`) reads are freed when that graph is gone.

        Raises:
            StateError: the unit computes with them, or is lent to `full_params`; or they were written to, which is lost.
        """
        for unit in self._units(recurse=False):
            expect(unit, "reshard", IDLE, BACKWARD_POST)
            unit.check_opened()
            if unit.runtime is None or not unit.runtime.has_graphs():
                unit.let_go()
            unit.reshard()

    def _runtimes(self) -> list[Runtime]:
        found = dict.fromkeys(map(runtime_of, self._units()))
        return [runtime for runtime in found if runtime is not None]

    # -- gradient accumulation -----------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside it do not communicate gradients; the first one after it sends the sums."""
        settings = [unit.settings for unit in self._units()]
        before = [each.requires_grad_sync for each in settings]
        self.set_requires_grad_sync(False)
        try:
            yield
        finally:
            for each, flag in zip(settings, before, strict=True):
                each.requires_grad_sync = flag

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Wraps the forward and backward of one micro-batch.

        In all but the last one (`last=False`) it communicates as little as `CommPolicy.accumulate` of this module allows,
        which decides for all units below it, too: gradients are reduce-scattered and their all-reduce deferred, or summed
        on this rank. In the last one everything is communicated.

            for i, batch in enumerate(micro_batches):
                with model.accumulate(last=i == len(micro_batches) - 1):
                    loss_of(model(batch)).backward()
        """
        last = check_flag("accumulate", last, "last=")
        settings = [unit.settings for unit in self._units()]
        before = [(each.requires_grad_sync, each.requires_all_reduce) for each in settings]
        # One policy for all units, as `hsdp.plan` counts it. Units that follow their own would cost a step both the memory
        # of whole sums and the traffic of reduce-scatters.
        scatters = self._hsdp_state.unit.comm_policy.accumulate == "reduce_scatter"
        for each in settings:
            each.requires_all_reduce = last
            each.requires_grad_sync = last or scatters
        try:
            yield
        finally:
            for each, (sync, all_reduce) in zip(settings, before, strict=True):
                each.requires_grad_sync, each.requires_all_reduce = sync, all_reduce

    def flush(self) -> None:
        """Communicates all pending gradient sums now and waits for them; every rank calls it.

        Raises:
            StateError: in the middle of a forward or backward.
        """
        check_idle(self._units(), "flush")
        for runtime in self._runtimes():
            runtime.flush()

    def pending_gradients(self) -> dict[str, str]:
        """Parameters whose gradient sums have not been summed over all ranks, and how far those came.

        Returns:
            By parameter name, the same ones on all ranks, "on this rank" (or "on other ranks", if this one did not use it),
            "in the shard group", or both; "lost with a backward that failed" until gradients are zeroed.
        """
        self._finish_reductions()  # what is on its way may become pending
        return self._by_name(lambda unit: unit.gradients.pending())

    def local_gradients(self) -> dict[str, Tensor]:
        """This rank's unsharded gradients that were not communicated, by parameter name: raw ones, for looking at.

            with model.no_sync():  # skips the reduction
                loss_of(model(batch)).backward()
            print(model.local_gradients()["blocks.0.weight"].norm())
            model.zero_grad()  # drops them, or the next backward that communicates sends them

        They have the whole shape of their parameter, are in fp32 or the reduce dtype if that is wider, and neither averaged
        nor scaled. They are the sums themselves, not copies.
        """
        return self._by_name(lambda unit: unit.gradients.local_sums())

    def _by_name(self, values_of: Callable[[Unit], dict[str, T]]) -> dict[str, T]:
        """What units tell by their own names of parameters, by those that parameters have in this module."""
        names = {id(param): name for name, param in cast(nn.Module, self).named_parameters()}
        found: dict[str, T] = {}
        for unit in self._units():
            if unit.runtime is not None and not unit.runtime.in_backward():
                unit.runtime.recover()
            # Inside a forward its unsharded parameters have the names.
            mine = {p.fqn: names.get(id(p.sharded)) or names.get(id(p.unsharded)) for p in unit.params}
            # A list unit may reach beyond this module: of those parameters nothing is given here.
            found |= {name: value for fqn, value in values_of(unit).items() if (name := mine[fqn]) is not None}
        return found


def _run_between_graphs(module: Any, args: Any, kwargs: Any, compiler: Any = None) -> Any:
    """A sharded module inside of what `torch.compile` traces: gathers cannot be traced, so the graph breaks around it.

    hsdp's own frames run as they are, and the module's forward is compiled as the function around it is: by `compiler`, or
    if that is None by what compiles at present.
    """
    compiler = set_compiler(None) or compiler
    leave_out_of_graphs()
    module._hsdp_follow()

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = set_compiler(compiler)
        try:
            return super(HSDPModule, module).__call__(*args, **kwargs)
        finally:
            set_compiler(before)

    try:
        return module._hsdp_state.run(module, forward, args, kwargs)
    finally:
        set_compiler(compiler)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; `nn.ModuleList` cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def hidden_by_methods(module: nn.Module) -> list[str]:
    """What a plain module has of its own under names of methods of sharded modules, which would come before it."""
    own = {name for base in type(module).__mro__ if base is not FSDPModule for name in vars(base)}
    own.update(module._modules, module._parameters, module._buffers)
    return sorted(own & _METHODS)


_METHODS = frozenset(
    name
    for cls in (HSDPModule, Setters, FSDP2Compat, FSDPModule)
    for name in vars(cls)
    if not name.startswith("__") and not hasattr(nn.Module, name)  # what plain modules have, those of sharded ones call
)


def sharded_class(cls: type) -> type:
    """The class that modules of class `cls` get: `FSDP<Cls>`, below both `HSDPModule` and `cls`.

    The name is the one that FSDP2 gives: libraries know the prefix, and take it off where they write a class's name down.
    """
    if cls not in _classes:
        original = cast(Any, cls).forward

        def follow() -> None:
            # Users replace methods of classes. Not looked up in `forward`: Dynamo does not trace that.
            nonlocal original
            original = cast(Any, cls).forward

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Calling `.forward` directly works as calling the module does, but for the user's hooks on the module.
            if torch.compiler.is_compiling():
                return original(self, *args, **kwargs)
            follow()
            state = self._hsdp_state
            if state.is_inside():
                return original(self, *args, **kwargs)
            return state.run_method(self, functools.partial(original, self), args, kwargs)

        members = {
            "forward": forward,
            "_hsdp_follow": staticmethod(follow),
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
        }
        _classes[cls] = type(f"{PREFIX}{cls.__name__}", (HSDPModule, cls), members)
    return _classes[cls]

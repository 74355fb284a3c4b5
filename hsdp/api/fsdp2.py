"""FSDP2's interface: what scripts and libraries written for `torch.distributed.fsdp` meet beside hsdp's own methods.

`HSDPModule` is a real subclass of torch's `FSDPModule`, because libraries ask `isinstance(module, FSDPModule)` and a plain
class cannot be joined in any other way. So every public method of that class is overridden, here, in setters.py or in
`HSDPModule`: what cannot be had is refused with a remedy, and nothing of torch's own implementation is ever reached.

    caller                       what it does with the answer                          with hsdp
    pipelining schedules         unshard / reshard around the micro-batches, switches  works: `FSDPStateShim`
                                 gradient sync off, runs the reduction by itself
    Lightning                    switches gradient sync off while it accumulates       works
    accelerate                   leaves a sharded model as it is in `prepare`          works
    FSDPMemTracker               reads FSDP2's parameter groups                        refused: `_Internals`
    NeMo Automodel, axolotl      ask FSDP2's state for policy, reshard_after_backward  `FSDPStateShim` tells them
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NoReturn

import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.fsdp import UnshardHandle as _UnshardHandle

from hsdp.comm.mesh import DataParallelMeshDims
from hsdp.errors import StateError
from hsdp.offload import CPUOffloadPolicy, OffloadPolicy
from hsdp.policies import MixedPrecisionPolicy, check_flag
from hsdp.schedule.module_hooks import own_state
from hsdp.schedule.runtime import Runtime
from hsdp.torch_private import REGISTRY_KEY, STATE_KEY, RegistryItem
from hsdp.unit.unit import Unit
from hsdp.weights.gather import check_idle

_OWN_POLICIES: dict[Any, type] = {
    fsdp.MixedPrecisionPolicy: MixedPrecisionPolicy,
    fsdp.OffloadPolicy: OffloadPolicy,
    fsdp.CPUOffloadPolicy: CPUOffloadPolicy,
    getattr(fsdp, "DataParallelMeshDims", None): DataParallelMeshDims,  # newer than torch 2.11
}
"""FSDP2's dataclass -> hsdp's, which has the same fields or more."""


def own_policy(policy: Any) -> Any:
    """hsdp's policy for one of `torch.distributed.fsdp`, which libraries make on a user's behalf; others as they are.

    Raises:
        ValueError: it sets what hsdp has no setting for, as torch 2.15's `param_dtype_override_fn`.
    """
    own: Any = _OWN_POLICIES.get(type(policy))
    if own is None:
        return policy
    known = {field.name for field in fields(own)}
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}
    for field in fields(policy):
        if field.name not in known and (value := values.pop(field.name)) != field.default:
            raise ValueError(
                f"{type(policy).__name__}({field.name}={value!r}): hsdp has no such setting; leave it out, and call "
                "fully_shard with a policy of their own on the modules that it is meant for"
            )
    return own(**values)


class UnshardHandle(_UnshardHandle):
    """What `unshard(async_op=True)` returns."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Waits until the module shows its unsharded parameters."""
        for unit in self._units:
            unit.show()
            unit.note_shards()
            unit.context.streams.finish_host_reads()
        self._units = []


class GradientReductionHandle(getattr(fsdp, "GradientReductionHandle", object)):  # type: ignore[misc]  # newer than torch 2.14
    """What `finalize_backward(async_op=True)` returns.

    Args:
        finish: lands what the call has started.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Waits until the reduced gradients are in `.grad`; at once if that was done."""
        if self._finish is not None:
            self._finish()
            self._finish = None


class FSDP2Compat(fsdp.FSDPModule):
    """The methods of FSDP2's `FSDPModule` that hsdp does not need, or does not have.

    Each says what it does here; their arguments, and which modules they reach, are FSDP2's.
    """

    _units: Callable[..., list[Unit]]
    _runtimes: Callable[[], list[Runtime]]

    # -- what is not needed --------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Drops an iteration that failed, and pending sums: they are *lost*, which is told until gradients are zeroed.

        Not needed: the next forward does it for what failed.
        """
        for runtime in self._runtimes():
            runtime.reset()
            for unit in runtime.units:
                if unit.gradients.is_pending():
                    unit.gradients.lose_all()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether gradients are to land at `finalize_backward` only: `set_is_last_backward(not enabled)`, in other words.

        Not needed: clipping and the optimizer's step wait for what runs on. torch's pipelining calls it, from 2.15 on.
        """
        self.set_is_last_backward(not check_flag("set_manual_backward_finalization", enabled))

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Communicates the gradients of all backwards before, as `flush` does, and frees unsharded parameters.

        Args:
            async_op: return a handle, whose `wait` is to be called before gradients are used.

        Raises:
            StateError: in the middle of a forward or backward, or gradients of weights that a pipeline schedule computes by
                themselves did not reach hsdp.
        """
        this: Any = self
        check_flag("finalize_backward", async_op, "async_op=")
        check_idle(this._units(), "finalize_backward")
        found = self._get_fsdp_state().start_finalizing()
        handle = GradientReductionHandle(this.flush if found else lambda: None)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: hsdp's collectives always sum, and scale by themselves.

        There FSDP2 divides sums of micro-batches that were reduce-scattered before by the last factor, too: hsdp refuses to
        change a divide factor while there are such sums.
        """
        flag = check_flag("set_force_sum_reduction_for_comms", enable)
        for unit in self._units(recurse=False):
            unit.settings.forces_sum = flag

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: hsdp's gathers are always asynchronous."""

    # -- what is not there ---------------------------------------------------------------------------------------

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused: buffers are the parameters' own places."""
        if enable:
            self._refuse("set_allocate_memory_from_process_group_for_comm(True)", _STAGING)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused: buffers are the parameters' own places."""
        self._refuse(f"set_symm_mem_for_comm({backend!r})", _STAGING)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refused: memory of parameters that are not there must not be read in silence."""
        if check_flag("set_keep_unsharded_storage", keep):
            self._refuse(
                "set_keep_unsharded_storage(True)",
                "to have unsharded parameters stay where they are, keep them: reshard_after_forward=False and "
                "set_reshard_after_backward(False)",
            )

    def _get_fsdp_state(self) -> Any:
        """What libraries ask of FSDP2's internal state: its policy, and whether it reshards after backward."""
        this: Any = self
        found = fsdp_state(this)
        assert found is not None, "fully_shard has put it there"
        return found

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {what}: {remedy}")


_STAGING = (
    "hsdp gathers large parameters straight into their place and has no staging buffer for them to allocate otherwise; "
    "leave the call out, or use set_custom_all_gather / set_custom_reduce_scatter with an `allocate` of your own"
)


class _Internals:
    """What stands for a part of FSDP2's internal state, as far as libraries read it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"hsdp has no {name!r} of FSDP2's internal state; tools that read it (FSDPMemTracker) do not work; use "
            "hsdp.describe(model)"
        )


class ParamGroupShim(_Internals):
    """Stands for FSDP2's parameter group of a module.

    Attributes:
        reshard_after_backward: what `set_reshard_after_backward` has set.
    """

    def __init__(self, reshard_after_backward: bool) -> None:
        self.reshard_after_backward = reshard_after_backward


class FSDPStateShim(_Internals):
    """What `torch.distributed.pipelining` reaches for once a stage has run the backward of its last micro-batch.

    A schedule switches gradient sync off and does FSDP2's post-backward by hand, on `fully_shard.state(stage)`. Here that
    is one call: the sums over micro-batches are communicated and land in `.grad`, and unsharded parameters go.

    Models and trainers ask it for the policy and for `reshard_after_backward`, of which FSDP2 has no public getters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._state_ctx = SimpleNamespace(all_states=())
        self._begun = 0

    @property
    def _unit(self) -> Unit:
        module: Any = self._module()
        assert module is not None, "a module that is asked is alive"
        return own_state(module).unit

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.mp_policy

    @property
    def _fsdp_param_group(self) -> ParamGroupShim:
        return ParamGroupShim(self._unit.settings.reshard_after_backward)

    def _root_post_backward_final_callback(self) -> None:
        if self.start_finalizing():
            module: Any = self._module()
            module.flush()

    def start_finalizing(self) -> bool:
        """Sends what backwards left, and frees unsharded parameters. Whether there were any since the last call."""
        module: Any = self._module()
        assert module is not None, "a stage that ran is alive"
        units, runtimes = module._units(), module._runtimes()
        for runtime in runtimes:
            runtime.take_outside()
        unfound = any([unit.pop_unfound() for unit in units])
        before, self._begun = self._begun, sum(runtime.begun for runtime in runtimes)
        begun = self._begun != before  # else an evaluation, behind which schedules come here, too
        reached = any(unit.gradients.stashed for unit in units) or not any(
            runtime.lacks_gradients() for runtime in runtimes
        )
        if begun and (unfound or (any(any(unit.trainable) for unit in units) and not reached)):
            raise StateError(
                f"{type(module).__name__}: gradients of this stage did not reach hsdp. Schedules that split a backward "
                "into inputs and weights (zero-bubble, ZBV, DualPipeV) look for unsharded parameters in parameters(): call "
                "unshard(async_op=True) on every sharded module of the stage before its forwards, and "
                "set_is_last_backward(False) on the stage before each part of a backward, as torch's schedules do"
            )
        for runtime in runtimes if begun else ():
            runtime.send_pending(runs_on=True)
        for unit in units:
            unit.end_split()
            unit.reshard()
        return begun


_torch_fully_shard: Any = getattr(fsdp.fully_shard, "__wrapped__", None)


def put_fsdp_state_shim(module: nn.Module) -> None:
    """Makes `torch.distributed.fsdp.fully_shard.state(module)` find a `FSDPStateShim`.

    It also makes torch's `fully_shard` refuse the module, which is sharded already, and torch's `replicate` leave it out
    of what it replicates around it, as both do with modules that FSDP2 has sharded.
    """
    module.__dict__.setdefault(STATE_KEY, {})[_torch_fully_shard] = FSDPStateShim(module)
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def fsdp_state(module: nn.Module) -> FSDPStateShim | None:
    """FSDP2's `fully_shard.state(module)`: what libraries find there of a sharded module; None of any other."""
    found: FSDPStateShim | None = module.__dict__.get(STATE_KEY, {}).get(_torch_fully_shard)
    return found


def share_comm_ctx(modules: list[Any]) -> None:
    """Makes several roots (a pipeline's stages on this rank) use the same side streams.

    Raises:
        TypeError: `modules` is no list.
        ValueError: one of `modules` is not sharded.
    """
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"share_comm_ctx: expected a list of sharded modules, not {type(modules).__name__}")
    for module in modules:
        if not isinstance(module, FSDP2Compat):
            raise ValueError(f"share_comm_ctx: {type(module).__name__} is not sharded; call fully_shard on it first")
    runtimes = [own_state(module).own_runtime() for module in modules]
    for runtime in runtimes[1:]:
        runtime.share_streams(runtimes[0])

"""`local`: the step of an elementwise optimizer at the price of plain tensors.

An optimizer of DTensors spends most of a step on dispatch, parameter by parameter, and PyTorch's multi-tensor kernels are
not chosen for it. An elementwise optimizer (SGD, Adam, ...) does the same to each element whoever holds it, so it can step
each rank's local tensors:

    optimizer = hsdp.optim.local(torch.optim.AdamW(model.parameters(), lr=3e-4))

    param_groups, state     DTensors, as before: schedulers, clipping, checkpoints and hooks see nothing new
    while it steps          plain tensors that share their memory; with flat=True one per unit, dtype and group

Optimizers that look at a parameter as a whole (norms, factored moments, orthogonalised updates: LAMB, Adafactor, Muon)
would compute something else from a shard; they are refused.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from hsdp.errors import StateError
from hsdp.optim.replicas import ReplicaGathers, part_of_grad, share_gradients_of, share_of_param
from hsdp.optim.states import Entries, mapped, of_no_parameter
from hsdp.optim.target_states import gathered_state, shown
from hsdp.optim.targets import Member, Target, counts_in, flat_targets, single
from hsdp.params.local import local_of
from hsdp.policies import check_flag
from hsdp.torch_private import rewrap_step
from hsdp.unit.landing import is_landed
from hsdp.unit.lookup import name_of, unit_of

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
"""PyTorch's own optimizers whose update of an element depends on that element's gradient and state alone."""


def local(optimizer: O, *, flat: bool = False, over_replicas: bool = False, elementwise: bool = False) -> O:
    """Makes an optimizer of DTensors step plain local tensors.

    Call it right after the optimizer was made, before a learning rate scheduler is. The update is the same to the last bit
    as that of the same implementation (for-loop, `foreach`, `fused`) on plain tensors, as far as its kernel treats all
    elements of a tensor alike: those that are fused for the CPU round some by where they lie in memory, and so does, of
    bf16 and fp16 on the CPU, the one that adds a multiple (SGD).

    Args:
        optimizer: one of `ELEMENTWISE`. Its parameters may be DTensors of any mesh, and plain tensors beside them.
        flat: step the parameters of a unit that share group and dtype as one tensor, and keep their state so: one kernel
            for a unit. Where gradients do not lie side by side already (one shard rank), they are copied first, which
            takes the memory of the gradients once more while it steps. Parameters that step as one share the numbers in
            their state: a count of steps that is changed in place is changed for all of them. `state_dict()` gives each
            its own.
        over_replicas: share gradients and the step out among replicas. Each of R replicas gets the sums of 1/R of each
            shard's gradient, has 1/R of the states and steps 1/R; the stepped parts are then all-gathered, beside whatever
            comes until somebody reads the parameters: the next forward, unit by unit. The reduce-scatter and this gather
            send as much over the replicate axis as the all-reduce did. `.grad` is a DTensor that both axes shard from now
            on, also for other optimizers of the same parameters: they get it whole, by a gather before their step. What is
            computed is the same to the last bit, as far as a kernel treats all elements of a tensor alike (those that are
            fused for the CPU do not) and the backend adds in the same order; and always equal on all replicas. Parameters
            with too uneven rows are stepped on all replicas, and gradients of those with few rows all-reduced as before.
            Ranks must step the same parameters. With `flat` shares of a unit are copied to be stepped, and back.
        elementwise: the optimizer's class is not PyTorch's, and you know that it updates each element by itself.

    Returns:
        `optimizer` itself; its class becomes `Local<Class>`, a subclass of its own.

    Raises:
        TypeError: not an optimizer, or one that is not known to be elementwise.
        ValueError: something replaced its `step` already (a scheduler does), or it is made with `differentiable=True`; or
            `over_replicas`, and ranks do not ascend along the replicate axis of a mesh.
        StateError: `over_replicas`, and sums of earlier micro-batches are pending.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optim.local takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    for name, flag in (("flat", flat), ("over_replicas", over_replicas), ("elementwise", elementwise)):
        check_flag("optim.local", flag, f"{name}=")
    cls = type(optimizer)
    if isinstance(getattr(optimizer, "_hsdp_stepper", None), _Stepper):
        raise ValueError(f"optim.local({cls.__name__}): it steps local tensors already")
    if cls not in ELEMENTWISE and not elementwise:
        raise TypeError(
            f"optim.local({cls.__name__}): not known to update each element by itself. If it looks at unsharded parameters "
            "(their norms, rows or columns, as LAMB, Adafactor and Muon do), shards would give other updates: leave it as "
            "it is. If it does not, pass elementwise=True"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"optim.local({cls.__name__}): differentiable=True; a step of local tensors is not part of the autograd graph, "
            "so gradients through it would be missing: leave the optimizer as it is"
        )
    if "step" in vars(optimizer):
        raise ValueError(
            f"optim.local({cls.__name__}): something replaced its step, a learning rate scheduler perhaps; call "
            "optim.local first, and make the scheduler afterwards"
        )
    if over_replicas:
        share_gradients_of((p for group in optimizer.param_groups for p in group["params"]), "hsdp.optim.local")
        optimizer._hsdp_steps_shares = True  # type: ignore[attr-defined]
    optimizer._hsdp_stepper = _Stepper(flat, over_replicas)  # type: ignore[attr-defined]
    if flat:
        optimizer.register_state_dict_post_hook(_with_own_numbers)
    optimizer.__class__ = _local_class(cls)
    rewrap_step(optimizer)
    return optimizer


_classes: dict[type, type] = {}


def _local_class(cls: type[torch.optim.Optimizer]) -> Any:
    """`Local<Class>`: as `cls`, but that `step` runs on local tensors, between the hooks that PyTorch runs around it."""
    if cls not in _classes:
        # PyTorch puts hooks around each class's `step`. Ours is wrapped so; inside it the bare one is called.
        bare = bare_step(cls)

        def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                self._hsdp_stepper.step(self, bare)
            return loss

        def refuse(self: Any, protocol: Any) -> Any:
            raise TypeError(
                f"{type(self).__name__} cannot be copied or pickled; make another one and load this one's state_dict()"
            )

        members = {"step": step, "_hsdp_made_of": cls, "__reduce_ex__": refuse, "__doc__": cls.__doc__}
        _classes[cls] = type(f"Local{cls.__name__}", (cls,), members)
    return _classes[cls]


def bare_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """A class's `step` without the hooks that PyTorch puts around it."""
    bare: Callable[..., Any] = cls.step
    return inspect.unwrap(bare, stop=lambda f: not getattr(f, "hooked", False)) if getattr(bare, "hooked", False) else bare


class _Stepper:
    """What an optimizer steps instead of its DTensors.

    The optimizer's own `state` has DTensors around the same memory, so it is always current. It is looked at again when
    it, one of its entries or `param_groups` was replaced, as `load_state_dict` and users who reset momenta do; and it is
    shown again when the step replaced entries of the targets' state.
    """

    def __init__(self, flat: bool, over_replicas: bool) -> None:
        self._flat = flat
        self._over_replicas = over_replicas
        self._replica_gathers: ReplicaGathers | None = None
        self._groups: list[list[Target]] = []
        self._state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._held = self._shown = Entries({})  # of `_state`, and of the optimizer's own
        self._seen: tuple[object, ...] = ()
        self._params: list[Any] = []
        self._locals: list[Tensor] = []
        self._used: list[bool] = []

    def step(self, optimizer: Any, bare: Callable[..., Any]) -> None:
        """One step: targets in the place of parameters, gradients beside them, the bare step, everything back."""
        grads = [param.grad for param in self._listed(optimizer)]
        used = [grad is not None for grad in grads]
        if not self._fits(optimizer, used):
            self._plan(optimizer, used)
        by_param = dict(zip(map(id, self._params), grads, strict=True)) if self._flat else {}
        wholes = [group["params"] for group in optimizer.param_groups]
        own_state = optimizer.state
        try:
            if self._flat:
                for targets in self._groups:
                    for target in targets:
                        target.bring()
                        target.tensor.grad = _flat_grad(target, by_param)
            else:
                for target, grad in zip((t for targets in self._groups for t in targets), grads, strict=True):
                    if grad is not None and target.tensor is not target.members[0].param:
                        target.tensor.grad = _local_grad(target.members[0], grad)
            for group, targets in zip(optimizer.param_groups, self._groups, strict=True):
                group["params"] = [target.tensor for target in targets]
            optimizer.state = self._state
            try:
                bare(optimizer)
            except BaseException:
                # Where memory ended between two moments, half a state is there: what this step began is begun anew.
                for tensor in self._held.begun_since(self._state):
                    del self._state[tensor]
                raise
            for targets in self._groups if self._flat else ():
                for target in targets:
                    target.take_back()
        finally:
            # At once: where an interrupt from the keyboard came before, nobody would step what a group has not got back.
            optimizer.state = own_state
            for group, params in zip(optimizer.param_groups, wholes, strict=True):
                group["params"] = params
            for targets in self._groups:
                for target in targets:
                    if target.tensor is not target.members[0].param:
                        target.tensor.grad = None  # or the gradients would live until the next step
                    target.free()
            # A graph that saved a parameter, as a penalty does, must not go backward through it any more.
            for stepped in (self._params, self._locals):
                increment_version([tensor for tensor, grad in zip(stepped, grads, strict=True) if grad is not None])
            # Behind a step that raised, too: it may have stepped some shares, and replicas are to stay equal.
            try:
                if self._replica_gathers is not None:
                    self._replica_gathers.run()
            finally:
                # So it may have put others into the states, which it goes on with the next time.
                if not self._held.are_those_of(self._state):
                    self._show(optimizer)

    def _listed(self, optimizer: Any) -> list[Any]:
        """The parameters of all groups, looked up again only where a list changed."""
        groups = optimizer.param_groups
        if len(groups) == 1:
            params: list[Any] = groups[0]["params"]
            return params
        return [param for group in groups for param in group["params"]]

    def _fits(self, optimizer: Any, used: list[bool]) -> bool:
        """Whether what was planned holds still."""
        params = self._listed(optimizer)
        return (
            self._seen == _identity(optimizer)
            and self._shown.are_those_of(optimizer.state)
            and len(params) == len(self._params)
            and (not (self._flat or self._over_replicas) or used == self._used)
            and all(
                one is other and (param_local is one or one._local_tensor is param_local)
                for one, other, param_local in zip(params, self._params, self._locals, strict=True)
            )
        )

    # -- planning ------------------------------------------------------------------------------------------------

    def _plan(self, optimizer: Any, used: list[bool]) -> None:
        """Makes the targets anew, and their state from the optimizer's."""
        self._seen = ()  # until all is there: half a plan fits nothing
        self._params = list(self._listed(optimizer))
        if self._over_replicas:
            share_gradients_of(self._params, "hsdp.optim.local")  # of groups that were added since
        self._used = used
        self._locals = [local_of(param) for param in self._params]
        is_used = dict(zip(map(id, self._params), used, strict=True))
        self._groups = []
        for group in optimizer.param_groups:
            params = group["params"]
            shares = {id(param): share_of_param(param) if self._over_replicas else None for param in params}
            if self._flat:
                targets = flat_targets(
                    params, is_used, optimizer.state, shares, lambda member: _local_grad(member, member.param.grad)
                )
            else:
                targets = [single(param, shares[id(param)]) for param in params]
            self._groups.append(targets)
        found = {
            id(member.param): member.share for targets in self._groups for target in targets for member in target.members
        }
        # In the order of the parameters, which all ranks have: that of targets follows from what a rank holds.
        shared = [(param, share) for param in self._params if (share := found[id(param)]) is not None]
        self._replica_gathers = ReplicaGathers([pair for pair in shared if is_used[id(pair[0])]]) if shared else None
        self._state = defaultdict(dict, of_no_parameter(optimizer.state))
        for targets in self._groups:
            for target in targets:
                if optimizer.state.get(target.members[0].param):
                    self._state[target.tensor] = gathered_state(target, optimizer.state)
        self._show(optimizer)

    def _show(self, optimizer: Any) -> None:
        """Puts the state that the targets have into the optimizer's, as DTensors around the same memory."""
        held_of = {id(m.param) for targets in self._groups for t in targets if self._state.get(t.tensor) for m in t.members}
        for param in self._params:  # all ranks have that order, in which torch gathers a state; not that of the targets
            if id(param) in held_of:
                optimizer.state.setdefault(param, {})
        counts = counts_in(self._state)
        for targets in self._groups:
            for target in targets:
                held = self._state.get(target.tensor)
                if not held:
                    continue
                for member in target.members:
                    entries = {name: shown(target, member, name, value, counts) for name, value in held.items()}
                    kept = optimizer.state.setdefault(member.param, {})  # users may keep it
                    kept.clear()
                    kept.update(entries)
        for key in of_no_parameter(optimizer.state).keys() - self._state.keys():
            del optimizer.state[key]
        optimizer.state.update(of_no_parameter(self._state))
        self._seen = _identity(optimizer)
        self._held, self._shown = Entries(self._state), Entries(optimizer.state)


def _identity(optimizer: Any) -> tuple[object, ...]:
    """Changes when the optimizer's state or groups are replaced, or a parameter goes from one group into the next."""
    groups = optimizer.param_groups
    return (id(optimizer.state), id(groups), *map(id, groups), *(len(group["params"]) for group in groups))


def _with_own_numbers(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Gives each parameter numbers of its own: an optimizer that takes them over counts each of its steps in each."""
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if isinstance(value, DTensor) or not isinstance(value, Tensor):
            return value
        known = id(value) in seen
        seen.add(id(value))
        return value.clone() if known else value

    state = {}
    for key, entries in state_dict["state"].items():
        if not isinstance(entries, dict):  # no parameter's
            state[key] = entries
            continue
        state[key] = dict(entries)
        for name, value in entries.items():
            state[key][name] = mapped(value, own)
    return {**state_dict, "state": state}


# -- gradients --------------------------------------------------------------------------------------------------------


def _local_grad(member: Member, grad: Any) -> Tensor:
    param = member.param
    if isinstance(grad, DTensor):
        spec = grad._spec
        if spec is not member.accepted and (spec.placements, spec.mesh) == (param.placements, param.device_mesh):
            member.accepted = spec
        if spec is member.accepted:
            return grad._local_tensor if member.share is None else member.share.of(grad._local_tensor)
        part = part_of_grad(grad, param._spec, member.share)
        if part is not None:
            return part
    raise StateError(
        f"optim.local: the gradient of {name_of(param)} is not sharded as the parameter is; set it to None, or to a "
        f"DTensor with placements {param.placements}"
    )


def _flat_grad(target: Target, grads: dict[int, Any]) -> Tensor | None:
    """The gradients of a target as one tensor: where they lie side by side, or in a copy."""
    first = target.members[0].param
    if target.alone:
        grad = grads[id(first)]
        if grad is None or target.tensor is first:
            return grad  # type: ignore[no-any-return]
        return _local_grad(target.members[0], grad)
    parts = [_local_grad(member, grads[id(member.param)]) for member in target.members]
    base = parts[0]._base
    origin = parts[0].storage_offset() - target.members[0].start
    lie_alike = base is not None and all(
        part._base is base and part.storage_offset() == origin + member.start and part.is_contiguous()
        for part, member in zip(parts, target.members, strict=True)
    )
    size = target.tensor.numel()
    # What seems a gap is another parameter's gradient where a user has put them side by side, and where replicas have
    # shares: these lie closer than parameters.
    if target.gaps and base is not None and lie_alike:
        unit = unit_of(first)
        lie_alike = is_landed(base) and not (unit is not None and unit.gradients.shared)
    if lie_alike and base is not None and base.is_contiguous() and 0 <= origin <= base.numel() - size:
        flat = base.view(-1)[origin : origin + size]
        gaps = [flat[start:stop] for start, stop in target.gaps]
        if gaps:
            torch._foreach_zero_(gaps)  # nobody wrote there: what came with the memory must not step
        return flat
    flat = torch.zeros_like(target.tensor)
    torch._foreach_copy_([flat[m.start : m.start + m.count].view(m.shape) for m in target.members], parts)
    return flat

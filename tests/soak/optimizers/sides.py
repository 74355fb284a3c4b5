"""The two sides that a program is played on, and what is done to states and weights between steps.

Changing  a side with the actions that change weights, gradients, states and optimizers
Twin      the plain model, fed with the batches of all ranks, one after the other; gradients are averaged
Sharded   the model under hsdp, fed with this rank's batches
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

import hsdp
from tests.soak import unasked
from tests.soak.optimizers import states
from tests.soak.optimizers.models import Net, shard
from tests.soak.optimizers.programs import WHOLE, Program, Spec
from tests.soak.optimizers.side import Side, Values
from tests.support.rig import RankEnv

NUMBERS = ("step", "mu_product", "eta", "mu", "ax_step")
"""Entries of states that are no means of gradients."""


def patient(program: Program) -> bool:
    """Whether a program is looked at when it is over, as half are: a look lands what is on its way."""
    return zlib.crc32(f"{program.seed}, patient".encode()) % 2 == 1


class Changing(Side):
    """A side with the actions that change weights, gradients, states and optimizers."""

    def group(self, at: int, which: int) -> Values:
        ((number, optimizer),) = self.chosen(which)
        held = {self.name_of[id(param)] for group in optimizer.param_groups for param in group["params"]}
        names = [name for name in self.held_back if name not in held]
        if names and self.specs[number].name != "LBFGS":
            for group in self.groups_of(replace(self.specs[number], groups=1), names):
                optimizer.add_param_group({**group, "params": [self.params[name] for name in group["params"]]})
            self.held_back, self.saved = [name for name in self.held_back if name in held], None
            self.schedulers.pop(number, None)
        return []

    def drop(self, at: int, which: int) -> Values:
        ((number, optimizer),) = self.chosen(which)
        params = optimizer.param_groups[0]["params"]
        if len(params) > 1 and self.specs[number].name != "LBFGS":
            param = params.pop()
            optimizer.state.pop(param, None)
            self.held_back, self.saved = [*self.held_back, self.name_of[id(param)]], None
        return []

    @torch.no_grad()
    def average(self, at: int, kind: str) -> Values:
        params: list[Any] = list(self.params.values())
        self.averages = self.averages or [param.detach().clone() for param in params]
        self.averaged += 1
        if kind == "lerp" or self.tp > 1:  # torch's averages are of tensors of one mesh
            for mean, param in zip(self.averages, params, strict=True):
                mean.lerp_(param.detach().to(mean.dtype), 0.3)
        else:
            average = get_ema_multi_avg_fn(0.9) if kind == "ema" else get_swa_multi_avg_fn()
            average(self.averages, params, self.averaged)
        return [
            (f"the average of {name}", states.whole(mean)) for name, mean in zip(self.params, self.averages, strict=True)
        ]

    @torch.no_grad()
    def swap(self, at: int) -> Values:
        for mean, param in zip(self.averages, self.params.values(), strict=False):
            held = param.detach().clone()
            param.copy_(mean)
            mean.copy_(held)
        return [("the loss in evaluation", self.model(self.batch(at, self.here), ()).pow(2).mean())]

    @torch.no_grad()
    def edit(self, at: int, kind: str, place: int | None) -> Values:
        names = list(self.params)
        for name in names if place is None else [names[place % len(names)]]:
            param = self.params[name]
            for number, optimizer in enumerate(self.optimizers):
                entries = optimizer.state.get(param)
                # Adagrad makes its state once; that of LBFGS is one for all.
                if entries and self.specs[number].name not in ("LBFGS", "Adagrad"):
                    self._edit(kind, optimizer.state, param)
        return []

    def _edit(self, kind: str, state: Any, param: Tensor) -> None:
        entries = state[param]
        means = {name: value for name, value in entries.items() if isinstance(value, Tensor) and name not in NUMBERS}
        if kind == "dict":
            state[param] = {}
        elif kind == "pop":
            del state[param]
        elif kind == "clear":
            entries.clear()
        elif kind == "zeros":
            entries.update({name: torch.zeros_like(value) for name, value in means.items()})
        elif kind == "halved":
            for value in means.values():
                value.mul_(0.5)
        elif kind == "copy":
            state[param] = {name: value.clone() if isinstance(value, Tensor) else value for name, value in entries.items()}
        elif isinstance(entries.get("step"), Tensor):
            entries["step"] = torch.full_like(entries["step"], 5.0)

    @torch.no_grad()
    def gradient(self, at: int, kind: str) -> Values:
        self.ready()
        for number, param in enumerate(self.params.values()):
            if param.grad is None:
                continue
            if kind == "scale":
                param.grad.mul_(0.5)
            elif kind == "add":
                param.grad.add_(param.detach(), alpha=0.1)
            elif kind == "assign":
                param.grad = param.grad + 0.1 * param.detach()
            elif number % 2:
                param.grad = None
        return []

    def replace(self, at: int, which: int, spec: Spec) -> Values:
        if not self.program.hooked:
            ((number, optimizer),) = self.chosen(which)
            names = [self.name_of[id(param)] for group in optimizer.param_groups for param in group["params"]]
            self.specs[number], self.saved = spec, None
            self.schedulers.pop(number, None)
            self.optimizers[number] = self.optimizer_of(spec, self.groups_of(spec, names))
        return []

    def _anew(self) -> list[Any]:
        """Other optimizers with the groups of those that are there."""
        made = []
        for spec, optimizer in zip(self.specs, self.optimizers, strict=True):
            groups = []
            for group in optimizer.param_groups:
                own = {key: group[key] for key in ("lr", "matrices", "algorithm") if key in group}
                groups.append({**own, "params": [self.name_of[id(param)] for param in group["params"]]})
            made.append((spec, groups))
        return made

    # -- keeping states ---------------------------------------------------------------------------------------------

    def keep(self, at: int, kind: str) -> Any:
        return kind, states.keep(kind, self.model, self.optimizers, at)

    def put_back(self, kept: Any) -> None:
        states.restore(kept[0], kept[1], self.model, self.optimizers)
        for spec, optimizer in zip(self.specs, self.optimizers, strict=True):
            if (
                self.tp > 1 and not spec.wrap
            ):  # as `optimizer_of` has it: of one that was wrapped the settings may be others
                for group in optimizer.param_groups:
                    group.update({name: False for name in ("foreach", "fused") if group.get(name)})

    def save(self, at: int, kind: str) -> Values:
        self.ready()
        if kind == "reload":
            for optimizer in self.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())
        else:
            self.saved = self.keep(at, kind)
        return []

    def restore(self, at: int) -> Values:
        self.ready()
        if self.saved is not None:
            self.put_back(self.saved)
        return []

    def move(self, at: int, kind: str, shape: tuple[int, ...], wrap: str) -> Values:
        """A run that goes on with a new model: there schedulers, averages and gradients begin anew."""
        self.ready()
        self.zero(at, "none")
        kept = self.keep(at, kind)
        if kind != "torch":  # shards as they are fit the same mesh alone
            self.place(shape)
        self.schedulers, self.averages, self.averaged, self.saved = {}, [], 0, None
        groups = self._anew()
        self.take(self.elsewhere())
        self.optimizers = []
        self.specs = [replace(spec, wrap=_allowed(wrap, spec, self.shape, self.program)) for spec, _ in groups]
        self.optimizers = [self.optimizer_of(spec, made) for spec, (_, made) in zip(self.specs, groups, strict=True)]
        self.put_back(kept)
        self.hook()
        return []

    def elsewhere(self) -> Any:
        """A model for another mesh, with other weights."""
        fresh = copy.deepcopy(self.plain)
        for name, param in fresh.named_parameters():
            param.data = torch.zeros_like(param, dtype=self.params[name].dtype)
            param.requires_grad_(self.params[name].requires_grad)
        return self.model_of(fresh)


def _allowed(wrap: str, spec: Spec, shape: tuple[int, ...], program: Program) -> str:
    """How an optimizer may step on another mesh, of what a program wants."""
    if "over" in wrap and (len(shape) == 1 or program.hooked):
        wrap = ""
    if spec.name in (*WHOLE, "LBFGS"):
        return "over" if "over" in wrap and spec.name in WHOLE else ""
    return wrap or ("local" if spec.takes_no_dtensors else "")


class Twin(Changing):
    """The oracle."""

    def share(self) -> float:
        divisor = self.factors["divide"] or (1.0 if self.factors["op"] == "sum" else len(self.ranks))
        return float(self.factors["scale"] / divisor)

    def hook(self) -> None:
        """Optimizers in backward step when the gradients of all ranks are there: `micro` has them do it."""

    def micro(self, at: int, skipped: tuple[int, ...], context: str) -> Values:
        results = super().micro(at, skipped, context)
        for optimizer in self.optimizers if self.program.hooked else ():
            if any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
                optimizer.step()
                optimizer.zero_grad()
        return results

    def keep(self, at: int, kind: str) -> Any:
        return kind, super().keep(at, "memory")

    def put_back(self, kept: Any) -> None:
        """As torch loads; hsdp's own functions leave states in the dtypes in which they were saved."""
        kind, memory = kept
        super().put_back(memory)
        for optimizer, state in zip(self.optimizers, memory[1][1], strict=True) if kind in ("files", "full") else ():
            params = [param for group in optimizer.param_groups for param in group["params"]]
            for number, entries in state["state"].items():
                tensors = {name: value.clone() for name, value in entries.items() if isinstance(value, Tensor)}
                optimizer.state[params[number]].update(tensors)

    def show_zeros(self, sharded: Side) -> None:
        """Zeroed sums leave zeros, of parameters that no rank used too: nobody knows that before sums are reduced."""
        for name, param in self.params.items():
            if param.grad is None and sharded.params[name].grad is not None:
                param.grad = torch.zeros_like(param)


class Sharded(Changing):
    """The model under hsdp."""

    def __init__(self, program: Program, env: RankEnv, plain: Net) -> None:
        self.device = env.device
        self.patient = patient(program)
        self.runs_on = False  # reductions may run on behind a backward
        super().__init__(program, env, plain)

    def fed(self) -> range:
        return range(self.here, self.here + 1)

    def model_of(self, plain: Net) -> Any:
        names = ("replicate", "shard")[-len(self.shape) :]
        mesh = self.env.mesh(self.shape) if self.tp == 1 else self.env.mesh((*self.shape, self.tp), (*names, "tp"))
        plain.to(self.device).tie()  # torch unties what it moves to a device of an extension
        model = shard(plain, self.program.parts, mesh, self.program.options)
        self.set_factors(model)
        return model

    def set_factors(self, model: Any) -> None:
        model.set_gradient_scaling_factor(self.factors["scale"])
        model.set_gradient_divide_factor(self.factors["divide"], recurse=True)
        model.set_reduce_op_type(self.factors["op"])

    def shares(self, spec: Spec) -> bool:
        return "over" in spec.wrap

    def wrapped(self, spec: Spec, made: Any) -> Any:
        if not spec.wrap:
            return made
        return hsdp.optim.local(made, flat="flat" in spec.wrap, over_replicas="over" in spec.wrap)

    def context(self, name: str) -> AbstractContextManager[Any]:
        self.model.set_is_last_backward(name != "late")
        self.runs_on |= name == "late"
        if name == "no_sync":
            return self.model.no_sync()  # type: ignore[no-any-return]
        return self.model.accumulate(last=name == "last") if name in ("first", "last") else nullcontext()

    def ready(self, *, waits: bool = False) -> None:
        if not self.patient or unasked.pending(self.model) or (self.runs_on and not waits):
            self.model.flush()
        self.runs_on = False

    def wait(self) -> None:
        """Waits for the device, which raises what its kernels did."""
        torch.get_device_module(self.device).synchronize()

    def mean(self, losses: list[Tensor]) -> Tensor:
        mean = losses[0] / self.env.world_size
        dist.all_reduce(mean)
        return mean

    def norm(self, kind: str, params: Iterable[nn.Parameter]) -> Tensor:
        if kind == "torch" and self.tp == 1:  # torch has none of tensors of several meshes
            return super().norm(kind, params)
        return hsdp.clip_grad_norm_(self.model, 0.1, float("inf") if kind.endswith("inf") else 2.0)

    def factor(self, at: int, name: str, value: Any) -> Values:
        results = super().factor(at, name, value)
        self.set_factors(self.model)
        return results

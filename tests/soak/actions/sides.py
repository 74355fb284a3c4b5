"""The two sides that a program of `tests.soak.actions.programs` is played on: a sharded model, or its twin.

Side     a model with its optimizer and the losses that wait for their backward; one method per action
Twin     the plain model, fed with the batches of all ranks, one after the other; gradients are averaged
Sharded  the model under hsdp, fed with this rank's batches
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hsdp
from hsdp import checkpoint, debug
from hsdp.params.dtensors import as_dtensor
from hsdp.torch_private import set_versions
from tests.soak import unasked
from tests.soak.actions.models import LENGTH, VOCAB, WIDTH, Body, How, Net, Planned, opened
from tests.soak.actions.programs import Action, Program
from tests.support.rig import RankEnv

Values = list[tuple[str, Tensor]]
"""What an action tells, with names: on both sides the same, or something is wrong."""


class Side:
    """A model and what a program does to it.

    Attributes:
        ranks: those whose batches it is fed with.
        share: what a loss is multiplied with, so that gradients become the mean over all ranks.
        device: where it computes.
        accumulates: a backward of losses is under way, not one that only asks for gradients.
        slots: by slot and rank, the loss that waits for its backward and the floats that it came from.
    """

    ranks: range
    share: float
    device = "cpu"
    accumulates = False

    def __init__(self, program: Program, model: Any, env: RankEnv, teacher: Any = None) -> None:
        self.program, self.model, self.env, self.teacher = program, model, env, teacher
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.optimizer = self.optimizer_of([{"params": list(self.params.values())}])
        self.slots: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self.hooks: list[Any] = []
        self.module_hooks: list[Any] = []
        self.averages: list[Tensor] = []
        self.held: list[tuple[str, Tensor]] = []
        self.saved: Any = None

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The program's optimizer, new, for these groups."""
        name, _, mode = self.program.optimizer.partition(" ")
        if name == "muon":
            shares = self.program.local == "over replicas"
            return hsdp.optim.Muon(self.groups_of(groups), lr=0.02, ns_dtype=None, over_replicas=shares)
        if name == "sgd":
            return torch.optim.SGD(groups, lr=0.05, momentum=0.5)
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-3, **{mode: True} if mode else {})

    def groups_of(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """These groups as the program's optimizer takes them: Muon those of matrices alone, and AdamW in it the others."""
        if self.program.optimizer != "muon":
            return groups
        made = []
        for group in groups:
            adamw = {**group, "algorithm": "adamw", "eps": 1e-3}
            for settings, matrices in ((group, True), (adamw, False)):
                if chosen := [param for param in group["params"] if (param.ndim == 2) is matrices]:
                    made.append({**settings, "params": chosen})
        return made

    # -- where the sides differ ------------------------------------------------------------------------------------

    def like(self, whole: Tensor, param: Tensor) -> Tensor:
        """A whole tensor in the form that parameters have on this side."""
        return whole

    def context(self, name: str) -> AbstractContextManager[Any]:
        """What a micro-batch is wrapped in: "no_sync", accumulate's "first" or "last", or ""."""
        return nullcontext()

    def squares(self, kind: str) -> Tensor:
        """The sum of the squares of all trained parameters."""
        return sum((_squares_of(p).sum() for p in self.params.values() if p.requires_grad), self._zero())

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    # -- forward and backward --------------------------------------------------------------------------------------

    def forward(self, at: int, slot: int, how: How, call: str, context: str) -> Values:
        self.slots.pop(slot, None)
        made = {}
        for rank in self.ranks:
            with self.context(context):
                made[rank] = self._loss(at, rank, how, call)
        self.slots[slot] = made
        return [("loss", made[self.env.rank][0].detach().clone())]

    def _loss(self, at: int, rank: int, how: How, call: str) -> tuple[Tensor, Tensor]:
        tokens, floats = self._batch(at, rank)
        penalised = how.get("loss") == "gradient penalty"
        floats.requires_grad_(bool(how.get("leaf")) or penalised)
        self.model.take_aux()
        for part in self.model.parts:
            part.first_rank = rank == self.ranks[0]
        box: list[Tensor] = []
        out = self.call(call)(tokens, floats, how, rank, box)
        if how.get("output") == "/=":
            out /= 2.0
        elif how.get("output") == "+= view":
            first = out[0]
            first += 1.0
        loss = out.pow(2).mean()
        for aux in (*box, *self.model.take_aux()):
            loss = loss + aux
        if penalised:
            (grad,) = torch.autograd.grad(loss, floats, create_graph=True)
            loss = loss + grad.pow(2).sum()
        return loss, floats

    def _batch(self, at: int, rank: int) -> tuple[Tensor, Tensor]:
        seeded = torch.Generator().manual_seed(1000 * at + rank)
        tokens = torch.randint(VOCAB, (2, LENGTH), generator=seeded).to(self.device)
        return tokens, torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=seeded).to(self.device)

    def call(self, call: str) -> Any:
        """The root's way to be called."""
        return {"forward": self.model.forward, "infer": self.model.infer}.get(call.split()[-1], self.model)

    def backward(self, at: int, slots: tuple[int, ...], how: How) -> Values:
        slots = tuple(slot for slot in slots if slot in self.slots)
        kept = [self.slots[slot] if how.get("retain") else self.slots.pop(slot) for slot in slots]
        if not kept:
            return []
        kind, which = how.get("hook", ("", 0))
        with self._hooked(kind, which), self.context(how.get("context", "")):
            for rank in self.ranks:
                total = torch.stack([losses[rank][0] for losses in kept]).sum() * self.share
                if "penalty" in how and rank == self.ranks[-1]:
                    total = total + how["penalty"] * self.squares("local")
                self.accumulates = True
                try:
                    total.backward(retain_graph=bool(how.get("retain")))  # type: ignore[no-untyped-call]
                finally:
                    self.accumulates = False
        return []

    @contextmanager
    def _hooked(self, kind: str, which: int) -> Iterator[None]:
        """A hook on a parameter that raises, or an optimizer in backward, for one backward."""

        def fail(*_: Any) -> None:
            raise Planned(f"in a hook ({kind})")

        handles: list[Any] = []
        if kind == "step":
            trained = [p for p in self.params.values() if p.requires_grad]
            handles = [p.register_post_accumulate_grad_hook(self.step_one) for p in trained]
        elif kind:
            param = self.chosen(which)[0][1]
            if param.requires_grad:
                register = param.register_hook if kind == "raise" else param.register_post_accumulate_grad_hook
                handles = [register(fail)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def step_one(self, param: Tensor) -> None:
        """An optimizer in backward."""
        assert param.grad is not None
        with torch.no_grad():
            param.add_(param.grad, alpha=-0.05)
        param.grad = None

    def grad(self, at: int, slot: int) -> Values:
        if slot not in self.slots:
            return []
        told = []
        for rank in self.ranks:
            loss, floats = self.slots[slot][rank]
            if floats.requires_grad:
                # Of all ranks: a recomputation in it may leave something behind, such as another hook.
                found = torch.autograd.grad(loss, floats, retain_graph=True)
                told = [*found] if rank == self.env.rank else told
        return [("gradient of the input", value) for value in told]

    def eval(self, at: int, how: How) -> Values:
        plain = {key: value for key, value in how.items() if key not in ("loss", "leaf", "end")}
        with torch.no_grad():
            return [("loss in eval", [self._loss(at, rank, plain, "call")[0] for rank in self.ranks][self.place])]

    @property
    def place(self) -> int:
        """Where this process's rank is among those that the side is fed with."""
        return self.ranks.index(self.env.rank)

    def penalty(self, at: int, coefficient: float, kind: str) -> Values:
        (coefficient * self.squares(kind)).backward()  # type: ignore[no-untyped-call]
        return []

    # -- gradients -------------------------------------------------------------------------------------------------

    def noise(self, at: int, kind: str) -> Values:
        for index, param in enumerate(self.params.values()):
            if param.grad is None:
                continue
            seeded = torch.Generator().manual_seed(1000 * at + index)
            noise = self.like(torch.randn(param.shape, dtype=param.dtype, generator=seeded).to(self.device), param)
            if kind == "assign":
                param.grad = param.grad + noise
            else:
                (param.grad.data if kind == "data" else param.grad).add_(noise)
        return []

    def scale(self, at: int, factor: float | str) -> Values:
        for param in self.params.values():
            if param.grad is not None and factor != "rows":
                param.grad.mul_(factor)
            elif param.grad is not None and param.ndim and len(param) > 1:
                param.grad[1:] = param.grad[1:] * 0.5
        return []

    def zero(self, at: int, kind: str) -> Values:
        who, _, how = kind.partition(" ")
        if how:
            (self.model if who == "module" else self.optimizer).zero_grad(set_to_none=how == "none")
            return []
        for param in self.params.values():
            grad = param.grad
            if kind == "none":
                param.grad = None
            elif grad is not None and kind == "zero_":
                grad.zero_()
            elif grad is not None and kind == "data":
                grad.data.zero_()
            elif grad is not None and kind == "detach":
                grad.detach().zero_()
            elif grad is not None:
                grad.mul_(0)
        return []

    def clip(self, at: int) -> Values:
        return [("norm", torch.nn.utils.clip_grad_norm_(self.params.values(), 0.5).clone())]

    def hook(self, at: int, which: int) -> Values:
        param = self.chosen(which)[0][1]
        if param.requires_grad:
            self.hooks.append(param.register_hook(lambda grad: grad * 0.5))
        return []

    def unhook(self, at: int) -> Values:
        return _removed(self.hooks)

    # -- parameters ------------------------------------------------------------------------------------------------

    def chosen(self, which: int | str | None) -> list[tuple[str, Any]]:
        """All parameters, one of them, or those whose name begins so."""
        params = list(self.params.items())
        if isinstance(which, str):
            return [(name, param) for name, param in params if name.startswith(which)]
        return params if which is None else [params[which % len(params)]]

    def all_hold(self, param: Tensor) -> bool:
        """Whether every rank holds a part of a parameter."""
        shards, rows = max(self.program.shards), param.shape[0] if param.ndim else 1
        return -(-rows // shards) * (shards - 1) < rows

    def written(self, kind: str, which: int | str | None) -> list[Any]:
        """The parameters that a write goes to.

        A rank that holds none of a parameter cannot see that its `.data` was written to, and goes on where others are told.
        On a device nobody sees it, but in debug mode.
        """
        if kind in ("data mul_", "local mul_") and self.env.device != "cpu" and not debug.ON:
            return []
        counted = kind in ("no_grad mul_", "rows", "foreach")
        return [param for _, param in self.chosen(which) if counted or self.all_hold(param)]

    def write(self, at: int, kind: str, which: int | str | None) -> Values:
        for param in self.written(kind, which):
            if kind == "data mul_":
                param.data.mul_(0.9)
            elif kind == "local mul_":
                (param.to_local() if isinstance(param, DTensor) else param).data.mul_(0.9)
            elif kind == "data set":
                param.data = param.data * 0.9
            elif kind == "foreach":
                with torch.no_grad():
                    torch._foreach_mul_([param], 0.9)
            elif kind == "rows":
                with torch.no_grad():
                    param[-1:].mul_(0.9) if param.ndim and len(param) > 1 else None
            else:
                with torch.no_grad():
                    param.mul_(0.9) if kind == "no_grad mul_" else param.copy_(param * 0.9)
        return []

    def toggle(self, at: int, which: int | str | None, flag: bool) -> Values:
        for name, param in self.chosen(which):
            if ".base." not in name:
                param.requires_grad_(flag)
        return []

    def load(self, at: int) -> Values:
        self.model.load_state_dict({name: value * 0.95 for name, value in self.model.state_dict().items()})
        return []

    def peek(self, at: int) -> Values:
        return [(name, param.detach().clone()) for name, param in self.params.items()]

    def full_write(self, at: int) -> Values:
        with torch.no_grad():
            for param in self.params.values():
                param.data.mul_(0.95)
        return []

    def step(self, at: int) -> Values:
        self.optimizer.step()
        return []

    raw_step = step

    # -- who holds weights, and the optimizer's state ----------------------------------------------------------------

    @torch.no_grad()
    def average(self, at: int) -> Values:
        params = list(self.params.values())
        self.averages = self.averages or [param.detach().clone() for param in params]
        torch._foreach_lerp_(self.averages, params, 0.3)
        return [(f"average of {name}", value.clone()) for name, value in zip(self.params, self.averages, strict=True)]

    @torch.no_grad()
    def keep(self, at: int, kind: str) -> Values:
        tensors = self.model.state_dict() if kind == "state dict" else self.params
        self.held = [(name, self.alias(tensor, kind)) for name, tensor in tensors.items()]
        return []

    def alias(self, tensor: Any, kind: str) -> Any:
        """A tensor in the memory of another one."""
        return tensor.detach()

    def kept(self, at: int) -> Values:
        return [(f"what was kept of {name}", tensor.clone()) for name, tensor in self.held]

    def reset(self, at: int, kind: str, which: int | str | None) -> Values:
        for _, param in self.chosen(which):
            entries = self.optimizer.state.get(param)
            if not entries:
                continue
            means = {name: value for name, value in entries.items() if name != "step" and isinstance(value, Tensor)}
            if kind == "dict":
                self.optimizer.state[param] = {}
            elif kind == "zeros":
                entries.update({name: torch.zeros_like(value) for name, value in means.items()})
            elif kind == "in place":
                for value in means.values():
                    value.mul_(0.5)
            elif "step" in entries:
                entries["step"] = torch.full_like(entries["step"], 5.0)
        return []

    def reload(self, at: int) -> Values:
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        return []

    def rate(self, at: int, factor: float) -> Values:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        return []

    def save(self, at: int, kind: str) -> Values:
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.saved = "memory", (weights, copy.deepcopy(self.optimizer.state_dict()))
        return []

    def restore(self, at: int) -> Values:
        weights, states = self.saved[1]
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(copy.deepcopy(states))
        return []

    # -- other roots, models and optimizers ---------------------------------------------------------------------------

    def child(self, at: int, slot: int, part: int) -> Values:
        self.slots.pop(slot, None)
        part %= len(self.program.parts)
        if self.program.parts[part].unit != "whole":  # its parameters are the root's
            return []
        self.slots[slot] = {rank: self._loss_of_part(at, rank, part) for rank in self.ranks}
        return [("loss", self.slots[slot][self.env.rank][0].detach().clone())]

    def _loss_of_part(self, at: int, rank: int, part: int) -> tuple[Tensor, Tensor]:
        _, floats = self._batch(at, rank)
        return opened(self.model.parts[part](floats, "", [])).pow(2).mean(), floats

    def distill(self, at: int, slot: int) -> Values:
        self.slots.pop(slot, None)
        self.slots[slot] = {rank: self._loss_to_teacher(at, rank) for rank in self.ranks}
        return [("loss", self.slots[slot][self.env.rank][0].detach().clone())]

    def _loss_to_teacher(self, at: int, rank: int) -> tuple[Tensor, Tensor]:
        tokens, floats = self._batch(at, rank)
        with torch.no_grad():
            wanted = self.teacher(tokens, floats, {}, rank, [])
        return (self.model(tokens, floats, {}, rank, []) - wanted).pow(2).mean(), floats

    def transform(self, at: int, slot: int, kind: str) -> Values:
        self.slots.pop(slot, None)
        self.slots[slot] = {rank: self._loss_through(at, rank, kind) for rank in self.ranks}
        return [("loss", self.slots[slot][self.env.rank][0].detach().clone())]

    def _loss_through(self, at: int, rank: int, kind: str) -> tuple[Tensor, Tensor]:
        tokens, floats = self._batch(at, rank)

        def out(tokens: Tensor, floats: Tensor) -> Tensor:
            found: Tensor = self.model(tokens, floats, {}, rank, [])
            return found

        def one(token: Tensor, some: Tensor) -> Tensor:
            return out(token[None], some[None]).pow(2).mean()

        along = torch.full_like(floats, 0.1)
        if kind == "jvp":
            value, tangent = torch.func.jvp(functools.partial(out, tokens), (floats,), (along,))
            loss = value.pow(2).mean() + tangent.pow(2).mean()
        elif kind == "dual":
            with fwAD.dual_level():
                value, tangent = fwAD.unpack_dual(out(tokens, fwAD.make_dual(floats, along)))
            loss = value.pow(2).mean() + tangent.pow(2).mean()
        elif kind == "grad":
            loss = torch.func.grad(lambda some: out(tokens, some).pow(2).mean())(floats).pow(2).sum()
        elif kind == "vmap":
            loss = torch.func.vmap(lambda some: out(tokens, some).pow(2).mean())(torch.stack([floats, along])).sum()
        elif kind == "per sample":
            loss = torch.func.vmap(one)(tokens, floats).mean()
        else:
            loss = torch.func.vmap(torch.func.grad(one, argnums=1))(tokens, floats).pow(2).sum()
        return loss, floats

    @torch.no_grad()
    def follow(self, at: int, kind: str) -> Values:
        pairs = list(zip(self.teacher.parameters(), self.model.parameters(), strict=True))
        if kind == "foreach":
            torch._foreach_lerp_([p for p, _ in pairs], [q for _, q in pairs], 0.3)
        else:
            for mine, leader in pairs:
                (mine.data if kind == "data" else mine).lerp_(leader.detach(), 0.3)
        return []

    def surgery(self, at: int, kind: str) -> Values:
        params = list(self.params.values())
        half = len(params) // 2 if kind != "same state" else 0
        first, second = [{"params": params[half:]}], [{"params": params[:half], "lr": 0.02}] if half else []
        made = self.optimizer_of([*first, *(second if kind == "two groups" else [])])
        if kind == "same state" and len(self.optimizer.param_groups) == 1:
            made.load_state_dict(self.optimizer.state_dict())
        for group in self.groups_of(second) if kind == "group added" else []:
            made.add_param_group(group)
        self.optimizer, self.saved = made, None
        return []

    def sam(self, at: int, scale: float) -> Values:
        moved = [(param, scale * param.grad) for param in self.params.values() if param.grad is not None]
        # DTensor leaves whole what a penalty gave to a parameter with fewer rows than ranks, and would not add it then.
        moved = [(p, by.redistribute(placements=p.placements) if isinstance(by, DTensor) else by) for p, by in moved]
        for param, by in moved:
            param.data.add_(by)
        try:
            self.zero(at, "none")
            for rank in self.ranks:
                (self._loss(at, rank, {}, "call")[0] * self.share).backward()  # type: ignore[no-untyped-call]
        finally:
            for param, by in moved:
                param.data.sub_(by)
        return []

    def infer(self, at: int) -> Values:
        with torch.inference_mode():
            told = [self._loss(at, rank, {}, "call")[0] for rank in self.ranks][self.place]
        return [("loss in inference", told.clone())]

    def assign(self, at: int) -> Values:
        self.slots.clear()
        self.hooks.clear()
        self.saved = None
        state = {name: value * 0.95 for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state, assign=True)
        self.model.tie(self.program.ties)  # which the assignment undid
        self.params = dict(self.model.named_parameters())
        self.optimizer = self.optimizer_of([{"params": list(self.params.values())}])
        return self.eval(at, {})  # nobody can tell what was assigned to the `.data` of a parameter that no forward has seen

    def lists(self, at: int, who: int, forward: tuple[int, ...], backward: tuple[int, ...]) -> Values:
        return []

    def factor(self, at: int, factor: float) -> Values:
        return []

    def tune(self, at: int, what: str, who: int, on: bool) -> Values:
        return []

    def flush(self, at: int) -> Values:
        return []

    def module_hook(self, at: int, kind: str, who: int) -> Values:
        parts = self.model.parts
        module = self.model if who < 0 else parts[who % len(parts)]
        if kind == "input":
            self.module_hooks.append(module.register_forward_pre_hook(lambda _, args: _scaled(args)))
        elif kind == "output":
            self.module_hooks.append(module.register_forward_hook(lambda _, args, out: _scaled(out)))
        elif kind == "gradient of output":
            self.module_hooks.append(module.register_full_backward_pre_hook(lambda _, grads: _scaled(grads)))
        elif kind == "gradient of input":
            self.module_hooks.append(module.register_full_backward_hook(lambda _, grads, __: _scaled(grads)))
        elif not self.program.ties:  # a tied weight may be another unit's
            own = next(one for one in module.modules() if next(one.parameters(recurse=False), None) is not None)
            self.module_hooks.append(own.register_full_backward_hook(lambda own, *_: self._add_to_gradients(own)))
        return []

    def _add_to_gradients(self, own: Any) -> None:
        """An edit that is one of every rank, whatever has been accumulated before.

        None beside hooks on parameters: those of sharded ones get what is reduced, with the edit.
        """
        if not self.accumulates or self.hooks:
            return
        for name, _ in list(own.named_parameters(recurse=False)):
            if (param := getattr(own, name)).requires_grad:
                more = torch.full_like(param, 0.01 * self.share)
                param.grad = more if param.grad is None else param.grad + more

    def module_unhook(self, at: int) -> Values:
        return _removed(self.module_hooks)

    def stream(self, at: int, which: int) -> Values:
        return []

    def set(self, at: int, what: str, flag: bool) -> Values:
        return []

    def unshard(self, at: int, who: int, asynchronous: bool) -> Values:
        return []

    def reshard(self, at: int, who: int) -> Values:
        return []


class Twin(Side):
    """The oracle. Before each action it can be told to remember itself, and to forget what the action did."""

    def __init__(self, program: Program, model: Net, env: RankEnv, teacher: Net | None = None) -> None:
        super().__init__(program, model, env, teacher)
        self.ranks = range(env.world_size)
        self.factor(0, 1.0)

    def remember(self) -> None:
        """Keeps parameters and gradients."""
        self._kept = [
            (p.data, p.detach().clone(), p._version, None if p.grad is None else p.grad.clone(), p.requires_grad)
            for p in self.params.values()
        ]

    def forget(self) -> None:
        """Takes back what has happened since; graphs of earlier forwards must not see it."""
        for param, (memory, value, version, grad, flag) in zip(self.params.values(), self._kept, strict=True):
            if param.data_ptr() != memory.data_ptr():
                param.data = memory  # which is what graphs of earlier forwards read
            if not torch.equal(param.data, value):
                param.data.copy_(value)
                set_versions((param,), (version,))
            param.grad = grad
            param.requires_grad_(flag)

    def adopt(self, sharded: Side) -> None:
        """Takes over the parameters of the other side: what an optimizer stepped inside of a failed backward is stepped."""
        for name, param in sharded.params.items():
            assert isinstance(param, DTensor)
            self.params[name].data.copy_(param.detach().full_tensor())

    def show_zeros(self, sharded: Side) -> None:
        """Zeroed sums leave zeros, of parameters that no rank used too: nobody knows that before sums are reduced."""
        for name, param in self.params.items():
            if param.grad is None and sharded.params[name].grad is not None:
                param.grad = torch.zeros_like(param)

    def factor(self, at: int, factor: float) -> Values:
        self.share = factor if "sum" in self.program.options else factor / self.env.world_size
        return []

    def step_one(self, param: Tensor) -> None:
        self._reached[id(param)] = param

    def backward(self, at: int, slots: tuple[int, ...], how: How) -> Values:
        """Optimizers in backward run once, when the gradients of all ranks are there."""
        self._reached: dict[int, Tensor] = {}
        results = super().backward(at, slots, how)
        for param in self._reached.values():
            super().step_one(param)
        return results


class Sharded(Side):
    """The model under hsdp.

    Attributes:
        errors: those that may be owed, as they are named.
        mesh: where it is sharded.
    """

    errors: tuple[type[BaseException], ...] = (hsdp.errors.HSDPError,)
    stays = False
    """Whether units stay unsharded after their backward, whatever the program sets."""
    ends_with_errors = False
    """Whether a program ends with the first error that the twin does not have."""

    def __init__(self, program: Program, model: Net, env: RankEnv, teacher: Net | None = None) -> None:
        self.mesh = env.mesh(program.shape)
        self.others = [env.mesh(shape) for shape in program.meshes]
        self.streams: list[Any] = []
        self.device = env.device
        for one in (model,) if teacher is None else (model, teacher):
            one.to(env.device)
            one.tie(program.ties)  # torch unties what it moves to a device of an extension
            self._shard(program, one)
        super().__init__(program, model, env, teacher)
        self.ranks, self.share = range(env.rank, env.rank + 1), 1.0

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made, kind = super().optimizer_of(groups), self.program.local
        if not kind or isinstance(made, hsdp.optim.Muon):
            return made
        return hsdp.optim.local(made, **{kind.replace(" ", "_"): True} if kind != "local" else {})

    def _shard(self, program: Program, model: Net) -> None:
        options: dict[str, Any] = {"reshard_after_forward": program.reshard}
        reduction: Any = "tree" if "tree" in program.options else "any"
        options["comm_policy"] = hsdp.CommPolicy(**program.policy, reduction=reduction)
        if program.reduces_in:
            reduced: torch.dtype | None = getattr(torch, program.reduces_in, None)
            options["mp_policy"] = hsdp.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduced)
        if "offloaded" in program.options and self.device == "cpu":  # else a penalty's graph would be on two devices
            options["offload_policy"] = hsdp.CPUOffloadPolicy()
        if "replicated" in program.options:
            options["replicate_params"] = {p for p in model.parameters() if p.ndim < 2}
        for module, mesh in zip(units_of(program, model), cycle(self.others or [self.mesh])):
            hsdp.fully_shard(module, **_on(mesh, options, program))
        hsdp.fully_shard(model, **_on(self.mesh, options, program))
        if "sum" in program.options:
            model.set_reduce_op_type("sum")  # type: ignore[operator]
        hows = [action[2] for action in program.actions if action[0] == "forward"]
        if self.device != "cpu" and any("inner double grad" in how.get("tweaks", {}).values() for how in hows):
            self.stays = True  # as the limits of hsdp tell users to
            model.set_reshard_after_backward(False)  # type: ignore[operator]
        hsdp.register_forward_method(model, "infer")

    def pending(self) -> bool:
        return unasked.pending(self.model)

    def lost(self) -> bool:
        return unasked.lost(self.model)

    def like(self, whole: Tensor, param: Tensor) -> Tensor:
        assert isinstance(param, DTensor)
        return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)

    def shard_of(self, whole: Tensor, param: Any) -> Tensor:
        """This rank's part of a whole tensor; what `like` holds, and quicker."""
        for axis, placement in enumerate(param.placements):
            if isinstance(placement, Shard):
                parts = whole.chunk(param.device_mesh.size(axis), placement.dim)
                at = param.device_mesh.get_local_rank(axis)
                whole = parts[at] if at < len(parts) else whole.narrow(placement.dim, 0, 0)
        return whole

    def context(self, name: str) -> AbstractContextManager[Any]:
        if name == "no_sync":
            return self.model.no_sync()  # type: ignore[no-any-return]
        return self.model.accumulate(last=name == "last") if name else nullcontext()

    def alias(self, tensor: Any, kind: str) -> Any:
        if kind == "local" and isinstance(tensor, DTensor):
            return as_dtensor(tensor.to_local(), tensor._spec)
        return tensor.detach()

    def squares(self, kind: str) -> Tensor:
        params: Any = [p for p in self.params.values() if p.requires_grad]
        if kind == "full":
            return sum((_squares_of(p).sum().full_tensor() for p in params), self._zero())
        return sum((_squares_of(p.to_local()).sum() for p in params), self._zero())

    def call(self, call: str) -> Any:
        if call.startswith("unshard"):
            self.model.unshard()
        return super().call(call)

    def clip(self, at: int) -> Values:
        return [("norm", hsdp.clip_grad_norm_(self.model, 0.5).clone())]

    def peek(self, at: int) -> Values:
        with hsdp.full_params(self.model):
            return [(name, param.detach().clone()) for name, param in self.model.named_parameters()]

    def full_write(self, at: int) -> Values:
        with hsdp.full_params(self.model, writeback="rank0"), torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.95)
        return []

    def write(self, at: int, kind: str, which: int | str | None) -> Values:
        """torch loses what is assigned to the `.data` of a DTensor: the next forward is refused."""
        if self.device != "cpu":  # `unshard(async_op=True)` asks for no writes while its gather reads the shards
            torch.get_device_module(self.device).synchronize()
        super().write(at, kind, which)
        return self.eval(at, {}) if kind == "data set" and self.written(kind, which) else []

    def save(self, at: int, kind: str) -> Values:
        if kind == "memory":
            return super().save(at, kind)
        if kind == "whole":
            whole = checkpoint.full_state_dict(self.model), checkpoint.full_optimizer_state_dict(self.model, self.optimizer)
            self.saved = kind, whole
            return []
        self.saved = kind, checkpoint.save(_folder(), self.model, self.optimizer, step=at, async_=kind == "background")
        return []

    def restore(self, at: int) -> Values:
        kind, saved = self.saved
        if kind == "memory":
            return super().restore(at)
        if kind == "whole":
            checkpoint.load_full_state_dict(self.model, saved[0])
            checkpoint.load_full_optimizer_state_dict(self.model, self.optimizer, saved[1])
        else:
            checkpoint.load(saved.wait(), self.model, self.optimizer)
        return []

    def end(self) -> None:
        """The program is over: nothing of it goes on."""
        if self.saved is not None and self.saved[0] == "background":
            self.saved[1].wait()

    def step(self, at: int) -> Values:
        self.model.flush()
        return super().step(at)

    def raw_step(self, at: int) -> Values:
        return super().step(at)

    def factor(self, at: int, factor: float) -> Values:
        self.model.set_gradient_scaling_factor(factor)
        return []

    def tune(self, at: int, what: str, who: int, on: bool) -> Values:
        unit, shares = self._unit(who), self.program.local == "over replicas"
        if what == "scatter group":
            unit.set_separate_reduce_scatter_group(on)
        elif what == "bound":
            unit.set_reduce_scatter_max_input_buffers(1 + 2 * on)
        elif what == "gather":
            unit.set_custom_all_gather(_gather if on else None)
        elif what == "prefetch":
            unit.set_modules_to_forward_prefetch([] if on else [self._unit(who + 1)])
        elif what == "hook" and not shares:
            unit.set_all_reduce_hook((lambda tensor: None) if on else None)
        elif "tree" not in self.program.options and what == "scatter":
            unit.set_custom_reduce_scatter(_scatter if on else None)
        elif "tree" not in self.program.options and what == "replica reduce" and not shares:
            unit.set_replica_reduce(_all_reduce if on else None)
        return []

    def flush(self, at: int) -> Values:
        self.model.flush()
        return []

    def set(self, at: int, what: str, flag: bool) -> Values:
        if what == "last_backward":
            self.model.set_is_last_backward(flag)
        elif not (self.stays and what == "reshard_after_backward"):
            name = f"set_{'requires_' if what in ('gradient_sync', 'all_reduce') else ''}{what}"
            getattr(self.model, name)(flag)
        return []

    def stream(self, at: int, which: int) -> Values:
        if self.device != "cpu":
            module: Any = torch.get_device_module(self.device)
            self.streams = self.streams or [module.current_stream(), module.Stream(), module.Stream()]
            chosen = self.streams[which]
            chosen.wait_stream(module.current_stream())
            module.set_stream(chosen)
        return []

    def unshard(self, at: int, who: int, asynchronous: bool) -> Values:
        self._unit(who).unshard(async_op=asynchronous)
        return []

    def reshard(self, at: int, who: int) -> Values:
        self._unit(who).reshard()
        return []

    def lists(self, at: int, who: int, forward: tuple[int, ...], backward: tuple[int, ...]) -> Values:
        self._unit(who).set_modules_to_forward_prefetch([self._unit(other) for other in forward])
        self._unit(who).set_modules_to_backward_prefetch([self._unit(other) for other in backward])
        return []

    def _unit(self, who: int) -> Any:
        parts = [part for part in self.model.parts if isinstance(part, hsdp.HSDPModule)]
        return self.model if who < 0 or not parts else parts[who % len(parts)]


def _squares_of(param: Tensor) -> Tensor:
    return (param * param.conj()).real if param.is_complex() else param.pow(2)


def _removed(hooks: list[Any]) -> Values:
    for handle in hooks:
        handle.remove()
    hooks.clear()
    return []


def _scaled(value: Any) -> Any:
    """What a hook on a module returns: the same with its floating-point tensors scaled."""
    if isinstance(value, tuple):
        return tuple(_scaled(one) for one in value)
    return 0.9 * value if isinstance(value, Tensor) and value.is_floating_point() else value


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """One for all programs that the process plays: a directory that it saves to stays its own."""
    return tempfile.TemporaryDirectory(prefix="hsdp-actions-")


def _folder() -> str:
    """Where checkpoints go: rank 0's folder, on all ranks."""
    told = [_own_folder().name if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told)
    return told[0]


def _gather(output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def _scatter(output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
    return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _all_reduce(tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def _on(mesh: DeviceMesh, options: dict[str, Any], program: Program) -> dict[str, Any]:
    """What a unit on this mesh is sharded with."""
    in_parts = {"reshard_after_forward": 2} if "parts" in program.options and mesh.size(-1) == 4 else {}
    return {**options, **in_parts, "mesh": mesh}


def units_of(program: Program, model: Net) -> list[nn.Module]:
    """The modules that are units beside the root, children first."""
    found: list[nn.Module] = []
    bodies = dict(zip(model.parts, program.parts, strict=True))  # a part may stand there twice
    for body, part in bodies.items():
        assert isinstance(body, Body)
        found += [body] if part.unit == "whole" else body.linears() if part.unit == "parts" else []
    if program.heads_are_units:
        found += model.heads
    return [*found, model.embedding] if program.embedding_is_unit else found


def on_device(program: Program) -> Program:
    """A program as the emulated device can run it.

    The process dies there in the backward of complex products, without hsdp, too. By hsdp's limits of devices, ranks use
    the same calls of units that differentiate twice inside of a forward.
    """
    parts = [replace(part, inside="") if part.inside == "complex" else part for part in program.parts]
    return replace(program, parts=tuple(parts), actions=tuple(map(_used_alike, program.actions)))


def _used_alike(action: Action) -> Action:
    if action[0] != "forward" or not {"cuts", "again"} & action[2].keys():
        return action
    tweaks = {at: tweak for at, tweak in action[2].get("tweaks", {}).items() if tweak != "inner double grad"}
    return (*action[:2], {**action[2], "tweaks": tweaks}, *action[3:])


def sides_of(program: Program, env: RankEnv, sharded: type[Sharded] = Sharded) -> tuple[Sharded, Twin]:
    """Both sides, with equal weights."""
    torch.manual_seed(7)
    plain = Net(program.parts, program.max_norm, program.ties).double()
    teacher: Net | None = None
    if any(action[0] in ("distill", "follow") for action in program.actions):
        teacher = Net(program.parts, None, program.ties).double()
    return sharded(program, copy.deepcopy(plain), env, copy.deepcopy(teacher)), Twin(program, plain, env, teacher)

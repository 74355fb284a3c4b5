"""What a program is played on, whether sharded or not: a model with its optimizers, and a method for most actions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import hsdp
from tests.soak.optimizers import states
from tests.soak.optimizers.models import WIDTH, Net
from tests.soak.optimizers.programs import WHOLE, Program, Spec
from tests.support.rig import RankEnv

Values = list[tuple[str, Tensor]]
"""What an action tells, with names: on both sides the same, or something is wrong."""

RATES = {"SGD": 0.05, "Adadelta": 0.5, "Adagrad": 0.05, "Muon": 0.02, "LBFGS": 0.1}
EPS = ("Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
"""They divide by a root of squares: where that is 0 but for rounding, both sides are to divide by something."""


@hsdp.optim.whole_matrix(lr=0.02)
def Scaled(matrices: Tensor, *, least: float = 1e-2) -> Tensor:
    """Each matrix over its norm."""
    return matrices / (least + matrices.flatten(1).norm(dim=1)[:, None, None])


class Side:
    """A model and what a program does to it.

    Attributes:
        device: where it computes.
        shape: of the mesh of data parallelism now.
        tp: how many ranks of tensor parallelism there are at each of its places.
        here: this rank's place there.
        ranks: the places whose batches it is fed with.
        factors: what becomes of sums of gradients.
        specs: what the optimizers are made of.
        held_back: names of parameters that no optimizer has yet.
        saved: weights and states as `save` kept them.
        averages, averaged: averages of the weights, and of how many they are.
    """

    ranks: range
    device = "cpu"

    def __init__(self, program: Program, env: RankEnv, plain: Net) -> None:
        self.program, self.env = program, env
        self.plain = copy.deepcopy(plain)
        self.factors: dict[str, Any] = {"scale": 1.0, "divide": None, "op": "sum" if "sum" in program.options else "avg"}
        self.saved: Any = None
        self.averages: list[Tensor] = []
        self.averaged = 0
        self.schedulers: dict[int, Any] = {}
        self.scaler = torch.amp.GradScaler(self.device, init_scale=8.0, growth_interval=2)  # type: ignore[attr-defined]
        self.place(program.shape)
        self.take(self.model_of(plain))
        names = list(self.params)
        last = f"parts.{len(program.parts) - 1}." if program.held_back else " "
        self.held_back = [name for name in names if name.startswith(last)]
        names = [name for name in names if name not in self.held_back]
        if program.hooked:
            names = [name for name in names if self.params[name].requires_grad]
            self.specs = [program.optimizers[0]] * len(names)
        else:
            self.specs = list(program.optimizers)
        count = len(self.specs)
        shares = [names if program.overlap else names[k::count] for k in range(count)]
        self.optimizers = [
            self.optimizer_of(s, self.groups_of(s, mine)) for s, mine in zip(self.specs, shares, strict=True)
        ]
        self.hook()

    def place(self, shape: tuple[int, ...]) -> None:
        """The model comes on a mesh of data parallelism of this shape."""
        self.shape, self.tp = shape, self.env.world_size // math.prod(shape)
        self.here = self.env.rank // self.tp
        self.ranks = self.fed()

    def fed(self) -> range:
        return range(self.env.world_size // self.tp)

    def take(self, model: Any) -> None:
        self.model = model
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.name_of = {id(param): name for name, param in self.params.items()}

    def model_of(self, plain: Net) -> Any:
        """A model as this side has it on its mesh, with the weights of a plain one."""
        return plain

    def hook(self) -> None:
        """Optimizers step in backward, if the program has it so."""
        for optimizer in self.optimizers if self.program.hooked else ():
            (param,) = optimizer.param_groups[0]["params"]
            trained = param.requires_grad
            param.requires_grad_()  # torch puts no hook on a frozen one, which may be thawed later
            param.register_post_accumulate_grad_hook(self.stepped_in_backward(optimizer))
            param.requires_grad_(trained)

    def stepped_in_backward(self, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def step(param: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    # -- making optimizers ------------------------------------------------------------------------------------------

    def groups_of(self, spec: Spec, names: Collection[str]) -> list[dict[str, Any]]:
        """The groups of an optimizer: names of parameters, and settings of their own."""
        if spec.name in WHOLE:
            wholes = [name for name in names if self.params[name].ndim > 1 and self.params[name].numel()]
            stacks = [name for name in wholes if self.params[name].ndim == 3]
            kinds: list[tuple[Collection[str], dict[str, Any]]] = [
                ([name for name in wholes if name not in stacks], {}),
                (stacks, {"matrices": "stacked"}),
                ([name for name in names if name not in wholes], {"algorithm": "adamw", "eps": 1e-3}),
            ]
            return [{"params": list(some), **settings} for some, settings in kinds if some]
        rate = RATES.get(spec.name, 0.01)
        parts = [list(names)[k :: spec.groups] for k in range(spec.groups)]
        rates: list[Any] = [rate * (1 + k) for k in range(spec.groups)]
        if ("lr", "tensor") in spec.settings:  # torch takes them on the host, and beside the parameters
            rates = [torch.tensor(lr, device=(self.device, "cpu")[k % 2]) for k, lr in enumerate(rates)]
        return [{"params": part, "lr": lr} for part, lr in zip(parts, rates, strict=True)]

    def optimizer_of(self, spec: Spec, groups: list[dict[str, Any]]) -> Any:
        """An optimizer of groups that name their parameters."""
        settings: dict[str, Any] = {**({"eps": 1e-3} if spec.name in EPS else {}), **dict(spec.settings)}
        settings.pop("lr", None)
        if settings.get("nesterov") and spec.name == "SGD":
            # The other one, which devices have by default, adds the momentum to the gradients themselves, of which flat
            # optimizers have copies.
            settings["foreach"] = False
        if spec.name == "Adagrad" and self.device == "cuda":
            settings.pop("fused", None)  # torch has it for the CPU alone
        if self.tp > 1 and not spec.wrap and spec.name not in (*WHOLE, "LBFGS"):
            settings |= {"foreach": False}  # torch has no operators over tensors of several meshes
            settings.pop("fused", None)
        named = [{**group, "params": [self.params[name] for name in group["params"]]} for group in groups]
        if spec.name == "LBFGS":
            return torch.optim.LBFGS(named[0]["params"], lr=named[0]["lr"], **settings)
        if spec.name in WHOLE:
            return self.whole(spec, named, settings)
        return self.wrapped(spec, getattr(torch.optim, spec.name)(named, **settings))

    def whole(self, spec: Spec, groups: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
        if spec.name == "Muon":
            return hsdp.optim.Muon(groups, lr=0.02, ns_dtype=None, over_replicas=self.shares(spec), **settings)
        settings.pop("adjust_lr_fn", None)
        return Scaled(groups, over_replicas=self.shares(spec), **settings)

    def shares(self, spec: Spec) -> bool:
        return False

    def wrapped(self, spec: Spec, made: Any) -> Any:
        return made

    def chosen(self, which: int | None) -> list[tuple[int, Any]]:
        """Optimizers with their numbers: one, or all."""
        numbered = list(enumerate(self.optimizers))
        return numbered if which is None else [numbered[which % len(numbered)]]

    # -- forward, backward, step ------------------------------------------------------------------------------------

    def share(self) -> float:
        """What a loss is multiplied with, so that gradients of all ranks add up to what hsdp makes of them."""
        return 1.0

    def context(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def ready(self, *, waits: bool = False) -> None:
        """Has all gradients in `.grad`, unless what follows `waits` for those that are on their way."""

    def mean(self, losses: list[Tensor]) -> Tensor:
        """The mean of the losses of all ranks."""
        return torch.stack(losses).mean()

    def batch(self, at: int, rank: int) -> Tensor:
        seeded = torch.Generator().manual_seed(1000 * at + rank)
        x = torch.randn(3, WIDTH, dtype=torch.float64, generator=seeded)
        return x.to(self.device, self.params["head.weight"].dtype)

    def losses(self, at: int, skipped: Collection[int], scale: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        """Runs forwards and backwards on a batch of each rank; returns the losses."""
        results = []
        for rank in self.ranks:
            loss = self.model(self.batch(at, rank), skipped).pow(2).mean()
            scale(loss * self.share(), rank).backward()  # type: ignore[no-untyped-call]
            results.append(loss.detach())
        return results

    def micro(self, at: int, skipped: tuple[int, ...], context: str) -> Values:
        with self.context(context):
            results = self.losses(at, skipped, lambda loss, rank: loss)
        return [("the loss", results[self.here - self.ranks[0]])]

    def step(self, at: int, which: int | None, how: str) -> Values:
        if self.program.hooked:
            return []
        self.ready(waits=True)
        results = []
        for number, optimizer in self.chosen(which):
            if how == "closure" or self.specs[number].name == "LBFGS":
                results.append(("the closure's loss", optimizer.step(self.closure(at, optimizer)).detach().clone()))
            else:
                optimizer.step()
        return results

    def closure(self, at: int, optimizer: Any) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            return self.mean(self.losses(at, (), lambda loss, rank: loss))

        return evaluate

    def zero(self, at: int, kind: str) -> Values:
        who, _, how = kind.partition(" ")
        if who == "optimizer":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=how == "none")
        elif who == "module":
            self.model.zero_grad(set_to_none=how == "none")
        for param in self.params.values() if not how else ():
            if kind == "none":
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        return []

    def clip(self, at: int, kind: str) -> Values:
        self.ready()
        params = [param for param in self.params.values() if param.grad is not None]
        if not params:  # torch has no largest of nothing
            return []
        if kind == "value":
            torch.nn.utils.clip_grad_value_(params, 0.02, foreach=None if self.tp == 1 else False)
            return []
        return [("the norm", states.whole(self.norm(kind, params)))]

    def norm(self, kind: str, params: Iterable[nn.Parameter]) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(params, 0.1, float("inf") if kind.endswith("inf") else 2.0)

    def scaled(self, at: int, infinite: bool) -> Values:
        if any(spec.name == "LBFGS" for spec in self.specs) or self.program.hooked:
            return []
        self.zero(at, "module none")
        inf = float("inf") if infinite else 1.0
        with self.context(""):
            self.losses(at, (), lambda loss, rank: self.scaler.scale(loss * (inf if rank == 0 else 1.0)))
        optimizers = [o for o in self.optimizers if any(p.grad is not None for g in o.param_groups for p in g["params"])]
        for optimizer in optimizers:
            if at % 2:
                self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)
        if optimizers:
            self.scaler.update()
        self.zero(at, "module none")
        return [("the scale", torch.tensor(self.scaler.get_scale()))]

    # -- settings ---------------------------------------------------------------------------------------------------

    def set(self, at: int, which: int, name: str, factor: float) -> Values:
        for group in (group for _, optimizer in self.chosen(which) for group in optimizer.param_groups):
            if name == "betas" and name in group:
                group[name] = (group[name][0] * min(factor, 1.0), group[name][1])
            elif name == "lr" or (name in group and factor < 1):
                group[name] = group[name] * factor
        return []

    def schedule(self, at: int, which: int, kind: str) -> Values:
        ((number, optimizer),) = self.chosen(which)
        cycles = {"cycle_momentum": {"momentum", "betas"} & {*optimizer.defaults} and self.specs[number].name not in WHOLE}
        make: dict[str, Callable[[], Any]] = {
            "one cycle": lambda: lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=40, **cycles),
            "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
            "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)),
            "sequential": lambda: lr_scheduler.SequentialLR(
                optimizer,
                [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
                milestones=[2],
            ),
            "cosine": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
            "swa": lambda: SWALR(optimizer, swa_lr=0.005, anneal_epochs=2),
            "cyclic": lambda: lr_scheduler.CyclicLR(optimizer, 0.001, 0.02, step_size_up=2, **cycles),
        }
        self.schedulers[number] = make[kind]()
        if self.saved is not None and self.saved[0] == "dcp":
            self.saved = None  # it does not load groups with other settings than it has saved
        return []

    def tick(self, at: int) -> Values:
        for scheduler in self.schedulers.values():
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        return []

    def factor(self, at: int, name: str, value: Any) -> Values:
        self.factors[name] = value
        return []

    def freeze(self, at: int, name: str, flag: bool) -> Values:
        self.ready()
        for found, param in self.params.items():
            if name in found and ".base." not in found:
                param.requires_grad_(not flag)
        return []

    def cast(self, at: int, dtype: str) -> Values:
        self.ready()
        self.model.to(getattr(torch, dtype))
        return []

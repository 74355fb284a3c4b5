"""A model in training with its optimizer and scheduler: laid out on a mesh, or plain, as the twin."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import lr_scheduler

import hsdp
from tests.soak.persistence.models import WIDTH, Net, fresh, placement
from tests.soak.persistence.programs import Layout, Program


class Run:
    """What a program acts on.

    Attributes:
        ranks: those whose batches it is fed with.
        params: by name, of tied ones the first.
    """

    def __init__(self, program: Program, ranks: Iterable[int], seed: int) -> None:
        self.program, self.ranks = program, list(ranks)
        self.model: Any = fresh(program.parts, seed)
        self.wrap = ""

    def lay_out(self, layout: Layout, mesh: DeviceMesh, start: str) -> None:
        """Shards the model; behind it the optimizer can be made."""
        if start == "meta":
            with torch.device("meta"):
                self.model = Net(self.program.parts)
        model, self.wrap = self.model, layout.wrap
        kept = [param for param in model.parameters() if param.ndim < 2] if layout.replicated else []
        options: dict[str, Any] = {"mesh": mesh, "replicate_params": kept, "shard_placement_fn": placement}
        if layout.offload:
            options["offload_policy"] = hsdp.CPUOffloadPolicy(pin_memory=False)
        for is_unit, part in zip(layout.units, model.parts, strict=True):
            if is_unit:
                hsdp.fully_shard(part, **options)
        hsdp.fully_shard(model, **options)
        if start == "meta":
            hsdp.init_sharded(model)

    def begin(self) -> None:
        """Makes the optimizer and the scheduler."""
        self.params: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        trained = [param for param in self.params.values() if param.requires_grad]
        wholes = [param for param in trained if param.ndim > 1 and param.numel()]
        rest = [param for param in trained if all(param is not one for one in wholes)]
        self.optimizer = self._optimizer(wholes, rest)
        self.scheduler: Any = None
        if self.program.schedule == "lambda":
            self.scheduler = lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 1.0 / (1 + epoch))
        elif self.program.schedule == "one cycle":
            cycles = self.program.optimizer == "AdamW"
            self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=60, cycle_momentum=cycles)

    def _optimizer(self, wholes: list[nn.Parameter], rest: list[nn.Parameter]) -> Any:
        over = "over" in self.wrap
        if self.program.optimizer == "Muon":
            stacks = [param for param in wholes if param.ndim == 3]
            groups = [
                {"params": [param for param in wholes if param.ndim == 2]},
                {"params": stacks, "matrices": "stacked"},
                {"params": rest, "algorithm": "adamw", "eps": 1e-3},
            ]
            return hsdp.optim.Muon([g for g in groups if g["params"]], lr=0.02, ns_dtype=None, over_replicas=over)
        groups = [group for group in ({"params": wholes}, {"params": rest, "lr": 0.02}) if group["params"]]
        made: Any
        if self.program.optimizer == "SGD":
            made = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        else:
            made = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
        return hsdp.optim.local(made, flat="flat" in self.wrap, over_replicas=over) if self.wrap else made

    # -- training -----------------------------------------------------------------------------------------------------

    def micro(self, at: int, context: str) -> None:
        """A forward and a backward for each rank that feeds it."""
        moving = _moving(self.model)
        held = copy.deepcopy(moving) if len(self.ranks) > 1 else moving
        for rank in self.ranks:
            if held is not moving:
                _put(moving, held)  # a forward of each rank moves them once
            seeded = torch.Generator().manual_seed(1000 * at + rank)
            x = torch.randn(3, WIDTH, dtype=torch.float64, generator=seeded)
            with self._context(context):
                loss = self.model(x).pow(2).mean() / len(self.ranks)  # hsdp takes the mean over ranks itself
                loss.backward()

    def _context(self, name: str) -> Any:
        if not isinstance(self.model, hsdp.HSDPModule):
            return nullcontext()
        if name == "no_sync":
            return self.model.no_sync()
        return self.model.accumulate(last=name == "last") if name in ("first", "last") else nullcontext()

    def ready(self) -> None:
        """Has all gradients in `.grad`."""
        if isinstance(self.model, hsdp.HSDPModule):
            self.model.flush()

    def step(self) -> None:
        """One of the optimizer and the scheduler."""
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    # -- what it is made of -------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        """Everything that a checkpoint holds of it, by a name that tells what it is; tensors are not copied."""
        found: dict[str, Any] = {f"weight {name}": param for name, param in self.params.items()}
        for name, value in self.model.state_dict().items():
            if not isinstance(value, Tensor):
                found[f"extra {name}"] = copy.deepcopy(value)
            elif name not in self.params:
                found[f"buffer {name}"] = value
        return found | self.states()

    def states(self) -> dict[str, Any]:
        """What a checkpoint holds of the optimizer."""
        found: dict[str, Any] = {}
        names = {param: name for name, param in self.params.items()}
        for number, group in enumerate(self.optimizer.param_groups):
            settings = {k: v for k, v in group.items() if k not in ("params", "foreach", "fused", "capturable")}
            found[f"settings {number}"] = copy.deepcopy(settings)
            for param in group["params"]:
                for entry, value in (self.optimizer.state.get(param) or {}).items():
                    found[f"state {entry} of {names[param]}"] = value
        return found

    def schedule(self) -> Any:
        """The scheduler's state."""
        return None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict())

    def put_schedule(self, state: Any) -> None:
        """Gives the scheduler a state."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(state))


def _moving(model: Any) -> list[Any]:
    """What forwards of a model move: buffers, and what is in extra states."""
    found: list[Any] = list(model.buffers())
    return found + [part for part in model.modules() if getattr(part, "kind", "") == "extra"]


def _put(moving: list[Any], held: list[Any]) -> None:
    for one, before in zip(moving, held, strict=True):
        if isinstance(one, Tensor):
            one.copy_(before)
        else:
            one.seen.clear()  # the same dict: a state that was kept as it is shows what comes later
            one.seen.update(copy.deepcopy(before.seen))


class Snapshot:
    """A twin's state at a moment, and how it gets it back; `alias`: with tensors in which shows what comes later."""

    def __init__(self, twin: Run, alias: bool = False) -> None:
        self._copied: Callable[[Any], Any] = (lambda state: state) if alias else copy.deepcopy
        self.model = self._copied(twin.model.state_dict())
        self.optimizer = self._copied(twin.optimizer.state_dict())
        self.schedule = twin.schedule()

    def give(self, twin: Run) -> None:
        """Puts it into a twin."""
        self.give_weights(twin, "*")
        self.give_states(twin)

    def give_states(self, twin: Run) -> None:
        """Puts the optimizer's state and the scheduler's into a twin."""
        twin.optimizer.load_state_dict(self._copied(self.optimizer))  # which puts the tensors of an alias into use again
        twin.put_schedule(self.schedule)

    def give_weights(self, twin: Run, pattern: str, extras: bool = True) -> None:
        """Puts what has these names in the model into a twin; `extras`: also what is no tensor."""
        matching = {name: value for name, value in self.model.items() if fnmatch.fnmatchcase(name, pattern)}
        chosen = {name: value for name, value in matching.items() if extras or isinstance(value, Tensor)}
        twin.model.load_state_dict(copy.deepcopy(chosen), strict=False)

"""Plays programs of pipelines: sharded stages under torch's schedules, and the plain model with all data ranks' batches.

Each action is done on the sharded side, then on the twin. Weights, gradients and states are compared when they are about to
be used, and at the end. What torch's schedules do to gradients, the twin does too: they divide them by the number of
micro-batches at the end of each step, and of each evaluation; they drop them when they are new, and when a step comes
behind an evaluation or the other way round, because they run a forward and backward of their own then.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import hsdp
from hsdp import checkpoint
from tests.soak.actions.play import watched
from tests.soak.optimizers.models import WIDTH
from tests.soak.optimizers.play import alike, attempt, beside, differences, meet
from tests.soak.optimizers.states import own_folder
from tests.soak.pipelines.programs import V_SHAPED, Action, Plan, Program
from tests.soak.pipelines.stages import Planned, Stage, shard
from tests.soak.verdicts import Over, Verdict, Wrong, judging
from tests.support import device as emulator
from tests.support.rig import RankEnv

TOLERANCE = 1e-10
TOLERANCE_OF_FLOAT32 = 1e-4
ROWS = 2
COMPARED_BEFORE = ("optimize", "clip", "save", "write", "eval", "fail")


def play(env: RankEnv, program: Program) -> Verdict:
    """Plays one program on this rank."""
    verdict = Verdict()
    if env.device == emulator.NAME and program.schedule == "1F1B" and program.size[0] > 1:
        return verdict  # of a batch its group runs one after the other: neighbours that both send first wait for ever
    with judging(verdict), warnings.catch_warnings(), watched(env, program.seed):
        warnings.simplefilter("ignore")
        playing = _Play(env, program, verdict)
        with suppress(Over), beside(env, program.seed):
            playing.all()
    return verdict


def _optimizer(plan: Plan, stage: Any, local: bool) -> Any:
    name, wrap = plan.optimizer
    if name == "SGD":
        made: Any = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)
    else:
        made = torch.optim.AdamW(stage.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)
    return hsdp.optim.local(made, flat="flat" in wrap, over_replicas="over" in wrap) if local and wrap else made


class _Play:
    """Both sides. The sharded one has the stages of this rank in `sharded` and `optimizers`, by their number."""

    def __init__(self, env: RankEnv, program: Program, verdict: Verdict) -> None:
        self.env, self.program, self.verdict, self.doing = env, program, verdict, "the beginning"
        self.device = torch.device(env.device)
        pipeline, data = program.size
        self.mesh = env.mesh((pipeline, data), ("pp", "dp"))
        self.rank, self.data_rank = self.mesh.get_coordinate()  # type: ignore[misc]
        self.mine = program.mine(self.rank)
        torch.manual_seed(7)
        self.plain = [Stage(plan) for plan in program.stages]
        self.twins = [_optimizer(plan, stage, False) for plan, stage in zip(program.stages, self.plain, strict=True)]
        self.sharded: dict[int, Any] = {}
        self.optimizers: dict[int, Any] = {}
        for at, plan in enumerate(program.stages):
            mesh = self.mesh["dp"]
            if len(plan.mesh) > 1:  # on all ranks: making a mesh makes its groups
                mesh = env.mesh((pipeline, *plan.mesh), ("pp", "replicate", "shard"))["replicate", "shard"]
            if at in self.mine:
                stage = copy.deepcopy(self.plain[at]).to(self.device)
                for layer in stage.layers:
                    layer.tie()  # type: ignore[operator]  # torch unties what it moves to a device of an extension
                self.sharded[at] = shard(stage, plan, mesh)
                self.optimizers[at] = _optimizer(plan, stage, True)
        narrow = any(plan.precision for plan in program.stages)
        self.tolerance = TOLERANCE_OF_FLOAT32 if narrow else TOLERANCE
        self.factors: dict[str, Any] = {"scale": 1.0, "divide": None, "op": "avg"}
        self.saved: Any = None
        self.inferred: bool | None = None  # for a step (True) or an evaluation; None: the schedule is new
        self.make_schedule()

    def all(self) -> None:
        for at, action in enumerate(self.program.actions):
            self.doing = f"action {at} {action}"
            if not self.applies(action):
                continue
            if action[0] in COMPARED_BEFORE:
                self.compare()
            _, error = attempt(getattr(self, action[0]), at, *action[1:])
            if isinstance(error, Wrong):
                raise error
            if error is not None:
                raise Wrong(f"{type(error).__name__} in {action[0]}", f"{self.doing}\n{error.__dict__['stack']}")
        self.doing = "the end"
        self.compare()
        for at, stage in self.sharded.items():
            hsdp.check_replicas(stage, self.optimizers[at])

    def applies(self, action: Action) -> bool:
        """Whether an action can be done where it stands."""
        program = self.program
        single, alone = program.schedule in ("GPipe", "1F1B"), program.size[0] == 1
        if action[0] == "eval":  # between neighbours on one rank torch hands gradients on, which an evaluation has none of
            return single or (not alone and program.schedule not in V_SHAPED)
        if action[0] == "fail":  # several ranks of a pipeline would wait for each other, and for what was sent before
            return self.inferred is True and alone
        return action[0] != "restore" or self.saved is not None

    # -- the schedule ---------------------------------------------------------------------------------------------------

    def make_schedule(self) -> None:
        program, shapes = self.program, {}
        if program.static:
            rows = torch.empty(ROWS, WIDTH, dtype=torch.float64, device=self.device)
            shapes = {"input_args": rows, "output_args": rows.clone().requires_grad_()}
        pipe = []
        for at, stage in self.sharded.items():
            if at and shapes:
                shapes["input_args"] = rows.clone().requires_grad_()
            group = self.mesh["pp"].get_group()
            pipe.append(PipelineStage(stage, at, len(program.stages), self.device, group=group, **shapes))
        kind: Any = get_schedule_class(program.schedule)
        takes = pipe[0] if issubclass(kind, PipelineScheduleSingle) else pipe
        self.schedule = kind(takes, program.micro, loss_fn=self.loss, scale_grads=program.scales)
        self.inferred = None

    def loss(self, out: Tensor, target: Tensor, last: Any = None) -> Tensor:
        last = self.sharded[len(self.plain) - 1] if last is None else last
        loss = (out - target).square().mean()
        return loss + last.aux if last.tells else loss

    def batch(self, at: int, data_rank: int) -> tuple[Tensor, Tensor]:
        seeded = torch.Generator().manual_seed(1000 * at + data_rank)
        x, y = torch.randn(2, ROWS * self.program.micro, WIDTH, dtype=torch.float64, generator=seeded)
        return x, y

    def run(self, at: int, call: Any) -> list[Tensor]:
        """Calls the schedule; returns the losses, on the rank that has the last stage."""
        x, y = (tensor.to(self.device) for tensor in self.batch(at, self.data_rank))
        ends = len(self.plain) - 1 in self.mine
        losses: list[Tensor] = []
        told = {"target": y, "losses": losses} if ends else {}
        call(*((x,) if 0 in self.mine else ()), **told)
        return losses

    def begin(self, trains: bool) -> None:
        """What a schedule's own forward and backward do to gradients."""
        if self.inferred is not trains:
            self.inferred = trains
            for param in self.twin_params():
                param.grad = None

    def twin_params(self) -> list[nn.Parameter]:
        return [param for stage in self.plain for param in stage.parameters()]

    def scale(self) -> None:
        for param in self.twin_params() if self.program.scales else ():
            if param.grad is not None:
                param.grad /= self.program.micro

    def add(self, run: Any) -> None:
        """Adds to the twin's gradients what hsdp makes of those that `run` computes for each data rank."""
        before = [param.grad for param in self.twin_params()]
        for param in self.twin_params():
            param.grad = None
        for data_rank in range(self.program.size[1]):
            run(data_rank)
        divisor = self.factors["divide"] or (1.0 if self.factors["op"] == "sum" else self.program.size[1])
        for param, old in zip(self.twin_params(), before, strict=True):
            if param.grad is not None:
                param.grad *= self.factors["scale"] / divisor
                param.grad += 0 if old is None else old
            else:
                param.grad = old

    def step(self, at: int, context: str) -> None:
        with ExitStack() as around:
            for stage in self.sharded.values() if context else ():
                around.enter_context(stage.no_sync() if context == "no_sync" else stage.accumulate(last=context == "last"))
            ours = self.run(at, self.schedule.step)
        self.begin(trains=True)
        theirs: dict[int, list[Tensor]] = {}

        def forwards(data_rank: int) -> None:
            theirs[data_rank] = self.twin_losses(at, data_rank)
            sum(theirs[data_rank]).backward()  # type: ignore[union-attr]

        self.add(forwards)
        self.scale()
        self.check_losses(ours, theirs[self.data_rank])

    def twin_losses(self, at: int, data_rank: int) -> list[Tensor]:
        losses = []
        for rows, target in zip(*(tensor.chunk(self.program.micro) for tensor in self.batch(at, data_rank)), strict=True):
            for stage in self.plain:
                rows = stage(rows)
            losses.append(self.loss(rows, target, self.plain[-1]))
        return losses

    def check_losses(self, ours: list[Tensor], theirs: list[Tensor]) -> None:
        pairs = [[("the losses", torch.stack(some).detach())] for some in (ours, theirs) if some]
        self.meet(differences(*pairs, self.tolerance) if ours else [])

    def eval(self, at: int, no_grad: bool) -> None:
        with torch.set_grad_enabled(not no_grad):
            ours = self.run(at, self.schedule.eval)
        self.begin(trains=False)
        self.scale()
        with torch.no_grad():
            self.check_losses(ours, self.twin_losses(at, self.data_rank))

    def fail(self, at: int, place: float) -> None:
        program = self.program
        self.sharded[int(place * len(program.stages))].raises_in = int(place * 97) % program.micro
        try:
            self.run(at, self.schedule.step)
        except RuntimeError as error:
            if not isinstance(error.__cause__, Planned):
                raise
        else:
            raise AssertionError("nothing was raised")
        for stage in self.sharded.values():
            stage.raises_in = None
            stage.set_is_last_backward(True)  # of a stage that did not raise itself nobody has said so
            for module in stage.modules():
                if isinstance(module, hsdp.HSDPModule):
                    module.reshard()  # what another stage was to show to the schedule's next backward
        self.zero(at, "module none" if place < 0.5 else "none")
        self.make_schedule()

    def remake(self, at: int) -> None:
        self.make_schedule()

    def solo(self, at: int) -> None:
        for stage in self.sharded.values():
            stage.set_requires_gradient_sync(True)  # a step that failed has left it off
            stage(self.batch(at, self.data_rank)[0][:ROWS].to(self.device)).pow(2).mean().backward()
        self.add(lambda rank: [s(self.batch(at, rank)[0][:ROWS]).pow(2).mean().backward() for s in self.plain])

    # -- between steps --------------------------------------------------------------------------------------------------

    def sides(self) -> list[tuple[Any, Any]]:
        """Each stage of this rank with its optimizer, and those of the twin."""
        mine = [(self.sharded[at], self.optimizers[at]) for at in self.mine]
        return [*mine, *zip(self.plain, self.twins, strict=True)]

    def optimize(self, at: int) -> None:
        for _, optimizer in self.sides():
            optimizer.step()

    def clip(self, at: int, largest: float) -> None:
        wrong = []
        theirs = [torch.nn.utils.clip_grad_norm_(stage.parameters(), largest) for stage in self.plain]
        for number, stage in self.sharded.items():
            ours = hsdp.clip_grad_norm_(stage, largest)
            wrong += differences([("the norm", ours.double())], [("the norm", theirs[number].double())], self.tolerance)
        self.meet(wrong)

    def zero(self, at: int, kind: str) -> None:
        who, _, how = kind.partition(" ")
        for stage, optimizer in self.sides():
            if how:
                (stage if who == "module" else optimizer).zero_grad(set_to_none=how == "none")
            for param in stage.parameters() if not how else ():
                if kind == "none":
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def freeze(self, at: int, name: str, flag: bool) -> None:
        for stage, _ in self.sides():
            for found, param in stage.named_parameters():
                if name in found and not found.startswith("layers.0.") and ".base." not in found:
                    param.requires_grad_(not flag)

    @torch.no_grad()
    def write(self, at: int, kind: str) -> None:
        for stage, _ in self.sides():
            if kind == "load":
                stage.load_state_dict({name: value * 0.9 for name, value in stage.state_dict().items()})
            for param in stage.parameters() if kind != "load" else ():
                if kind == "in place":
                    param.mul_(0.9)
                else:
                    param.data.mul_(0.9)

    def save(self, at: int) -> None:
        group = self.mesh["dp"].get_group()
        # Of this group of ranks: a directory stays that of the process that saved to it first.
        folder = f"{own_folder()}/{self.program.size[1]} at {self.env.rank - self.data_rank}"
        paths = {}
        for number, stage in self.sharded.items():
            handle = checkpoint.save(f"{folder}/{number}", stage, self.optimizers[number], step=at, process_group=group)
            paths[number] = handle.wait()
        self.saved = (
            paths,
            copy.deepcopy([(s.state_dict(), o.state_dict()) for s, o in zip(self.plain, self.twins, strict=True)]),
        )

    def restore(self, at: int) -> None:
        paths, states = self.saved
        group = self.mesh["dp"].get_group()
        for number, stage in self.sharded.items():
            checkpoint.load(paths[number], stage, self.optimizers[number], process_group=group)
        for stage, optimizer, (weights, state) in zip(self.plain, self.twins, copy.deepcopy(states), strict=True):
            stage.load_state_dict(weights)
            optimizer.load_state_dict(state)

    def factor(self, at: int, name: str, value: Any) -> None:
        self.factors[name] = value
        for stage in self.sharded.values():
            stage.set_gradient_scaling_factor(self.factors["scale"])
            stage.set_gradient_divide_factor(self.factors["divide"], recurse=True)
            stage.set_reduce_op_type(self.factors["op"])

    # -- judging --------------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compares weights, gradients and states of this rank's stages; ranks meet here."""
        wrong: list[str] = []
        for number, stage in self.sharded.items():
            twin, states = self.plain[number], self.twins[number].state
            for (name, mine), other in zip(stage.named_parameters(), twin.parameters(), strict=True):
                values = {"value": (mine, other), "gradient": (mine.grad, other.grad)}
                held, theirs = self.optimizers[number].state.get(mine) or {}, states.get(other) or {}
                values |= {f"state {key}": (held.get(key), theirs.get(key)) for key in sorted(held.keys() | theirs.keys())}
                for what, (ours, twins) in values.items():
                    if ours is None or twins is None:
                        wrong += [f"{what} of {number}.{name} is {'None' if ours is None else 'a tensor'}"] * (
                            ours is not twins
                        )
                        continue
                    ours, twins = alike(ours.detach(), twins.detach())
                    label = f"{what} of {number}.{name}"
                    wrong += differences([(label, ours.double())], [(label, twins.double())], self.tolerance)
        self.meet(wrong)

    def meet(self, wrong: list[str]) -> None:
        meet(self.env, wrong, self.doing)

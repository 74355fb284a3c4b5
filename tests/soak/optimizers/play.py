"""Plays programs of optimizers on both sides and judges them: equal, a named error that is owed, or a failure.

Each action is done on the sharded side, then on the twin. Gradients, weights and states are compared whenever they are
about to be used, and at the end. A program ends with the first error, be it owed or one that both sides raise.
"""

from __future__ import annotations

import re
import traceback
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import hsdp
from tests.soak import unasked
from tests.soak.actions.play import watched
from tests.soak.optimizers.models import Net
from tests.soak.optimizers.programs import Action, Program, Spec
from tests.soak.optimizers.sides import Sharded, Twin, Values
from tests.soak.verdicts import Over, Verdict, Wrong, judging
from tests.support.rig import RankEnv

TOLERANCE = 1e-10
TOLERANCE_OF_FLOAT32 = 1e-4
TOLERANCE_OF_RATES = 1e-6
"""Of ASGD and of rates that are tensors: both are in float32, in which a device divides by multiplying with the inverse."""
COMPARED_BEFORE = ("step", "clip", "scaled", "move", "save", "replace")

OWED: list[tuple[tuple[str, ...], str, str]] = [
    (
        ("step",),
        "Cannot flatten unevenly sharded tensor",
        "LBFGS flattens gradients, which DTensor refuses for uneven rows",
    ),
    (("step",), "aten.cat.default:? got mixed", "LBFGS takes plain zeros for the gradient of a parameter without one"),
    (
        ("step", "scaled"),
        "StateError: .* is not sharded as .*; load it",
        "`load_state_dict` does not bring shares of states along",
    ),
    (
        ("step", "scaled"),
        "in-place operations that require placement changes",
        "the same of an optimizer of torch's on DTensors",
    ),
    (("move", "restore"), r"whole tensor \(\) in the state dict", "torch gives whole values to parameters without dims"),
]
"""Errors that hsdp may raise where the twin does not: in which actions, a pattern of "Type: message", and why."""


def play(env: RankEnv, program: Program) -> Verdict:
    """Plays one program on this rank."""
    verdict = Verdict()
    with judging(verdict), warnings.catch_warnings(), watched(env, program.seed):
        warnings.simplefilter("ignore")
        with suppress(Over):
            playing = _Play(env, program, verdict)
            with beside(env, program.seed):
                playing.all()
    return verdict


@contextmanager
def beside(env: RankEnv, text: str) -> Iterator[None]:
    """On a device, and for half of the texts of seeds, runs the body on another stream than the model was sharded on."""
    if env.device == "cpu" or zlib.crc32(f"{text}, beside".encode()) % 2:
        yield
        return
    module: Any = torch.get_device_module(env.device)
    before, beside = module.current_stream(), module.Stream()
    beside.wait_stream(before)
    with module.stream(beside):
        yield
    before.wait_stream(beside)


class _Play:
    def __init__(self, env: RankEnv, program: Program, verdict: Verdict) -> None:
        self.env, self.program, self.verdict = env, program, verdict
        self.doing = "the beginning"
        self.unseen: list[tuple[str, Tensor, Tensor]] = []
        narrow = any(part.dtype == "float32" for part in program.parts)
        rates = any(spec.name == "ASGD" or ("lr", "tensor") in spec.settings for spec in program.specs)
        rounds = env.device != "cpu" and rates
        self.tolerance = TOLERANCE_OF_FLOAT32 if narrow else TOLERANCE_OF_RATES if rounds else TOLERANCE
        torch.manual_seed(7)
        plains = [Net(program.parts)]
        plains.append(Net(program.parts))
        plains[1].load_state_dict(plains[0].state_dict())
        made = [attempt(Sharded, program, env, plains[0]), attempt(Twin, program, env, plains[1])]
        self.judge(("made",), made[0][1], made[1][1])
        self.sharded: Sharded = made[0][0]
        self.twin: Twin = made[1][0]

    def all(self) -> None:
        for at, action in enumerate(self.program.actions):
            self.doing = f"action {at} {action}"
            if not self.applies(action):
                continue
            if action[0] in COMPARED_BEFORE and not self.sharded.patient:
                self.compare()
            self.one(at, action)
        self.doing = "the end"
        self.compare()
        for optimizer in self.sharded.optimizers:
            hsdp.check_replicas(self.sharded.model, optimizer)

    def applies(self, action: Action) -> bool:
        """Whether an action can be judged where it stands."""
        kind, optimizers = action[0], self.sharded.specs
        if kind == "cast" and action[1] == "float32":
            self.tolerance = TOLERANCE_OF_FLOAT32
        if kind == "clip" and action[1].endswith("inf"):
            return all(param.numel() for param in self.twin.params.values())  # torch has no largest of nothing
        if kind in ("save", "move") and "dcp" in action[1]:
            return not self.program.overlap and all(map(_suits_torch, optimizers, self.twin.optimizers))
        return True

    def one(self, at: int, action: Action) -> None:
        name = action[0]
        pending = name == "zero" and unasked.pending(self.sharded.model)
        ours, error = attempt(getattr(self.sharded, name), at, *action[1:])
        theirs, twins = attempt(getattr(self.twin, name), at, *action[1:])
        if error is None and twins is not None:
            _, error = attempt(self.sharded.wait)  # a device tells late what a kernel raised
        self.judge(action, error, twins)
        if pending:
            self.twin.show_zeros(self.sharded)
        for (what, mine), (_, other) in zip(ours, theirs, strict=True):
            self.unseen.append((f"{what} in {self.doing}", mine, other))
        if not self.sharded.patient:
            self.see()

    def judge(self, action: Action, error: Exception | None, twins: Exception | None) -> None:
        """Judges errors of both sides in an action; whatever is right ends the program."""
        if error is None and twins is None:
            return
        told = "" if error is None else f"{type(error).__name__}: {error}"
        told_by_twin = "" if twins is None else f"{type(twins).__name__}: {twins}"
        if type(error) is type(twins):
            self.verdict.named[f"{type(error).__name__} of both sides in {action[0]}"] += 1
            raise Over
        if error is not None and any(action[0] in at and re.search(pattern, told) for at, pattern, _ in OWED):
            self.verdict.named[f"{type(error).__name__} in {action[0]}"] += 1
            raise Over
        stack = "" if error is None else error.__dict__["stack"]
        what = "silent where the twin raises" if error is None else f"{type(error).__name__} in {action[0]}"
        raise Wrong(what, f"{self.doing}\n{told}\nthe twin: {told_by_twin}\n{stack}")

    def see(self) -> None:
        """Compares what actions told; ranks meet here."""
        wrong = [told for what, mine, other in self.unseen for told in self.off(what, mine, other)]
        self.unseen.clear()
        self.same(wrong)

    def compare(self) -> None:
        """Compares weights, gradients and states of both sides; ranks meet here."""
        self.sharded.model.flush()
        self.see()
        wrong: list[str] = []
        for name, param in self.sharded.params.items():
            other = self.twin.params[name]
            wrong += self.off(f"value of {name}", param, other)
            wrong += self.off(f"gradient of {name}", param.grad, other.grad)
        for number, (ours, theirs) in enumerate(zip(self.sharded.optimizers, self.twin.optimizers, strict=True)):
            wrong += self.off(f"rates of optimizer {number}", _rates(ours), _rates(theirs))
            for name, param in self.sharded.params.items():
                mine, twins = (one.state.get(p) or {} for one, p in ((ours, param), (theirs, self.twin.params[name])))
                if self.sharded.specs[number].name == "LBFGS":
                    continue  # flat, in the order of what a rank holds
                if mine.keys() != twins.keys():
                    wrong.append(f"state of {name} has {sorted(mine)}, not {sorted(twins)}")
                    continue
                for key in mine:
                    wrong += self.off(f"state {key} of {name}", mine[key], twins[key])
        self.same(wrong)

    def off(self, what: str, mine: Any, other: Any) -> Iterator[str]:
        """What is wrong about a value of ours."""
        if mine is None or other is None:
            if mine is not other:
                yield f"{what} is {'None' if mine is None else 'a tensor'}"
            return
        if not isinstance(mine, Tensor):
            mine, other = torch.as_tensor(mine, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
        mine, other = alike(mine.detach(), other.detach())
        if what.startswith("state") and not mine.ndim:  # a number of steps, say: loads may change its dtype
            mine, other = mine.double(), other.double()
        yield from differences([(what, mine)], [(what, other)], self.tolerance)

    def same(self, wrong: list[str]) -> None:
        meet(self.env, wrong, self.doing)


def meet(env: RankEnv, wrong: list[str], doing: str) -> None:
    """Raises on all ranks what is wrong on some, behind what they were `doing`."""
    found: list[list[str]] = [[]] * env.world_size
    some = torch.tensor([float(bool(wrong))])
    dist.all_reduce(some)
    if some.item():
        dist.all_gather_object(found, wrong)
        first = next(filter(None, found))[0]
        raise Wrong(re.sub(r" of .*| differs.*| is .*", "", first), f"{doing}\n" + "\n".join(map(str, found)))


def alike(mine: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Local tensors of both where these are easily found, else whole ones."""
    if not isinstance(mine, DTensor):
        return mine, other
    cut = [axis for axis, placement in enumerate(mine.placements) if not isinstance(placement, Replicate)]
    if len(cut) > 1 or any(type(mine.placements[axis]) is not Shard for axis in cut) or mine.shape != other.shape:
        return mine.full_tensor(), other
    for axis in cut:
        dim, ranks = mine.placements[axis].dim, mine.device_mesh.size(axis)  # type: ignore[attr-defined]
        parts, at = other.chunk(ranks, dim), mine.device_mesh.get_local_rank(axis)
        other = parts[at] if at < len(parts) else other.narrow(dim, 0, 0)
    return mine.to_local(), other


def differences(ours: Values, theirs: Values, tolerance: float) -> list[str]:
    """What differs between tensors of both sides by more than a tolerance, relative and absolute."""
    wrong = []
    for (what, mine), (_, other) in zip(ours, theirs, strict=True):
        mine = mine.cpu()
        if tolerance > TOLERANCE:
            mine, other = mine.double(), other.double()  # torch's load casts states to the parameters' dtype
        if mine.shape != other.shape or mine.dtype != other.dtype:
            wrong.append(f"{what} is of {tuple(mine.shape)} {mine.dtype}, not {tuple(other.shape)} {other.dtype}")
        elif not torch.allclose(mine, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            wrong.append(f"{what} differs by {(mine - other).abs().max().item():.3g}")
    return wrong


def _rates(optimizer: Any) -> list[float]:
    return [
        float(group[key]) for group in optimizer.param_groups for key in ("lr", "weight_decay", "momentum") if key in group
    ]


def _suits_torch(spec: Spec, optimizer: Any) -> bool:
    """Whether torch's functions for states bring a state to another optimizer as it is.

    An optimizer without a state takes a step to have one, states of frozen parameters and groups without parameters are
    left out, and numbers are rounded where a load has given them another dtype than a new optimizer's.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stepped = all(bool(optimizer.state.get(param)) is param.requires_grad for param in params)
    filled = all(group["params"] for group in optimizer.param_groups)
    return stepped and filled and spec.name not in ("LBFGS", "NAdam", "ASGD")


def attempt(call: Any, *args: Any) -> tuple[Any, Exception | None]:
    """What a call returns, and its error, which has its `stack`."""
    try:
        return call(*args), None
    except Exception as error:
        error.__dict__["stack"] = "".join(traceback.format_exception(error))[-2500:]
        return [], error

"""Plays programs of user actions on both sides and judges them: equal, a named error that is owed, or a failure.

Each action is done on the sharded side first, then on the twin. If both raise the same, or the sharded side refuses the
action by name where `EXCUSES` allow it, the twin forgets the action: a failed action must leave nothing. Gradients and
parameters are compared whenever nothing is pending and gradients are about to be used, and at the end.
"""

from __future__ import annotations

import re
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hsdp import HSDPModule
from hsdp.errors import DivergenceError
from tests.soak.actions.excuses import excuse_for
from tests.soak.actions.fsdp2 import FSDP2
from tests.soak.actions.models import Planned
from tests.soak.actions.programs import Action, Program
from tests.soak.actions.sides import Sharded, Side, Twin, Values, on_device, sides_of
from tests.soak.verdicts import Verdict, Wrong, judging, play_each
from tests.support import device as emulator
from tests.support.rig import RankEnv

TOLERANCE = 1e-10
TOLERANCE_OF_FLOAT32 = 3e-5
_OF_AUTOGRAD = "|".join(
    (
        "in-?place operation",
        r"this checkpoint\(\) is not necessary",
        "does not require grad",
        "A different number of tensors was saved",
        "cached during selective activation checkpoint has been mutated",
    )
)


def run_programs(env: RankEnv, programs: list[Program], system: str = "hsdp") -> list[Verdict]:
    """On a worker: plays programs up to the first that fails, see `play_each`."""
    return play_each(programs, lambda program: play(env, program, system))


def play(env: RankEnv, program: Program, system: str = "hsdp") -> Verdict:
    """Plays one program on this rank."""
    verdict = Verdict()
    program = on_device(program) if env.device == emulator.NAME else program
    kinds = [action[0] for action in program.actions]
    with judging(verdict), watched(env, program.seed, moves="stream" in kinds[1:]):
        sharded, twin = sides_of(program, env, FSDP2 if system == "fsdp2" else Sharded)
        _Play(env, program, sharded, twin, verdict).all()
    return verdict


@contextmanager
def watched(env: RankEnv, text: str, moves: bool = False) -> Iterator[None]:
    """On the emulated device: delays that the text of a seed chooses, and an AssertionError if there was a race.

    For half of the texts memory is poisoned as soon as it is freed, unless the body `moves` between streams: what autograd
    and optimizers made on one, and users let go on another, is theirs to order. Behind it, a device's current stream is the
    one from before.
    """
    if env.device == "cpu":
        yield
        return
    seed = zlib.crc32(text.encode())
    modes = [*emulator.MODES]
    emulated: Any = nullcontext()
    if env.device == emulator.NAME:
        emulated = emulator.watched(modes[seed % len(modes)], seed % 1000, poison_free=seed % 2 == 0 and not moves)
    module: Any = torch.get_device_module(env.device)
    before = module.current_stream()
    try:
        with emulated:
            yield
    finally:
        module.set_stream(before)


class _Play:
    def __init__(self, env: RankEnv, program: Program, sharded: Sharded, twin: Twin, verdict: Verdict) -> None:
        self.env, self.program, self.sharded, self.twin, self.verdict = env, program, sharded, twin, verdict
        self.pending = False  # whether sums were, before the action
        self.zeroed = False  # a zero gradient and none are the same from now on
        self.levels = {"gradient_sync": True, "all_reduce": True}
        self.runs_on = False  # reductions may run on behind a backward: their sums are not in `.grad` yet
        self.facts: dict[int, set[str]] = {}  # by slot, what has happened since its forward, and in it
        self.uneven_slots: set[int] = set()
        self.always: set[str] = {"max_norm"} if program.max_norm else set()
        self.late = ""  # a difference of values, told at the next comparison, where all ranks meet
        # Half of the programs are looked at when they are over: a look lands what is on its way, and waits for the device.
        self.patient = zlib.crc32(f"{program.seed}, patient".encode()) % 2 == 1
        self.unseen: list[tuple[str, Tensor, Tensor]] = []
        self.doing = "the beginning"
        self.tolerance = TOLERANCE_OF_FLOAT32 if program.reduces_in else TOLERANCE

    def all(self) -> None:
        for at, action in enumerate(self.program.actions):
            self.doing, self.pending = f"action {at} {action}", self.sharded.pending()
            if not self.applies(action):
                continue
            looks = action[0] in ("step", "clip", "raw step", "hook", "unhook") and not self.patient
            if looks and not self.pending:
                self.compare()
            self.one(at, action)
        self.doing = "the end"
        if self.sharded.lost():
            for side in (self.sharded, self.twin):
                side.zero(-1, "none")
        for what in ("gradient_sync", "all_reduce", "last_backward"):
            self.sharded.set(-1, what, True)
        self.sharded.flush(-1)
        self.compare()
        self.compare_replicas()
        self.sharded.end()

    def applies(self, action: Action) -> bool:
        """Whether an action can be judged where it stands."""
        kind, pending = action[0], self.pending or self.runs_on
        if self.env.device != "cpu" and kind == "forward" and {"heads", "gradient penalty"} <= _facts_of(action[2]):
            return False  # hsdp's limits: on a device, all ranks must use the same units in a gradient penalty
        if kind in ("hook", "unhook"):
            return not pending  # it would see sums of backwards before it, which the twin's hooks saw already
        if kind == "scale":
            # What is visible is scaled, and sums are not; parts of shares, which lie in stripes, are refused.
            return not pending and not (action[1] == "rows" and self.program.local == "over replicas")
        if kind == "assign" and self.program.max_norm:
            return False  # the forward in it would be refused
        if kind == "restore":
            return self.sharded.saved is not None and self.twin.saved is not None
        if kind in ("sam", "assign", "surgery"):
            return not pending and not (kind == "sam" and self.program.local == "over replicas")  # each has a share there
        if kind == "noise":
            return not pending and not self.zeroed  # zeros may stand where no rank used a parameter
        if kind == "set" and action[1] in self.levels:
            self.levels["all_reduce"] = action[2]  # FSDP2's `set_requires_gradient_sync` switches both
            if action[1] == "gradient_sync":
                self.levels["gradient_sync"] = action[2]
        if kind == "set" and action[1] == "last_backward":
            self.runs_on = self.runs_on or not action[2]
        if kind == "backward" and "penalty" in action[2] and action[2].get("hook", ("",))[0] == "step":
            return False  # autograd hands on the penalty's gradient first: the optimizer steps before the units' backward
        if kind == "backward" and "hook" in action[2]:
            # Hooks on sharded parameters run when gradients are complete, the twin's in each backward.
            return all(self.levels.values()) and not pending and action[2].get("context", "") in ("", "last")
        if kind == "tune" and action[1] in ("gather", "scatter") and pending:
            return False  # parameters may have to be laid out anew, which loses sums: refused
        if kind == "penalty":
            return any(p.requires_grad for p in self.twin.params.values())
        return True

    # -- one action ----------------------------------------------------------------------------------------------

    def one(self, at: int, action: Action) -> None:
        facts, kind = self.note(action), action[0]
        uneven = self.uneven(action)
        if uneven:
            theirs, twins_error = self.twins(at, action)
            if twins_error is not None:  # neither side does it: what an action that fails does is tried with even losses
                self.twin.forget()
                self.drop(action)
                return
        ours, error = _attempt(self.sharded, at, action)
        if error is not None and kind in ("step", "raw step", "clip", "surgery", "assign"):
            self.refused(action, error, facts, None)
            return
        if not uneven:
            theirs, twins_error = self.twins(at, action)
        if error is None and twins_error is None:
            self.same_values(ours, theirs)
            if kind == "zero" and "pending" in facts:
                self.twin.show_zeros(self.sharded)
            return
        self.twin.forget()
        self.drop(action)
        for side in (self.sharded, self.twin):
            if kind in ("penalty", "sam") or (
                kind == "backward" and ("penalty" in action[-1] or action[-1].get("hook", ("",))[0] == "step")
            ):
                side.zero(at, "none")  # nobody takes back what autograd gave to sharded parameters, or a hook's optimizer
        if kind == "backward" and action[-1].get("hook", ("",))[0] == "step":
            self.twin.adopt(self.sharded)
        if error is None:
            message = f"{type(twins_error).__name__}: {twins_error}"
            if excuse_for("silent", message, action[0], facts) is None:
                raise Wrong("silent where the twin raises", f"{self.doing}\n{message}")
            for side in (self.sharded, self.twin):
                side.zero(at, "none")
            return
        self.refused(action, error, facts, twins_error)

    def drop(self, action: Action) -> None:
        """Forgets the losses of an action that failed."""
        for side in (self.sharded, self.twin):
            for slot in self.slots_of(action):
                side.slots.pop(slot, None)

    def uneven(self, action: Action) -> bool:
        """Whether ranks' losses use different units in an action: an exception would find them at different points."""
        if action[0] == "forward":
            how = action[2]
            chosen = (how.get("heads", ()), *how.get("cuts", {}).values(), *(cuts for _, cuts in how.get("again", ())))
            self.uneven_slots.discard(action[1])
            self.uneven_slots |= {action[1]} if any(len({*each}) > 1 for each in chosen) else set()
        return not self.uneven_slots.isdisjoint(self.slots_of(action))

    def twins(self, at: int, action: Action) -> tuple[Values, Exception | None]:
        self.twin.remember()
        return _attempt(self.twin, at, action)

    def refused(self, action: Action, error: Exception, facts: set[str], twins: Exception | None) -> None:
        """Judges an error of the sharded side."""
        same = twins is not None and type(error) is type(twins) and str(error)[:50] == str(twins)[:50]
        # The engine decides which of two errors comes first.
        if same or (twins is not None and (isinstance(error, Planned) or re.search(_OF_AUTOGRAD, str(error)))):
            self.verdict.planned += 1
            if wrote := facts & {"max_norm", "copy_ renorm", "data renorm"}:
                self.repair()
                self.always |= wrote  # the next gather tells of it
            return
        message = f"{type(error).__name__}: {error}"
        if self.sharded.ends_with_errors:
            raise Wrong(f"raised {type(error).__name__}", f"{self.doing}\n{message}")
        named = isinstance(error, self.sharded.errors)
        if "wrote to parameter" in message:
            self.repair()
        # Ranks that play the same program never disagree, whatever else fails in it: that is nobody's excuse.
        owed = named and twins is not None and not isinstance(error, DivergenceError)
        if owed or excuse_for(type(error).__name__, message, action[0], facts) is not None:
            self.verdict.named[f"{type(error).__name__} in {action[0]}"] += 1
            return
        stack = error.__dict__["stack"]
        twin_told = f"; the twin: {type(twins).__name__}: {twins}" if twins is not None else ""
        if isinstance(error, Planned) and twins is None:
            raise Wrong("Planned error where the twin runs", f"{self.doing}\n{message}\n{stack}")
        what = f"named, not owed: {type(error).__name__}" if named else f"unnamed {type(error).__name__}"
        raise Wrong(f"{what} in {action[0]}", f"{self.doing}, facts {sorted(facts)}\n{message}{twin_told}\n{stack}")

    def repair(self) -> None:
        """Puts back what a forward wrote: with one shard rank, or replicated, unsharded parameters are the shards."""
        if min(self.program.shards) > 1 and "replicated" not in self.program.options:
            return
        with torch.no_grad():
            for name, param in self.sharded.params.items():
                param.copy_(self.sharded.like(self.twin.params[name].to(self.sharded.device), param))
        for facts in self.facts.values():
            facts.add("write")

    def slots_of(self, action: Action) -> tuple[int, ...]:
        if action[0] in ("forward", "grad", "child", "distill", "transform"):
            return (action[1],)
        return tuple(action[1]) if action[0] == "backward" else ()

    def note(self, action: Action) -> set[str]:
        """Writes down that the action happens; returns what excuses may look at."""
        kind = action[0]
        mine = {kind, *self.always}
        if self.pending:
            mine.add("pending")
            if self.sharded.lost():
                mine.add("lost")
        if kind == "zero" and "none" not in action[1]:
            self.zeroed = True
        told = {"full write": "write", "raw step": "step", "restore": "load"}.get(kind, kind)
        if kind == "backward" and "hook" in action[2]:
            told = action[2]["hook"][0] + " in backward"
        if kind == "toggle" or kind == "unshard":
            self.always.add(kind + "d" * (kind[-1] == "e") + "ed" * (kind[-1] != "e"))
        how = action[2] if kind == "forward" else action[1] if kind == "eval" else {}
        mine |= _facts_of(how)
        for slot, facts in self.facts.items():
            if slot not in self.slots_of(action):
                facts.add(told)
                facts |= _facts_of(how) & {"copy_ renorm", "data renorm"}
        if kind in ("forward", "child", "distill", "transform"):
            mine |= {f"call {action[3]}"} if kind == "forward" else set()
            self.facts[action[1]] = set(mine - {kind})
            return mine
        if kind == "backward":
            mine |= {key for key in action[2] if key != "context"} | {told, action[2].get("context", "")} - {""}
        for slot in self.slots_of(action):
            mine |= self.facts.get(slot, set())
            if kind == "backward":
                self.facts.setdefault(slot, set()).update(("backward", told))
        return mine

    # -- comparisons ---------------------------------------------------------------------------------------------

    def same_values(self, ours: Values, theirs: Values) -> None:
        """Values of one action; told late, as other ranks may have no difference."""
        for (name, mine), (_, other) in zip(ours, theirs, strict=True):
            mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
            self.unseen.append((f"{name} in {self.doing}", mine.detach().clone(), other.detach().clone()))
        if not self.patient:
            self.see()

    def see(self) -> None:
        """Compares values of actions."""
        for what, given, other in self.unseen:
            mine = given.cpu()
            if not self.late and not self.close(mine, other):
                self.late = f"{what} differs by {_off(mine, other)}"
        self.unseen.clear()

    def compare(self) -> None:
        """This rank's shards of parameters and gradients; all ranks learn whether all are right."""
        self.see()
        wrong = [f"the {self.late}"] if self.late else []
        if isinstance(self.sharded.model, HSDPModule):
            for runtime in self.sharded.model._runtimes():
                runtime.settle()  # joins reductions that run on behind a backward
        for name, param in self.sharded.params.items():
            other = self.twin.params[name]
            if not isinstance(param, DTensor):
                wrong.append(f"{name} is a {type(param).__name__}")
                continue
            shard = self.sharded.shard_of(other.detach(), param)
            mine = param._local_tensor.cpu()  # type: ignore[attr-defined]
            if not self.close(mine, shard):
                wrong.append(f"value of {name} differs by {_off(mine, shard)}")
            wrong += self._grad_differs(name, param, other)
        alive = torch.tensor([bool(wrong)], dtype=torch.int64)
        dist.all_reduce(alive)
        if alive.item():
            told = "\n".join(wrong) or "(on other ranks)"
            failure = "wrong values" if not wrong else _class_of(wrong[0])
            raise Wrong(failure, f"before {self.doing}\n{told}")

    def _grad_differs(self, name: str, param: Any, other: Tensor) -> list[str]:
        grad = other.grad
        if param.grad is None and grad is None:
            return []
        if param.grad is None or grad is None:
            if not self.zeroed:
                return [f"gradient of {name} is {'None' if param.grad is None else 'a tensor'}, and should not be"]
            zeros = torch.zeros_like(other) if grad is None else grad
            mine = 0.0 if param.grad is None else param.grad._local_tensor.abs().sum().item()
            off = max(mine, zeros.abs().max().item() if param.grad is None and zeros.numel() else 0.0)
            return [f"gradient of {name} differs from none by {off}"] if not off <= self.tolerance else []
        if not isinstance(param.grad, DTensor):
            return [f"gradient of {name} is a {type(param.grad).__name__}"]
        if self.program.local == "over replicas" and param.grad.placements != param.placements:
            shard, mine_now = grad, param.grad.full_tensor().cpu()
        else:
            # DTensor does not shard what a penalty gives to a parameter with fewer rows than ranks.
            outside = param.grad.placements != param.placements
            shard = grad if outside else self.sharded.shard_of(grad, param)
            mine_now = param.grad._local_tensor.cpu()
        return [] if self.close(mine_now, shard) else [f"gradient of {name} differs by {_off(mine_now, shard)}"]

    def close(self, mine: Tensor, other: Tensor) -> bool:
        at_most = self.tolerance
        if self.program.reduces_in and other.numel():
            # What rounding to float32 leaves of a sum goes by its addends, not by what is left of them.
            mine, at_most = mine.to(other.dtype), at_most * max(1.0, float(other.abs().max()))
        return mine.shape == other.shape and torch.allclose(mine, other, rtol=self.tolerance, atol=at_most)

    def compare_replicas(self) -> None:
        """Ranks that hold the same shards hold the same bits of them, and of their gradients."""
        for mesh in dict.fromkeys([self.sharded.mesh, *self.sharded.others]):
            if mesh.ndim > 1:
                self._compare_replicas(mesh, [p for p in self.sharded.params.values() if p.device_mesh == mesh])

    def _compare_replicas(self, mesh: DeviceMesh, params: list[Any]) -> None:
        # Of an optimizer over replicas each has a share of the gradients.
        grads = [] if self.program.local == "over replicas" else [param.grad for param in params]
        mine = torch.tensor([_bits(params), _bits(grads)], dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(mesh.size(0))]
        dist.all_gather(found, mine, group=mesh.get_group(0))
        unequal = torch.tensor([any(not torch.equal(mine, one) for one in found)], dtype=torch.int64)
        dist.all_reduce(unequal)
        if unequal.item():
            raise Wrong("replicas differ", f"bits {[one.tolist() for one in found]}")


def _attempt(side: Side, at: int, action: Action) -> tuple[Values, Exception | None]:
    method = getattr(side, action[0].replace(" ", "_"))
    try:
        return method(at, *action[1:]), None
    except Exception as error:
        error.__dict__["stack"] = "".join(traceback.format_exception(error))[-1800:]
        # While the frames of a forward that raised are alive, torch's checkpoints inside of it catch what others save.
        error.__context__ = error.__cause__ = None
        return [], error.with_traceback(None)


def _facts_of(how: dict[str, Any]) -> set[str]:
    found = {*how.get("tweaks", {}).values(), *(f"{edit} behind" for edit in how.get("edits", {}).values())}
    return found | {str(how[key]) for key in ("end", "output", "loss") if key in how} | set(how)


def _class_of(wrong: str) -> str:
    words = wrong.split()
    for told in ("gradient of", "value of", "the loss", "the gradient of the input", "the norm"):
        if wrong.startswith(told):
            kind = "is None" if "is None" in wrong else "is not None" if "a tensor, and" in wrong else "differs"
            return f"{told} {kind}" + (" (NaN)" if words[-1] == "nan" or " nan " in wrong else "")
    return "wrong values"


def _off(mine: Tensor, other: Tensor) -> str:
    return f"{(mine - other).abs().max().item():.3g}" if mine.shape == other.shape else f"{mine.shape}, {other.shape}"


def _bits(tensors: list[Any]) -> int:
    found = 0
    for tensor in tensors:
        data = b"none" if tensor is None else tensor._local_tensor.detach().cpu().contiguous().numpy().tobytes()
        found = zlib.crc32(data, found)
    return found

"""Programs of persistence, drawn at random from a seed: plain data, printable and shrinkable.

A `Program` is a model with its optimizer, how both are laid out at first, and a list of actions:

    ("micro", context)               a forward and its backward; `context`: one of `CONTEXTS`
    ("step",)                        of the optimizer and the scheduler, behind which gradients are None
    ("save", kind, keep, again, fault)   keeps the state, see `KINDS`; of files at most `keep`; `again`: under the last step
    ("load", back, fault)            what was kept so many saves ago, into the run itself
    ("resume", fault)                the checkpoint saved last
    ("move", kind, layout, start)    another model, laid out otherwise, takes the state; `start`: one of `STARTS`
    ("part", kind, pattern)          some weights of the last files, the others stay; by `kind`: "files" or "safetensors"
    ("halves",)                      each half of the ranks loads the last checkpoint alone, into a model of its own
    ("verify",)                      files are checked while a save may be under way
    ("mode", training)               `train()` or `eval()`

A fault is (place, count, rank, error): at the `count`-th torch operator ("op") or use of a file ("file"), on one rank or,
for None, on all. What cannot be done where it stands does nothing, so that any part of a program is one too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.soak.persistence import models

Action = tuple[Any, ...]
Fault = tuple[str, int, int | None, str]

CONTEXTS = ("", "", "no_sync", "first", "last")
KINDS = ("files", "files", "files", "async", "async", "full", "full", "safetensors", "dcp", "memory", "bytes", "alias")
"""How a state is kept: checkpoints of hsdp, whole state dicts, safetensors beside a whole optimizer's, torch's
checkpoints; state dicts of the ranks, copied, pickled, or as they are (what comes later shows in them)."""
MOVES = ("files", "files", "async", "full", "full", "safetensors", "dcp", "bytes")
OF_RANKS = ("memory", "bytes", "alias")
STARTS = ("other", "other", "meta", "stepped")
"""What a state is moved into: a model of other weights, one from the meta device, one that has taken steps."""
OPTIMIZERS = ("AdamW", "AdamW", "SGD", "Muon")
SCHEDULES = ("", "lambda", "one cycle")
SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (1, 1)),
    2: ((2,), (2, 1), (1, 2)),
    4: ((4,), (2, 2), (4, 1), (1, 4)),
}
WRAPS = ("", "local", "flat", "over", "flat over")
ERRORS = {"op": ("MemoryError", "RuntimeError"), "file": ("OSError", "OSError", "MemoryError")}


@dataclass(frozen=True)
class Layout:
    """Where a state lies on the ranks: the mesh, which parts are units, how the optimizer steps."""

    shape: tuple[int, ...]
    units: tuple[bool, ...]
    wrap: str = ""
    offload: bool = False
    replicated: bool = False


@dataclass(frozen=True)
class Program:
    """What is trained, and what is done with it."""

    seed: str
    parts: tuple[str, ...]
    optimizer: str
    schedule: str
    layout: Layout
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.parts}, {self.optimizer}, schedule {self.schedule!r}", f"  {self.layout}"]
        return "\n".join([*lines, *(f"    {action}" for action in self.actions)])


@dataclass
class _Draw:
    rng: random.Random
    ranks: int
    parts: tuple[str, ...]
    optimizer: str
    faults: bool

    def layout(self) -> Layout:
        rng = self.rng
        shape, wrap = rng.choice(SHAPES[self.ranks]), rng.choice(WRAPS)
        if self.optimizer == "Muon":  # a step of whole matrices is local as it is
            wrap = "over" if "over" in wrap else ""
        if "over" in wrap and len(shape) == 1:
            wrap = wrap.replace("over", "").strip()
        units = tuple(rng.random() < 0.7 for _ in self.parts)
        return Layout(shape, units, wrap, rng.random() < 0.15, rng.random() < 0.2)

    def fault(self) -> Fault | None:
        rng = self.rng
        if not self.faults or rng.random() < 0.4:
            return None
        place = rng.choice(("op", "file"))
        rank = rng.choice([None, *range(self.ranks)])
        return place, int(rng.expovariate(1 / 12)), rank, rng.choice(ERRORS[place])

    def training(self) -> list[Action]:
        rng = self.rng
        made: list[Action] = [("micro", rng.choice(CONTEXTS)) for _ in range(rng.choice([1, 1, 2, 3]))]
        return made + [("step",)] * (rng.random() < 0.8)

    def saving(self) -> Action:
        rng = self.rng
        return ("save", rng.choice(KINDS), rng.choice([None, 1, 2, 3]), rng.random() < 0.2, self.fault())

    def other(self) -> Action:
        rng = self.rng
        return rng.choice(
            [
                ("load", rng.choice([0, 0, 1, 2]), self.fault()),
                ("load", rng.choice([0, 0, 1, 2]), self.fault()),
                ("resume", self.fault()),
                ("move", rng.choice(MOVES), self.layout(), rng.choice(STARTS)),
                ("move", rng.choice(MOVES), self.layout(), rng.choice(STARTS)),
                ("move", rng.choice(MOVES), self.layout(), rng.choice(STARTS)),
                ("part", rng.choice(["files", "safetensors"]), rng.choice(["parts.0.*", "head.*", "*weight", "*bias"])),
                ("halves",),
                ("verify",),
                ("mode", rng.random() < 0.7),
            ]
        )


def draw(seed: str, ranks: int) -> Program:
    """The program of a seed, for so many ranks."""
    rng = random.Random(seed)
    parts = tuple(rng.choice(models.KINDS) for _ in range(rng.choice([1, 2, 2, 3])))
    drawing = _Draw(rng, ranks, parts, rng.choice(OPTIMIZERS), rng.random() < 0.4)
    layout = drawing.layout()
    actions: list[Action] = []
    for _ in range(rng.choice([2, 3, 4, 5])):
        actions += drawing.training()
        for _ in range(rng.choice([1, 1, 2])):
            actions.insert(rng.randrange(max(0, len(actions) - 3), len(actions) + 1), drawing.saving())
        for _ in range(rng.choice([0, 1, 2])):
            actions.insert(rng.randrange(max(0, len(actions) - 3), len(actions) + 1), drawing.other())
    actions += [*drawing.training(), ("step",)]
    return Program(seed, parts, drawing.optimizer, rng.choice(SCHEDULES), layout, tuple(actions))


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less in them, the boldest first: what a shrinker tries."""
    actions = program.actions
    for size in (len(actions) // 2, len(actions) // 4, 2, 1):
        for start in range(0, len(actions) if size else 0, max(size, 1)):
            yield replace(program, actions=actions[:start] + actions[start + size :])
    for at in range(len(program.parts) if len(program.parts) > 1 else 0):
        yield _without(program, at)
    for simple in ({"schedule": ""}, {"optimizer": "SGD"}):
        if any(getattr(program, name) != value for name, value in simple.items()):
            yield replace(program, **simple)  # type: ignore[arg-type]
    plain = [{"wrap": ""}, {"offload": False}, {"replicated": False}]
    plain.append({"units": (False,) * len(program.parts)})
    for one in plain:
        layout = replace(program.layout, **one)
        if layout != program.layout:
            yield replace(program, layout=layout)
    for at, action in enumerate(actions):
        for other in _simpler(action, plain):
            yield replace(program, actions=(*actions[:at], other, *actions[at + 1 :]))


def _simpler(action: Action, plain: list[dict[str, Any]]) -> Iterator[Action]:
    if action[0] == "save":
        yield from (a for a in ((*action[:2], None, False, action[4]), (*action[:4], None)) if a != action)
    elif action[0] in ("load", "resume") and action[-1] is not None:
        yield (*action[:-1], None)
    elif action[0] == "move":
        layouts = [replace(action[2], **one) for one in plain]
        yield from ((*action[:2], one, action[3]) for one in layouts if one != action[2])
        if action[3] != "other":
            yield (*action[:3], "other")
    elif action == ("micro", "no_sync") or action == ("micro", "first"):
        yield ("micro", "")


def _without(program: Program, at: int) -> Program:
    """The program without one part of its model."""

    def cut(layout: Layout) -> Layout:
        return replace(layout, units=layout.units[:at] + layout.units[at + 1 :])

    actions = tuple((*a[:2], cut(a[2]), a[3]) if a[0] == "move" else a for a in program.actions)
    parts = program.parts[:at] + program.parts[at + 1 :]
    return replace(program, parts=parts, layout=cut(program.layout), actions=actions)

"""Programs of what users do with optimizers, drawn at random from a seed: plain data, printable and shrinkable.

A `Program` is a model, its mesh, its optimizers, and a list of actions; each action is a tuple of its name and arguments:

    ("micro", skipped, context)         a forward without some parts, and its backward; `context`: one of `CONTEXTS`
    ("step", which, how)                of one optimizer, or of all (None); `how`: one of `STEPS`
    ("zero", kind) ("clip", kind)       one of `ZEROS`; one of `CLIPS`
    ("scaled", infinite)                a step under `GradScaler`, on one rank with an infinite loss
    ("set", which, name, factor)        multiplies a setting of the groups of an optimizer
    ("schedule", which, kind) ("tick",) puts a scheduler on an optimizer: one of `SCHEDULES`; steps all schedulers
    ("group", which)                    adds a group of the parameters that were held back
    ("freeze", name, flag)              requires_grad of the parameters that have this in their name
    ("average", kind) ("swap",)         moves averages of weights: one of `AVERAGES`; swaps weights and averages
    ("edit", kind, place)               of a parameter's entries in the state: one of `EDITS`
    ("gradient", kind)                  writes to `.grad`: one of `GRADIENTS`
    ("replace", which, spec)            another optimizer in the place of one
    ("save", kind) ("restore",)         keeps weights and states: one of `SAVES`; goes back to them
    ("move", kind, shape, wrap)         a new model on another mesh with new optimizers, which get weights and states
    ("cast", dtype)                     the model's `to(dtype)`
    ("factor", name, value)             what becomes of sums of gradients from now on: one of `FACTORS`
    ("drop", which)                     takes a parameter and its state out of an optimizer; ("group", ...) takes it back

What cannot be done where it stands does nothing, so that any part of a program is one too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.soak.optimizers.models import CUT, KINDS, Part

Action = tuple[Any, ...]

CONTEXTS = ("", "", "", "no_sync", "first", "last", "late")
STEPS = ("", "", "", "", "closure")
ZEROS = ("optimizer none", "optimizer none", "optimizer zero", "module none", "module zero", "none", "zero_")
CLIPS = ("hsdp", "hsdp inf", "torch", "value")
SCHEDULES = ("one cycle", "plateau", "lambda", "sequential", "cosine", "swa", "cyclic")
AVERAGES = ("ema", "swa", "lerp")
EDITS = ("dict", "clear", "zeros", "halved", "copy", "count", "pop")
FACTORS = (("scale", 0.5), ("scale", 1.0), ("scale", 3.0), ("divide", 3.0), ("divide", None), ("op", "sum"), ("op", "avg"))
GRADIENTS = ("scale", "add", "assign", "none")
SAVES = ("memory", "torch", "files", "full", "dcp", "dcp full", "reload")
MOVES = ("torch", "torch", "files", "full", "dcp", "dcp full")
SHAPES: dict[int, dict[str, tuple[int, ...]]] = {2: {"1d": (2,), "2d": (2, 1)}, 4: {"1d": (4,), "2d": (2, 2)}}
PARALLEL: dict[str, tuple[int, ...]] = {"tp": (2,), "tp 2d": (2, 1)}
"""Meshes of data parallelism at each place of which two ranks share layers: of four ranks."""
OTHERS: dict[int, tuple[tuple[int, ...], ...]] = {2: ((2,), (2, 1), (1, 2)), 4: ((4,), (2, 2), (4, 1), (1, 4))}
WRAPS = ("", "local", "flat", "over", "flat over")
"""What `hsdp.optim.local` makes of an optimizer: nothing, or a step of local tensors, flat ones, of shares of replicas."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.3}],
    "Adam": [{}, {"amsgrad": True}, {"decoupled_weight_decay": True}],
    "AdamW": [{}, {}, {"amsgrad": True}, {"betas": (0.5, 0.9)}],
    "Adagrad": [{}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.2}],
    "RMSprop": [{}, {"momentum": 0.5}, {"centered": True, "alpha": 0.8}],
    "NAdam": [{}, {"decoupled_weight_decay": True}],
    "RAdam": [{"betas": (0.9, 0.9)}, {"betas": (0.5, 0.8), "decoupled_weight_decay": True}],
    "Adamax": [{}],
    "Adadelta": [{}, {"rho": 0.5}],
    "ASGD": [{"t0": 1, "lambd": 0.1}],
    "Rprop": [{"etas": (0.5, 1.2)}],
    "Muon": [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}],
    "Scaled": [{}, {"nesterov": False}],
    "LBFGS": [{"max_iter": 2}, {"max_iter": 3, "line_search_fn": "strong_wolfe"}],
}
"""By class, what it may be made with; `Scaled` is one of `hsdp.optim.whole_matrix`."""
WHOLE = ("Muon", "Scaled")
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
COMMON = ("AdamW", "AdamW", "AdamW", "SGD", "SGD")
"""Drawn more often than the others."""


@dataclass(frozen=True)
class Spec:
    """An optimizer: its class, its settings, how it steps, and over how many groups its parameters go."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    wrap: str = ""
    groups: int = 1

    @property
    def takes_no_dtensors(self) -> bool:
        """Whether torch's step of DTensors raises, under FSDP2 too."""
        return self.name == "Rprop" or (self.name in ("Adagrad", "SGD") and ("fused", True) in self.settings)


@dataclass(frozen=True)
class Program:
    """A model with its mesh and optimizers, and what is done with it.

    Attributes:
        optimizers: they share the model's parameters out in turns.
        hooked: each parameter has an optimizer of its own (the first one's spec), which steps in backward.
        held_back: the parameters of the last part come into an optimizer with ("group", ...) alone.
        overlap: each optimizer has all parameters instead.
        options: "replicated", "sum", "one mesh".
    """

    seed: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    optimizers: tuple[Spec, ...]
    actions: tuple[Action, ...]
    hooked: bool = False
    held_back: bool = False
    overlap: bool = False
    options: frozenset[str] = frozenset()

    @property
    def specs(self) -> list[Spec]:
        """Of all optimizers that it may have at any time."""
        return [*self.optimizers, *(action[2] for action in self.actions if action[0] == "replace")]

    def __str__(self) -> str:
        flags = [name for name in ("hooked", "held_back", "overlap") if getattr(self, name)] + sorted(self.options)
        lines = [f"seed {self.seed}, mesh {self.shape}, {', '.join(flags)}"]
        lines += [f"  {part}" for part in self.parts] + [f"  {spec}" for spec in self.optimizers]
        return "\n".join([*lines, *(f"    {action}" for action in self.actions)])


@dataclass
class _Draw:
    rng: random.Random
    shape: tuple[int, ...]
    tp: int = 1
    hooked: bool = False
    parts: list[Part] = field(default_factory=list)

    def spec(self) -> Spec:
        rng = self.rng
        name = rng.choice(COMMON) if rng.random() < 0.4 else rng.choice(list(VARIANTS))
        empty = any(part.kind == "scaled" for part in self.parts)  # DTensor's `view` of no elements never returns
        if (self.hooked and name in WHOLE) or (name == "LBFGS" and (self.hooked or empty or self.tp > 1)):
            name = "AdamW"
        settings = {**rng.choice(VARIANTS[name])}
        if name not in (*WHOLE, "LBFGS"):
            # torch's fused SGD takes uninitialised memory for momenta where `GradScaler` skips its first step.
            fused = name in FUSED and not (name == "SGD" and "momentum" in settings)
            if rng.random() < 0.4:
                how = rng.choice(["foreach", "foreach", "for-loop", *["fused"] * fused])
                settings |= {"foreach": False} if how == "for-loop" else {how: True}
            if rng.random() < 0.15 and name != "Rprop":
                settings["maximize"] = True
            if name in ("Adam", "AdamW", "SGD") and "foreach" not in settings and rng.random() < 0.1:
                settings["lr"] = "tensor"
        if name not in ("Rprop", "LBFGS") and rng.random() < 0.3:
            settings["weight_decay"] = 0.1
        # With one replica there is nothing to share out, and with parts that all replicas have no difference to see.
        wraps = [*WRAPS, "", "local", "flat"] if len(self.shape) > 1 else ["", "local", "flat"]
        wrap = rng.choice(wraps)
        if name == "LBFGS" or (self.hooked and "over" in wrap):
            wrap = ""
        if name in WHOLE:
            wrap = rng.choice(["", "over"]) if len(self.shape) > 1 else ""
        groups = 1 if name == "LBFGS" or self.hooked else rng.choice([1, 1, 2, 3])
        spec = Spec(name, tuple(settings.items()), wrap, groups)
        return replace(spec, wrap="local") if not wrap and spec.takes_no_dtensors else spec

    def micro(self) -> Action:
        rng = self.rng
        skipped = tuple(at for at in range(len(self.parts)) if rng.random() < 0.15)
        return ("micro", skipped, "" if self.hooked else rng.choice(CONTEXTS))

    def step(self) -> list[Action]:
        """What a step of training is made of, mostly: micro-batches, the step, zeroing."""
        rng = self.rng
        made: list[Action] = [self.micro() for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        if rng.random() < 0.2:
            made.append(("clip", rng.choice(CLIPS)))
        if rng.random() < 0.12 and not self.hooked:
            return [("zero", "module none"), ("scaled", rng.random() < 0.4)]
        which = None if rng.random() < 0.8 else rng.randrange(2)
        made.append(("step", which, rng.choice(STEPS)))
        return [*made, *[("zero", rng.choice(ZEROS))] * (rng.random() < 0.9)]

    def other(self) -> Action:
        rng = self.rng
        which = rng.randrange(2)
        sizes = {math.prod(self.shape), math.prod(self.shape) * self.tp}
        shapes, wrap = [shape for size in sorted(sizes) for shape in OTHERS[size]], rng.choice(WRAPS)
        return rng.choice(
            [
                ("set", which, rng.choice(["lr", "lr", "weight_decay", "betas", "momentum"]), rng.choice([0.3, 0.5, 1.5])),
                ("schedule", which, rng.choice(SCHEDULES)),
                ("tick",),
                ("tick",),
                ("group", which),
                ("freeze", rng.choice(["bias", "weight", "0", "head"]), rng.random() < 0.6),
                ("average", rng.choice(AVERAGES)),
                ("swap",),
                ("edit", rng.choice(EDITS), rng.choice([None, rng.randrange(8)])),
                ("gradient", rng.choice(GRADIENTS)),
                ("replace", which, self.spec()),
                ("save", rng.choice(SAVES)),
                ("save", rng.choice(SAVES)),
                ("restore",),
                ("restore",),
                ("move", rng.choice(MOVES), rng.choice(shapes), wrap),
                ("move", rng.choice(MOVES), rng.choice(shapes), wrap),
                ("cast", rng.choice(["float32", "float64"])),
                ("factor", *rng.choice(FACTORS)),
                ("factor", *rng.choice(FACTORS)),
                ("drop", which),
                ("zero", rng.choice(ZEROS)),
                ("clip", rng.choice(CLIPS)),
            ]
        )


def draw(seed: str, shape: tuple[int, ...], tp: int = 1) -> Program:
    """The program of a seed, on a mesh of data parallelism; `tp`: ranks of tensor parallelism at each of its places."""
    rng = random.Random(seed)
    drawing = _Draw(rng, shape, tp, hooked=rng.random() < 0.1)
    mixed = rng.random() < 0.12
    drawing.parts = [
        Part(rng.choice(KINDS), rng.random() < 0.7, "float32" if mixed and rng.random() < 0.5 else "float64")
        for _ in range(rng.choice([1, 2, 2, 3]))
    ]
    specs = tuple(drawing.spec() for _ in range(1 if drawing.hooked else rng.choice([1, 1, 2])))
    actions: list[Action] = []
    for _ in range(rng.choice([3, 4, 6, 8])):
        actions += drawing.step()
        for _ in range(rng.choice([0, 1, 1, 2])):
            actions.insert(rng.randrange(max(0, len(actions) - 4), len(actions) + 1), drawing.other())
    for at, action in reversed([*enumerate(actions)]):
        if action[0] == "freeze" and action[2]:  # most are thawed again: their counts of steps are others from then on
            actions.insert(rng.randrange(at + 1, len(actions) + 1), ("freeze", action[1], False))
    steps = [at for at, action in enumerate(actions) if action[0] == "step"]
    counts = random.Random(f"{seed}:counts")  # of its own: other actions stay what they were
    if any("flat" in spec.wrap for spec in specs) and len(steps) > 1:  # what steps as one is to have counts in common
        actions.insert(counts.randrange(steps[0], steps[-1]) + 1, ("edit", "count", counts.randrange(8)))
    options = frozenset(name for name, chance in (("replicated", 0.15), ("sum", 0.15)) if rng.random() < chance)
    parts = tuple(drawing.parts)
    if tp > 1:
        cuts = random.Random(f"{seed}:tp")
        parts = tuple(replace(part, cut=part.kind in CUT and cuts.random() < 0.8) for part in parts)
        options |= {"one mesh"} if cuts.random() < 0.4 else set()
    return Program(
        seed,
        shape,
        parts,
        specs,
        tuple(actions),
        hooked=drawing.hooked,
        held_back=not drawing.hooked and rng.random() < 0.2,
        overlap=not drawing.hooked and len(specs) > 1 and rng.random() < 0.4,
        options=options,
    )


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less in them, the boldest first: what a shrinker tries."""
    actions = program.actions
    for size in (len(actions) // 2, len(actions) // 4, 2, 1):
        for start in range(0, len(actions) if size else 0, max(size, 1)):
            yield replace(program, actions=actions[:start] + actions[start + size :])
    for name in ("parts", "optimizers"):
        for at in range(len(getattr(program, name)) if len(getattr(program, name)) > 1 else 0):
            yield replace(program, **{name: getattr(program, name)[:at] + getattr(program, name)[at + 1 :]})
    for name, plain in (("hooked", False), ("held_back", False), ("overlap", False), ("options", frozenset())):
        if getattr(program, name) != plain:
            yield replace(program, **{name: plain})
    for at, spec in enumerate(program.optimizers):
        fewer = [replace(spec, settings=spec.settings[:n] + spec.settings[n + 1 :]) for n in range(len(spec.settings))]
        for other in (replace(spec, groups=1), replace(spec, wrap=""), *fewer):
            if other != spec:
                yield replace(program, optimizers=(*program.optimizers[:at], other, *program.optimizers[at + 1 :]))
    for at, part in enumerate(program.parts):
        simpler = {"dtype": "float64", "unit": True, "kind": "mlp", "cut": False}
        for simple in (replace(part, **{name: value}) for name, value in simpler.items()):
            if simple != part:
                yield replace(program, parts=(*program.parts[:at], simple, *program.parts[at + 1 :]))

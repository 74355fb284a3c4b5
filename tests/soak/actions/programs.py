"""Programs of what users do in a training script, drawn at random from a seed: plain data, printable and shrinkable.

A `Program` is a model, how it is sharded, and a list of actions; each action is a tuple of its name and its arguments:

    ("forward", slot, how, call, context)    keeps the loss in a slot; `how`: see models.py
    ("backward", slots, how)                 of the sum of the losses in some slots
    ("grad", slot)                           autograd.grad of a loss with respect to the input
    ("penalty", coefficient, kind)           L2 on model.parameters(), in a backward of its own
    ("noise", kind) ("scale", factor)        edits of `.grad`; a factor of "rows": of all rows but the first
    ("zero", kind)                           one of `ZEROS`
    ("write", kind, which)                   to sharded parameters: one of `WRITES`, "rows" or "foreach"
    ("toggle", which, flag)                  requires_grad
    ("hook", which) ("unhook",)              a gradient hook that halves
    ("step",) ("raw step",) ("clip",) ("flush",) ("eval", how) ("peek",) ("load",) ("full write",)
    ("set", what, flag)                      one of `SETTINGS`
    ("unshard", who, asynchronous) ("reshard", who)
    ("average",)                             moves averages of all weights towards them
    ("keep", kind) ("kept",)                 holds tensors in the memory of the weights: one of `KEEPS`, and reads them
    ("reset", kind, which)                   edits the optimizer's state: one of `RESETS`
    ("reload",) ("rate", factor)             load_state_dict of its own state_dict; another learning rate
    ("child", slot, part)                    a part called by itself; keeps its loss in a slot
    ("distill", slot) ("follow", kind)       a loss against a teacher; which then moves towards the model
    ("transform", slot, kind)                a loss through one of `TRANSFORMS`
    ("surgery", kind)                        another optimizer in the place of the one there: one of `SURGERIES`
    ("sam", scale)                           a second pass at weights that are moved along the gradient, and back
    ("infer",)                               an evaluation under inference_mode
    ("lists", who, forward, backward)        prefetch lists of a unit
    ("assign",)                              load_state_dict(assign=True), and a new optimizer
    ("save", kind) ("restore",)              keeps the model's and the optimizer's state: one of `SAVES`; goes back to it
    ("factor", factor)                       what gradients of backwards from now on are multiplied with
    ("tune", what, who, on)                  one of `TUNES` of a unit: how it communicates, which changes no number
    ("module hook", kind, who) ("module unhook",)    a hook on the model or a part, one of `MODULE_HOOKS`; no hooks
    ("stream", which)                        on a device: what follows is done on another stream of the user's

What cannot be done where it stands (a backward of an empty slot) does nothing, so that any part of a program is one too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.soak.actions.models import BEFORE, BEHIND, EDITS, ENDS, INSIDES, KINDS, LATER, UNITS, How, Part

Action = tuple[Any, ...]

ZEROS = ("module none", "module zero", "optimizer none", "optimizer zero", "none", "zero_", "data", "detach", "mul_")
WRITES = ("data mul_", "no_grad mul_", "local mul_", "data set", "copy_")
KEEPS = ("detach", "local", "state dict")
RESETS = ("dict", "zeros", "in place", "count")
SAVES = ("memory", "files", "background", "whole")
TRANSFORMS = ("vmap", "jvp", "grad", "dual", "per sample", "per sample grad")
"""How a forward may be transformed; `dual`: by dual numbers."""
FOLLOWS = ("foreach", "in place", "data")
SURGERIES = ("same state", "two groups", "group added")
LOCALS = ("", "", "local", "flat", "over replicas", "over replicas")
"""What `hsdp.optim.local` makes of the optimizer."""
CUTS = ((False,), (False,), (True, False), (False, True), (True,))
OPTIONS = ("sum", "tree", "replicated", "offloaded")  # and "parts", which came later
SETTINGS = ("gradient_sync", "all_reduce", "last_backward", "reshard_after_forward", "reshard_after_backward")
TUNES = ("scatter group", "bound", "hook", "replica reduce", "gather", "scatter", "prefetch")
MODULE_HOOKS = ("input", "output", "gradient of output", "gradient of input", "gradients of weights")
TIES = ("heads", "embedding", "module", "module", "weights")
REDUCTIONS = ("float32", "float64", "default")
CONTEXTS = ("", "", "", "", "no_sync", "first", "last")
CALLS = ("call", "call", "call", "call", "forward", "infer", "unshard call", "unshard forward", "unshard infer")
OPTIMIZERS = (*("sgd",) * 7, "adamw", "adamw foreach", "adamw fused")
"""Mostly the cheapest: DTensors propagate the shardings of each list of parameters anew."""
MESHES: dict[int, tuple[tuple[int, ...], ...]] = {2: ((2,), (2, 1), (1, 2)), 4: ((4,), (2, 2), (4, 1), (1, 4))}
"""Of a number of ranks, all meshes that have each of them once: whatever it is sharded on, a gradient is their mean."""
SHAPES: dict[str, dict[int, tuple[int, ...]]] = {"1d": {2: (2,), 4: (4,)}, "2d": {2: (2, 1), 4: (2, 2)}}
"""Meshes by their kind and the number of ranks."""

FEATURES = {
    "edits": "in-place edits of units' outputs by the root, and exceptions between units",
    "tweaks": "what a part does inside its forward",
    "ends": "what the root does at the end of its forward, and what users do to its output",
    "calls": "other ways to call the root",
    "heads": "ranks use different heads",
    "skips": "forwards that leave parts out",
    "toggles": "requires_grad",
    "writes": "writes to sharded parameters",
    "outside": "penalties, noise and edits of gradients",
    "hooks": "hooks on sharded parameters",
    "fails": "exceptions",
    "levels": "no_sync, accumulate and the setters of the same",
    "unshards": "unshard and reshard by hand",
    "zeros": "other ways of zeroing than zero_grad",
    "graphs": "retain_graph, autograd.grad, create_graph, several slots",
    "policies": "other policies than the default ones",
    "chains": "linear layers, units of their own, with ReLU(inplace=True) between them",
    "scalars": "a parameter without dims",
    "max_norm": "an embedding with max_norm",
    "locals": "optimizers that step local tensors, and share the step out among replicas",
    "holders": "tensors in the memory of weights, averages of weights, edits of the optimizer's state",
    "others": "parts called by themselves, a second model beside the first, other optimizers, prefetch lists",
    "repeats": "parts called several times in a forward, of which ranks' losses use different calls",
    "factors": "other gradient factors from one micro-batch to the next",
    "tunes": "setters of how units communicate, between any two actions, and units that stay in parts",
    "saves": "the model's and the optimizer's state, kept in one way or another and restored later",
    "ties": "names that share a parameter, and parts that are one module",
    "module hooks": "hooks on the model and on parts of it, before or behind a forward and a backward",
    "streams": "training that moves from one stream of a device to another",
    "mixed": "forwards in another precision than that of the parameters",
    "muon": "an optimizer that steps whole matrices",
    "insides": "selective checkpoints, parametrised and complex weights, buffers, outputs of other kinds",
    "rows": "writes to rows of sharded parameters and gradients",
    "transforms": "losses through vmap, jvp, grad and dual numbers, and writes by foreach operators",
    "meshes": "units on other meshes of the same ranks",
    "options": "sums instead of means, tree reductions, parameters that are not sharded, offloaded shards",
}
"""What can be left out of programs."""


@dataclass(frozen=True)
class Program:
    """A model, its sharding, and what is done with it."""

    seed: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    actions: tuple[Action, ...]
    heads_are_units: bool = False
    embedding_is_unit: bool = False
    max_norm: float | None = None
    reshard: bool | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    local: str = ""
    options: frozenset[str] = frozenset()
    ties: frozenset[str] = frozenset()
    reduces_in: str = ""
    """The dtype that gradients of forwards in float32 are reduced in; "": all is float64."""
    meshes: tuple[tuple[int, ...], ...] = ()
    """Those of the units, in turns; none: that of the root."""

    @property
    def shards(self) -> set[int]:
        """Into how many parts parameters are sharded."""
        return {shape[-1] for shape in (self.shape, *self.meshes)}

    def __str__(self) -> str:
        optimizer = " ".join([self.optimizer, self.local, *sorted(self.options)])
        lines = [f"seed {self.seed}, mesh {self.shape}, {optimizer}, reshard {self.reshard}, policy {self.policy}"]
        units = ["heads"] * self.heads_are_units + ["embedding"] * self.embedding_is_unit
        lines.append(f"  own units: {units}, max_norm {self.max_norm}, ties {sorted(self.ties)}, mixed {self.reduces_in!r}")
        lines += [f"  units on {self.meshes}"] if self.meshes else []
        lines += [f"  part {index}: {part}" for index, part in enumerate(self.parts)]
        return "\n".join([*lines, *(f"    {action}" for action in self.actions)])


def draw(seed: str, shape: tuple[int, ...], without: frozenset[str] = frozenset()) -> Program:
    """The program of a seed, on a mesh; `without`: features that it must not use."""
    program = _Draw(random.Random(seed), without).program(seed, shape)
    if "ties" not in without:
        program = _with_ties(program, random.Random(f"{seed}, ties"))
    program = _with_more(program, random.Random(f"{seed}, what came later"), without)
    if "others" not in without:
        program = _with_others(program, random.Random(f"{seed}, what came last"))
    program = _with_repeats(program, random.Random(f"{seed}, repeats"), without)
    if "factors" not in without:
        program = _with_factors(program, random.Random(f"{seed}, factors"))
    if "muon" not in without:
        program = _with_muon(program, random.Random(f"{seed}, muon"))
    if "module hooks" not in without:
        program = _with_module_hooks(program, random.Random(f"{seed}, module hooks"))
    if "mixed" not in without:
        program = _with_mixed(program, random.Random(f"{seed}, mixed"))
    if "streams" not in without:
        program = _with_streams(program, random.Random(f"{seed}, streams"))
    if "saves" not in without:
        program = _with_saves(program, random.Random(f"{seed}, saves"))
    if "insides" not in without:
        program = _with_insides(program, random.Random(f"{seed}, insides"))
    if "tunes" not in without:
        program = _with_tunes(program, random.Random(f"{seed}, tunes"))
    if "rows" not in without:
        program = _with_rows(program, random.Random(f"{seed}, rows"))
    if "meshes" not in without:
        program = _with_meshes(program, random.Random(f"{seed}, meshes"))
    return program if "transforms" in without else _with_transforms(program, random.Random(f"{seed}, transforms"))


class _Draw:
    def __init__(self, rng: random.Random, without: frozenset[str]) -> None:
        self.rng, self.without = rng, without
        self.slots: list[int] = []
        self.num_parts = 0

    def chance(self, probability: float, feature: str = "") -> bool:
        drawn = self.rng.random() < probability  # always drawn: switches change as little as they can
        return drawn and feature not in self.without

    def program(self, seed: str, shape: tuple[int, ...]) -> Program:
        rng = self.rng
        self.num_parts = rng.choice([1, 2, 2, 3])
        left_out = {"chain": "chains", "scaled": "scalars"}
        kinds = [kind for kind in KINDS if left_out.get(kind) not in self.without]
        parts = tuple(
            Part(rng.choice(kinds), rng.choice(UNITS), rng.choice([None, None, None, None, None, None, False, True]))
            for _ in range(self.num_parts)
        )
        policy: dict[str, Any] = {}
        if self.chance(0.4, "policies"):
            choices = {
                "fusion": ["packed", "direct"],
                "prefetch": [0, 1, 2],
                "max_inflight_reduce_scatters": [1, 2],
                "max_inflight_all_reduces": [1, 2],
                "reduce_scatter_bucket_bytes": [1 << 20],
                "all_reduce_bucket_bytes": [1 << 20],
                "accumulate": ["local"],
            }
            for name in rng.sample(sorted(choices), rng.choice([1, 1, 2, 3])):
                policy[name] = rng.choice(choices[name])
        # By a generator of its own: the programs of known seeds stay what they are.
        if "policies" not in self.without and random.Random(f"sockets {seed}").random() < 0.5:
            policy["shared_memory"] = False
        reshard = rng.choice([None, None, True, False])
        return Program(
            seed=seed,
            shape=shape,
            parts=parts,
            actions=tuple(self.actions()),
            heads_are_units=self.chance(0.4),
            embedding_is_unit=self.chance(0.3),
            max_norm=1.0 if self.chance(0.06, "max_norm") else None,
            reshard=reshard if "policies" not in self.without else None,
            policy=policy,
            optimizer=rng.choice(OPTIMIZERS),
        )

    def actions(self) -> Iterator[Action]:
        """Mostly iterations, with other actions strewn in everywhere; at the end what is open is run backward."""
        for _ in range(self.rng.choice([1, 1, 2, 2, 3])):
            for _ in range(self.rng.choice([1, 1, 1, 2]) if "graphs" not in self.without else 1):
                yield from self.others(0.25)
                yield self.forward()
            yield from self.others(0.35)
            while self.slots:
                yield self.backward()
                yield from self.others(0.25)
            if self.chance(0.5):
                yield ("step",)
            if self.chance(0.4):
                yield ("zero", self.rng.choice(ZEROS if "zeros" not in self.without else ZEROS[:4]))

    def others(self, probability: float) -> Iterator[Action]:
        while self.rng.random() < probability:
            feature, make = self.rng.choice(_OTHERS)
            if feature not in self.without:
                yield make(self)

    def forward(self) -> Action:
        slot = self.rng.randrange(4)
        if slot not in self.slots:
            self.slots.append(slot)
        call = self.rng.choice(CALLS) if self.chance(0.4, "calls") else "call"
        return ("forward", slot, self.how(), call, self.context())

    def context(self) -> str:
        drawn = self.rng.choice(CONTEXTS)
        return drawn if "levels" not in self.without else ""

    def how(self) -> How:
        """What a forward does: little of everything, so that what it meets tells itself apart."""
        rng, found = self.rng, {}
        calm = frozenset({"raise", "raise in backward"}) if "fails" in self.without else frozenset[str]()
        if self.chance(0.5, "tweaks"):
            chosen = [t for t in (rng.choice(BEHIND) if rng.random() < 0.75 else rng.choice(BEFORE),) if t not in calm]
            found["tweaks"] = {rng.randrange(self.num_parts): tweak for tweak in chosen}
        if self.chance(0.35, "edits"):
            chosen = [e for e in (rng.choice(EDITS[:-1]) if rng.random() < 0.9 else "raise",) if e not in calm]
            found["edits"] = {rng.randrange(self.num_parts): edit for edit in chosen}
        if self.chance(0.15, "ends"):
            end = rng.choice(ENDS)
            found["end"] = "" if end in calm else end
        if self.chance(0.15, "ends"):
            found["output"] = rng.choice(["/=", "+= view"])
        if self.chance(0.2, "heads"):
            found["heads"] = rng.choice([("first", "second"), ("first",), ("both", "second")])
        if self.num_parts > 1 and self.chance(0.15, "skips"):
            found["skip"] = (rng.randrange(self.num_parts),)
        if self.chance(0.1, "graphs"):
            found["loss"] = "gradient penalty"
        if self.chance(0.15, "graphs"):
            found["leaf"] = True
        return {key: value for key, value in found.items() if value}

    def backward(self) -> Action:
        rng = self.rng
        count = len(self.slots) if rng.random() < 0.4 else 1
        chosen = tuple(rng.sample(self.slots, count))
        how: How = {"context": self.context()}
        if self.chance(0.12, "graphs"):
            how["retain"] = True
        else:
            self.slots = [slot for slot in self.slots if slot not in chosen]
        if self.chance(0.1, "outside"):
            how["penalty"] = 0.1
        if self.chance(0.12, "hooks"):
            how["hook"] = (rng.choice(["step", "raise", "post raise"]), rng.randrange(20))
            if how["hook"][0] != "step" and "fails" in self.without:
                del how["hook"]
        return ("backward", chosen, {key: value for key, value in how.items() if value})


def _which(draw: _Draw) -> int | str | None:
    """All parameters, those of a part, or one."""
    drawn = draw.rng.random()
    return None if drawn < 0.25 else f"parts.{draw.rng.randrange(3)}." if drawn < 0.5 else draw.rng.randrange(20)


_OTHERS: list[tuple[str, Callable[[_Draw], Action]]] = [
    ("graphs", lambda draw: ("grad", draw.rng.randrange(4))),
    ("outside", lambda draw: ("penalty", 0.1, draw.rng.choice(["full", "local"]))),
    ("outside", lambda draw: ("noise", draw.rng.choice(["add_", "data", "assign"]))),
    ("outside", lambda draw: ("scale", 0.5)),
    ("zeros", lambda draw: ("zero", draw.rng.choice(ZEROS))),
    ("", lambda draw: ("zero", draw.rng.choice(ZEROS[:4]))),
    ("writes", lambda draw: ("write", draw.rng.choice(WRITES), _which(draw))),
    ("writes", lambda draw: ("write", draw.rng.choice(WRITES), _which(draw))),
    ("toggles", lambda draw: ("toggle", _which(draw), draw.rng.random() < 0.5)),
    ("toggles", lambda draw: ("toggle", _which(draw), draw.rng.random() < 0.5)),
    ("toggles", lambda draw: ("toggle", None, draw.rng.random() < 0.8)),
    ("hooks", lambda draw: ("hook", draw.rng.randrange(20))),
    ("hooks", lambda draw: ("unhook",)),
    ("", lambda draw: ("step",)),
    ("levels", lambda draw: ("raw step",)),
    ("", lambda draw: ("clip",)),
    ("", lambda draw: ("flush",)),
    ("", lambda draw: ("eval", draw.how())),
    ("", lambda draw: ("peek",)),
    ("writes", lambda draw: ("load",)),
    ("writes", lambda draw: ("full write",)),
    ("levels", lambda draw: ("set", draw.rng.choice(SETTINGS), draw.rng.random() < 0.5)),
    ("levels", lambda draw: ("set", draw.rng.choice(SETTINGS[:3]), True)),
    ("unshards", lambda draw: ("unshard", draw.rng.randrange(-1, 3), draw.rng.random() < 0.4)),
    ("unshards", lambda draw: ("reshard", draw.rng.randrange(-1, 3))),
]
"""Actions between forwards and backwards, with the feature that each belongs to."""


_MORE: list[Callable[[_Draw], Action]] = [
    lambda draw: ("average",),
    lambda draw: ("average",),
    lambda draw: ("keep", draw.rng.choice(KEEPS)),
    lambda draw: ("keep", draw.rng.choice(KEEPS)),
    lambda draw: ("kept",),
    lambda draw: ("reset", draw.rng.choice(RESETS), _which(draw)),
    lambda draw: ("reload",),
    lambda draw: ("rate", draw.rng.choice([0.5, 2.0])),
]


def _with_more(program: Program, rng: random.Random, without: frozenset[str]) -> Program:
    """With features that came later, drawn by themselves: a seed keeps the rest of its program."""
    kind, actions, draw = rng.choice(LOCALS), list(program.actions), _Draw(rng, without)
    if rng.random() < 0.4 and "holders" not in without:
        for _ in range(rng.choice([1, 2, 4])):
            actions.insert(rng.randrange(len(actions) + 1), rng.choice(_MORE)(draw))
        actions.append(("kept",))
    return replace(program, local=kind if "locals" not in without else "", actions=tuple(actions))


def _with_others(program: Program, rng: random.Random) -> Program:
    """With other roots, models and optimizers than the program's own; again by themselves."""
    actions = list(program.actions)
    if rng.random() < 0.35:
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randrange(len(actions) + 1)
            chosen = rng.choice(_ONES)(rng)
            actions.insert(at, chosen)
            if chosen[0] in ("child", "distill"):
                _run_backward(actions, at, chosen[1], rng)
    return replace(program, actions=tuple(actions))


def _with_repeats(program: Program, rng: random.Random, without: frozenset[str]) -> Program:
    """With parts that are called again, and options of sharding; again by themselves."""
    drawn = frozenset(rng.sample(OPTIONS, rng.choice([1, 1, 2]))) if rng.random() < 0.25 else frozenset[str]()
    if "options" not in without:
        program = replace(program, options=drawn)
    # hsdp's limits: a part that is a root of its own, too, must be in all ranks' losses alike.
    if rng.random() > 0.35 or "repeats" in without or any(action[0] == "child" for action in program.actions):
        return program
    actions = list(program.actions)
    for at, action in enumerate(actions):
        if action[0] == "forward" and rng.random() < 0.7:
            actions[at] = (*action[:2], {**action[2], **_repeats(program, action[2], rng)}, *action[3:])
    return replace(program, actions=tuple(actions))


def _with_factors(program: Program, rng: random.Random) -> Program:
    """With gradient factors that change, most often before a backward; again by themselves."""
    actions = list(program.actions)
    if rng.random() < 0.25:
        for _ in range(rng.choice([1, 2, 3])):
            backwards = [at for at, action in enumerate(actions) if action[0] == "backward"]
            at = rng.choice(backwards) if backwards and rng.random() < 0.7 else rng.randrange(len(actions) + 1)
            actions.insert(at, ("factor", rng.choice([0.5, 1.0, 3.0, -2.0])))
    return replace(program, actions=tuple(actions))


def _with_ties(program: Program, rng: random.Random) -> Program:
    """Perhaps with names that share a parameter, in units that own all of them; again by themselves."""
    if rng.random() > 0.2:
        return program
    ties = frozenset(rng.sample(TIES, rng.choice([1, 1, 2])))
    if not ties.isdisjoint({"heads", "embedding"}):
        program = replace(program, heads_are_units=False)
    if "embedding" in ties:
        program = replace(program, embedding_is_unit=False, max_norm=None)
    first, *others = program.parts
    if not ties.isdisjoint({"module", "weights"}) and others:
        first = first if "module" in ties else replace(first, unit="")
        program = replace(program, parts=(first, *others[:-1], first))
    return replace(program, ties=ties)


def _with_module_hooks(program: Program, rng: random.Random) -> Program:
    """With hooks on modules, that come and go at any moment; again by themselves."""
    actions = list(program.actions)
    if rng.random() < 0.2:
        for _ in range(rng.choice([1, 1, 2, 3])):
            hook = ("module hook", rng.choice(MODULE_HOOKS), rng.randrange(-1, 3))
            actions.insert(rng.randrange(len(actions) + 1), hook)
        if rng.random() < 0.5:
            actions.insert(rng.randrange(len(actions) + 1), ("module unhook",))
    return replace(program, actions=tuple(actions))


def _with_muon(program: Program, rng: random.Random) -> Program:
    """Perhaps with an optimizer that steps matrices as a whole, shared out among replicas or not."""
    local = rng.choice(["", "over replicas"])
    return replace(program, optimizer="muon", local=local) if rng.random() < 0.1 else program


def _with_mixed(program: Program, rng: random.Random) -> Program:
    """Perhaps in mixed precision: float32 in float64's place, which the twin is not far from."""
    chosen = rng.choice(REDUCTIONS)
    return replace(program, reduces_in=chosen) if rng.random() < 0.2 and program.optimizer != "muon" else program


def _with_streams(program: Program, rng: random.Random) -> Program:
    """Perhaps with changes of stream between any two actions; again by themselves."""
    actions = list(program.actions)
    if rng.random() < 0.15:
        for _ in range(rng.choice([1, 2, 4])):
            actions.insert(rng.randrange(len(actions) + 1), ("stream", rng.randrange(3)))
    return replace(program, actions=tuple(actions))


def _with_saves(program: Program, rng: random.Random) -> Program:
    """With states that are kept, and restored some time later; again by themselves."""
    actions = list(program.actions)
    if rng.random() < 0.2:
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(len(actions) + 1)
            actions.insert(at, ("save", rng.choice(SAVES)))
            for _ in range(rng.choice([1, 1, 2])):
                actions.insert(rng.randrange(at + 1, len(actions) + 1), ("restore",))
    return replace(program, actions=tuple(actions))


def _with_insides(program: Program, rng: random.Random) -> Program:
    """With parts that are special inside, and tweaks that came later, in the place of others; again by themselves."""
    if rng.random() > 0.4:
        return program
    parts = []
    for part in program.parts:
        inside = rng.choice(INSIDES) if rng.random() < 0.5 else ""
        if inside == "weight norm" and "weights" in program.ties:
            inside = ""  # what is parametrised has no weight to tie
        if inside == "selective" and part.recompute is None and part.unit != "parts":
            part = replace(part, recompute=False)
        parts.append(replace(part, inside=inside if inside != "selective" or part.recompute is False else ""))
    if "module" in program.ties:
        parts[-1] = parts[0]
    actions = list(program.actions)
    for at, action in enumerate(actions):
        if action[0] == "forward" and rng.random() < 0.4:
            tweaks = {**action[2].get("tweaks", {}), rng.randrange(len(parts)): rng.choice(LATER)}
            actions[at] = (*action[:2], {**action[2], "tweaks": tweaks}, *action[3:])
    if program.optimizer == "adamw fused" and any(part.inside == "complex" for part in parts):
        program = replace(program, optimizer="adamw")  # torch's fused one takes no complex weights
    return replace(program, parts=tuple(parts), actions=tuple(actions))


def _with_rows(program: Program, rng: random.Random) -> Program:
    """With writes to rows between any two actions; again by themselves."""
    actions = list(program.actions)
    if rng.random() < 0.25:
        for _ in range(rng.choice([1, 2, 3])):
            which = rng.choice([None, 0, 1, "parts.0", "heads"])
            write = rng.choice([("scale", "rows"), ("scale", "rows"), ("write", "rows", which)])
            actions.insert(rng.randrange(len(actions) + 1), write)
    return replace(program, actions=tuple(actions))


def _with_meshes(program: Program, rng: random.Random) -> Program:
    """Perhaps with units on other meshes than the root's; torch takes no parameters of several meshes in one operation."""
    chosen = rng.choices(MESHES[math.prod(program.shape)], k=rng.choice([1, 2, 3]))
    if rng.random() < 0.15 and program.optimizer in ("sgd", "adamw", "muon"):
        program = replace(program, meshes=tuple(chosen))
    return program


def _with_transforms(program: Program, rng: random.Random) -> Program:
    """With losses through transforms of the forward, and foreach writes; again by themselves."""
    actions = list(program.actions)
    if rng.random() < 0.3:
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randrange(len(actions) + 1)
            slot = rng.choice([4, 5])
            actions.insert(at, ("transform", slot, rng.choice(TRANSFORMS)))
            _run_backward(actions, at, slot, rng)
    # torch takes no parameters of several meshes in one operation.
    if rng.random() < 0.15 and not program.meshes:
        actions.insert(rng.randrange(len(actions) + 1), ("write", "foreach", rng.choice([None, 0, 1, "parts.0", "heads"])))
    return replace(program, actions=tuple(actions))


def _with_tunes(program: Program, rng: random.Random) -> Program:
    """With units that communicate otherwise from some moment on; again by themselves."""
    actions = list(program.actions)
    if rng.random() < 0.25:
        for _ in range(rng.choice([1, 2, 4])):
            chosen = ("tune", rng.choice(TUNES), rng.randrange(-1, 3), rng.random() < 0.7)
            actions.insert(rng.randrange(len(actions) + 1), chosen)
    in_parts = {"parts"} if rng.random() < 0.15 else set[str]()
    return replace(program, actions=tuple(actions), options=program.options | in_parts)


def _repeats(program: Program, how: How, rng: random.Random) -> How:
    parts = program.parts
    # hsdp's limits: not of what a reentrant checkpoint recomputes, nor of one of several units in one checkpoint.
    may_cut = [part.recompute is None or (part.recompute is False and part.unit != "parts") for part in parts]
    if {"detached out", "no grad"} & {*how.get("tweaks", {}).values()}:
        may_cut = [False] * len(parts)  # nor where gradients would enter the next part on some ranks only
    cuts = {index: rng.choice(CUTS) for index, may in enumerate(may_cut) if may and rng.random() < 0.4}
    again = []
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        index = rng.randrange(len(parts))
        again.append((index, rng.choice(CUTS) if may_cut[index] else CUTS[0]))
    return {key: value for key, value in (("cuts", cuts), ("again", tuple(again))) if value}


def _run_backward(actions: list[Action], behind: int, slot: int, rng: random.Random) -> None:
    """Some time behind a forward, alone or with other losses, comes the backward of a slot."""
    there = [at for at in range(behind + 1, len(actions)) if actions[at][0] == "backward"]
    if there and rng.random() < 0.5:
        at = rng.choice(there)
        name, slots, how = actions[at]
        actions[at] = (name, tuple({**dict.fromkeys(slots), slot: None}), how)
    else:
        actions.insert(rng.randrange(behind + 1, len(actions) + 1), ("backward", (slot,), {}))


_ONES: list[Callable[[random.Random], Action]] = [
    lambda rng: ("child", rng.choice([4, 5]), rng.randrange(3)),
    lambda rng: ("child", rng.choice([4, 5]), rng.randrange(3)),
    lambda rng: ("distill", rng.choice([4, 5])),
    lambda rng: ("distill", rng.choice([4, 5])),
    lambda rng: ("follow", rng.choice(FOLLOWS)),
    lambda rng: ("surgery", rng.choice(SURGERIES)),
    lambda rng: ("sam", 0.1),
    lambda rng: ("infer",),
    lambda rng: ("lists", rng.randrange(-1, 3), (rng.randrange(-1, 3),), (rng.randrange(-1, 3),)),
    lambda rng: ("assign",),
]


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less in them, the boldest first: what a shrinker tries."""
    actions = program.actions
    for size in (len(actions) // 2, len(actions) // 4, 2, 1):
        for start in range(0, len(actions) if size else 0, max(size, 1)):
            yield replace(program, actions=actions[:start] + actions[start + size :])
    if len(program.parts) > 1:
        yield replace(program, parts=program.parts[:-1])
        yield replace(program, parts=program.parts[1:])
    for name, plain in (
        ("policy", {}),
        ("max_norm", None),
        ("reshard", None),
        ("heads_are_units", False),
        ("embedding_is_unit", False),
        ("optimizer", "sgd"),
        ("local", ""),
        ("options", frozenset()),
        ("ties", frozenset()),
        ("reduces_in", ""),
        ("meshes", ()),
    ):
        if getattr(program, name) != plain:
            yield replace(program, **{name: plain})
    for index, part in enumerate(program.parts):
        for simple in (
            replace(part, inside=""),
            replace(part, recompute=None),
            replace(part, kind="linear"),
            replace(part, unit="whole"),
        ):
            if simple != part:
                yield replace(program, parts=(*program.parts[:index], simple, *program.parts[index + 1 :]))
    for index, action in enumerate(actions):
        for simpler in _simpler(action):
            yield replace(program, actions=(*actions[:index], simpler, *actions[index + 1 :]))


def _simpler(action: Action) -> Iterator[Action]:
    for at, value in enumerate(action):
        if isinstance(value, dict):
            for key in value:
                yield (*action[:at], {k: v for k, v in value.items() if k != key}, *action[at + 1 :])
        elif action[0] == "forward" and at in (3, 4) and value not in ("call", ""):
            yield (*action[:at], "call" if at == 3 else "", *action[at + 1 :])
        elif action[0] == "backward" and at == 1 and len(value) > 1:
            for slot in value:
                yield (action[0], (slot,), *action[2:])

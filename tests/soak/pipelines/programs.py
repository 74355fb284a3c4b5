"""Programs of pipelines, drawn at random from a seed: plain data, printable and shrinkable.

A `Program` is a schedule with its stages, and a list of actions; each action is a tuple of its name and arguments:

    ("step", context) ("eval", no_grad)     of the schedule; `context`, around the step: one of `CONTEXTS`
    ("fail", place)                         a step in which a forward raises, behind which the schedule is made anew
    ("remake",)                             the schedule is made anew
    ("solo",)                               a forward and backward of each stage by itself
    ("optimize",) ("clip", largest)         of each stage
    ("zero", kind)                          one of `ZEROS`
    ("freeze", name, flag)                  requires_grad of parameters with this in their name, not in first layers
    ("write", kind)                         weights are changed: one of `WRITES`
    ("save",) ("restore",)                  `hsdp.checkpoint` of each stage with its optimizer
    ("factor", name, value)                 what becomes of sums of gradients from now on: one of `FACTORS`

What cannot be done where it stands does nothing, so that any part of a program is one too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.soak.optimizers.models import KINDS, Part

Action = tuple[Any, ...]

PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SIZES = {2: ((2, 1), (1, 2)), 4: ((2, 2), (2, 2), (1, 4), (4, 1))}
"""Pipeline ranks x data ranks."""
MESHES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (1, 1)),
    2: ((2,), (2, 1), (1, 2)),
    4: ((4,), (2, 2), (4, 1), (1, 4)),
}
CALLS = ("", "", "", "", "twice", "checkpointed", "reentrant", "gated", "aux", "unused")
TWICE = ("tied", "norm", "experts")
"""What torch's schedules can call twice where they compute gradients of weights apart, sharded or not."""
CONTEXTS = ("", "", "", "", "no_sync", "first", "last")
ZEROS = ("optimizer none", "optimizer none", "optimizer zero", "module none", "module zero", "none", "zero_")
WRITES = ("in place", "load", "assign")
FACTORS = (("scale", 0.5), ("scale", 3.0), ("divide", 3.0), ("divide", None), ("op", "sum"), ("op", "avg"))
POLICIES: dict[str, tuple[Any, ...]] = {
    "fusion": ("packed", "direct"),
    "prefetch": (0, 2),
    "max_inflight_reduce_scatters": (2,),
    "max_inflight_all_reduces": (1,),
    "reduce_scatter_bucket_bytes": (400,),
    "all_reduce_bucket_bytes": (400,),
    "accumulate": ("local",),
    "shared_memory": (False,),
    "reduction": ("tree",),
}
WRAPS = ("", "", "local", "flat", "over", "flat over")


@dataclass(frozen=True)
class Plan:
    """A stage.

    Attributes:
        layers: with how each is called; the first ones plainly, and never frozen, as torch's schedules find out only once
            whether later stages get inputs that want gradients.
        mesh: over how many replicas and shards, or shards alone.
        precision: "", "reduce" (in fp32), or the dtype of reductions under fp32 parameters.
        tells: the last stage's loss adds what its forward has left on the module.
        optimizer: "AdamW" or "SGD", with what `hsdp.optim.local` makes of it.
    """

    layers: tuple[tuple[Part, str], ...]
    mesh: tuple[int, ...]
    reshard: bool | None = None
    precision: str = ""
    policy: tuple[tuple[str, Any], ...] = ()
    replicated: bool = False
    offload: bool = False
    tells: bool = False
    optimizer: tuple[str, str] = ("AdamW", "")


@dataclass(frozen=True)
class Program:
    """A pipeline of `size` ranks x data ranks, and what is done with it.

    Attributes:
        scales: the schedule divides gradients by the number of micro-batches.
        static: stages are told shapes, so that torch does not infer them by a forward and backward of its own.
    """

    seed: str
    size: tuple[int, int]
    schedule: str
    micro: int
    stages: tuple[Plan, ...]
    actions: tuple[Action, ...]
    scales: bool = True
    static: bool = False

    def mine(self, rank: int) -> list[int]:
        """The stages of a rank of the pipeline."""
        return [at for at in range(len(self.stages)) if self.rank_of(at) == rank]

    def rank_of(self, at: int) -> int:
        """The rank of the pipeline that has a stage."""
        turn, place = divmod(at, self.size[0])
        return self.size[0] - 1 - place if turn % 2 and self.schedule in V_SHAPED else place

    def __str__(self) -> str:
        message = f"scales={self.scales}, static={self.static}"
        lines = [f"seed {self.seed}, {self.size[0]} x {self.size[1]} ranks, {self.schedule} of {self.micro}, {message}"]
        return "\n".join([*lines, *(f"  {stage}" for stage in self.stages), *(f"    {action}" for action in self.actions)])


def _plan(rng: random.Random, calls: tuple[str, ...], splits: bool, data: int, last: bool) -> Plan:
    precision = rng.choice(["reduce", "float32", "float64"]) if rng.random() < 0.15 else ""
    layers: list[tuple[Part, str]] = []
    for _ in range(rng.choice([1, 2, 2, 3])):
        call = rng.choice(calls) if layers else ""
        # Units cast by themselves; one that is not called on some ranks is an error.
        unit = precision[:5] == "float" or (call != "gated" and rng.random() < 0.7)
        kind = rng.choice(TWICE if splits and call == "twice" else KINDS)
        layers.append((Part(kind, unit), "" if unit and call == "gated" else call))
    mesh = rng.choice(MESHES[data])
    policy = {name: rng.choice(values) for name, values in POLICIES.items() if rng.random() < 0.15}
    wrap = rng.choice(WRAPS)
    return Plan(
        tuple(layers),
        mesh,
        rng.choice([None, None, True, False]),
        precision,
        tuple(policy.items()),
        rng.random() < 0.15,
        rng.random() < 0.15,
        last and rng.random() < 0.3,
        (rng.choice(["AdamW", "AdamW", "SGD"]), wrap if len(mesh) > 1 else wrap.replace("over", "").strip()),
    )


def _allows(schedule: str, pipeline: int, micro: int) -> bool:
    """Whether torch's schedule takes a number of micro-batches."""
    stages = pipeline * PER_RANK[schedule]
    if schedule in ("1F1B", "DualPipeV"):
        return micro >= stages
    return not schedule.startswith("Interleaved") or micro % max(1, micro // pipeline) == 0


def _step(rng: random.Random) -> list[Action]:
    made: list[Action] = [("step", rng.choice(CONTEXTS)) for _ in range(rng.choice([1, 1, 1, 2]))]
    if rng.random() < 0.2:
        made.append(("clip", rng.choice([0.1, 1.0])))
    return [*made, ("optimize",), *[("zero", rng.choice(ZEROS))] * (rng.random() < 0.9)]


def _other(rng: random.Random) -> Action:
    return rng.choice(
        [
            ("eval", rng.random() < 0.5),
            ("eval", rng.random() < 0.5),
            ("fail", rng.random()),
            ("remake",),
            ("solo",),
            ("freeze", rng.choice(["bias", "up", "weight"]), True),
            ("write", rng.choice(WRITES)),
            ("save",),
            ("restore",),
            ("factor", *rng.choice(FACTORS)),
            ("zero", rng.choice(ZEROS)),
        ]
    )


def draw(seed: str, ranks: int) -> Program:
    """The program of a seed, on so many ranks."""
    rng = random.Random(f"{seed}, {ranks} ranks")
    size = rng.choice(SIZES[ranks])
    schedule = rng.choice(list(PER_RANK))
    micro = rng.choice([n for n in range(1, 9) if _allows(schedule, size[0], n)][:3])
    static = rng.random() < 0.4
    # torch infers shapes by `autograd.grad`, and splits backwards so: reentrant checkpoints refuse it.
    calls = tuple(call for call in CALLS if call != "reentrant" or (static and schedule not in SPLIT))
    count = size[0] * PER_RANK[schedule]
    stages = tuple(_plan(rng, calls, schedule in SPLIT, size[1], at == count - 1) for at in range(count))
    if count > 2:  # what fp32 rounds in a last stage grows on its way to the first one beyond any tolerance
        stages = tuple(replace(plan, precision=plan.precision and "reduce") for plan in stages)
    actions: list[Action] = []
    for _ in range(rng.choice([2, 3, 4])):
        actions += _step(rng)
        for _ in range(rng.choice([0, 1, 2])):
            actions.insert(rng.randrange(max(0, len(actions) - 4), len(actions) + 1), _other(rng))
    for at, action in reversed([*enumerate(actions)]):
        if action[0] == "freeze":  # most are thawed again
            actions.insert(rng.randrange(at + 1, len(actions) + 1), ("freeze", action[1], False))
        elif action[0] == "save":
            actions.insert(rng.randrange(at + 1, len(actions) + 1), ("restore",))
    return Program(seed, size, schedule, micro, stages, tuple(actions), rng.random() < 0.7, static)


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less in them, the boldest first: what a shrinker tries."""
    actions = program.actions
    for size in (len(actions) // 2, len(actions) // 4, 2, 1):
        for start in range(0, len(actions) if size else 0, max(size, 1)):
            yield replace(program, actions=actions[:start] + actions[start + size :])
    for at, plan in enumerate(program.stages):
        plain = Plan(((Part("mlp"), ""),), plan.mesh)
        fewer = [replace(plan, layers=plan.layers[:n] + plan.layers[n + 1 :]) for n in range(1, len(plan.layers))]
        reset = [
            replace(plan, **{name: getattr(plain, name)})
            for name in ("reshard", "precision", "policy", "replicated", "offload", "tells", "optimizer")
        ]
        for other in (plain, *fewer, *reset):
            if other != plan:
                yield replace(program, stages=(*program.stages[:at], other, *program.stages[at + 1 :]))

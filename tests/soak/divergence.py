"""Ways in which ranks come to disagree, and a soak over random ones.

    python -m tests.soak.divergence --cases 100 --seed 0 --log divergence.log

    way   what one rank (or one replica's ranks) does otherwise, while the model is built or in one of the steps
    case  a way with a mesh, the ranks that deviate, the step and the unit at which they do

Every rank must get an error that names unit and ranks in time; that of a collective that found nobody at the other end
names its own rank. A rank that goes on, hangs or dies is a failure. Each case is one line of JSON in the log.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hsdp
from hsdp.clip import clip_grad_norm_
from tests.support.deep import DIM, floats, seeded
from tests.support.facts import header
from tests.support.rig import Outcome, Pool, RankEnv

STEPS_BEHIND = 2  # so that also ranks that nobody waits for at once come to need the others


@dataclass(frozen=True)
class Case:
    """One disagreement; picklable.

    Attributes:
        way: a key of `BUILDING` or `RUNNING`.
        shape: of the mesh.
        who: the ranks that deviate.
        step: in which step (ways of building have none): from the third on ranks know the order, and do not ask.
        unit: at which block.
    """

    way: str
    shape: tuple[int, ...]
    who: tuple[int, ...]
    step: int = 3
    unit: int = 1


class Chain(nn.Module):
    """Blocks in a row; `walk` is the list of those that run, `cut` the one behind which the graph is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.last = nn.Linear(DIM, DIM)
        self.walk = list(range(4))
        self.cut = -1

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        inner = []
        for index in self.walk:
            x = torch.tanh(self.blocks[index](x))
            x = x.detach() if index == self.cut else x
            inner.append(x)
        return self.last(x), inner


# -- ways of building -----------------------------------------------------------------------------------------------


def _other_shape(model: Chain, options: dict[str, Any], unit: int) -> None:
    model.blocks[unit] = nn.Linear(DIM, DIM, bias=False).double()
    model.blocks[unit].bias = nn.Parameter(torch.zeros(DIM + 1).double()[:DIM].view(1, DIM))


def _extra_parameter(model: Chain, options: dict[str, Any], unit: int) -> None:
    model.blocks[unit].extra = nn.Parameter(torch.zeros(3).double())


def _other_dtype(model: Chain, options: dict[str, Any], unit: int) -> None:
    model.blocks[unit].float()


def _frozen(model: Chain, options: dict[str, Any], unit: int) -> None:
    model.blocks[unit].bias.requires_grad_(False)  # type: ignore[union-attr]


def _unit_left_out(model: Chain, options: dict[str, Any], unit: int) -> None:
    options["units"].remove(unit)


def _extra_layer(model: Chain, options: dict[str, Any], unit: int) -> None:
    model.blocks.append(nn.Linear(DIM, DIM).double())
    options["units"].append(4)


def _extra_model(model: Chain, options: dict[str, Any], unit: int) -> None:
    options["extra"] = True


def _on_meta(model: Chain, options: dict[str, Any], unit: int) -> None:
    model.blocks[unit].to("meta")


def _other_param_dtype(model: Chain, options: dict[str, Any], unit: int) -> None:
    options["mp_policy"] = hsdp.MixedPrecisionPolicy(param_dtype=torch.float32)


def _other_reduce_dtype(model: Chain, options: dict[str, Any], unit: int) -> None:
    options["mp_policy"] = hsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)


def _other_fusion(model: Chain, options: dict[str, Any], unit: int) -> None:
    options["comm_policy"] = hsdp.CommPolicy(fusion="direct")


BUILDING: dict[str, Callable[[Chain, dict[str, Any], int], None]] = {
    "other shape": _other_shape,
    "extra parameter": _extra_parameter,
    "other dtype": _other_dtype,
    "frozen parameter": _frozen,
    "unit left out": _unit_left_out,
    "extra layer": _extra_layer,
    "extra model": _extra_model,
    "on meta": _on_meta,
    "other param dtype": _other_param_dtype,
    "other reduce dtype": _other_reduce_dtype,
    "other fusion": _other_fusion,
}

# -- ways of running ------------------------------------------------------------------------------------------------

RUNNING = (
    "skips a unit",
    "runs a unit twice",
    "runs units in another order",
    "forward only",
    "eval instead",
    "one micro-batch more",
    "backward twice",
    "toggles requires_grad",
    "without sync",
    "without all-reduce",
    "stops",
    "clips alone",
    "other reduce op",
    "skips the step",
    "fails inside a backward",
    "fails at the end of a backward",
    "fails inside a backward and stops",
)
NEEDS_REPLICAS = frozenset({"without all-reduce"})
HARMLESS = ("loss from inside", "cuts the graph")
"""What a rank may do alone: its backward passes over units that it does not reach."""
HARMLESS_IN_A_REPLICA = frozenset({"runs a unit twice", "without sync", "without all-reduce"})
"""What all ranks of a replica may do together: its gradients are its own affair, as its data are.

Neither communicating nor stepping makes the replica late by a step, and replicas stay equal; the others miss it at the end.
"""


def _build(env: RankEnv, case: Case) -> nn.Module:
    model = seeded(Chain)
    assert isinstance(model, Chain)
    options: dict[str, Any] = {"units": [0, 1, 2, 3], "extra": False}
    if env.rank in case.who and case.way in BUILDING:
        BUILDING[case.way](model, options, case.unit)
    units, extra = options.pop("units"), options.pop("extra")
    if case.way == "fails at the end of a backward":
        model.last.requires_grad_(False)  # the root's reduction, which is the last one, would give the rank away
    mesh = env.mesh(case.shape)
    # Freed after forward: then the order of gathers in backward is part of what ranks must agree on.
    options["reshard_after_forward"] = True
    for unit in units:
        hsdp.fully_shard(model.blocks[unit], mesh=mesh, **options)
    hsdp.fully_shard(model, mesh=mesh, **options)
    if extra:
        hsdp.fully_shard(nn.Linear(3, 3), mesh=mesh)
    return model


class BoomError(Exception):
    """What a user's hook raises, and the user catches."""


def _boom(grad: Tensor) -> None:
    raise BoomError


def _step(model: Any, optimizer: torch.optim.Optimizer, rank: int, way: str, unit: int) -> None:
    """One step, which `way` ("": none) makes another one than that of the others."""
    bias = model.blocks[unit].bias
    walks = {
        "skips a unit": [i for i in range(4) if i != unit],
        "runs a unit twice": sorted([0, 1, 2, 3, unit]),
        "runs units in another order": [3, 2, 1, 0],
    }
    model.walk, model.cut = walks.get(way, [0, 1, 2, 3]), unit if way == "cuts the graph" else -1
    bias.requires_grad_(way != "toggles requires_grad")
    model.set_requires_grad_sync(way != "without sync")
    model.set_requires_all_reduce(way != "without all-reduce")
    model.set_reduce_op_type("sum" if way == "other reduce op" else "avg")
    data = floats(rank).requires_grad_(way == "fails at the end of a backward")
    with torch.no_grad() if way == "eval instead" else nullcontext():
        out, inner = model(data * 1.0)
    loss = inner[unit].square().sum() if way == "loss from inside" else out.square().sum()
    if way.startswith("fails"):
        # The node of the product runs last, when all gradients of weights are there.
        (data if data.requires_grad else inner[unit]).register_hook(_boom)
        with suppress(BoomError):
            loss.backward()
        if way.endswith("stops"):
            raise hsdp.StateError(f"rank(s) {rank} stopped behind unit 'blocks.{unit}', as the case wants it")
    elif way not in ("forward only", "eval instead"):
        loss.backward(retain_graph=way == "backward twice")
    if way == "backward twice":
        loss.backward()
    if way == "one micro-batch more":
        model(floats(rank, 1))[0].sum().backward()
    if way == "clips alone":
        clip_grad_norm_(model, 1.0)
    if way not in ("skips the step", "without sync", "without all-reduce"):
        optimizer.step()
    optimizer.zero_grad()


def disagree(env: RankEnv, case: Case) -> str:
    """Runs a case on this rank; what it returns, when no error comes, is a failure."""
    model = _build(env, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(case.step + 1 + STEPS_BEHIND):
        deviates = env.rank in case.who and step == case.step and case.way in RUNNING
        if deviates and case.way == "stops":
            raise hsdp.StateError(f"rank(s) {env.rank} stopped before unit 'blocks.0', as the case wants it")
        _step(model, optimizer, env.rank, case.way if deviates else "", case.unit)
    return f"no error in {case.step + 1 + STEPS_BEHIND} steps"


def verdict(outcomes: list[Outcome], timeout: float) -> str:
    """Says "ok", or what is wrong with the outcomes of a case. `timeout` is that of the groups."""
    wrong = []
    for one in outcomes:
        if one.error not in ("DivergenceError", "CollectiveError", "StateError"):
            wrong.append(f"rank {one.rank}: {one.error or one.value}: {one.message[:200]}")
        elif not any(where in one.message for where in ("unit", "fully_shard(", "clip_grad_norm_")):
            wrong.append(f"rank {one.rank}: names no unit: {one.message[:200]}")
        elif "rank" not in one.message:
            wrong.append(f"rank {one.rank}: names no rank: {one.message[:200]}")
        elif "ranks disagree" in one.message and one.message.count("rank(s) [") < 2:
            wrong.append(f"rank {one.rank}: does not tell the ranks apart: {one.message[:200]}")
        # On two axes a rank may wait for one that waits; the rest is for building and a busy machine.
        elif one.seconds > 2 * timeout + 10.0:
            wrong.append(f"rank {one.rank}: only after {one.seconds:.1f} s")
    return "; ".join(wrong) or "ok"


def draw(rng: random.Random) -> Case:
    """A random case."""
    shape = rng.choice([(2,), (4,), (2, 2), (2, 1)])
    world = 4 if shape in ((4,), (2, 2)) else 2
    # One rank, or all ranks of one replica: then its shard group is of one mind.
    who = rng.choice([(rng.randrange(world),), (2, 3)]) if shape == (2, 2) else (rng.randrange(world),)
    barred = set() if len(shape) == 2 else set(NEEDS_REPLICAS)
    if len(who) == 2 or shape == (2, 1):
        barred |= HARMLESS_IN_A_REPLICA
    ways = [way for way in (*BUILDING, *RUNNING) if way not in barred]
    way, step = rng.choice(ways), rng.randrange(5)
    return Case(way, shape, who, step, rng.randrange(4))


def main() -> int:
    """Runs random cases and logs them; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3.0, help="of the process groups, seconds")
    parser.add_argument("--log", type=argparse.FileType("w"), default=sys.stdout)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    counts: Counter[str] = Counter()
    print(json.dumps(header()), file=args.log, flush=True)
    with Pool(2, group_timeout=args.timeout) as pool2, Pool(4, group_timeout=args.timeout) as pool4:
        for number in range(args.cases):
            case = draw(rng)
            pool = pool4 if case.shape in ((4,), (2, 2)) else pool2
            start = time.monotonic()
            outcomes = pool.run_raw(disagree, case, timeout=4 * args.timeout + 30.0)
            found = verdict(outcomes, args.timeout)
            kinds = sorted({str(one.error) for one in outcomes})
            counts["ok" if found == "ok" else "failed"] += 1
            counts.update(kinds)
            line = {"case": number, **asdict(case), "errors": kinds, "seconds": round(time.monotonic() - start, 1)}
            print(json.dumps({**line, "verdict": found}), file=args.log, flush=True)
    print(json.dumps({"seed": args.seed, "cases": args.cases, **counts}), file=args.log, flush=True)
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(min(main(), 100))

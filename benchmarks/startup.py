"""`python -m benchmarks.startup`: what it takes W ranks to agree that they start alike, by simulation.

One rank runs hsdp on the fake backend (`tests/support/cluster.py`), wraps a model and trains for three steps: that gives
the number of questions that go to the store. Then W clients ask as many of a real TCPStore. They share a few processes,
which make the clients' operations one after the other: the work of all clients is in the time, on as many cores as there
are processes, and the server's on one more or the same.

    operations  store operations of all ranks, counted; the formula: 2 per rank and question, and those that delete gates
    seconds     from the first vote until the last rank has left the last question; the formula: operations times the
                seconds of one, which are measured at the smallest W of each kind of mesh

Questions in the group (an all-reduce of 32 bytes each) are counted and not timed: there is no group. Clients share
connections, and connecting is not timed: torch connects every rank to this server, and hsdp once more.

`--what wrap`: the time of `fully_shard` for many units on the fake backend, beside FSDP2's in the same run.

`--what steps`: how many functions of hsdp, and C functions called by them, a steady step with clipping calls, on the fake
backend as one of 8, 512 and 8,192 ranks.

`--what failure`: one rank of many differs, comes late or dies before it does what the others do: who is told what, after
how long, for how many store operations. Every rank runs the guard's real code. Time, store and process group are simulated
(`tests/support/many_ranks.py`): the server takes for each operation what one of a real TCPStore takes, as measured first.

    seconds     from when a rank came to the point until it was told or went on: the least and the most of all ranks
    operations  of the store, of one rank from that point on: the median and the most, which is of who writes the report
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore, fsdp

import hsdp
from benchmarks.harness import positive, progress, publish
from hsdp.comm.questions import Answer, Questions
from tests.support.cluster import Cluster
from tests.support.counted_store import CountedStore
from tests.support.host_calls import calls_per_step
from tests.support.many_ranks import Failure, Where, fail
from tests.support.rig import fake_world

FLAT = (16, 64, 256, 1024, 4096, 16384)
REPLICAS = (8, 16, 64, 256)
WORLDS = (8, 512, 8192)
SHARDS = 64
CONNECTIONS = 4
"""Of a process to the server."""

TIMEOUT = 600.0
DIM = 8


@dataclass(frozen=True)
class Asked:
    """What one rank asked while it started.

    Attributes:
        in_store: questions in the store.
        in_group: questions in the group.
        operations: store operations of the rank.
    """

    in_store: int
    in_group: int
    operations: int


def named(shape: Sequence[int]) -> str:
    """A mesh, for people."""
    return " x ".join(map(str, shape))


def ask_as_rank(shape: Sequence[int], units: int, rank: int) -> Asked:
    """Wraps a model of so many units and trains it for three steps, as one rank of a simulated cluster."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(units)))
    cluster = Cluster()
    with fake_world(torch.Size(shape).numel(), rank) as env, cluster.guarded() as store:
        mesh = env.mesh(shape)
        for unit in model:
            hsdp.fully_shard(unit, mesh=mesh)
        hsdp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.zeros(1, DIM)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return Asked(cluster.in_store, cluster.in_group, store.taken())


# -- the simulated cluster ---------------------------------------------------------------------------------------------


def groups_of(rank: int, shape: Sequence[int]) -> list[tuple[str, range]]:
    """A rank's groups, by name, with their ranks."""
    shards, world = shape[-1], torch.Size(shape).numel()
    first = rank // shards * shards
    found = [(f"shard {first}", range(first, first + shards))]
    if len(shape) == 2:
        found.append((f"replicate {rank % shards}", range(rank % shards, world, shards)))
    return found


def serve(pipe: Any) -> None:
    """A process with the server."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT))
    pipe.send(server.port)
    pipe.recv()


def take_part(pipe: Any, port: int, ranks: range, shape: tuple[int, ...], count: int) -> None:
    """A process with the clients of some ranks: asks `count` questions in each of a rank's groups, counts operations."""
    patience = timedelta(seconds=TIMEOUT)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
    connections = [store.clone() for _ in range(CONNECTIONS)]
    calls: Counter[str] = Counter()
    asking: list[list[tuple[int, Questions]]] = [[] for _ in shape]
    for rank in ranks:
        client = connections[rank % CONNECTIONS]
        for axis, (name, members) in enumerate(groups_of(rank, shape)):
            counted = CountedStore(name, PrefixStore(name, client), calls)
            asking[axis].append((rank, Questions(counted, True, rank, members, TIMEOUT)))
    pipe.send(0)
    pipe.recv()
    for number in range(1, count + 1):
        for axis_asks in asking:
            came = []
            for rank, questions in axis_asks:
                answer = Answer(rank, number, "simulated question", number)
                came.append((questions.arrive(answer), questions, answer))
            # Who came last opens the gate. It goes first: each rank would go on by itself.
            for is_last, questions, answer in sorted(came, key=lambda one: not one[0]):
                questions.leave(is_last, answer)
                questions.tidy()
    pipe.send(calls.total())
    pipe.recv()


def simulate(shape: tuple[int, ...], questions: int, processes: int) -> tuple[float, int]:
    """Seconds and store operations of all ranks of a mesh, for so many questions in each of their groups."""
    world = torch.Size(shape).numel()
    context: Any = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    running = [(context.Process(target=serve, args=(theirs,), daemon=True), mine)]
    running[0][0].start()
    port = mine.recv()
    for index in range(processes):
        ranks = range(index * world // processes, (index + 1) * world // processes)
        mine, theirs = context.Pipe()
        process = context.Process(target=take_part, args=(theirs, port, ranks, shape, questions), daemon=True)
        process.start()
        running.append((process, mine))
    clients = [pipe for _, pipe in running[1:]]
    for pipe in clients:
        pipe.recv()
    began = time.perf_counter()
    for pipe in clients:
        pipe.send(None)
    operations = sum(pipe.recv() for pipe in clients)
    seconds = time.perf_counter() - began
    for process, pipe in running:
        pipe.send(None)
        process.join()
    return seconds, operations


def operations_by_formula(shape: Sequence[int], questions: int) -> int:
    """Each of n ranks of a group adds its vote and comes to the gate; those that open gates delete all but the last two."""
    world = torch.Size(shape).numel()
    return sum(world // size * (2 * size * questions + max(questions - 2, 0)) for size in shape)


@dataclass(frozen=True)
class Row:
    """One mesh: what was measured, and what the formulas say."""

    mesh: str
    ranks: int
    questions: int
    operations: int
    operations_expected: int
    seconds: float
    seconds_expected: float

    def __str__(self) -> str:
        return (
            f"{self.mesh:>9} {self.ranks:6} {self.questions:9} {self.operations:10} {self.operations_expected:10} "
            f"{self.operations / self.ranks:8.2f} {self.seconds:9.3f} {self.seconds_expected:9.3f}"
        )


def measure(args: argparse.Namespace, questions: int) -> list[Row]:
    """A row per mesh, the smallest of each kind first."""
    flat = [(size,) for size in FLAT if size <= args.most]
    grid = [(size, SHARDS) for size in REPLICAS if size * SHARDS <= args.most]
    rows = []
    for shapes in (flat, grid):
        each = 0.0
        for shape in shapes:
            progress(f"{shape} ...")
            seconds, operations = min(simulate(shape, questions, args.processes) for _ in range(args.rounds))
            each = each or seconds / operations
            expected = operations_by_formula(shape, questions)
            world = torch.Size(shape).numel()
            rows.append(Row(named(shape), world, questions, operations, expected, seconds, expected * each))
    return rows


def agree(args: argparse.Namespace) -> None:
    """Measures and reports how ranks agree."""
    lines = [f"questions of one rank in fully_shard and three steps; {args.units} units and the root"]
    questions = 0
    for shape in ((args.engine,), (args.engine // SHARDS, SHARDS)):
        world = torch.Size(shape).numel()
        for rank in (0, world // 2, world - 1):
            asked = ask_as_rank(shape, args.units, rank)
            questions = max(questions, -(-asked.in_store // len(shape)))
            lines.append(
                f"{named(shape):>9}, rank {rank:5}: {asked.in_store} in the store, {asked.operations} operations, "
                f"{asked.in_group} in the group"
            )
    lines.append("     mesh  ranks questions operations    formula per rank   seconds   formula")
    rows = measure(args, questions)
    publish("startup", "\n".join([*lines, *map(str, rows)]), vars(args), args.json, rows=[asdict(row) for row in rows])


# -- one rank fails ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What came of one job: a failure, how many ranks of those that live were told, when, and for how many operations."""

    ranks: int
    failure: Failure
    timeout: float
    told: int
    living: int
    seconds: tuple[float, float]
    operations: tuple[int, int]
    messages: dict[str, int]

    def __str__(self) -> str:
        how = f"late by {self.failure.seconds:g} s" if self.failure.how == "late" else self.failure.how
        return (
            f"{self.ranks:5}  {self.failure.where:18}  {how:12} {self.timeout:9.0f}  {self.told:5} of {self.living:5}"
            f"{self.seconds[0]:14.2f} {self.seconds[1]:6.2f} {self.operations[0]:18} {self.operations[1]:4}"
        )


def fate(world: int, failure: Failure, timeout: float, each: float) -> Fate:
    """Runs one job; `each`: seconds of a store operation."""
    outcomes = fail(world, failure, timeout, each)
    seconds = [one.ended - one.came for one in outcomes]
    operations = sorted(one.calls.total() for one in outcomes)
    # What differs between the messages of ranks is their own number.
    told = Counter(re.sub(r"on rank \d+", "on rank [its own]", one.message) for one in outcomes if one.error)
    return Fate(
        world,
        failure,
        timeout,
        told.total(),
        len(outcomes),
        (min(seconds), max(seconds)),
        (operations[len(operations) // 2], operations[-1]),
        dict(told),
    )


def failures(args: argparse.Namespace) -> None:
    """Measures and reports what ranks are told of one that fails."""
    real = [simulate((16,), 64, args.processes) for _ in range(args.rounds)]
    each = min(seconds / operations for seconds, operations in real)
    lines = [
        f"ranks, clock, process group and store are simulated, a store operation of {1e6 * each:.0f} us is a TCPStore's",
        "ranks  one fails before    how           time-out  told           seconds: least   most operations: median most",
    ]
    rows = []
    for where in get_args(Where):
        # Ranks that wait for a collective look at the store once per second: many of them take long to simulate.
        for world in (4, 64, args.engine) if where == "first question" else (4, 64):
            progress(f"{where}, {world} ranks ...")
            for how, timeout in (("nothing", 600), ("differs", 600), ("late", 600), ("late", 20), ("dead", 20)):
                rows.append(fate(world, Failure(how, where, (world // 2,)), float(timeout), each))
                lines.append(str(rows[-1]))
        lines += [f"       {count} x {text}" for row in rows[-5:] for text, count in row.messages.items()]
    publish("startup --what failure", "\n".join(lines), vars(args), args.json, rows=[asdict(row) for row in rows])


# -- fully_shard -------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A unit with so many weights."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(DIM, DIM)) for _ in range(params))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of its products, for those who want to run it."""
        return torch.stack([x @ weight for weight in self.weights]).sum(0)


def wrap(args: argparse.Namespace) -> None:
    """Measures and reports how long `fully_shard` takes; hsdp and FSDP2 take turns, the best round of each counts."""
    took: dict[str, list[float]] = {"hsdp": [], "FSDP2": []}
    with fake_world(args.engine) as env:
        mesh = env.mesh((args.engine,))
        for _ in range(args.rounds):
            for name, fully_shard in (("hsdp", hsdp.fully_shard), ("FSDP2", fsdp.fully_shard)):
                model = nn.Sequential(*(Wide(args.params) for _ in range(args.units)))
                began = time.process_time()
                for unit in model:
                    fully_shard(unit, mesh=mesh)
                fully_shard(model, mesh=mesh)
                took[name].append(time.process_time() - began)
                progress(f"{name} {took[name][-1]:.2f} s")
                del model
    ours, theirs = (min(took[name]) for name in took)
    publish(
        "startup --what wrap",
        f"fully_shard of {args.units} units x {args.params} parameters on {args.engine} ranks, CPU seconds: "
        f"hsdp {ours:.2f}, FSDP2 {theirs:.2f}, ratio {ours / theirs:.2f}",
        vars(args),
        args.json,
        **took,
    )


def steps(args: argparse.Namespace) -> None:
    """Counts and reports the function calls of a step, which do not depend on the machine."""
    units, lines = 8, ["    mesh  function calls of a step  of each unit in it"]
    rows = []
    for replicas in (1, 4):
        for world in WORLDS:
            few, many = (calls_per_step(world, replicas, number) for number in (units, 2 * units))
            shape = named((replicas, world // replicas) if replicas > 1 else (world,))
            lines.append(f"{shape:>8}  {few:24}  {(many - few) / units:18.2f}")
            rows.append({"mesh": shape, "calls": few, "calls_of_a_unit": (many - few) / units})
    publish("startup --what steps", "\n".join(lines), vars(args), args.json, rows=rows)


WHATS = {"agree": agree, "wrap": wrap, "failure": failures, "steps": steps}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=WHATS, default="agree", help="to measure (default %(default)s)")
    parser.add_argument("--units", type=positive, default=100, help="of the model (default %(default)s)")
    parser.add_argument("--params", type=positive, default=10, help="of a unit, for wrap (default %(default)s)")
    parser.add_argument("--processes", type=positive, default=2, help="that share the clients (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="the best one counts (default %(default)s)")
    parser.add_argument("--most", type=positive, default=max(FLAT), help="ranks (default %(default)s)")
    parser.add_argument("--engine", type=positive, default=1024, help="ranks around the one that runs hsdp (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    args = parser.parse_args(argv)
    WHATS[args.what](args)


if __name__ == "__main__":
    main()

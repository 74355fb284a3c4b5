"""`python -m benchmarks.elastic`: a step over torchft's replicas on two emulated nodes, hsdp beside FSDP2's hook.

Two replicas of two ranks, each on a node of its own (`benchmarks.netns`), and a lighthouse on the first. The layers are
those of `benchmarks.two_nodes`. All contenders take turns in one set of processes, each with a lighthouse, managers and a
model of its own. A step is a whole one, with its quorum, its vote and an optimizer's step (SGD, which takes little of the
few cores).

    elastic    `hsdp.elastic.ElasticOptimizer`
    hook       FSDP2, whose `set_all_reduce_hook` waits for `manager.allreduce`, and torchft's `OptimizerWrapper`
    hsdp       hsdp on a mesh of 2 x 2 ranks: what replicas that come and go cost
    local      `CommPolicy(accumulate="local")`: micro-batches are added before the reduce-scatter, as the hook has it

Each rank checks that every step was taken by both replicas, and that all contenders have the same gradients at the end.
Needs root, iproute2 and torchft.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsdp
from benchmarks.harness import Spread, publish
from benchmarks.two_nodes import DIM, WORLD, Job, arguments, build, heading, measured, run
from hsdp import elastic
from hsdp.examples.launch import leave

SHARDS = 2
NODE = "10.213.77.{}"
LIGHTHOUSE_PORT, STORE_PORT = 29610, 29710
PATIENCE = timedelta(seconds=60)
CONTENDERS = ("hook", "elastic", "hsdp", "hook / 4", "elastic / 4", "elastic, local / 4", "hsdp / 4")
BASELINES = {name: "hook / 4" if name.endswith("/ 4") else "hook" for name in CONTENDERS}


@dataclass(frozen=True)
class Place:
    """A rank of a replica."""

    rank: int

    @property
    def replica(self) -> int:
        """Number of its replica, and of its node."""
        return self.rank // SHARDS

    @property
    def host(self) -> str:
        """Address of its node."""
        return NODE.format(self.replica + 1)


class Training:
    """One contender's model, optimizer and, but for "hsdp", its manager of replicas."""

    def __init__(self, job: Job, number: int, mesh: DeviceMesh, place: Place) -> None:
        self.name = job.contenders[number]
        library = self.name.split(" / ")[0].split(",")[0]
        self.micro_batches = job.micro_batches if self.name.endswith("/ 4") else 1
        policy = hsdp.CommPolicy(accumulate="local") if "local" in self.name else hsdp.CommPolicy()
        self.library = library
        shards = mesh if library == "hsdp" else mesh["shard"]
        self.model: Any = build(job, "fsdp2" if library == "hook" else "hsdp", policy, shards)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=True)
        self.optimizer: Any = sgd
        self.manager: Any = None
        if library != "hsdp":
            self.manager, self._held = make_manager(number, place)
        if library == "elastic":
            self.optimizer = elastic.ElasticOptimizer(self.manager, self.model, sgd)
        elif library == "hook":
            self.optimizer = hook(self.manager, self.model, sgd)
        # Other batches on each data rank, so that a reduction that is left out shows in gradients.
        generator = torch.Generator().manual_seed(place.rank)
        self.x = torch.randn(job.rows, DIM, generator=generator).requires_grad_()
        self.taken = 0

    def step(self) -> None:
        """A training step. With several micro-batches, what goes over replicas goes once."""
        self.optimizer.zero_grad()
        for micro in range(self.micro_batches):
            last = micro == self.micro_batches - 1
            if self.library == "hook":
                # Its hook runs behind each reduce-scatter: to have one, whole gradients must be kept until the last.
                self.model.set_requires_gradient_sync(last)
                self.model(self.x).mean().backward()
            else:
                with self.model.accumulate(last=last):
                    self.model(self.x).mean().backward()
        self.optimizer.step()
        self.taken += 1
        if self.manager is not None and (self.manager.current_step(), self.manager.num_participants()) != (self.taken, 2):
            raise RuntimeError(f"{self.name}: step {self.taken} was not taken by both replicas: {self.manager.errored()}")

    def gradients(self) -> list[Tensor]:
        """This rank's, of the last step."""
        return [param.grad.to_local() for param in self.model.parameters()]


def make_manager(number: int, place: Place) -> tuple[Any, list[Any]]:
    """A manager, and what lives as long as it does: a contender's lighthouse, the store of its replica."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    held: list[Any] = []
    port = LIGHTHOUSE_PORT + number
    if place.rank == 0:
        # All replicas take part in the first quorum: none begins alone.
        held.append(LighthouseServer(bind=f"{place.host}:{port}", min_replicas=2, quorum_tick_ms=10))
    held.append(dist.TCPStore(place.host, STORE_PORT + number, is_master=place.rank % SHARDS == 0, wait_for_workers=False))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        init_sync=False,
        timeout=PATIENCE,
        rank=place.rank % SHARDS,
        world_size=SHARDS,
        store_addr=place.host,
        store_port=STORE_PORT + number,
        lighthouse_addr=f"http://{NODE.format(1)}:{port}",
        replica_id=f"replica{place.replica}",
        hostname=place.host,
    )
    return manager, held


def hook(manager: Any, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """FSDP2 over torchft's replicas: an all-reduce per unit, behind its reduce-scatter, which its hook waits for."""
    from torchft.optim import OptimizerWrapper

    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)

    def all_reduce(reduced: Tensor) -> None:
        manager.allreduce(reduced).wait()

    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(all_reduce)
    return OptimizerWrapper(manager, optimizer)


def rank_main(rank: int, job: Job) -> None:
    """One rank."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # torchft tells each step what it decided
    store = dist.FileStore(f"{job.directory}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=2 * PATIENCE)
    mesh = init_device_mesh("cpu", (WORLD // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    trainings = [Training(job, number, mesh, Place(rank)) for number in range(len(job.contenders))]
    times: dict[str, list[float]] = {training.name: [] for training in trainings}
    for training in trainings:
        for _ in range(2):
            training.step()
    for _ in range(job.rounds):
        for training in trainings:
            gc.collect()
            times[training.name].append(_slowest(training.step, job.steps))
    for training in trainings:
        alike = next(one for one in trainings if one.micro_batches == training.micro_batches)
        for mine, theirs in zip(training.gradients(), alike.gradients(), strict=True):
            size = theirs.abs().max().item()
            assert size > 0, f"{alike.name}: a gradient is 0"
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * size)
    if rank == 0:
        Path(job.directory, "times.json").write_text(json.dumps(times))
    dist.barrier()
    leave(0)  # torchft's threads go with the process


def _slowest(run: Callable[[], object], times: int) -> float:
    """Wall time of a run on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        run()
    took = torch.tensor((time.perf_counter() - start) / times, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def table(results: Sequence[tuple[str, dict[str, list[float]]]]) -> str:
    """The ratios as text."""
    lines = [f"{'':22}  {'ratio to hook, round by round':^30}  context: ms", f"{'':22}  {'min median    max  minima':>30}"]
    for title, times in results:
        lines.append(title)
        for name, took in times.items():
            base = times[BASELINES[name]]
            spread = Spread.of([a / b for a, b in zip(took, base, strict=True)])
            cell = "" if took is base else f"{spread}  {min(took) / min(base):6.2f}"
            lines.append(f"  {name:20}  {cell:>30}  {1e3 * min(took):.0f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    args = arguments(argv, "benchmarks.elastic", __doc__, BASELINES, ["1gbit"], steps=2)
    found = measured(args, "benchmarks.elastic", timeout=600)
    results = [(f"{layers} layers, {rate}", times) for layers, rate, times in found]
    rows = [{"config": title, "times": times} for title, times in results]
    publish("elastic", f"{heading(args)}\n{table(results)}", vars(args), args.json, rows=rows)


if __name__ == "__main__":
    run(main, rank_main)

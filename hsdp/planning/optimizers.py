"""What an optimizer's step takes: states, time, and bytes; elementwise on shards or on replicas' shares of them, or Muon.

    elementwise     reads parameters, gradients and states, writes all but gradients; other replicas get what was stepped
    Muon            momentum on shards (or shares); pieces to owners, iterations there, pieces back (hsdp/optim/exchange.py)

Muon steps the matrices of blocks, an elementwise optimizer beside it what is none, and the embedding and the head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from hsdp.optim.matrices import owners_of
from hsdp.optim.whole_matrix import BUCKET_BYTES
from hsdp.planning.facts import ParamFacts
from hsdp.planning.layouts import GroupPlan, UnitPlan, head_of
from hsdp.planning.traffic import Collective, Wires

Kind = Literal["elementwise", "muon"]
KINDS: tuple[Kind, ...] = ("elementwise", "muon")

WIRE_BYTES = 2
"""Of an element of a matrix on its way: Muon's default is bf16."""

ITERATIONS = 5
"""Of Newton and Schulz, Muon's default."""


class Travel(NamedTuple):
    """Bytes that a rank sends in the mean: to ranks of its replica, and to those of others."""

    inside: float
    across: float


@dataclass(frozen=True)
class OptimizerPlan:
    """An optimizer's step of a model on a mesh.

    Attributes:
        kind: of the optimizer.
        units, wires: of the step; with `wires.over_replicas` replicas share gradients and states out.
        states: tensors of state for each parameter that is stepped elementwise. A matrix that Muon steps has one.
        flops, bandwidth: of a rank, per second.
    """

    kind: Kind
    units: Sequence[UnitPlan]
    wires: Wires
    states: int
    flops: float
    bandwidth: float

    @property
    def sharers(self) -> int:
        """How many replicas share a state."""
        return self.wires.replicas if self.wires.over_replicas else 1

    # -- memory --------------------------------------------------------------------------------------------------

    def state_bytes(self, unit: UnitPlan, group: GroupPlan) -> int:
        """Of the states that a rank has for a dtype group."""
        matrices, others = self._local_bytes(unit, group, self.wires.over_replicas)
        return matrices + self.states * others

    def _local_bytes(self, unit: UnitPlan, group: GroupPlan, shares: bool) -> tuple[int, int]:
        """Of the shards of what Muon steps, and of what is stepped elementwise; or of this replica's shares of them."""
        numels = [0, 0]
        for param, one in zip(group.params, group.held, strict=True):
            if param.trainable:
                numels[not self._is_matrix(unit, param)] += one.numel if shares else math.prod(one.local)
        matrices, others = (numel * group.kind.storage.itemsize for numel in numels)
        return matrices, others

    def _is_matrix(self, unit: UnitPlan, param: ParamFacts) -> bool:
        if self.kind != "muon" or unit.facts.parent is None or unit is self._head:
            return False
        return len(param.shape) > 1 and not param.looked_up and not param.name.endswith("bias")

    @cached_property
    def _head(self) -> UnitPlan | None:
        return head_of(self.units)

    @property
    def step_bytes(self) -> int:
        """What the step makes beside what it steps: Muon's matrices, or behind them one tensor of each other shard's size.

        That is what foreach implementations make, PyTorch's default on devices. Fused ones make nothing, and the loops that
        are the default on CPUs a tensor at a time.
        """
        resident = [(unit, group) for unit in self.units for group in unit.dtype_groups if not group.offloaded]
        local = [self._local_bytes(unit, group, self.wires.over_replicas) for unit, group in resident]
        return max(self._matrix_bytes, sum(others for _, others in local))

    @property
    def _matrix_bytes(self) -> int:
        """Of the bucket that an owner iterates and of those before and behind it: see `hsdp.optim.exchange`."""
        if not self._matrices:
            return 0
        replicas, buckets = self.wires.replicas, self._buckets
        ranks = replicas * self.wires.shards
        elements = sum(param.numel for param in self._matrices) / ranks / buckets  # of an owner, in a bucket
        owned = WIRE_BYTES * elements
        sent = owned * (ranks - 1) / ranks  # to owners, and as much comes from others
        back = replicas * sent
        sides = max(min(shape) / max(shape) for shape in map(_flat, self._matrices))
        # The gradients with momentum, in fp32, are cut; matrices are kept until all are iterated, beside two of x and two
        # Gram matrices of the last iteration; what comes out travels to all that hold it.
        starting = elements * 4 * replicas / self.sharers + owned + 2 * sent
        iterating = owned * (3 + 2 * sides) + sent
        returning = 2 * owned + sent + 2 * back
        beside = 0.0
        if buckets > 1:  # the next one has been sent
            beside += owned + 2 * sent
        if buckets > 2:  # of the one before the updates come
            beside += owned + 2 * back
        return math.ceil(max(starting, iterating, returning) + beside)

    # -- bytes ---------------------------------------------------------------------------------------------------

    def arriving(self, unit: UnitPlan) -> list[Collective]:
        """The gather that brings what each replica has stepped elementwise of a unit to the others, behind the step."""
        if self.sharers == 1:
            return []
        direct: list[int] = []
        packed: dict[torch.dtype, int] = {}
        for group in unit.dtype_groups:
            dtype = group.kind.storage
            for param, one in zip(group.params, group.held, strict=True):
                if one.rows and one.numel and param.trainable and not self._is_matrix(unit, param):
                    if one.local[0] == one.rows * self.sharers and not group.offloaded:
                        direct.append(one.numel * dtype.itemsize)
                    else:
                        packed[dtype] = packed.get(dtype, 0) + one.numel * dtype.itemsize
        return self.wires.stepped([*direct, *packed.values()])

    @cached_property
    def exchanged(self) -> list[Collective]:
        """Pieces of matrices to owners and back, in which all ranks take part, inside of the step."""
        if not self._matrices or self.wires.replicas * self.wires.shards == 1:
            return []
        travels = [self._travel(param) for param in self._matrices]
        inside, across = (WIRE_BYTES * sum(side) for side in zip(*travels, strict=True))
        return self.wires.exchange(inside, across, 2 * self._buckets)

    def _travel(self, param: ParamFacts) -> Travel:
        """Elements of a parameter, there and back; owners are dealt evenly over all ranks."""
        replicas, shards, numel = self.wires.replicas, self.wires.shards, param.numel
        ranks = replicas * shards
        back = Travel(numel * (shards - 1) / (ranks * shards), numel * (replicas - 1) / ranks)
        if param.dim is None:  # every rank holds all of it
            return Travel(numel * (shards - 1) / ranks, numel * (replicas - 1) / replicas)
        stacked = len(param.shape) > 2 and not param.convolution and param.dim == 0 and param.merged == 1
        if stacked and param.shape[0] % (shards * self.sharers) == 0:  # experts: ranks own what they have
            return Travel(0.0, back.across)
        if self.sharers == 1:
            return Travel(2 * back.inside, back.across)
        there = Travel(numel * (shards - 1) / ranks**2, numel * (replicas - 1) / (ranks * replicas))
        return Travel(there.inside + back.inside, there.across + back.across)

    # -- time ----------------------------------------------------------------------------------------------------

    @cached_property
    def seconds(self) -> float:
        """Until the step returns. Iterations of one bucket of matrices hide the travels of those beside it."""
        resident = [(unit, group) for unit in self.units for group in unit.dtype_groups if not group.offloaded]
        # Of gradients the momentum and what becomes an update; then weights, of which each rank has the whole shards.
        touched = 0
        for unit, group in resident:
            matrices, others = self._local_bytes(unit, group, self.wires.over_replicas)
            touched += others * (3 + 2 * self.states) + 4 * matrices + 3 * self._local_bytes(unit, group, False)[0]
        travel = sum(one.seconds for one in self.exchanged)
        compute, buckets = self.iterations, self._buckets
        return touched / self.bandwidth + max(compute + travel / buckets, travel + compute / buckets)

    @cached_property
    def iterations(self) -> float:
        """Seconds of the rank with most to iterate."""
        costs = tuple(cost for param in self._matrices for cost in _costs(param))
        return _most(self.wires.replicas * self.wires.shards, costs) / self.flops

    @cached_property
    def _matrices(self) -> list[ParamFacts]:
        return [p for unit in self.units for p in unit.facts.params if p.trainable and self._is_matrix(unit, p)]

    @property
    def _buckets(self) -> int:
        most = BUCKET_BYTES * self.wires.replicas * self.wires.shards
        return max(1, -(-WIRE_BYTES * sum(param.numel for param in self._matrices) // most))


@functools.lru_cache(maxsize=64)  # advice asks for the same again and again
def _most(ranks: int, costs: tuple[float, ...]) -> float:
    """What the rank has to do that has most to do."""
    loads = dict.fromkeys(range(ranks), 0.0)
    for rank, cost in zip(owners_of(tuple(loads), costs, [[]] * len(costs)), costs, strict=True):
        loads[rank] += cost
    return max(loads.values())


def _flat(param: ParamFacts) -> tuple[int, int]:
    """Rows and columns of each of a parameter's matrices."""
    shape = param.shape
    return (shape[0], math.prod(shape[1:])) if param.convolution else (shape[-2], shape[-1])


def _costs(param: ParamFacts) -> list[float]:
    """Flops of the iterations of each of a parameter's matrices."""
    shape = param.shape
    count, rows = (1, shape[0]) if param.convolution else (math.prod(shape[:-2]), shape[-2])
    small, large = sorted((rows, math.prod(shape[1:] if param.convolution else shape[-1:])))
    return [2.0 * ITERATIONS * small * small * (2 * large + small)] * count

"""Collectives of a step and the bytes that a rank sends, on fast links inside a node and slow ones between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hsdp.comm.backends import GATHER_ALONE_BYTES, REDUCE_ALONE_BYTES, UNEVEN_LISTS, share_calls
from hsdp.comm.tree import travelling
from hsdp.planning.layouts import GroupPlan, UnitPlan
from hsdp.planning.schedule import Event, Verb


@dataclass(frozen=True)
class Link:
    """How ranks are connected, neighbours in a node first: ranks 0 to n-1 are one node.

    The default rates are 80 % and 90 % of the nominal ones of nodes of 8 H100 (NVLink 4: 450 GB/s each way; a 400 Gbit/s
    NIC per GPU: 50 GB/s), the default latencies those by which NCCL itself predicts rings (src/graph/tuning.cc). Measure
    your own (nccl-tests' "busbw") for figures to rely on.

    Attributes:
        fast: bytes per second that a rank sends inside a node, while it receives as many.
        slow: the same between nodes, of a rank's share of its node's adapters.
        ranks_per_node: n.
        latency: seconds of a call.
        fast_step, slow_step: seconds of each hop of a ring, inside a node and between nodes.
    """

    fast: float = 360e9
    slow: float = 45e9
    ranks_per_node: int = 8
    latency: float = 8.4e-6
    fast_step: float = 3.4e-6
    slow_step: float = 14e-6

    def __post_init__(self) -> None:
        if type(self.ranks_per_node) is not int or self.ranks_per_node < 1:
            raise ValueError(f"Link(ranks_per_node={self.ranks_per_node!r}): expected an integer of at least 1")
        for name in ("fast", "slow"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"Link({name}={value!r}): expected bytes per second, a number above 0")
        for name in ("latency", "fast_step", "slow_step"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"Link({name}={value!r}): expected seconds, a number of at least 0")

    def in_a_node(self, world: int) -> int:
        """Ranks that lie in one node when so many are spread evenly: 7 of 7, 6 of 12, 8 of 64 on nodes of 8."""
        nodes = -(-world // self.ranks_per_node)
        return world // nodes if world % nodes == 0 else self.ranks_per_node

    def members(self, axis: str, replicas: int, shards: int, parts: int = 1) -> int:
        """How many ranks of a group lie in one node, at least; `parts`: size of the groups of the axis "part"."""
        together = self.in_a_node(replicas * shards)
        if axis != "replicate":
            return math.gcd(parts if axis == "part" else shards, together)
        beside = together // shards if together % shards == 0 else 1
        return math.gcd(replicas, beside)

    def split(self, sent: float, size: int, members: int) -> tuple[float, float]:
        """Of the bytes that a rank sends in a group of `size`, those inside its node and those between nodes.

        A rank needs each other node's bytes once per node, not once per rank: that is how rings and trees over nodes
        work, and every rank carries an equal share.
        """
        slow = sent * (size - members) / (members * (size - 1)) if size > 1 else 0.0
        return sent - slow, slow

    def seconds(self, rounds: int, size: int, members: int, fast: float, slow: float) -> float:
        """How long a call takes that sends so much in `rounds` rounds of a ring: the two tiers work at the same time."""
        between = size // members - 1
        steps = rounds * ((size - 1 - between) * self.fast_step + between * self.slow_step)
        return self.latency + steps + max(fast / self.fast, slow / self.slow)


@dataclass(frozen=True)
class Collective:
    """Calls of one kind.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce", or "all-to-all" (of matrices and their owners).
        axis: the group: "shard", "part" (neighbours that keep the whole parameters after forward), "replicate" or "all
            ranks".
        size: ranks in it.
        calls: how often a collective is started.
        transfers: tensors that move, more than one per call when coalesced.
        sent: bytes that a rank sends, and receives.
        fast, slow: those of them inside a node, and between nodes.
        seconds: what the calls take, each alone.
    """

    kind: str
    axis: str
    size: int
    calls: int
    transfers: int
    sent: float
    fast: float
    slow: float
    seconds: float

    def __add__(self, other: Collective) -> Collective:
        assert (self.kind, self.axis) == (other.kind, other.axis), "only calls of one kind are added up"
        return Collective(
            self.kind,
            self.axis,
            self.size,
            self.calls + other.calls,
            self.transfers + other.transfers,
            self.sent + other.sent,
            self.fast + other.fast,
            self.slow + other.slow,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Wires:
    """What turns events into collectives: the mesh, its links and the habits of its backend.

    With `over_replicas` gradients are reduce-scattered over replicas, of which each steps its share.
    """

    replicas: int
    shards: int
    link: Link
    backend: str
    over_replicas: bool = False

    def of(self, event: Event, units: Sequence[UnitPlan]) -> list[Collective]:
        """The collectives that an event starts."""
        involved = [units[index] for index in event.units]
        if event.verb is Verb.GATHER:
            groups = [group for unit in involved for group in unit.dtype_groups]
            inputs = [size for group in groups for size in group.gather_inputs]
            uneven = [one for group in groups for one in group.uneven_gathers]
            return self._gather("shard", self.shards, inputs) + self._unevenly("all-gather", uneven)
        if event.verb is Verb.REGATHER:
            parts = [size for unit in involved for group in unit.dtype_groups for size in group.part_bytes]
            return self._gather("part", involved[0].parts, parts)
        if event.verb is Verb.SCATTER and self.shards > 1:
            return self._scatter(involved)
        if event.verb in (Verb.ALL_REDUCE, Verb.SUM_EARLY) and self.replicas > 1:
            if self.over_replicas and not involved[0].in_tree:
                return self._share_out([group for unit in involved for group in unit.dtype_groups])
            return self._all_reduce("replicate", self.replicas, _operands(involved), involved[0].in_tree)
        return []

    def stepped(self, parts: list[int]) -> list[Collective]:
        """The collective that brings what each replica has stepped to the others; `parts`: its bytes."""
        return self._gather("replicate", self.replicas, parts)

    def exchange(self, inside: float, across: float, calls: int) -> list[Collective]:
        """All-to-alls among all ranks, in which a rank sends so much inside its replica, and across to others."""
        link, size = self.link, self.replicas * self.shards
        near = link.members("shard", self.replicas, self.shards)
        far = (self.shards - near) / (self.shards - 1) if self.shards > 1 else 0.0
        beside = max(link.in_a_node(size) // self.shards, 1) - 1  # other replicas in the node
        apart = 1 - beside / (self.replicas - 1) if self.replicas > 1 else 0.0
        slow = inside * far + across * apart
        fast = inside + across - slow
        seconds = calls * link.latency + max(fast / link.fast, slow / link.slow)
        return [Collective("all-to-all", "all ranks", size, calls, calls, inside + across, fast, slow, seconds)]

    def _share_out(self, dtype_groups: Sequence[GroupPlan]) -> list[Collective]:
        """The reduce-scatter of gradients over replicas, and the all-reduce of those of which they have no shares."""
        inputs: list[tuple[torch.dtype, int]] = []
        whole: list[tuple[torch.dtype, int]] = []
        for group in dtype_groups:
            dtype, itemsize, sums = group.kind.summed, group.kind.reduce.itemsize, group.shared_sums
            if sums is None:
                whole += [(dtype, nbytes) for nbytes in group.operands]
                continue
            inputs += [(dtype, numel * itemsize) for numel in sums.inputs]
            whole += [(dtype, sums.whole * itemsize)] if sums.whole else []
        calls = len(inputs) if self.backend == "gloo" else len({dtype for dtype, _ in inputs})
        sent = sum(nbytes for _, nbytes in inputs) * (self.replicas - 1) / self.replicas
        found = self._collective("reduce-scatter", "replicate", self.replicas, calls, len(inputs), sent)
        return found + self._all_reduce("replicate", self.replicas, whole, in_tree=False)

    def _gather(self, axis: str, size: int, inputs: list[int]) -> list[Collective]:
        calls = self._calls(inputs, GATHER_ALONE_BYTES)
        return self._collective("all-gather", axis, size, calls, len(inputs), sum(inputs) * (size - 1))

    def _unevenly(self, kind: str, tensors: Sequence[tuple[int, int]], in_tree: bool = False) -> list[Collective]:
        """Collectives of tensors of so many bytes, of which so many ranks hold a part: what a rank sends on average."""
        sent = sum(nbytes for nbytes, _ in tensors) * (self.shards - 1) / self.shards
        in_one = in_tree or self.backend in UNEVEN_LISTS
        calls = len(tensors) if in_one else sum(holders for _, holders in tensors)
        return self._collective(kind, "shard", self.shards, calls, calls, sent)

    def _scatter(self, units: list[UnitPlan]) -> list[Collective]:
        inputs = [
            (group.kind.summed, size) for unit in units for group in unit.dtype_groups for size in group.scatter_inputs
        ]
        # On gloo, and in a tree, each tensor is an all-to-all of its own.
        alone = self.backend == "gloo" or units[0].in_tree
        calls = len(inputs) if alone else len({dtype for dtype, _ in inputs})
        sent = sum(size for _, size in inputs) * (self.shards - 1) / self.shards
        found = self._collective("reduce-scatter", "shard", self.shards, calls, len(inputs), sent)
        uneven = [one for unit in units for group in unit.dtype_groups for one in group.uneven_scatters]
        found += self._unevenly("reduce-scatter", uneven, units[0].in_tree)
        return found + self._all_reduce("shard", self.shards, _operands(units, replicated=True), units[0].in_tree)

    def _all_reduce(
        self, axis: str, size: int, operands: Sequence[tuple[torch.dtype, int]], in_tree: bool
    ) -> list[Collective]:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for dtype, nbytes in operands:
            by_dtype.setdefault(dtype, []).append(nbytes)
        if in_tree:  # an all-to-all of each tensor, and one all-gather of their sums
            cuts = [travelling(dtype, sizes, size) for dtype, sizes in by_dtype.items()]
            tensors = [nbytes for in_place, packed in cuts for nbytes in (*in_place, packed) if nbytes]
            calls = len(tensors) + self._calls([nbytes // size for nbytes in tensors], GATHER_ALONE_BYTES)
            transfers = 2 * len(tensors)
        else:
            tensors = [nbytes for _, nbytes in operands]
            calls = sum(self._calls(sizes, REDUCE_ALONE_BYTES) for sizes in by_dtype.values())
            transfers = len(tensors)
        sent = 2 * sum(tensors) * (size - 1) / size
        return self._collective("all-reduce", axis, size, calls, transfers, sent)

    def _calls(self, sizes: list[int], alone: int) -> int:
        return len(share_calls(sizes, alone)) if self.backend == "gloo" else int(bool(sizes))

    def _collective(self, kind: str, axis: str, size: int, calls: int, transfers: int, sent: float) -> list[Collective]:
        if not calls:
            return []
        members = self.link.members(axis, self.replicas, self.shards, size)
        fast, slow = self.link.split(sent, size, members)
        rounds = 2 if kind == "all-reduce" else 1
        seconds = calls * self.link.seconds(rounds, size, members, fast / calls, slow / calls)
        return [Collective(kind, axis, size, calls, transfers, sent, fast, slow, seconds)]


def _operands(units: Sequence[UnitPlan], replicated: bool = False) -> list[tuple[torch.dtype, int]]:
    """What is all-reduced, with its dtype; only that of parameters that every rank keeps whole if told."""
    dtype_groups = [group for unit in units for group in unit.dtype_groups if group.kind.replicated or not replicated]
    return [(group.kind.summed, size) for group in dtype_groups for size in group.operands]


def add_up(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """One entry for each kind and axis."""
    sums: dict[tuple[str, str], Collective] = {}
    for one in collectives:
        key = (one.kind, one.axis)
        sums[key] = sums[key] + one if key in sums else one
    return tuple(sums.values())

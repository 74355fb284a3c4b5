"""Where the bytes of each unit lie and travel on a mesh: the `Layout` of every dtype group, and the sizes it implies.

This is the planner that `fully_shard` itself uses; nothing is estimated here. All sizes are bytes on one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hsdp.buffers.layout import Layout, ParamSpec, Piece, Thresholds, lay_out
from hsdp.comm.backends import direct_bytes, uneven_bytes
from hsdp.comm.tree import check_shape, travelling
from hsdp.offload import OffloadPolicy
from hsdp.planning.facts import ParamFacts, UnitFacts
from hsdp.planning.replica_sums import Held, SharedSums, held, shared_sums
from hsdp.unit.dtype_group import GroupKey, thresholds_for, whole_numels

# Blocks are alike: most layouts are asked for again and again.
_layout = functools.lru_cache(maxsize=1024)(lay_out)


@dataclass(frozen=True)
class GroupPlan:
    """The parameters of a unit that share dtypes.

    Attributes:
        kind: their dtypes.
        params: the parameters.
        layout: of their shards and of the whole ones.
        trained: of the reduction of those that get gradients; None if none does.
        replicas: size R of the mesh.
        thresholds: the sizes from which they travel directly.
        parts: size of the group over which they stay sharded after forward (1: none).
        offloaded: shards, and gradients beside them, live in host memory.
    """

    kind: GroupKey
    params: tuple[ParamFacts, ...]
    layout: Layout
    trained: Layout | None
    replicas: int
    thresholds: Thresholds
    parts: int = 1
    offloaded: bool = False

    @property
    def moves(self) -> bool:
        """What is gathered is a copy of the shards: in another dtype, or on another device."""
        return self.offloaded or self.kind.compute != self.kind.storage

    @property
    def alone(self) -> bool:
        """Every rank of the shard group holds all of it: nothing is gathered or scattered."""
        return self.layout.shards == 1

    @property
    def trainable(self) -> tuple[ParamFacts, ...]:
        """Those that get gradients, in the order of `trained.pieces`."""
        return tuple(param for param in self.params if param.trainable)

    # -- parameters ----------------------------------------------------------------------------------------------

    @property
    def shard_bytes(self) -> int:
        """The shard buffer, padding included."""
        return self.layout.numel * self.kind.storage.itemsize

    @property
    def device_bytes(self) -> int:
        """What of that is on the device."""
        return 0 if self.offloaded else self.shard_bytes

    @property
    def arriving_bytes(self) -> int:
        """The offloaded shards on the device, before they are cast."""
        return self.shard_bytes if self.offloaded else 0

    @property
    def padding_bytes(self) -> int:
        """What of that is padding, on average over ranks."""
        return self.layout.padding * self.kind.storage.itemsize // self.layout.shards

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """Of each parameter what the first rank holds, and which rows of it are its share among replicas."""
        pieces = zip(self.params, self.layout.pieces, strict=True)
        return tuple(held(param, piece, self.replicas, self.layout.shards) for param, piece in pieces)

    @property
    def whole_bytes(self) -> int:
        """The memory behind the whole parameters; none where they alias the shards."""
        if self.alone:
            return self.layout.numel * self.kind.compute.itemsize if self.moves else 0
        return sum(whole_numels(self.layout, self.parts)) * self.kind.compute.itemsize

    @property
    def unpacked_bytes(self) -> int:
        """What of that is there only when its gather has ended: the memory behind packed parameters."""
        return 0 if self.alone else whole_numels(self.layout, self.parts)[1] * self.kind.compute.itemsize

    @property
    def part_bytes(self) -> list[int]:
        """What is kept between forward and backward when parameters stay sharded over a smaller group, by transfers."""
        if self.alone or self.parts == 1:
            return []
        kept = [numel // self.parts for numel in whole_numels(self.layout, self.parts)]
        return [numel * self.kind.compute.itemsize for numel in kept if numel]

    @property
    def staging_bytes(self) -> int:
        """What only the gather needs: the rows of packed parameters."""
        if self.alone:
            return 0
        packed = self.layout.numel - self.layout.gather_packed_start
        return self.layout.shards * packed * self.kind.compute.itemsize

    @property
    def gather_inputs(self) -> list[int]:
        """What this rank gives to each transfer of the gather."""
        if self.alone:
            return []
        direct = [piece.numel for piece in self.layout.pieces if piece.direct_gather and not piece.uneven]
        packed = self.layout.numel - self.layout.gather_packed_start
        return [numel * self.kind.compute.itemsize for numel in (*direct, packed) if numel]

    @property
    def uneven_gathers(self) -> list[tuple[int, int]]:
        """What is gathered from parts of different sizes: bytes of the whole, and how many ranks hold some."""
        return [_uneven(piece, self.kind.compute.itemsize) for piece in self.layout.pieces if piece.uneven]

    # -- gradients -----------------------------------------------------------------------------------------------

    def made_bytes(self, late: bool) -> int:
        """Whole gradients as autograd makes them.

        `late`: those of embeddings, which it makes when the rest of the unit is over; or all others.
        """
        made = (param.numel for param in self.trainable if (param.active == 0) == late)
        return sum(made) * self.kind.compute.itemsize

    @property
    def direct_numels(self) -> list[int]:
        """Elements of the gradients that are reduced directly, in the order in which they are handed over."""
        if self.trained is None:
            return []
        pieces = [self.trained.pieces[i] for i in (range(self.flags) if self.alone else self.trained.in_order)]
        return [piece.spec.numel for piece in pieces if piece.direct_reduce or self.alone]

    @property
    def handed_over(self) -> list[int]:
        """Elements of those of them that are operands as they are, or cast one by one."""
        return [numel for numel in self.direct_numels if self.alone or not self.kind.casts_together(numel)]

    @property
    def copied_numel(self) -> int:
        """Elements of the gradients that one operator casts, or packs into rows."""
        return sum(param.numel for param in self.trainable) - sum(self.handed_over)

    @property
    def copies(self) -> int:
        """Bytes of what they are copied to."""
        cast = sum(self.direct_numels) - sum(self.handed_over)
        return self.scatter_rows + cast * self.kind.reduce.itemsize

    @property
    def flags(self) -> int:
        """Used-flags: one element per parameter that gets gradients."""
        return len(self.trainable)

    @property
    def scatter_rows(self) -> int:
        """The packed input of the reduce-scatter: a row per rank."""
        if self.trained is None or self.alone:
            return 0
        packed = self.trained.numel - self.trained.reduce_packed_start + self.flags
        return self.trained.shards * packed * self.kind.reduce.itemsize

    @property
    def scatter_inputs(self) -> list[int]:
        """The inputs of the reduce-scatter: gradients that go directly, then the packed rows."""
        if self.trained is None or self.alone:
            return []
        even = [piece for piece in self.trained.pieces if piece.direct_reduce and not piece.uneven]
        return [*(piece.spec.numel * self.kind.reduce.itemsize for piece in even), self.scatter_rows]

    @property
    def uneven_scatters(self) -> list[tuple[int, int]]:
        """What is reduced to parts of different sizes: bytes of the whole, and how many ranks get some."""
        pieces = self.trained.pieces if self.trained is not None else ()
        return [_uneven(piece, self.kind.reduce.itemsize) for piece in pieces if piece.uneven]

    @property
    def uneven_inputs(self) -> list[int]:
        """Bytes of those."""
        return [nbytes for nbytes, _ in self.uneven_scatters]

    @property
    def received_parts(self) -> list[int]:
        """What the first rank receives of them in an all-to-all: its part from every rank."""
        pieces = self.trained.pieces if self.trained is not None else ()
        return [self.layout.shards * piece.numel * self.kind.reduce.itemsize for piece in pieces if piece.uneven]

    @property
    def operands(self) -> list[int]:
        """What is all-reduced over replicas: the reduction buffer, or each gradient where nothing is scattered."""
        if self.trained is None:
            return []
        gradients = [piece.spec.numel for piece in self.trained.pieces]
        numels = [*gradients, self.flags] if self.alone else [self.trained.numel + self.flags]
        return [numel * self.kind.reduce.itemsize for numel in numels]

    @cached_property
    def shared_sums(self) -> SharedSums | None:
        """What is reduce-scattered over replicas instead, if these share gradients out; None: it has no shares of any."""
        parts = [one for one, param in zip(self.held, self.params, strict=True) if param.trainable]
        return shared_sums(parts, self.replicas, self.kind.reduce.itemsize, self.thresholds.reduce_bytes)

    @property
    def buffer_bytes(self) -> int:
        """What the operands take beside the gradients that become them: the reduction buffer, or only the flags."""
        return self.flags * self.kind.reduce.itemsize if self.alone else sum(self.operands)

    @property
    def landing_bytes(self) -> int:
        """What a gradient's cast to the storage dtype takes; 0 where the reduced one serves as it is."""
        if self.trained is None or self.kind.reduce == self.kind.storage:
            return 0
        numel = sum(p.spec.numel for p in self.trained.pieces) if self.alone else self.trained.numel
        return numel * self.kind.storage.itemsize

    @property
    def gradient_bytes(self) -> int:
        """The sharded gradients that stay, where the shards are."""
        return self.landing_bytes or sum(self.operands)

    def gradient_bytes_with(self, sums: SharedSums | None) -> int:
        """The same of what a reduce-scatter over replicas leaves, if there is one."""
        if sums is None:
            return self.gradient_bytes
        return sums.left * self.kind.storage.itemsize  # cast if need be

    @property
    def partial_bytes(self) -> int:
        """Sums of shards over micro-batches, in the dtype in which they are accumulated."""
        return sum(self.operands) // self.kind.reduce.itemsize * self.kind.accumulate.itemsize

    @property
    def stash_bytes(self) -> int:
        """Sums of whole gradients over micro-batches that were not communicated."""
        return sum(param.numel for param in self.trainable) * self.kind.accumulate.itemsize


@dataclass(frozen=True)
class UnitPlan:
    """A unit on a mesh.

    Attributes:
        facts: what it consists of.
        replicas, shards: sizes R and S of the mesh.
        dtype_groups: its parameters by dtypes.
    """

    facts: UnitFacts
    replicas: int
    shards: int
    dtype_groups: tuple[GroupPlan, ...]

    @property
    def numel(self) -> int:
        """Elements of its whole parameters."""
        return sum(param.numel for param in self.facts.params)

    @property
    def trains(self) -> bool:
        """Whether any of its parameters gets gradients."""
        return any(param.trainable for param in self.facts.params)

    @property
    def in_tree(self) -> bool:
        """Whether its gradients are added in the order of the tree over data ranks."""
        return self.facts.comm_policy.reduction == "tree"

    @property
    def received_bytes(self) -> int:
        """What an all-reduce of its sums holds beside them: in a tree what arrives, and what small ones are packed in."""
        if not self.in_tree or self.replicas == 1:
            return 0
        total = 0
        for group in self.dtype_groups:
            in_place, packed = travelling(group.kind.summed, list(group.operands), self.replicas)
            total += sum(in_place) + 2 * packed
        return total

    @property
    def parts(self) -> int:
        """Size of the group over which it stays sharded after forward; 1: it does not."""
        return max((group.parts for group in self.dtype_groups), default=1)

    @property
    def keeps(self) -> bool:
        """Whether its parameters stay whole between forward and backward."""
        policy = self.facts.reshard_after_forward
        # A group of one, too, holds everything.
        return policy is False or (policy is None and self.facts.parent is None) or (type(policy) is int and policy == 1)

    @property
    def scattered_bytes(self) -> int:
        """The whole gradients in its reduction, and the packed rows."""
        return self.total("scatter_inputs") + self.total("uneven_inputs")

    def total(self, name: str) -> int:
        """The sum of a size over its dtype groups."""
        values = (getattr(group, name) for group in self.dtype_groups)
        return sum(sum(value) if isinstance(value, list) else value for value in values)


def tables_of(units: Sequence[UnitPlan]) -> set[int]:
    """The numbers of rows of a model's embeddings."""
    return {param.shape[0] for unit in units for param in unit.facts.params if param.looked_up}


def head_of(units: Sequence[UnitPlan]) -> UnitPlan | None:
    """The unit that has a model's head and no block's layers: the last one below the root, if all that multiplies in it
    makes logits over the rows of an embedding. Heads of most models are in the root's unit instead.
    """
    last = units[-1]
    products = [param for param in last.facts.params if any(param.widths)]
    is_head = last.facts.parent == 0 and len(products) == 1 and products[0].shape[0] in tables_of(units)
    return last if is_head else None


def plan_unit(facts: UnitFacts, replicas: int, shards: int, backend: str, device: bool) -> UnitPlan:
    """Plans a unit as `fully_shard` does.

    Args:
        facts: what it consists of.
        replicas, shards: sizes of the mesh.
        backend: of its groups.
        device: whether the mesh is of devices with memory of their own, from which shards can be offloaded.

    Raises:
        ValueError: `reshard_after_forward` is an integer that does not divide the shard ranks, or sums on the mesh cannot
            have the order of `CommPolicy(reduction="tree")`.
    """
    if facts.comm_policy.reduction == "tree":
        check_shape(replicas, shards, f"plan: unit {facts.name!r}")
    after = facts.reshard_after_forward
    if type(after) is int and (after < 1 or shards % after):
        raise ValueError(
            f"plan: unit {facts.name!r} has reshard_after_forward={after}, which does not divide {shards} shard ranks; "
            f"choose one of {[k for k in range(1, shards + 1) if shards % k == 0]}"
        )
    parts = after if type(after) is int and 1 < after < shards else 1
    facts = replace(facts, params=tuple(param.on(shards) for param in facts.params))
    offloaded = device and type(facts.offload_policy) is not OffloadPolicy
    groups: dict[GroupKey, list[ParamFacts]] = {}
    for param in facts.params:
        kind = GroupKey.of(param.dtype, facts.mp_policy, param.replicated, param.extension)
        groups.setdefault(kind, []).append(param)
    dtype_groups = []
    for kind, params in groups.items():
        thresholds = thresholds_for(facts.comm_policy, kind, *direct_bytes(backend), uneven_bytes(backend))
        ranks = 1 if kind.replicated else shards
        trainable = [param for param in params if param.trainable]
        layout, trained = (_layout_of(which, ranks, thresholds) for which in (params, trainable))
        dtype_groups.append(
            GroupPlan(kind, tuple(params), layout, trained if trainable else None, replicas, thresholds, parts, offloaded)
        )
    return UnitPlan(facts, replicas, shards, tuple(dtype_groups))


def _uneven(piece: Piece, itemsize: int) -> tuple[int, int]:
    return piece.spec.numel * itemsize, -(-piece.spec.cut // piece.chunk)


def _layout_of(params: list[ParamFacts], shards: int, thresholds: Thresholds) -> Layout:
    return _layout(tuple(ParamSpec(param.shape, param.dim, param.merged) for param in params), shards, thresholds)

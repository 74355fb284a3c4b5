"""Equal random numbers on all ranks of a mesh, and numbers of their own for units on smaller meshes.

all ranks in one state                           one stream for all units, as one process would draw it
first ranks of smaller meshes in other states    a stream for each of those meshes, too: experts are to differ
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from hsdp.comm.collectives import all_reduce_now
from hsdp.schedule.gather_order import RankSet
from hsdp.unit.unit import Unit
from hsdp.weights.gather import broadcast
from hsdp.weights.module_buffers import widest

_COMPARED = 1 << 40
"""Stands for the comparison, for the ranks' divergence guard."""


class RandomNumbers:
    """What units are initialised with.

    Args:
        units: all those of the model.
        device: where numbers are drawn.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._own: dict[RankSet, list[Tensor]] = {}

    @contextmanager
    def of_first(self) -> Iterator[None]:
        """Draws the random numbers of the mesh's first rank, on tensor-parallel ranks too: what they hold is to be equal.

        Ranks in one state stay in one state, so that what users expect to be equal on all ranks stays equal. Ranks in other
        states get them back: they were made different on purpose, for dropout or for data.
        """
        own = self._state()
        first = [state.clone() for state in own]
        unit = widest(self._units)
        params = [param for unit in self._units for param in unit.params]
        inner = [param.inner for param in params if param.inner is not None and param.inner.visible]
        for state in first:
            broadcast("init_sharded", state, unit, unit.replicate_comm, unit.shard_comm)
            data = state.to(unit.axes.device)
            for mesh in dict.fromkeys(one.mesh for one in inner):
                for axis in range(mesh.ndim):
                    dist.broadcast(data, group=mesh.get_group(axis), group_src=0)
            state.copy_(data)
        self._find_own(own, first)
        self._set(first)
        try:
            yield
        finally:
            if not all(map(torch.equal, own, first)):
                self._set(own)

    @contextmanager
    def of(self, unit: Unit | None) -> Iterator[None]:
        """Draws those that belong to a unit; None: what is in none."""
        if unit is None or unit.mesh_ranks not in self._own:
            yield
            return
        common = self._state()
        self._set(self._own[unit.mesh_ranks])
        try:
            yield
        finally:
            self._own[unit.mesh_ranks] = self._state()
            self._set(common)

    def _find_own(self, own: list[Tensor], first: list[Tensor]) -> None:
        """Gives smaller meshes streams of their own if the first rank of any is in another state than `first`.

        All get one then: those who drew from the common stream would leave it at another place.
        """
        largest, seeds, differs = widest(self._units), {}, False
        for unit in self._units:
            parts = any(param.inner is not None and param.inner.visible for param in unit.params)  # of one draw
            if unit.mesh_ranks == largest.mesh_ranks or unit.mesh_ranks in seeds or parts:
                continue
            state = own[0].clone()
            broadcast("init_sharded", state, unit, unit.replicate_comm, unit.shard_comm)
            differs = differs or not torch.equal(state, first[0])
            # Not the state itself: in it, experts would get the numbers of the dense layers.
            seeds[unit.mesh_ranks] = torch.randint(2**62, (), generator=_generator(state)).item()
        asked = torch.tensor([float(differs)], device=largest.axes.device)
        for comm in (largest.replicate_comm, largest.shard_comm):
            if comm.group is not None and comm.size > 1:
                all_reduce_now(asked, dist.ReduceOp.MAX, comm.group, _COMPARED, "comparison of random states")
        if asked.item() > 0:
            devices = list(dict.fromkeys((torch.device("cpu"), self._device)))
            self._own = {
                ranks: [torch.Generator(device).manual_seed(int(seed)).get_state() for device in devices]
                for ranks, seed in seeds.items()
            }

    def _state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)


def _generator(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator

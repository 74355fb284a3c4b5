"""What `plan` says is gathered and reduced, and when: the engine's own sequence of a steady step, event by event."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from hsdp import CommPolicy
from hsdp.comm.observer import Point
from hsdp.planning.schedule import Event, Verb, simulate_step
from hsdp.unit.lookup import units_below
from tests.support.rig import fake_world

DIM = 8
KINDS = {"all-gather": Verb.GATHER, "reduce-scatter": Verb.SCATTER, "all-reduce": Verb.ALL_REDUCE}


class Tree(nn.Module):
    """A model whose middle block holds two units, and whose layers differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(DIM, DIM)
        middle = Residual(nn.Linear(DIM, DIM), Wide(), nn.Linear(DIM, DIM))
        self.blocks = Residual(nn.Linear(DIM, DIM), middle, Wide(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """(n, DIM) -> (n, DIM)."""
        out: Tensor = self.blocks(self.embedding(x))
        return out


class Residual(nn.Sequential):
    """Its backward begins with a node of its own, before that of the last module in it."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, DIM) -> (n, DIM)."""
        out: Tensor = super().forward(x)
        return x + out


class Wide(nn.Module):
    """A layer eight times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """(n, DIM) -> (n, DIM)."""
        out: Tensor = self.down(self.up(x))
        return out


Started = tuple[Verb, tuple[int, ...], int | None]
"""A collective, the units that it is for, and whose forward or backward begins while it starts, if it is a gather."""


class Log:
    """An observer that keeps which collectives start."""

    def __init__(self, units: list[Any]) -> None:
        self.units = units
        self.started_ones: list[Started] = []
        self._entered: int | None = None

    def passes(self, point: Point, what: Any) -> None:
        """A unit's forward or backward begins, or something else happens."""
        if point in (Point.FORWARD_ENTERED, Point.BACKWARD_ENTERED):
            self._entered = self.units.index(what)

    def started(self, comm: Any, owner: Any, comm_work: Any, calls: list[Any]) -> None:
        """A collective."""
        if comm_work.kind in KINDS:
            verb = KINDS[comm_work.kind]
            of = [owner] if owner in self.units else [item.unit for item in owner.items]
            indices = tuple(self.units.index(unit) for unit in of)
            self.started_ones.append((verb, indices, self._entered if verb is Verb.GATHER else None))

    def _nothing(self, *args: Any) -> None:
        pass

    begins = ends = starting = allocates = _nothing


def _planned(events: list[Event]) -> list[Started]:
    """The collectives of a plan; what it gathers when a unit's forward or backward begins comes before that in it."""
    found: list[Started] = []
    ahead: list[int] = []  # places of gathers whose unit is not known yet
    for verb, units in events:
        if verb in (Verb.GATHER, Verb.SCATTER, Verb.ALL_REDUCE):
            if verb is Verb.GATHER:
                ahead.append(len(found))
            found.append((verb, units, None))
        elif verb in (Verb.OPEN, Verb.BACKWARD):
            for at in ahead:
                found[at] = (*found[at][:2], units[0])
            ahead = []
    return found


def _started_and_planned(policy: CommPolicy, reshard: bool | None, micro_batches: int) -> tuple[list[Started], list[Event]]:
    """The collectives of a step, and its plan."""
    model = Tree()
    middle: Any = model.blocks[1]
    options: dict[str, Any] = {"comm_policy": policy, "reshard_after_forward": reshard}
    with fake_world(4) as env:
        for module in (middle[1], middle, *(block for block in model.blocks if block is not middle), model):
            hsdp.fully_shard(module, mesh=env.mesh((2, 2)), **options)

        def step() -> None:
            for left in reversed(range(micro_batches)):
                with model.accumulate(last=left == 0):  # type: ignore[operator]
                    model(torch.randn(2, DIM)).sum().backward()
            model.zero_grad()

        step()
        step()
        planned = hsdp.plan(model, tokens_per_rank=2).units
        units = units_below(model)
        by_name = {unit.name: unit for unit in units}
        log = Log([by_name[one.facts.name] for one in planned])
        for unit in units:
            unit.observe(log)
        step()
    return log.started_ones, simulate_step(planned, micro_batches, device=False)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_collectives_start_in_the_planned_order(prefetch: int, reshard: bool | None, micro_batches: int) -> None:
    policy = CommPolicy(prefetch=prefetch, accumulate="reduce_scatter", fusion="direct")
    started, events = _started_and_planned(policy, reshard, micro_batches)
    assert started == _planned(events)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_units_that_travel_packed_are_unpacked_before_others_are_gathered_ahead(prefetch: int) -> None:
    policy = CommPolicy(prefetch=prefetch, fusion="packed")
    started, events = _started_and_planned(policy, None, 1)
    # Behind an `OPEN` a plan does not say whether the unit gathers ahead, or the next one gathers itself.
    assert [one[:2] for one in started] == [one[:2] for one in _planned(events)]
    verbs = [event.verb for event in events]
    assert [verbs.index(verb) for verb in (Verb.GATHER, Verb.OPEN)] == [0, 1]
    assert verbs[2 : 2 + prefetch] == [Verb.GATHER] * prefetch

"""The plan of a step as users have it: the numbers, what holds the step up in a sentence, tables and files of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hsdp.planning.advice import Diagnosis, diagnose
from hsdp.planning.data import Advice, PlanData
from hsdp.planning.report import as_csv, as_json, as_text, comparison_as_csv, comparison_as_json, comparison_as_text


@dataclass(frozen=True)
class Plan(PlanData):
    """A step of a model on a mesh. `print(plan)` shows it as tables.

    Attributes:
        name: of the model.
        replicas, shards: sizes of the mesh's axes.
        assumptions: what it was told.
        units: what is gathered and reduced together, in the order in which forwards begin.
        collectives: of the whole step, by kind and axis.
        memory: the peak on the rank that holds most.
        time: predicted.
    """

    @cached_property
    def _diagnoses(self) -> tuple[Diagnosis, ...]:
        return diagnose(self)

    @property
    def bottleneck(self) -> str:
        """What holds the step up or does not fit and what to do about it: a sentence, and one on padding if it matters."""
        return " ".join(map(str, self._diagnoses))

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What to change, the best first: `plan.changed(**plan.advice[0].options)` is the plan that follows it."""
        return tuple(advice for one in self._diagnoses for advice in one.advice)

    def __str__(self) -> str:
        return as_text(self)

    def to_json(self) -> str:
        """Everything, as JSON; sizes in bytes, times in seconds."""
        return as_json(self)

    def to_csv(self) -> str:
        """A line per unit; sizes in bytes."""
        return as_csv(self)


def meshes_of(world: int) -> list[tuple[int, int]]:
    """Every (replicas, shards) of a world of that many ranks, most shards first."""
    return [(world // shards, shards) for shards in range(world, 0, -1) if world % shards == 0]


@dataclass(frozen=True)
class Comparison:
    """Plans of one model on several meshes. `print(comparison)` shows them in one table, the best one marked."""

    plans: tuple[Plan, ...]

    @property
    def best(self) -> Plan | None:
        """The one that trains on most tokens per second and rank, of those that fit; None if none does."""
        fitting = [one for one in self.plans if one.fits]
        return max(fitting, key=lambda one: one.tokens_per_second / (one.replicas * one.shards), default=None)

    def __str__(self) -> str:
        return comparison_as_text(self.plans, self.best)

    def to_json(self) -> str:
        """The plans, as JSON, and the index of the best."""
        return comparison_as_json(self.plans, self.best)

    def to_csv(self) -> str:
        """A line per plan; sizes in bytes, times in seconds."""
        return comparison_as_csv(self.plans, self.best)
